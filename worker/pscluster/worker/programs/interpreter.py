"""Runs a program on the blocks of one task's devices.

All tasks of the mesh run the same program at the same time, each with its own blocks, in the same order. What moves
between tasks is planned by all of them alike (`core.layouts.moving`), and each pair that has something to exchange in a
move does so in one message each way: receives are posted before anything is sent.

A program changes nothing before it is known to make sense. Arrays are stored once it has ended: if it fails, or is run
again since a worker died, none of its results is there, or the same ones are made again. Numbers of arrays to be
forgotten come with a later program, which does not use them.

Devices of a task that have equal blocks share one, and what is computed from equal blocks is computed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.context import current_function
from pscluster.core.errors import ProtocolError
from pscluster.core.geometry import Block
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.moving import Moving, moving
from pscluster.core.transport.frames import view
from pscluster.worker.collectives.replica import replica_context
from pscluster.worker.programs.exchange import Exchange, exchange_of
from pscluster.worker.programs.makers import MAKERS
from pscluster.worker.programs.operations import COMBINES, OPERATIONS
from pscluster.worker.programs.program import (
    ArrayType,
    Compute,
    Create,
    Fetch,
    Instruction,
    Load,
    Move,
    Placeholder,
    Program,
    parse,
)
from pscluster.worker.programs.store import Blocks, BlockStore

Array = npt.NDArray[Any]

Payload = Mapping[int, Array]
"""Blocks of one array, by their number in its layout: those that a task needs."""


def run_program(
    text: str,
    store: BlockStore,
    inputs: Sequence[int],
    outputs: Sequence[int],
    forgotten: Sequence[int],
    payloads: Sequence[Payload],
) -> list[list[Array]]:
    """Run a program as a member of a gang, and return what it fetches; scheduled by the coordinator.

    Args:
        text: the program.
        store: this worker's.
        inputs, outputs: the numbers in the store of its first registers, and of its outputs.
        forgotten: numbers of arrays that are no longer needed.
        payloads: what it loads here.
    """
    program = parse(text)
    function = current_function()
    assert function is not None  # it was scheduled
    exchange = exchange_of(program.mesh, replica_context(), function.worker_index)
    return run(program, store, exchange, inputs, outputs, forgotten, payloads)


def run(
    program: Program,
    store: BlockStore,
    exchange: Exchange,
    inputs: Sequence[int],
    outputs: Sequence[int],
    forgotten: Sequence[int],
    payloads: Sequence[Payload],
) -> list[list[Array]]:
    """Do what `run_program` does, with any way to the other tasks.

    Raises:
        ProtocolError: numbers, payloads or results do not fit the program.
        TensorLostError: an input is not in the store.
        MemberUnavailableError: another task is gone.
    """
    if len(inputs) != program.inputs or len(outputs) != len(program.outputs) or len(payloads) < program.payloads:
        raise ProtocolError(
            f"a program of {program.inputs} inputs, {len(program.outputs)} outputs and {program.payloads} payloads was "
            f"given {len(inputs)}, {len(outputs)} and {len(payloads)}"
        )
    store.drop(forgotten)
    running = _Running(program, exchange, payloads)
    for register, number in enumerate(inputs):
        running.registers[register] = store.get(number, program.arrays[register])
    with np.errstate(all="ignore"):  # warnings would be shown on the worker
        for group, over in zip(program.groups, program.last_use, strict=True):
            running.execute(group)
            for register in over:
                running.registers.pop(register, None)
    for register, number in zip(program.outputs, outputs, strict=True):
        store.put(number, running.registers[register])
    return running.fetched


class _Running:
    """One run of a program."""

    def __init__(self, program: Program, exchange: Exchange, payloads: Sequence[Payload]) -> None:
        self.registers: dict[int, Blocks] = {}
        self.fetched: list[list[Array]] = []
        self._program, self._exchange, self._payloads = program, exchange, payloads
        self._devices = program.mesh.devices_of(exchange.task)
        self._moves = 0

    def execute(self, group: Sequence[Instruction]) -> None:
        """Execute one instruction, or moves that are made together."""
        match group:
            case [Load() as load]:
                self._load(load)
            case [Create() as create]:
                self._create(create)
            case [Compute() as compute]:
                self._compute(compute)
            case [Fetch() as fetch]:
                self._fetch(fetch)
            case _:
                self._move([item for item in group if isinstance(item, Move)])

    def _load(self, load: Load) -> None:
        of, blocks = self._program.arrays[load.output], {}
        payload = self._payloads[load.payload]
        for device in self._devices:
            block = payload.get(of.layout.shard_of(device)) if isinstance(payload, Mapping) else None
            shape = self._program.local_shape(load.output, device)
            if not isinstance(block, np.ndarray) or (block.shape, block.dtype) != (shape, of.dtype):
                raise ProtocolError(
                    f"device {device} of a mesh needs a block of shape {shape} and type {of.dtype}, but was sent "
                    f"{'none' if block is None else getattr(block, 'shape', type(block).__name__)}"
                )
            blocks[device] = block
        self.registers[load.output] = Blocks(of, blocks)

    def _create(self, create: Create) -> None:
        of, made = self._program.arrays[create.output], dict[int, Array]()
        for device in self._devices:
            shard = of.layout.shard_of(device)
            if shard not in made:
                block = of.layout.block(of.shape, device)
                made[shard] = np.empty(block.shape, of.dtype)
                MAKERS[create.maker].fill(of.shape, block, made[shard], *create.numbers)
        blocks = {device: made[of.layout.shard_of(device)] for device in self._devices}
        self.registers[create.output] = Blocks(of, blocks)

    def _compute(self, compute: Compute) -> None:
        operands = [self.registers[register] for register in compute.inputs]
        types = [self._program.arrays[register] for register in compute.outputs]
        function = OPERATIONS[compute.function]
        known: dict[object, Sequence[Array]] = {}
        results: list[dict[int, Array]] = [{} for _ in types]
        for device in self._devices:
            blocks = [operand.of[device] for operand in operands]
            shapes = [self._program.local_shape(register, device) for register in compute.outputs]
            key = *map(id, blocks), *shapes
            if key not in known:
                made = function(
                    *(_filled(arg, blocks, shapes) for arg in compute.args),
                    **{name: _filled(arg, blocks, shapes) for name, arg in compute.kwargs.items()},
                )
                known[key] = _checked(compute, made, types, shapes)
            for result, block in zip(results, known[key], strict=True):
                result[device] = block
        for register, of, result in zip(compute.outputs, types, results, strict=True):
            self.registers[register] = Blocks(of, result)

    def _move(self, moves: Sequence[Move]) -> None:
        sources = [self.registers[move.input] for move in moves]
        targets = [self._program.arrays[move.output] for move in moves]
        plans = [
            moving(source.type.layout, of.layout, of.shape, source.type.partial)
            for source, of in zip(sources, targets, strict=True)
        ]
        received = self._exchanged(sources, plans)
        for move, source, of, plan, pieces in zip(moves, sources, targets, plans, received, strict=True):
            combine = COMBINES[source.type.combine]
            made: dict[int, Array] = {}
            for device in self._devices:
                shard = of.layout.shard_of(device)
                if shard not in made:
                    made[shard] = self._assembled(source, plan, device, of.layout, pieces, combine)
            blocks = {device: made[of.layout.shard_of(device)] for device in self._devices}
            self.registers[move.output] = Blocks(of, blocks)

    def _exchanged(self, sources: Sequence[Blocks], plans: Sequence[Moving]) -> list[dict[tuple[int, Block], Array]]:
        """Send other tasks the pieces that they need for these moves, and return those that this one needs, by move."""
        first, self._moves = self._moves + 1, self._moves + len(plans)
        received: list[dict[tuple[int, Block], Array]] = [{} for _ in plans]
        if not any(plan.transfers for plan in plans):
            return received
        me = self._exchange.task
        outgoing: dict[int, list[Array]] = {}
        awaited: dict[int, list[tuple[int, int, Block]]] = {}  # by task: the move, and the device that has the piece
        # Large elements first: so each lies in the message where an array of its type may.
        for nth in sorted(range(len(plans)), key=lambda nth: -sources[nth].type.dtype.itemsize):
            for (of, to), sent in plans[nth].transfers.items():
                if of == me:
                    parts = (np.ascontiguousarray(self._part(sources[nth], *piece)) for piece in sent)
                    outgoing.setdefault(to, []).extend(part.reshape(-1).view(np.uint8) for part in parts)
                elif to == me:
                    awaited.setdefault(of, []).extend((nth, device, box) for device, box in sent)
        incoming: dict[int, Array] = {}
        for of, pieces in awaited.items():
            ends = itertools.accumulate(box.size * sources[nth].type.dtype.itemsize for nth, _, box in pieces)
            bounds = list(itertools.pairwise((0, *ends)))
            incoming[of] = np.empty(bounds[-1][1], np.uint8)
            for (nth, device, box), (start, end) in zip(pieces, bounds, strict=True):
                flat = incoming[of][start:end].view(sources[nth].type.dtype)
                received[nth][device, box] = flat.reshape(box.shape)
        # All tasks call it, also those that have nothing to exchange.
        self._exchange.swap(
            {to: view(flats[0] if len(flats) == 1 else np.concatenate(flats)) for to, flats in outgoing.items()},
            {of: view(buffer) for of, buffer in incoming.items()},
            f"move {first} of a program, of {sources[0].type}"
            + (f", and {len(plans) - 1} more" if len(plans) > 1 else ""),
        )
        return received

    @staticmethod
    def _part(source: Blocks, device: int, box: Block) -> Array:
        """Return a view of a part of a device's block."""
        start = source.type.layout.block(source.type.shape, device).start
        part: Array = source.of[device][_within(box, start)]
        return part

    def _assembled(
        self,
        source: Blocks,
        plan: Moving,
        device: int,
        layout: Layout,
        received: Mapping[tuple[int, Block], Array],
        combine: np.ufunc,
    ) -> Array:
        """Return a device's block, made of pieces that are here."""
        own = layout.block(source.type.shape, device)

        def term(of: int, box: Block) -> Array:
            return self._part(source, of, box) if of in source.of else received[of, box]

        pieces = plan.pieces[device]
        if len(pieces) == 1 and pieces[0].box == own and len(pieces[0].sources) == 1:
            whole = term(pieces[0].sources[0], own)
            base = source.of.get(pieces[0].sources[0])
            # A small part of a block must not keep all of it in memory; and blocks that are whole are shared.
            return base if base is not None and base.shape == whole.shape else np.ascontiguousarray(whole).copy()
        out = np.empty(own.shape, source.type.dtype)
        for box, sources in pieces:
            target = out[_within(box, own.start)]
            target[...] = term(sources[0], box)
            for of in sources[1:]:
                combine(target, term(of, box), out=target)
        return out

    def _fetch(self, fetch: Fetch) -> None:
        blocks = self.registers[fetch.input]
        owners = blocks.type.layout.owners
        self.fetched.append(
            [block for device, block in sorted(blocks.of.items()) if fetch.every_device or device in owners]
        )


def _within(box: Block, start: Sequence[int]) -> Any:
    """Return the index of a box in a block that starts there. With `...`, a scalar's part is an array, too."""
    return (*(slice(a - s, b - s) for a, b, s in zip(box.start, box.stop, start, strict=True)), ...)


def _filled(argument: Any, blocks: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return an argument with blocks and shapes in place of what stands for them."""
    if isinstance(argument, Placeholder):
        return blocks[argument.number] if argument.kind == "in" else shapes[argument.number]
    if isinstance(argument, list | tuple):
        return type(argument)(_filled(item, blocks, shapes) for item in argument)
    return argument


def _checked(compute: Compute, made: Any, types: Sequence[ArrayType], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return what a function has returned as arrays. Raise ProtocolError if it is not what the program says."""
    results = list(made) if isinstance(made, list | tuple) else [made]
    arrays = [np.asarray(result) for result in results]
    found = [(array.shape, array.dtype) for array in arrays]
    wanted = [(shape, of.dtype) for shape, of in zip(shapes, types, strict=True)]
    if found != wanted:
        raise ProtocolError(f"{compute.function} has returned {found}, where the program expects {wanted}")
    return [array if array.flags.c_contiguous else np.ascontiguousarray(array) for array in arrays]
