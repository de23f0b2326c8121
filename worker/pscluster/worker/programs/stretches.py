"""Computes functions of blocks that follow each other in a program, on all devices of a task.

What devices have in common is computed once, and moves within the task are made in between: a sum of what its devices
have is a function of their blocks. What differs between devices is computed by threads at the same time, where it takes
long enough: NumPy computes without holding Python's lock. See `scheduling` for the order.

Which devices have what in common follows from the blocks that a stretch begins with. So all is settled once for each
such pattern: the slots that blocks are in, the order, where memory can be let go, and where a result may be written
over an operand, since that is new memory, made in this stretch, and nothing else needs it any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pscluster.worker.programs.computing import ARITHMETIC, Computation, Slots
from pscluster.worker.programs.moves import Settled, Together
from pscluster.worker.programs.nodes import Assembly, HandOver, Node, Sum, Wait
from pscluster.worker.programs.once import pattern_of
from pscluster.worker.programs.program import Compute, Move, Program
from pscluster.worker.programs.scheduling import Job, Kind, arranged
from pscluster.worker.programs.store import Pattern, Registers
from pscluster.worker.programs.thread_pool import thread_pool

_WORK_A_MICROSECOND = 27_000

WORTH_WORK = 50 * _WORK_A_MICROSECOND
"""Of a function on one device, for which threads are used: see `work_of`."""

_PRODUCTS = frozenset(("matmul", "einsum", "tensordot"))


def reads_of(program: Program, start: int, stop: int) -> tuple[int, ...]:
    """Return the registers that a stretch of a program begins with."""
    known: tuple[int, ...] | None = program.settled.get(("reads", start))
    if known is None:
        read, made = dict[int, None](), set[int]()
        for item in _items(program, start, stop):
            inputs, outputs = ends_of(item)
            read.update((register, None) for register in inputs if register not in made)
            made.update(outputs)
        known = program.settled["reads", start] = tuple(read)
    return known


def ends_of(item: Compute | Move) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the registers that an instruction reads, and that it writes."""
    return (item.inputs, item.outputs) if isinstance(item, Compute) else ((item.input,), (item.output,))


def _items(program: Program, start: int, stop: int) -> list[Compute | Move]:
    return [item for group in program.groups[start:stop] for item in group if isinstance(item, Compute | Move)]


def work_of(program: Program, compute: Compute, device: int) -> float:
    """Return the work of a device in elements that are read or written; 2.5 multiplications take as long."""
    sizes = [math.prod(program.local_shape(register, device)) for register in (*compute.inputs, *compute.outputs)]
    return sum(sizes) + (math.sqrt(math.prod(sizes[:3])) / 2.5 if compute.function in _PRODUCTS else 0)


def may_share(program: Program, start: int, stop: int, devices: Sequence[int]) -> bool:
    """Return whether threads may be used, since several devices compute for long."""
    items = [item for item in _items(program, start, stop) if isinstance(item, Compute)]
    return len(devices) > 1 and any(work_of(program, item, devices[0]) >= WORTH_WORK for item in items)


class _Planned(NamedTuple):
    """A function of blocks in slots, once for all devices that have the same operands."""

    node: Computation | Sum | Assembly
    function: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    job: Job


class Stretch:
    """Functions that follow each other in a program, for a task whose devices have certain blocks in common."""

    def __init__(
        self,
        program: Program,
        start: int,
        stop: int,
        devices: Sequence[int],
        patterns: Mapping[int, Pattern],
        moving: Mapping[int, Together],
    ) -> None:
        """Take the groups of the program, and which devices share which of the blocks that it begins with.

        `moving` has what is settled of the groups that move arrays within this task, by their numbers.
        """
        planning = _Planning(program, devices, patterns)
        for nth in range(start, stop):
            if nth in moving:
                for item, move in zip(program.groups[nth], moving[nth].moves, strict=True):
                    assert isinstance(item, Move)
                    planning.move(item, move)
            else:
                for item in program.groups[nth]:
                    assert isinstance(item, Compute)
                    planning.compute(item)
        over = {register for registers in program.last_use[start:stop] for register in registers}
        read = reads_of(program, start, stop)
        made = [register for item in _items(program, start, stop) for register in ends_of(item)[1]]
        self._over = tuple(over.intersection(read))
        self._loads = [
            (register, place, slot)
            for register in read
            for slot, place in {slot: place for place, slot in enumerate(planning.at[register])}.items()
        ]
        self._results = [
            (register, planning.patterns[register], planning.at[register]) for register in made if register not in over
        ]
        kept = {slot for _, _, slots in self._results for slot in slots}
        self._handed = range(planning.count, planning.count + len(planning.planned))
        self._count = planning.count + len(planning.planned)
        self._steps = _steps(planning, kept)

    def run(self, registers: Registers) -> None:
        """Compute. Raise ProtocolError, or the functions' own errors."""
        slots: Slots = [None] * self._count
        for register, place, slot in self._loads:
            slots[slot] = registers.of[register][place]
        for register in self._over:
            registers.drop(register)
        try:
            for node, over in self._steps:
                node.run(slots)
                for slot in over:
                    slots[slot] = None
        except BaseException:
            for nth in self._handed:
                if slots[nth] is not None:
                    slots[nth].abandon()
            raise
        for register, pattern, of in self._results:
            registers.of[register], registers.patterns[register] = [slots[slot] for slot in of], pattern


