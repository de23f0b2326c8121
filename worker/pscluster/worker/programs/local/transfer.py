"""How collectives of functions' calls are carried out: among devices of one task in place, between tasks by exchanges.

Arrays are combined in the order of the devices, so the bits of a result do not depend on how many tasks there are.
Large ones are cut: each device's task combines one segment, and sends it to all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.geometry.partition import even_ends
from pscluster.core.layouts.mesh import Mesh
from pscluster.core.transport.frames import view
from pscluster.worker.programs.exchange import Exchange
from pscluster.worker.programs.local.rounds import GATHER, ArrayShape, Group, Waiting

Array = npt.NDArray[Any]

Key = tuple[str, int, int, int]
"""("own", device, leaf, 0), ("segment", device, leaf, number) of that, or ("combined", first device, leaf, number)."""

COMBINES: Mapping[str, np.ufunc] = {"psum": np.add, "pmax": np.maximum, "pmin": np.minimum}
"""By the name of the collective."""

CUT_BYTES = 64 << 10
"""Arrays that have more bytes together are cut."""


class _Piece(NamedTuple):
    """What one task sends another."""

    of: int
    to: int
    key: Key
    dtype: np.dtype[Any]
    size: int


def carry_out(
    mesh: Mesh,
    exchange: Exchange,
    groups: Sequence[Group],
    waiting: Mapping[int, Waiting],
    own: Mapping[int, Sequence[Array]],
    label: str,
) -> dict[int, list[Array]]:
    """Carry out the collectives of groups, and return the results by device of this task; no two share memory.

    Args:
        waiting: what the devices of the groups have said of their arrays.
        own: this task's arrays, by device.
    """
    work = _Work(mesh, exchange, groups, waiting, own)
    work.exchanged([piece for group in groups for piece in work.sent_first(group)], label)
    for group in groups:
        work.combine(group)
    work.exchanged([piece for group in groups for piece in work.sent_after(group)], label)
    return {device: work.result(group, device) for group in groups for device in group.devices if device in own}


class _Work:
    """Collectives that are being carried out: flat arrays that this task has."""

    def __init__(
        self,
        mesh: Mesh,
        exchange: Exchange,
        groups: Sequence[Group],
        waiting: Mapping[int, Waiting],
        own: Mapping[int, Sequence[Array]],
    ) -> None:
        self._task_of, self._exchange, self._waiting = mesh.task_of, exchange, waiting
        self._tasks = {group.devices: sorted({self._task_of[device] for device in group.devices}) for group in groups}
        self._arrays: dict[Key, Array] = {}
        for group in groups:
            for device in set(group.devices).intersection(own):
                for leaf, array in enumerate(own[device]):
                    flat = np.ascontiguousarray(array).reshape(-1)
                    self._arrays["own", device, leaf, 0] = flat
                    if self._is_cut(group):
                        for nth, segment in enumerate(self._segments(group, leaf)):
                            self._arrays["segment", device, leaf, nth] = flat[segment]

    def _is_cut(self, group: Group) -> bool:
        """Return whether its arrays are combined by segments. All tasks say the same."""
        nbytes = sum(_type(of).itemsize * _size(of) for of in group.waiting.arrays)
        return group.waiting.operation != GATHER and len(self._tasks[group.devices]) > 1 and nbytes > CUT_BYTES

    @staticmethod
    def _segments(group: Group, leaf: int) -> list[slice]:
        """Return which part of an array each device of a group combines, by its place there."""
        ends = even_ends(_size(group.waiting.arrays[leaf]), len(group.devices))
        return [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]

    def sent_first(self, group: Group) -> Iterator[_Piece]:
        """Yield what tasks send each other before anything is combined."""
        for device in group.devices:
            for leaf, of in enumerate(self._waiting[device].arrays):
                if not self._is_cut(group):
                    for task in self._tasks[group.devices]:
                        yield _Piece(self._task_of[device], task, ("own", device, leaf, 0), _type(of), _size(of))
                    continue
                for nth, segment in enumerate(self._segments(group, leaf)):
                    to, size = self._task_of[group.devices[nth]], segment.stop - segment.start
                    yield _Piece(self._task_of[device], to, ("segment", device, leaf, nth), _type(of), size)

    def sent_after(self, group: Group) -> Iterator[_Piece]:
        """Yield what tasks send each other of what they have combined."""
        if not self._is_cut(group):
            return
        for leaf, of in enumerate(group.waiting.arrays):
            for nth, segment in enumerate(self._segments(group, leaf)):
                key, size = ("combined", group.devices[0], leaf, nth), segment.stop - segment.start
                for task in self._tasks[group.devices]:
                    yield _Piece(self._task_of[group.devices[nth]], task, key, _type(of), size)

    def exchanged(self, pieces: Sequence[_Piece], label: str) -> None:
        """Send and receive pieces. All tasks list the same ones, in the same order."""
        between = [piece for piece in pieces if piece.of != piece.to]
        if not between:
            return
        outgoing: dict[int, list[Array]] = {}
        incoming: dict[int, list[_Piece]] = {}
        for piece in between:
            if piece.of == self._exchange.task:
                outgoing.setdefault(piece.to, []).append(self._arrays[piece.key].view(np.uint8))
            elif piece.to == self._exchange.task:
                incoming.setdefault(piece.of, []).append(piece)
        sent = {to: np.concatenate(arrays) for to, arrays in outgoing.items()}
        received = {
            of: np.empty(sum(piece.size * piece.dtype.itemsize for piece in theirs), np.uint8)
            for of, theirs in incoming.items()
        }
        self._exchange.swap(
            {to: view(array) for to, array in sent.items()}, {of: view(array) for of, array in received.items()}, label
        )
        for of, theirs in incoming.items():
            start = 0
            for piece in theirs:
                end = start + piece.size * piece.dtype.itemsize
                self._arrays[piece.key] = received[of][start:end].copy().view(piece.dtype)  # aligned
                start = end

    def combine(self, group: Group) -> None:
        """Combine arrays, or this task's segments of them, in the order of the devices."""
        if group.waiting.operation == GATHER or self._exchange.task not in self._tasks[group.devices]:
            return
        ufunc = COMBINES[group.waiting.operation]
        for leaf in range(len(group.waiting.arrays)):
            kind, parts = ("own", 1) if not self._is_cut(group) else ("segment", len(group.devices))
            for nth in range(parts):
                if kind == "segment" and self._task_of[group.devices[nth]] != self._exchange.task:
                    continue
                total = self._arrays[kind, group.devices[0], leaf, nth].copy()
                for device in group.devices[1:]:
                    ufunc(total, self._arrays[kind, device, leaf, nth], out=total)
                self._arrays["combined", group.devices[0], leaf, nth] = total

    def result(self, group: Group, device: int) -> list[Array]:
        """Return new arrays for a device."""
        results = []
        for leaf, of in enumerate(self._waiting[device].arrays):
            if group.waiting.operation == GATHER:
                arrays = [
                    self._arrays["own", other, leaf, 0].reshape(self._waiting[other].arrays[leaf].shape)
                    for other in group.devices
                ]
                results.append(np.concatenate(arrays, axis=group.waiting.axis))
                continue
            parts = len(group.devices) if self._is_cut(group) else 1
            combined = [self._arrays["combined", group.devices[0], leaf, nth] for nth in range(parts)]
            results.append(np.concatenate(combined).reshape(of.shape))
        return results


def _type(of: ArrayShape) -> np.dtype[Any]:
    return np.dtype(of.dtype)


def _size(of: ArrayShape) -> int:
    return math.prod(of.shape)
