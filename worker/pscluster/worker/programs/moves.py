"""Brings arrays into other layouts: what one task sends, receives, and makes of the pieces.

Moves that are made together are one exchange: one message each way for each pair of tasks that have something to send.
It holds the pieces of all moves, those with the largest elements first, so that each lies where an array of its type
may. A message that is one piece is received where the piece belongs, if that is one stretch of memory. What a block
needs of this task alone is put into it when everything is sent, while messages of others are still on their way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.geometry.partition import Block
from pscluster.core.layouts.moving import Moving, gathering, moving, owners_of
from pscluster.core.transport.frames import view
from pscluster.worker.collectives.algorithms import PIECE_BYTES, Incoming, Meanwhile, Outgoing
from pscluster.worker.programs.exchange import Exchange
from pscluster.worker.programs.operations import COMBINES
from pscluster.worker.programs.program import ArrayType
from pscluster.worker.programs.store import Blocks

Array = npt.NDArray[Any]


class _Term(NamedTuple):
    """What a piece is made of: a part of a device's block, or what is received of one."""

    device: int
    index: Any  # of the part; None: the whole block
    slot: int  # among the pieces that are received; -1 if the device is of this task


class _Assembled(NamedTuple):
    """A part of a block that is made here: where it is, and its terms."""

    index: Any  # None: the whole block
    terms: tuple[_Term, ...]


class _Piece(NamedTuple):
    """A piece of a message: of which move, and the device that has it."""

    move: int
    device: int
    box: Block


class Together:
    """Moves that are made together, as one task sees them: a program settles once what does not depend on blocks."""

    def __init__(self, moves: Sequence[Settled], task: int, label: str) -> None:
        """Take each move, the number of this task, and what errors call them."""
        self.moves, self._label = moves, label
        self.is_exchange = any(move.plan.transfers for move in moves)
        """Whether any task sends another one something."""
        self._outgoing: dict[int, list[_Piece]] = {}  # by task
        self._awaited: dict[int, list[_Piece]] = {}
        for nth in sorted(range(len(moves)), key=lambda nth: -moves[nth].itemsize):
            for (of, to), sent in moves[nth].plan.transfers.items():
                pieces = [_Piece(nth, device, box) for device, box in sent]
                if of == task:
                    self._outgoing.setdefault(to, []).extend(pieces)
                elif to == task:
                    self._awaited.setdefault(of, []).extend(pieces)

    def run(
        self, sources: Sequence[Blocks], exchange: Exchange, meanwhile: Meanwhile = lambda: None
    ) -> list[dict[int, Array]]:
        """Return the blocks of each array that are made here, by number. All tasks call it, also to send nothing.

        `meanwhile` is called once everything is sent.
        """
        runs = [_Run(move, source.of) for move, source in zip(self.moves, sources, strict=True)]

        def fill() -> None:
            for run in runs:
                run.fill_own()
            meanwhile()

        if self.is_exchange:
            exchange.swap(
                {to: _message(runs, pieces) for to, pieces in self._outgoing.items()},
                {of: _memory_for(runs, pieces) for of, pieces in self._awaited.items()},
                self._label,
                fill,
            )
        else:
            meanwhile()
        return [run.blocks() for run in runs]


def moves_together(
    pairs: Sequence[tuple[ArrayType, ArrayType]], devices: Sequence[int], task: int, label: str
) -> Together:
    """Settle how arrays of the first type of each pair come to be of the second, with their terms combined.

    Made are the blocks of `devices`, which are those of the task. `label` is shown in errors.
    """
    settled = []
    for source, target in pairs:
        made: dict[int, int] = {}
        for device in devices:
            made.setdefault(target.layout.shard_of(device), device)
        plan = moving(source.layout, target.layout, target.shape, source.partial)
        settled.append(Settled(source, target, plan, made))
    return Together(settled, task, label)


