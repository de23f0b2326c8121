"""The blocks that one worker holds of global arrays, from one program to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pscluster.core.errors import ProtocolError, TensorLostError
from pscluster.core.handles import Handle
from pscluster.worker.programs.program import ArrayType

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one task has of an array: the block of each of its devices, by the device's number in the mesh.

    Blocks never change: devices with the same block share the memory.
    """

    type: ArrayType
    of: Mapping[int, Array]


Pattern = tuple[int, ...]
"""For each device of a task, by its place there, the first one that has the same block in memory."""


class Registers:
    """The arrays of one run of a program, by register."""

    def __init__(self, types: Sequence[ArrayType], devices: Sequence[int]) -> None:
        self._types, self._devices = types, devices
        self.of: dict[int, Sequence[Array]] = {}
        """The block of each device, by its place in the task."""
        self.patterns: dict[int, Pattern] = {}
        """Which devices share them."""

    def put(self, register: int, blocks: Blocks) -> None:
        """Write a register."""
        self.put_all(register, [blocks.of[device] for device in self._devices])

    def put_all(self, register: int, of: Sequence[Array]) -> None:
        """Write a register: the block of each device."""
        self.of[register] = of
        first: dict[int, int] = {}
        self.patterns[register] = tuple([first.setdefault(id(block), place) for place, block in enumerate(of)])

    def get(self, register: int) -> Blocks:
        """Read a register."""
        return Blocks(self._types[register], dict(zip(self._devices, self.of[register], strict=True)))

    def drop(self, register: int) -> None:
        """Forget a register, which is not read any more."""
        self.of.pop(register, None)
        self.patterns.pop(register, None)


class BlockStore(Handle):
    """Arrays by number. They live as long as the coordinator's attachment: a worker that comes back has none.

    Not thread-safe: a worker runs one function at a time.
    """

    handle_kind = "block-store"
    handle_key = ""

    def __init__(self) -> None:
        self._arrays: dict[int, Blocks] = {}

    def get(self, number: int, expected: ArrayType) -> Blocks:
        """Return an array. Raise TensorLostError if it is not here; ProtocolError if it is not of this type."""
        if (found := self._arrays.get(number)) is None:
            lost = TensorLostError(f"global array {number}, {expected}, is lost")  # its client knows what it is
            lost.number = number
            raise lost
        if found.type is not expected and found.type != expected:
            raise ProtocolError(f"global array {number} is {found.type}, {found.type.layout!r}, not {expected}")
        return found

    def put(self, number: int, blocks: Blocks) -> None:
        """Keep an array, in place of an earlier one: a program that is run again makes the same."""
        self._arrays[number] = blocks

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget arrays, also some that are not here."""
        for number in numbers:
            self._arrays.pop(number, None)

    def __len__(self) -> int:
        return len(self._arrays)
