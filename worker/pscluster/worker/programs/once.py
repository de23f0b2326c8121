"""Computes functions of blocks one by one, as they come: for programs that run once, which are not worth a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pscluster.worker.programs.computing import Array, Computation
from pscluster.worker.programs.moves import Together
from pscluster.worker.programs.program import Compute, Move, Program
from pscluster.worker.programs.store import Pattern, Registers


def compute_once(
    program: Program,
    start: int,
    stop: int,
    devices: Sequence[int],
    registers: Registers,
    moving: Mapping[int, Together],
) -> None:
    """Do what a `Stretch` of the program does. Raise ProtocolError, or the functions' own errors."""
    for nth in range(start, stop):
        group = program.groups[nth]
        if nth in moving:
            moves = [item for item in group if isinstance(item, Move)]
            for move, settled in zip(moves, moving[nth].moves, strict=True):
                of = registers.get(move.input).of
                layout = program.arrays[move.output].layout
                made = {shard: settled.assembled(shard, of) for shard in settled.pieces}
                registers.put_all(move.output, [made[layout.shard_of(device)] for device in devices])
        for item in group:
            if isinstance(item, Compute):
                _compute(program, item, devices, registers)
        for register in program.last_use[nth]:
            registers.drop(register)


def pattern_of(program: Program, compute: Compute, devices: Sequence[int], read: Sequence[Sequence[int]]) -> Pattern:
    """Return which devices have the same results, given what identifies their operands, by operand and place."""
    shapes = [[program.local_shape(register, device) for register in compute.outputs] for device in devices]
    first: dict[object, int] = {}
    places = range(len(devices))
    return tuple([first.setdefault((*[of[place] for of in read], *shapes[place]), place) for place in places])


def _compute(program: Program, compute: Compute, devices: Sequence[int], registers: Registers) -> None:
    """Call a function, once for equal blocks."""
    pattern = pattern_of(program, compute, devices, [registers.patterns[register] for register in compute.inputs])
    dtypes = [program.arrays[register].dtype for register in compute.outputs]
    made: dict[int, dict[int, Array]] = {}
    for place in dict.fromkeys(pattern):
        blocks = made[place] = {register: registers.of[register][place] for register in compute.inputs}
        shapes = [program.local_shape(register, devices[place]) for register in compute.outputs]
        Computation(compute, compute.inputs, compute.outputs, shapes, dtypes).run(blocks)
    for register in compute.outputs:
        registers.of[register], registers.patterns[register] = [made[first][register] for first in pattern], pattern
