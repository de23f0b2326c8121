"""Runs a program on the blocks of one task's devices.

All tasks of the mesh run the same program at the same time, each with its own blocks, in the same order. What moves
between tasks is planned by all of them alike (`core.layouts.moving`, `moves`).

A program changes nothing before it is known to make sense. Arrays are stored once it has ended: if it fails, or is run
again since a worker died, none of its results is there, or the same ones are made again. Numbers of arrays to be
forgotten come with a later program, which does not use them.

Devices of a task that have equal blocks share one, and what is computed from equal blocks is computed once. What
differs is computed by threads at the same time, if it is worth it: see `stretches`. A program that runs for the second
time is planned; one that runs once, which most do that are not functions, would take longer: see `once`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.context import current_function
from pscluster.core.errors import ProtocolError
from pscluster.core.geometry.partition import Block
from pscluster.core.layouts.layout import Layout
from pscluster.worker.collectives.replica import replica_context
from pscluster.worker.programs.exchange import Exchange, exchange_of
from pscluster.worker.programs.local.blocks import LocalFunction, called, type_as_arrays
from pscluster.worker.programs.makers import MAKERS
from pscluster.worker.programs.moves import Together, gathers_together, moves_together
from pscluster.worker.programs.once import compute_once
from pscluster.worker.programs.program import (
    ArrayType,
    Call,
    Compute,
    Create,
    Fetch,
    Instruction,
    Load,
    Move,
    Numbers,
    Program,
    Read,
    Update,
)
from pscluster.worker.programs.reading import parse, read_numbers
from pscluster.worker.programs.store import Blocks, BlockStore, Registers
from pscluster.worker.programs.stretches import Stretch, ends_of, may_share, reads_of
from pscluster.worker.programs.variables import NoVariables, OnServers, Variables, Write

Array = npt.NDArray[Any]

Payload = Mapping[int, Array]
"""Blocks of one array, by their number in its layout: those that a task needs."""


_NO_VARIABLES = NoVariables()


def run_program(
    text: str,
    store: BlockStore,
    numbers: bytes,
    payloads: Sequence[Payload] = (),
    variables: Sequence[Any] = (),
    optimizers: Sequence[Any] = (),
) -> list[list[Array]] | None:
    """Run a program as a member of a gang, and return what it fetches; scheduled by the coordinator.

    Return None if it was to run again only for its results, after its updates were committed, and can't: arrays that it
    needs went with the worker that died.

    Args:
        text: the program.
        store: this worker's.
        numbers: of arrays, see `Numbers`.
        payloads: this worker's, see `run`.
        variables, optimizers: handles of those that it names.
    """
    return run_local(text, (), store, numbers, payloads, variables, optimizers)


def run_local(
    text: str,
    functions: Sequence[LocalFunction],
    store: BlockStore,
    numbers: bytes,
    payloads: Sequence[Payload] = (),
    variables: Sequence[Any] = (),
    optimizers: Sequence[Any] = (),
) -> list[list[Array]] | None:
    """Run a program that calls plain functions, as `run_program` does."""
    program, read = parse(text), read_numbers(numbers)
    function = current_function()
    assert function is not None  # it was scheduled
    if program.inputs and function.steps is not None and function.steps.dry:
        return None  # all members know it
    exchange = exchange_of(program.mesh, replica_context(), function.worker_index)
    of_program: Variables = _NO_VARIABLES
    if program.variables or program.optimizers or variables or optimizers:
        of_program = OnServers(program, variables, optimizers)
    return run(program, store, exchange, read, payloads, functions, of_program)


def run(
    program: Program,
    store: BlockStore,
    exchange: Exchange,
    numbers: Numbers,
    payloads: Sequence[Payload],
    functions: Sequence[LocalFunction] = (),
    variables: Variables | None = None,
) -> list[list[Array]]:
    """Do what `run_program` does, with any way to the other tasks, and any variables.

    Args:
        program: what to do.
        store: this task's.
        exchange: the way to the others.
        numbers: in the store, of its inputs and outputs, and of what is forgotten.
        payloads: what it loads; and after that, blocks of inputs that are not in the store yet.
        functions: those that it calls.
        variables: those that it names.

    Raises:
        ProtocolError: numbers, payloads, functions or results do not fit the program.
        TensorLostError: an input is not in the store.
        MemberUnavailableError: another task is gone.
    """
    inputs, outputs, sent = numbers.inputs, numbers.outputs, numbers.sent
    takes = program.inputs, len(program.outputs) + program.untyped, program.payloads, program.functions
    given = len(inputs), len(outputs), len(payloads) - len(sent), len(functions)
    if takes[:2] != given[:2] or takes[2] > given[2] or takes[3] > given[3]:
        raise ProtocolError(
            f"a program takes {takes[0]} inputs, {takes[1]} outputs, {takes[2]} payloads and {takes[3]} functions, and "
            f"was given {', '.join(map(str, given))}"
        )
    store.drop(numbers.forgotten)
    variables = variables or _NO_VARIABLES
    running = _Running(program, exchange, payloads, functions)
    for register, payload in zip(sent, payloads[len(payloads) - len(sent) :], strict=True):
        if register not in range(len(inputs)):
            raise ProtocolError(f"blocks were sent of input {register} of a program, but it has {len(inputs)}")
        store.put(inputs[register], running.loaded(register, payload))
    for register, number in enumerate(inputs):
        running.registers.put(register, store.get(number, program.arrays[register]))
    running.read(variables)
    with np.errstate(all="ignore"):  # warnings would be shown on the worker
        running.execute_all()
    if updates := program.updates:
        variables.write(updates, running.writes)
    results = [*map(running.registers.get, program.outputs), *running.untyped]
    for blocks, number in zip(results, outputs, strict=True):
        store.put(number, blocks)
    return running.fetched


class _Part(NamedTuple):
    """Groups of a program that are executed at once."""

    start: int
    stop: int
    is_local: bool  # they need nothing of other tasks; else the first one does, and the others nothing of that


class _Running:
    """One run of a program."""

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        payloads: Sequence[Payload],
        functions: Sequence[LocalFunction],
    ) -> None:
        self.fetched: list[list[Array]] = []
        self.untyped: list[Blocks] = []
        self.writes: list[Write] = []
        self._read: dict[int, Blocks] = {}  # by the register that will have it
        self._program, self._exchange, self._payloads, self._functions = program, exchange, payloads, functions
        self._devices = program.mesh.devices_of(exchange.task)
        self.registers = Registers(program.arrays, self._devices)

    def execute_all(self) -> None:
        """Execute the program."""
        groups, last_use = self._program.groups, self._program.last_use
        for part in self._parts():
            if part.is_local:
                self._compute(part.start, part.stop)
                continue
            self._execute(part.start, groups[part.start], part)
            for register in last_use[part.start]:
                self.registers.drop(register)

    def _parts(self) -> list[_Part]:
        """Return the groups: ranges of those that need nothing of other tasks, and others."""
        key = "parts", self._devices[0]
        found: list[_Part] | None = self._program.settled.get(key)
        if found is None:
            found = []
            groups, nth = self._program.groups, 0
            while nth < len(groups):
                start, nth = nth, nth + 1
                if is_local := self._is_local(start):
                    while nth < len(groups) and self._is_local(nth):
                        nth += 1
                elif isinstance(groups[start][0], Move):
                    moved = {item.output for item in groups[start] if isinstance(item, Move)}
                    while nth < len(groups) and self._is_local(nth) and not self._needs(nth, moved):
                        nth += 1
                found.append(_Part(start, nth, is_local))
            self._program.settled[key] = found
        return found

    def _is_local(self, nth: int) -> bool:
        return isinstance(self._program.groups[nth][0], Compute) or self._is_move_here(nth)

    def _needs(self, nth: int, registers: Set[int]) -> bool:
        """Return whether a local group reads some registers."""
        items = [item for item in self._program.groups[nth] if isinstance(item, Compute | Move)]
        return any(register in registers for item in items for register in ends_of(item)[0])

    def _is_move_here(self, nth: int) -> bool:
        return isinstance(self._program.groups[nth][0], Move) and not self._together(nth).is_exchange

    def _execute(self, nth: int, group: Sequence[Instruction], part: _Part) -> None:
        """Execute one instruction, or moves or updates that are made together: the n-th group."""
        match group:
            case [Load() as load]:
                self.registers.put(load.output, self.loaded(load.output, self._payloads[load.payload]))
            case [Create() as create]:
                self._create(create)
            case [Call() as call]:
                self._call(call)
            case [Fetch() as fetch]:
                self._fetch(fetch)
            case [Read() as read]:
                self.registers.put(read.output, self._read.pop(read.output))
            case [Update(), *_]:
                self._update(nth, [item for item in group if isinstance(item, Update)])
            case _:
                self._move(nth, [item for item in group if isinstance(item, Move)], part)

    def read(self, variables: Variables) -> None:
        """Read this task's blocks of all variables that the program will read: at once."""
        if not (reads := self._program.reads):
            return
        wanted: dict[tuple[int, Block], None] = {}
        for item in reads:
            of = self._program.arrays[item.output]
            wanted.update(((item.variable, of.layout.block(of.shape, device)), None) for device in self._devices)
        blocks = dict(zip(wanted, variables.read(list(wanted)), strict=True))
        for item in reads:
            of = self._program.arrays[item.output]
            by_device = {device: blocks[item.variable, of.layout.block(of.shape, device)] for device in self._devices}
            self._read[item.output] = Blocks(of, by_device)

    def _update(self, nth: int, updates: Sequence[Update]) -> None:
        """Combine terms of the blocks that this task sends, and keep them until the program ends."""
        gathered = self._together(nth).run([self.registers.get(update.input) for update in updates], self._exchange)
        for update, made in zip(updates, gathered, strict=True):
            of = self._program.variables[update.variable]
            of_layout = of.layout.partition(of.shape).blocks
            self.writes += [Write(update, of_layout[shard], values) for shard, values in made.items() if values.size]

    def loaded(self, register: int, payload: Payload) -> Blocks:
        """Return an array made of blocks that were sent here. Raise ProtocolError if they are not those it has here."""
        of, blocks = self._program.arrays[register], {}
        for device in self._devices:
            block = payload.get(of.layout.shard_of(device)) if isinstance(payload, Mapping) else None
            shape = self._program.local_shape(register, device)
            if not isinstance(block, np.ndarray) or (block.shape, block.dtype) != (shape, of.dtype):
                raise ProtocolError(
                    f"device {device} of a mesh needs a block of shape {shape} and type {of.dtype}, but was sent "
                    f"{'none' if block is None else getattr(block, 'shape', type(block).__name__)}"
                )
            blocks[device] = block
        return Blocks(of, blocks)

    def _create(self, create: Create) -> None:
        of, made = self._program.arrays[create.output], dict[int, Array]()
        for device in self._devices:
            shard = of.layout.shard_of(device)
            if shard not in made:
                block = of.layout.block(of.shape, device)
                made[shard] = np.empty(block.shape, of.dtype)
                MAKERS[create.maker].fill(of.shape, block, made[shard], *create.numbers)
        blocks = {device: made[of.layout.shard_of(device)] for device in self._devices}
        self.registers.put(create.output, Blocks(of, blocks))

    def _compute(self, start: int, stop: int) -> None:
        """Compute some groups: functions of blocks, and moves within this task."""
        patterns, settled = self.registers.patterns, self._program.settled
        read = reads_of(self._program, start, stop)
        key = start, self._devices[0], *[patterns[register] for register in read]
        known: Stretch | bool = settled.get(key, False)
        if not isinstance(known, Stretch):
            groups = self._program.groups
            moving = {nth: self._together(nth) for nth in range(start, stop) if isinstance(groups[nth][0], Move)}
            if not known and not may_share(self._program, start, stop, self._devices):
                settled[key] = True
                compute_once(self._program, start, stop, self._devices, self.registers, moving)
                return
            first = {register: patterns[register] for register in read}
            known = settled[key] = Stretch(self._program, start, stop, self._devices, first, moving)
        known.run(self.registers)

    def _together(self, nth: int) -> Together:
        """Return what is settled of the n-th group, which moves arrays, or updates variables."""
        program, task = self._program, self._exchange.task
        known: Together | None = program.settled.get((nth, self._devices[0]))
        if known is None:
            items = [item for item in program.groups[nth] if isinstance(item, Move | Update)]
            sources = [program.arrays[item.input] for item in items]
            before = sum(isinstance(item, Move | Update) for group in program.groups[:nth] for item in group)
            what = f"move {before + 1} of a program, of {sources[0]}"
            what += f", and {len(items) - 1} more" if len(items) > 1 else ""
            if updates := [item for item in items if isinstance(item, Update)]:
                numbers = [item.variable for item in updates]
                pairs = list(zip(sources, (program.variables[number] for number in numbers), strict=True))
                known = gathers_together(pairs, numbers, self._devices, task, what)
            else:
                targets = [program.arrays[item.output] for item in items if isinstance(item, Move)]
                known = moves_together(list(zip(sources, targets, strict=True)), self._devices, task, what)
            program.settled[nth, self._devices[0]] = known
        return known

    def _call(self, call: Call) -> None:
        operands = [self.registers.get(register) for register in call.inputs]
        wanted: Sequence[ArrayType | Layout] = call.layouts or [
            self._program.arrays[register] for register in call.outputs
        ]
        function, mesh = self._functions[call.function], self._program.mesh
        results = called(function, mesh, self._exchange, operands, wanted, check=call.check)
        if call.layouts:
            self.untyped += results
            self.fetched.append([part for blocks in results for part in type_as_arrays(blocks.type)])
        for register, blocks in zip(call.outputs, results, strict=False):
            self.registers.put(register, blocks)

    def _move(self, nth: int, moves: Sequence[Move], part: _Part) -> None:
        def meanwhile() -> None:
            if nth + 1 < part.stop:
                self._compute(nth + 1, part.stop)

        sources = [self.registers.get(move.input) for move in moves]
        moved = self._together(nth).run(sources, self._exchange, meanwhile)
        for move, made in zip(moves, moved, strict=True):
            of = self._program.arrays[move.output]
            self.registers.put(move.output, Blocks(of, {at: made[of.layout.shard_of(at)] for at in self._devices}))

    def _fetch(self, fetch: Fetch) -> None:
        blocks = self.registers.get(fetch.input)
        owners = blocks.type.layout.owners
        self.fetched.append(
            [block for device, block in sorted(blocks.of.items()) if fetch.every_device or device in owners]
        )
