"""Brings arrays into other layouts: what one task sends, receives, and makes of the pieces.

Moves that are made together are one exchange: one message each way for each pair of tasks that have something to send.
It holds the pieces of all moves, those with the largest elements first, so that each lies where an array of its type
may. A message that is one piece is received where the piece belongs, if that is one stretch of memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.geometry.partition import Block
from pscluster.core.layouts.moving import Moving, Piece, gathering, moving, owners_of
from pscluster.core.transport.frames import view
from pscluster.worker.collectives.algorithms import PIECE_BYTES, Incoming, Outgoing
from pscluster.worker.programs.exchange import Exchange
from pscluster.worker.programs.operations import COMBINES
from pscluster.worker.programs.program import ArrayType
from pscluster.worker.programs.store import Blocks

Array = npt.NDArray[Any]


class _Sent(NamedTuple):
    """A piece of a message: of which move, and which device has it."""

    move: int
    device: int
    box: Block


def move_together(
    sources: Sequence[Blocks], targets: Sequence[ArrayType], devices: Sequence[int], exchange: Exchange, what: str
) -> list[Blocks]:
    """Return each array in its layout of `targets`, its terms combined: the blocks of this task's devices.

    All tasks call it, also those that have nothing to send. `what` is shown in errors.
    """
    moves = [
        _Move(source, target, devices, moving(source.type.layout, target.layout, target.shape, source.type.partial))
        for source, target in zip(sources, targets, strict=True)
    ]
    _exchange(moves, exchange, what)
    return [move.blocks() for move in moves]


def gather_together(
    sources: Sequence[Blocks],
    targets: Sequence[ArrayType],
    numbers: Sequence[int],
    devices: Sequence[int],
    exchange: Exchange,
    what: str,
) -> list[dict[int, Array]]:
    """Return those blocks of each array in its layout of `targets` that this task has to pass on, by number.

    Of the devices that have a block there, one passes it on; which one depends on the array's number, so that all have
    their share. Otherwise as `move_together`.
    """
    moves = [
        _Move(
            source,
            target,
            devices,
            gathering(source.type.layout, target.layout, target.shape, source.type.partial, nth),
        )
        for source, target, nth in zip(sources, targets, numbers, strict=True)
    ]
    _exchange(moves, exchange, what)
    return [
        move.blocks_of(owners_of(target.layout, nth)) for move, target, nth in zip(moves, targets, numbers, strict=True)
    ]


def _exchange(moves: Sequence[_Move], exchange: Exchange, what: str) -> None:
    """Send other tasks the pieces that they need, and receive those that this one needs."""
    if any(move.plan.transfers for move in moves):
        outgoing: dict[int, list[tuple[_Move, int, Block]]] = {}
        awaited: dict[int, list[_Sent]] = {}  # by task
        for nth in sorted(range(len(moves)), key=lambda nth: -moves[nth].itemsize):
            for (of, to), sent in moves[nth].plan.transfers.items():
                if of == exchange.task:
                    outgoing.setdefault(to, []).extend((moves[nth], *piece) for piece in sent)
                elif to == exchange.task:
                    awaited.setdefault(of, []).extend(_Sent(nth, device, box) for device, box in sent)
        exchange.swap(
            {to: _message(pieces) for to, pieces in outgoing.items()},
            {of: _memory_for(moves, sent) for of, sent in awaited.items()},
            what,
        )


def _message(pieces: Sequence[tuple[_Move, int, Block]]) -> Outgoing:
    """Return what one task is sent."""
    if len(pieces) == 1:
        ((move, device, box),) = pieces
        part = move.part(device, box)
        if cuts := _cuts(box, move.itemsize):
            return _rows(part, cuts)
        return view(np.ascontiguousarray(part))
    flats = [view(np.ascontiguousarray(move.part(device, box))) for move, device, box in pieces]
    if sum(map(len, flats)) <= PIECE_BYTES:
        return [flats]
    return view(np.concatenate([np.frombuffer(flat, np.uint8) for flat in flats]))


def _cuts(box: Block, itemsize: int) -> list[slice]:
    """Return how a large piece is cut along its first axis into messages; empty if it is not. Both sides know it."""
    size = box.size * itemsize
    if size <= PIECE_BYTES or size > PIECE_BYTES * (rows := box.shape[0]):
        return []
    each = PIECE_BYTES * rows // size
    return [slice(start, min(start + each, rows)) for start in range(0, rows, each)]


def _rows(part: Array, cuts: Sequence[slice]) -> Iterator[list[memoryview]]:
    """Yield rows of a piece, contiguous: copied in memory that stays in the processor's cache, if they are not."""
    if part.flags.c_contiguous:
        yield from ([view(part[cut])] for cut in cuts)
        return
    room = np.empty((cuts[0].stop, *part.shape[1:]), part.dtype)
    for cut in cuts:
        rows = room[: cut.stop - cut.start]
        rows[...] = part[cut]
        yield [view(rows)]