def gathers_together(
    pairs: Sequence[tuple[ArrayType, ArrayType]], numbers: Sequence[int], devices: Sequence[int], task: int, label: str
) -> Together:
    """Settle how each block of arrays comes to be on one device, which passes it on; otherwise as `moves_together`.

    Which of the devices that have a block that is depends on the array's number, so that all have their share.
    """
    settled = []
    for (source, target), nth in zip(pairs, numbers, strict=True):
        plan = gathering(source.layout, target.layout, target.shape, source.partial, nth)
        owners = owners_of(target.layout, nth)
        made = {shard: owner for shard, owner in enumerate(owners) if owner in devices}
        settled.append(Settled(source, target, plan, made))
    return Together(settled, task, label)


def _message(runs: Sequence[_Run], pieces: Sequence[_Piece]) -> Outgoing:
    """Return what one task is sent."""
    if len(pieces) == 1:
        ((nth, device, box),) = pieces
        part = runs[nth].part(device, box)
        if cuts := _cuts(box, runs[nth].move.itemsize):
            return _rows(part, cuts)
        return view(np.ascontiguousarray(part))
    flats = [view(np.ascontiguousarray(runs[nth].part(device, box))) for nth, device, box in pieces]
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


def _memory_for(runs: Sequence[_Run], pieces: Sequence[_Piece]) -> Incoming:
    """Return memory for a message of these pieces, which each run knows as its received ones."""
    if len(pieces) == 1:
        ((nth, device, box),) = pieces
        run, settled = runs[nth], runs[nth].move
        if (place := run.place_of(device, box)) is None:
            place = np.empty(box.shape, settled.dtype)
        run.received[settled.slots[device, box]] = place
        cuts = _cuts(box, settled.itemsize)
        return [view(place[cut]) for cut in cuts] if cuts else view(place)
    ends = itertools.accumulate(box.size * runs[nth].move.itemsize for nth, _, box in pieces)
    bounds = list(itertools.pairwise((0, *ends)))
    memory = np.empty(bounds[-1][1], np.uint8)
    for (nth, device, box), (start, end) in zip(pieces, bounds, strict=True):
        run, settled = runs[nth], runs[nth].move
        run.received[settled.slots[device, box]] = memory[start:end].view(settled.dtype).reshape(box.shape)
    return view(memory)


class Settled:
    """How one array moves: the blocks that one task makes, and what of."""

    def __init__(self, source: ArrayType, target: ArrayType, plan: Moving, made: Mapping[int, int]) -> None:
        """Take the plan, and which blocks are made here, by number: as which device's."""
        self.plan, self.dtype, self.itemsize = plan, target.dtype, target.dtype.itemsize
        self.combine = COMBINES[source.combine]
        self.slots: dict[tuple[int, Block], int] = {}  # of what is received: from which device, and which part
        self.parts: dict[tuple[int, Block], Any] = {}  # indices of parts of blocks; None: the whole one
        self.shapes: dict[int, tuple[int, ...]] = {}  # of the blocks that are made
        self.pieces: dict[int, list[_Assembled]] = {}  # of each
        self.own: dict[int, list[_Assembled]] = {}  # those that need this task only, of blocks of several
        self.rest: dict[int, list[_Assembled]] = {}  # the others
        self.places: dict[tuple[int, Block], tuple[int, Any]] = {}  # of what belongs in one block as it is
        self._source, task = source, plan.mesh.task_of
        for (_, to), sent in plan.transfers.items():
            for device, box in sent:
                self.parts[device, box] = self._index(device, box)
                if any(task[own] == to for own in made.values()):
                    self.slots[device, box] = len(self.slots)
        for shard, own in made.items():
            block = target.layout.block(target.shape, own)
            self.shapes[shard], self.pieces[shard] = block.shape, []
            self.own[shard], self.rest[shard] = [], []
            for piece in plan.pieces[own]:
                index = None if piece.box == block else _within(piece.box, block.start)
                terms = tuple(self._term(of, piece.box, task[of] == task[own]) for of in piece.sources)
                assembled = _Assembled(index, terms)
                self.pieces[shard].append(assembled)
                is_own = index is not None and all(term.slot < 0 for term in terms)
                (self.own if is_own else self.rest)[shard].append(assembled)
                if len(terms) == 1 and terms[0].slot >= 0:
                    self.places.setdefault((terms[0].device, piece.box), (shard, index))

    def terms_of(self, shard: int) -> list[int]:
        """Return the devices of this task whose blocks a block is made of, in the order of its pieces."""
        terms = [term for piece in self.pieces[shard] for term in piece.terms]
        return list(dict.fromkeys(term.device for term in terms if term.slot < 0))

    def is_sum(self, shard: int) -> bool:
        """Return whether a block is just the blocks of several devices of this task, combined."""
        pieces = self.pieces[shard]
        return (
            len(pieces) == 1
            and pieces[0].index is None
            and len(pieces[0].terms) > 1
            and all(term.slot < 0 and term.index is None for term in pieces[0].terms)
        )

    def assembled(self, shard: int, of: Mapping[int, Array]) -> Array:
        """Return a block, made of those of devices of this task: perhaps one of these itself."""
        return _Run(self, of).block(shard)

    def _index(self, device: int, box: Block) -> Any:
        block = self._source.layout.block(self._source.shape, device)
        return None if box == block else _within(box, block.start)

    def _term(self, device: int, box: Block, is_here: bool) -> _Term:
        return _Term(device, self._index(device, box) if is_here else None, -1 if is_here else self.slots[device, box])