class _Planning:
    """Functions that are being given slots."""

    def __init__(self, program: Program, devices: Sequence[int], patterns: Mapping[int, Pattern]) -> None:
        self._program, self._devices = program, devices
        self.patterns = dict(patterns)
        self.at: dict[int, tuple[int, ...]] = {}  # the slots of a register: of each device, by its place
        self.planned: list[_Planned] = []
        self.count = 0  # of slots
        self._made_by: dict[int, int] = {}  # slots, by number of what is planned
        for register, pattern in patterns.items():
            self._give(register, pattern)

    def _give(self, register: int, pattern: Pattern) -> None:
        """Give a register a slot for each block."""
        slots: dict[int, int] = {}
        for first in pattern:
            if first not in slots:
                slots[first] = self.count
                self.count += 1
        self.at[register], self.patterns[register] = tuple(slots[first] for first in pattern), pattern

    def compute(self, compute: Compute) -> None:
        """Plan a function of each device's blocks."""
        program = self._program
        dtypes = [program.arrays[register].dtype for register in compute.outputs]
        read = [self.at[register] for register in compute.inputs]
        pattern = pattern_of(program, compute, self._devices, read)
        owners = dict.fromkeys(pattern)
        for register in compute.outputs:
            self._give(register, pattern)
        written = [self.at[register] for register in compute.outputs]
        work = work_of(program, compute, self._devices[0])
        is_long = work >= WORTH_WORK and len(owners) > 1
        for place in owners:
            shapes = [program.local_shape(register, self._devices[place]) for register in compute.outputs]
            inputs, outputs = tuple([at[place] for at in read]), tuple([at[place] for at in written])
            node = Computation(compute, inputs, outputs, shapes, dtypes)
            self._plan(node, compute.function, inputs, outputs, work, is_long=is_long)

    def move(self, move: Move, settled: Settled) -> None:
        """Plan a move within the task: each block that it makes."""
        layout = self._program.arrays[move.output].layout
        first: dict[int, int] = {}
        shards = [layout.shard_of(device) for device in self._devices]
        self._give(move.output, tuple([first.setdefault(shard, place) for place, shard in enumerate(shards)]))
        place_of = {device: place for place, device in enumerate(self._devices)}
        for shard, place in first.items():
            terms, output = settled.terms_of(shard), self.at[move.output][place]
            inputs = tuple(self.at[move.input][place_of[device]] for device in terms)
            work = float(math.prod(settled.shapes[shard]) * (len(terms) + 1))
            if settled.is_sum(shard):
                node: Sum | Assembly = Sum(settled, shard, inputs, output)
                self._plan(node, settled.combine.__name__, inputs, (output,), work, is_long=False)
            else:
                node = Assembly(settled, shard, terms, inputs, output)
                self._plan(node, "", inputs, (output,), work, is_long=False)

    def _plan(
        self,
        node: Computation | Sum | Assembly,
        function: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        work: float,
        *,
        is_long: bool,
    ) -> None:
        needs = tuple([self._made_by[slot] for slot in inputs if slot in self._made_by])
        for slot in outputs:
            self._made_by[slot] = len(self.planned)
        job = Job(1 + work / _WORK_A_MICROSECOND, needs, is_long)
        self.planned.append(_Planned(node, function, inputs, outputs, job))

    def type_of(self) -> dict[int, tuple[Any, ...]]:
        """Return the shape and the type of what is in each slot."""
        program = self._program
        return {
            slot: (program.local_shape(register, device), program.arrays[register].dtype)
            for register, slots in self.at.items()
            for slot, device in zip(slots, self._devices, strict=True)
        }


def _steps(planning: _Planning, kept: set[int]) -> list[tuple[Node, tuple[int, ...]]]:
    """Return what is done, in order, and after each the slots that are not needed any more."""
    planned = planning.planned
    actions = arranged([item.job for item in planned], thread_pool().num_threads)
    last: dict[int, int] = {}  # the action after which nothing reads or writes a slot
    for nth, (kind, job) in enumerate(actions):
        if kind is not Kind.HAND:
            for slot in (*planned[job].inputs, *planned[job].outputs):
                last[slot] = nth
    over: dict[int, tuple[int, ...]] = {}
    for slot, nth in last.items():
        if slot not in kept:
            over[nth] = (*over.get(nth, ()), slot)
    spares = _Spares(planning)
    steps: list[tuple[Node, tuple[int, ...]]] = []
    for nth, (kind, job) in enumerate(actions):
        item = planned[job]
        if kind is Kind.DO:
            item.node.spare = spares.find(item, over.get(nth, ()))
            steps.append((item.node, over.get(nth, ())))
        elif kind is Kind.HAND:
            steps.append((HandOver(item.node, planning.count + job), ()))
        else:
            steps.append((Wait(planning.count + job), over.get(nth, ())))
    return steps


class _Spares:
    """Operands that results may be written over."""

    def __init__(self, planning: _Planning) -> None:
        fresh = {slot for item in planning.planned if item.node.is_fresh for slot in item.outputs}
        shared = {slot for item in planning.planned if not item.node.is_fresh for slot in item.inputs}
        self._own, self._type_of = fresh - shared, planning.type_of()

    def find(self, item: _Planned, over: Sequence[int]) -> int | None:
        """Return the slot of an operand that nothing needs after this, and that its result fits."""
        if item.function not in ARITHMETIC or not item.node.is_fresh:
            return None
        (output,) = item.outputs
        operands = item.inputs[:1] if isinstance(item.node, Sum) else item.inputs
        for slot in operands:
            if slot in over and slot in self._own and self._type_of[slot] == self._type_of[output]:
                return None if isinstance(item.node, Sum) and item.inputs.count(slot) > 1 else slot
        return None