def _memory_for(moves: Sequence[_Move], sent: Sequence[_Sent]) -> Incoming:
    """Return memory for a message of these pieces, which each move knows as its received ones."""
    if len(sent) == 1:
        ((nth, device, box),) = sent
        if (place := moves[nth].place_of(device, box)) is None:
            place = np.empty(box.shape, moves[nth].source.type.dtype)
        moves[nth].received[device, box] = place
        cuts = _cuts(box, moves[nth].itemsize)
        return [view(place[cut]) for cut in cuts] if cuts else view(place)
    ends = itertools.accumulate(box.size * moves[nth].itemsize for nth, _, box in sent)
    bounds = list(itertools.pairwise((0, *ends)))
    memory = np.empty(bounds[-1][1], np.uint8)
    for (nth, device, box), (start, end) in zip(sent, bounds, strict=True):
        flat = memory[start:end].view(moves[nth].source.type.dtype)
        moves[nth].received[device, box] = flat.reshape(box.shape)
    return view(memory)


class _Move:
    """One array that moves."""

    def __init__(self, source: Blocks, target: ArrayType, devices: Sequence[int], plan: Moving) -> None:
        self.source, self._target, self._devices, self.plan = source, target, devices, plan
        self.itemsize = target.dtype.itemsize
        self.received: dict[tuple[int, Block], Array] = {}  # by the device that has it
        self._begun: dict[int, Array] = {}  # blocks that pieces are received in, by their numbers in the layout

    def part(self, device: int, box: Block) -> Array:
        """Return a view of a part of a device's block."""
        start = self.source.type.layout.block(self.source.type.shape, device).start
        part: Array = self.source.of[device][_within(box, start)]
        return part

    def place_of(self, device: int, box: Block) -> Array | None:
        """Return where a piece belongs in a block that is made here; None if it does not as it is, or not in one."""
        for own in self._devices:
            if Piece(box, (device,)) in self.plan.pieces[own]:
                block, shard = self._target.layout.block(self._target.shape, own), self._target.layout.shard_of(own)
                if shard not in self._begun:
                    self._begun[shard] = np.empty(block.shape, self._target.dtype)
                place: Array = self._begun[shard][_within(box, block.start)]
                return place if place.flags.c_contiguous else None
        return None

    def blocks(self) -> Blocks:
        """Return the array in its new layout."""
        layout, made = self._target.layout, dict[int, Array]()
        for device in self._devices:
            if (shard := layout.shard_of(device)) not in made:
                made[shard] = self._assembled(device, self._begun.get(shard))
        return Blocks(self._target, {device: made[layout.shard_of(device)] for device in self._devices})

    def blocks_of(self, owners: Sequence[int]) -> dict[int, Array]:
        """Return those blocks whose owner is one of this task's devices."""
        return {
            shard: self._assembled(owner, self._begun.get(shard))
            for shard, owner in enumerate(owners)
            if owner in self._devices
        }

    def _assembled(self, device: int, out: Array | None) -> Array:
        """Return a device's block, made of pieces that are here; in `out`, if some have been received in it."""
        own = self._target.layout.block(self._target.shape, device)
        pieces = self.plan.pieces[device]
        if out is None and len(pieces) == 1 and pieces[0].box == own and len(pieces[0].sources) == 1:
            whole = self._term(pieces[0].sources[0], own)
            base = self.source.of.get(pieces[0].sources[0])
            # A small part of a block must not keep all of it in memory; and blocks that are whole are shared.
            return base if base is not None and base.shape == whole.shape else np.array(whole, order="C")
        if out is None:
            out = np.empty(own.shape, self._target.dtype)
        combine = COMBINES[self.source.type.combine]
        for box, sources in pieces:
            target, terms = out[_within(box, own.start)], [self._term(of, box) for of in sources]
            if len(terms) > 1:
                combine(terms[0], terms[1], out=target)
            elif _address(terms[0]) != _address(target):  # else it has been received there
                target[...] = terms[0]
            for term in terms[2:]:
                combine(target, term, out=target)
        return out

    def _term(self, of: int, box: Block) -> Array:
        return self.part(of, box) if of in self.source.of else self.received[of, box]


def _within(box: Block, start: Sequence[int]) -> Any:
    """Return the index of a box in a block that starts there. With `...`, a scalar's part is an array, too."""
    return (*(slice(a - s, b - s) for a, b, s in zip(box.start, box.stop, start, strict=True)), ...)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