class _Run:
    """One array that moves now."""

    __slots__ = ("_begun", "_has_own", "_of", "move", "received")

    def __init__(self, move: Settled, of: Mapping[int, Array]) -> None:
        self.move, self._of = move, of
        self.received: dict[int, Array] = {}  # by slot
        self._begun: dict[int, Array] = {}  # blocks that are being made, by their numbers in the layout
        self._has_own = False  # blocks have this task's own pieces

    def part(self, device: int, box: Block) -> Array:
        """Return a view of a part of a device's block."""
        return _part(self._of[device], self.move.parts[device, box])

    def place_of(self, device: int, box: Block) -> Array | None:
        """Return where a piece belongs in a block that is made here; None if it does not as it is, or not in one."""
        if (found := self.move.places.get((device, box))) is None:
            return None
        shard, index = found
        place = _part(self._begin(shard), index)
        return place if place.flags.c_contiguous else None

    def _begin(self, shard: int) -> Array:
        if (block := self._begun.get(shard)) is None:
            block = self._begun[shard] = np.empty(self.move.shapes[shard], self.move.dtype)
        return block

    def fill_own(self) -> None:
        """Put into the blocks what needs nothing of other tasks."""
        for shard, pieces in self.move.own.items():
            if pieces:
                self._fill(self._begin(shard), pieces)
        self._has_own = True

    def blocks(self) -> dict[int, Array]:
        """Return the blocks that are made here, by their numbers in the new layout."""
        return {shard: self.block(shard) for shard in self.move.pieces}

    def block(self, shard: int) -> Array:
        """Return one of them."""
        pieces = self.move.pieces[shard]
        if shard not in self._begun and len(pieces) == 1 and pieces[0].index is None and len(pieces[0].terms) == 1:
            (term,) = pieces[0].terms
            # A small part of a block must not keep all of it in memory; and blocks that are whole are shared.
            is_whole = term.slot < 0 and term.index is None
            return self._of[term.device] if is_whole else np.array(self._term(term), order="C")
        block = self._begin(shard)
        self._fill(block, self.move.rest[shard] if self._has_own else pieces)
        return block

    def _fill(self, out: Array, pieces: Sequence[_Assembled]) -> None:
        combine = self.move.combine
        for index, (first, *more) in pieces:
            target, value = _part(out, index), self._term(first)
            if more:
                combine(value, self._term(more[0]), out=target)
            elif _address(value) != _address(target):  # else it has been received there
                target[...] = value
            for term in more[1:]:
                combine(target, self._term(term), out=target)

    def _term(self, term: _Term) -> Array:
        return _part(self._of[term.device], term.index) if term.slot < 0 else self.received[term.slot]


def _part(block: Array, index: Any) -> Array:
    part: Array = block if index is None else block[index]
    return part


def _within(box: Block, start: Sequence[int]) -> Any:
    """Return the index of a box in a block that starts there. With `...`, a scalar's part is an array, too."""
    return (*(slice(a - s, b - s) for a, b, s in zip(box.start, box.stop, start, strict=True)), ...)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
