"""Computes functions of blocks that follow each other in a program, on all devices of a task.

What devices have in common is computed once. What differs is computed by threads at the same time, where it is long
enough: NumPy computes without holding Python's lock. Functions that take some microseconds are computed one after the
other: threads that both want the lock that often wait for each other, which takes longer.

So functions are brought in an order in which those of a kind form a phase: long or short, of the same devices. One that
another one needs still comes first.

Which devices have what in common follows from the blocks that a stretch begins with. So it is settled once for each
such pattern, as is what memory can be let go, and when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.worker.programs.computing import Computation
from pscluster.worker.programs.crew import crew
from pscluster.worker.programs.program import Compute, Program
from pscluster.worker.programs.store import Pattern, Registers

WORTH_WORK = 1 << 20
"""Of a function on one device, for which threads are used: see `work_of`. It takes about 50 us."""

_PRODUCTS = frozenset(("matmul", "einsum", "tensordot"))

Steps = list[tuple[Computation, tuple[int, ...]]]
"""Functions, and after each the registers that are not needed any more."""


def reads_of(program: Program, start: int, stop: int) -> tuple[int, ...]:
    """Return the registers that a stretch of a program begins with."""
    known: tuple[int, ...] | None = program.settled.get(("reads", start))
    if known is None:
        read, made = dict[int, None](), set[int]()
        for compute in _computes(program, start, stop):
            read.update((register, None) for register in compute.inputs if register not in made)
            made.update(compute.outputs)
        known = program.settled["reads", start] = tuple(read)
    return known


def _computes(program: Program, start: int, stop: int) -> list[Compute]:
    return [item for (item, *_) in program.groups[start:stop] if isinstance(item, Compute)]


def work_of(program: Program, compute: Compute, device: int) -> float:
    """Return about how long a device computes, in elements that are read or written; 4 multiplications are as much."""
    sizes = [math.prod(program.local_shape(register, device)) for register in (*compute.inputs, *compute.outputs)]
    return sum(sizes) + (math.sqrt(math.prod(sizes[:3])) / 4 if compute.function in _PRODUCTS else 0)


class Kind(NamedTuple):
    """What the functions of a phase have in common."""

    pattern: Pattern
    is_shared: bool  # by threads


class Phase:
    """Functions of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._pattern, self._is_shared = kind
        self.owners = [place for place, first in enumerate(self._pattern) if place == first]
        """The devices that compute."""
        self.steps: list[Steps] = [[] for _ in self.owners]
        """Of each."""
        self.results: list[int] = []
        """Registers that are needed afterwards."""
        self.over: list[int] = []
        """Those that are not."""

    def run(self, registers: Registers) -> None:
        """Compute."""
        of, owners = registers.of, self.owners
        if self._is_shared:
            crew().share(len(owners), lambda nth: _run(self.steps[nth], of[owners[nth]]))
        elif len(of) > len(owners) == 1:
            _run_once(self.steps[0], of)
        else:
            for place, steps in zip(owners, self.steps, strict=True):
                _run(steps, of[place])
        if len(of) > len(owners):
            for place, first in enumerate(self._pattern):
                if place != first:
                    for register in self.results:
                        of[place][register] = of[first][register]
                    for register in self.over:
                        of[place].pop(register, None)


def _run(steps: Steps, blocks: dict[int, npt.NDArray[np.generic]]) -> None:
    for computation, over in steps:
        computation.run(blocks)
        for register in over:
            del blocks[register]


def _run_once(steps: Steps, of: Sequence[dict[int, npt.NDArray[np.generic]]]) -> None:
    """Compute what all devices have in common, as the first of them."""
    blocks = of[0]
    for computation, over in steps:
        computation.run(blocks)
        for register in over:
            for each in of:
                each.pop(register, None)


class Stretch:
    """Functions that follow each other in a program, for a task whose devices have certain blocks in common."""

    def __init__(
        self, program: Program, start: int, stop: int, devices: Sequence[int], patterns: Mapping[int, Pattern]
    ) -> None:
        """Take the groups of the program, and which devices share which of the blocks that it begins with."""
        known = dict(patterns)
        left: list[tuple[Compute, Kind]] = []
        for compute in _computes(program, start, stop):
            shapes = [[program.local_shape(register, device) for register in compute.outputs] for device in devices]
            first: dict[object, int] = {}
            pattern = tuple(
                first.setdefault((*(known[register][place] for register in compute.inputs), *shapes[place]), place)
                for place in range(len(devices))
            )
            known.update(dict.fromkeys(compute.outputs, pattern))
            is_long = work_of(program, compute, devices[0]) >= WORTH_WORK
            left.append((compute, Kind(pattern, is_long and len(set(pattern)) > 1)))
        phases = list(_phases(left))
        over = {register for registers in program.last_use[start:stop] for register in registers}
        last: dict[int, Compute] = {}
        for phase in phases:
            for compute, _ in phase:
                last.update((register, compute) for register in (*compute.inputs, *compute.outputs) if register in over)
        self.phases = [_phase(program, phase, devices, last) for phase in phases]
        made = [register for compute, _ in left for register in compute.outputs]
        self._results = [(register, known[register]) for register in made if register not in over]
        self._over = tuple(over)

    def run(self, registers: Registers) -> None:
        """Compute. Raise ProtocolError, or the functions' own errors."""
        for phase in self.phases:
            phase.run(registers)
        registers.patterns.update(self._results)
        for register in self._over:
            registers.patterns.pop(register, None)


def _phases(left: list[tuple[Compute, Kind]]) -> list[list[tuple[Compute, Kind]]]:
    """Return functions by phases: each takes those of one kind that need nothing of what is left."""
    phases = []
    while left:
        phase, skipped, missing = [], [], set[int]()
        for compute, kind in left:
            if kind == left[0][1] and missing.isdisjoint(compute.inputs):
                phase.append((compute, kind))
            else:
                skipped.append((compute, kind))
                missing.update(compute.outputs)
        phases.append(phase)
        left = skipped
    return phases


def _phase(
    program: Program, functions: Sequence[tuple[Compute, Kind]], devices: Sequence[int], last: Mapping[int, Compute]
) -> Phase:
    phase = Phase(functions[0][1])
    made = set[int]()
    for compute, _ in functions:
        used = dict.fromkeys((*compute.inputs, *compute.outputs))
        over = tuple(register for register in used if last.get(register) is compute)
        for steps, place in zip(phase.steps, phase.owners, strict=True):
            steps.append((Computation(program, compute, devices[place]), over))
        phase.over += over
        made.update(compute.outputs)
    phase.results = sorted(made.difference(phase.over))
    return phase
