"""A program that is being written: instructions over arrays, which become registers once it is sent."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy.typing as npt

from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.core.layouts.moving import moving
from pscluster.spmd.execution.ordering import Recorded, ordered, reads_and_writes, with_places
from pscluster.spmd.execution.propagation import propagate_shardings
from pscluster.worker.programs.local.blocks import LocalFunction
from pscluster.worker.programs.program import ArrayType, Numbers, encode

Array = npt.NDArray[Any]

_REMEMBERED_INSTRUCTIONS = 16
"""The most of a program whose text is remembered."""

_REMEMBERED_TEXTS = 1024

_texts: dict[tuple[Any, ...], str] = {}


class HasArrays(Protocol):
    """The session that an array belongs to."""

    has_values: bool
    """Whether its arrays have values that can be fetched."""

    dropped: deque[int]
    """The numbers of arrays that nothing refers to any more."""

    def why_lost(self, ref: Ref) -> str | None:
        """Return why an array was not made; None if it was, or may still be."""


class Ref:
    """An array on the devices, by its number. Once nothing refers to it, the devices are told to forget it."""

    __slots__ = ("__weakref__", "blocks", "made_by", "number", "program", "sent_here", "session", "type")

    def __init__(self, session: HasArrays, number: int, of: ArrayType, program: int, made_by: str) -> None:
        self.session, self.number, self.type, self.program, self.made_by = session, number, of, program, made_by
        self.sent_here: tuple[Running, int] | None = None
        """The program that makes it and sends its value here, and the number of that fetch; None: it does not."""
        self.blocks: Mapping[int, Array] | None = None
        """Its blocks, by number in its layout, if they come from here and go with the first program that needs them."""

    def __del__(self) -> None:
        # Perhaps in the middle of something, on any thread: nothing here may take a lock.
        self.session.dropped.append(self.number)


Loaded = tuple[weakref.ref[Ref], Mapping[int, Array]]
"""An array whose blocks go with a program."""


def described(made_by: str, of: ArrayType) -> str:
    """Return what an array is, for people."""
    return f"a global array of shape {of.shape} and type {of.dtype.name}, the result of {made_by}"


@dataclass(frozen=True, eq=False)
class Stored:
    """A variable, as programs name it: what holds it, and its shape, type and layout."""

    handle: Any
    type: ArrayType


@dataclass(frozen=True, slots=True)
class Updating:
    """What is done to a variable: by an array, which may have terms."""

    kind: str  # see `worker.programs.program`
    source: Ref
    variable: Stored
    optimizer: Any = None  # of a gradient


Fetched = list[list[list[Array]]]
"""By task: what each fetch of a program has returned."""


class Running(Protocol):
    """A program that was sent."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; return whether it has within `timeout` seconds."""

    def result(self) -> Fetched:
        """Return what it fetches, once it has ended. Raises its error."""


@dataclass(frozen=True, slots=True)
class Sendable:
    """A program, and what goes with it."""

    mesh: Mesh
    text: str
    inputs: list[int]  # numbers of arrays
    outputs: list[int]
    forgotten: list[int]
    payloads: list[list[Mapping[int, Array]]]  # for each task that gets some: the blocks of each that it needs
    functions: tuple[LocalFunction, ...] = ()  # that it calls
    definition: Callable[..., Any] | None = None  # the program as a function, which workers are sent once
    sent_here: Sequence[int] = ()  # places among the outputs of those that it fetches, in the order of its fetches
    variables: tuple[Stored, ...] = ()
    optimizers: tuple[Any, ...] = ()
    updates: bool = False
    fetches: bool = False
    waits: bool = False  # it begins nowhere before the one that was sent before it has ended
    sent: Sequence[int] = ()  # places among the inputs of those that are sent with it: as payloads, after its own

    @property
    def numbers(self) -> Numbers:
        """The numbers of the arrays that a run of it is about."""
        return Numbers(self.inputs, self.outputs, self.forgotten, self.sent)

    @property
    def has_results(self) -> bool:
        """Whether it makes or fetches arrays."""
        return self.fetches or bool(self.outputs)


class Recording:
    """Instructions, in order. Not thread-safe."""

    def __init__(self, mesh: Mesh, number: int, tasks: Sequence[int]) -> None:
        """Take the tasks that payloads go to."""
        self.mesh, self.number = mesh, number
        self._tasks = tasks
        self.payload_bytes = 0
        self.work = 0  # elements that are computed, made or moved, about
        self._code: list[Recorded] = []
        self._places: dict[int, int] = {}  # by the number of the array: how many were used before it
        self._types: list[ArrayType] = []  # by place
        self._inputs: dict[int, Ref] = {}  # kept until it is sent
        self._made: dict[int, weakref.ref[Ref]] = {}
        self._payloads: list[tuple[Mapping[int, Array], ArrayType]] = []
        self.loaded: list[Loaded] = []
        self._functions: list[LocalFunction] = []
        self._variables: dict[Stored, int] = {}
        self._optimizers: dict[int, tuple[int, Any]] = {}  # by id
        self._updated: set[Stored] = set()

    def __len__(self) -> int:
        return len(self._code)

    @property
    def inputs(self) -> dict[int, Ref]:
        """The arrays that it reads and has not made, by number."""
        return self._inputs

    @property
    def made(self) -> set[int]:
        """The numbers of the arrays that it makes."""
        return set(self._made)

    def load(self, output: Ref, blocks: Mapping[int, Array]) -> None:
        """Record that an array comes from here: its blocks, by number in its layout."""
        self._code.append(("load", self._write(output), len(self._payloads)))
        self.work += output.type.size
        self._payloads.append((blocks, output.type))
        self.loaded.append((weakref.ref(output), blocks))
        self.payload_bytes += sum(block.nbytes for block in blocks.values())

    def create(self, output: Ref, maker: str, numbers: Sequence[float]) -> None:
        """Record that an array is made in place."""
        self._code.append(("create", self._write(output), maker, list(numbers)))
        self.work += output.type.size

    def move(self, output: Ref, source: Ref) -> None:
        """Record that an array is brought into another layout."""
        self._code.append(("move", self._read(source), self._write(output)))
        self.work += output.type.size

    def compute(
        self,
        outputs: Sequence[Ref],
        function: str,
        inputs: Sequence[Ref],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        work: int,
    ) -> None:
        """Record a function of blocks. Arguments are as in a program."""
        self.work += work
        read = [self._read(ref) for ref in inputs]
        self._code.append(("compute", [self._write(ref) for ref in outputs], function, read, args, kwargs, work))

    def call(
        self,
        outputs: Sequence[Ref],
        function: LocalFunction,
        inputs: Sequence[Ref],
        layouts: Sequence[Layout],
        name: str,
        *,
        check: bool,
    ) -> None:
        """Record a plain function that is called for each device. With layouts, the types of its results are not known.

        Then these are further outputs of the program, and there are no others. `name` is the function's, for people.
        """
        read = [self._read(ref) for ref in inputs]
        specs = [layout.sharding_specs for layout in layouts]
        written = [self._write(ref) for ref in outputs]
        self._code.append(("call", written, len(self._functions), read, specs, check, name))
        self._functions.append(function)

    def fetch(self, source: Ref, *, every_device: bool) -> None:
        """Record that blocks are wanted here."""
        self._code.append(("fetch", self._read(source), every_device))

    def read(self, output: Ref, variable: Stored) -> None:
        """Record that a variable is read."""
        self._code.append(("read", self._write(output), self._variables.setdefault(variable, len(self._variables))))

    def update(self, updating: Updating) -> None:
        """Record that a variable is updated."""
        source, variable, optimizer = self._read(updating.source), updating.variable, updating.optimizer
        number = None
        if optimizer is not None:
            number, _ = self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))
        self._updated.add(variable)
        at = self._variables.setdefault(variable, len(self._variables))
        self._code.append(("update", source, updating.kind, at, number))

    def updates(self, variable: Stored) -> bool:
        """Return whether it has updated a variable, so that it can't read it any more."""
        return variable in self._updated

    def propagate_shardings(self, results: Collection[int]) -> None:
        """Make in shards what the results, arrays of these numbers, need in shards only: see `propagation`."""
        kept = {self._places[number] for number in results}
        self._code, self._types = propagate_shardings(self._code, self._types, kept)

    def instructions(self) -> Iterator[tuple[Recorded, list[ArrayType], list[ArrayType]]]:
        """Yield the instructions, with the types of what each reads, and of what it makes or updates."""
        variables = list(self._variables)
        for instruction in self._code:
            read, written = reads_and_writes(instruction)
            made = [self._types[place] for place in written]
            if instruction[0] == "update":
                made = [variables[instruction[3]].type]
            yield instruction, [self._types[place] for place in read], made

    def finish(self, dropped: Collection[int]) -> Sendable:
        """Return the program. `dropped` are the numbers of arrays that nothing refers to, and that it does not read."""
        gone = set(dropped)
        inputs = list(self._inputs)
        outputs = [number for number, made in self._made.items() if number not in gone and made() is not None]
        text = self._text([self._places[number] for number in outputs])
        forgotten = [number for number in gone if number not in self._made]
        payloads, functions = payloads_by_task(self.mesh, self._tasks, self._payloads), tuple(self._functions)
        program = Sendable(self.mesh, text, inputs, outputs, forgotten, payloads, functions)
        if self._variables:
            optimizers = tuple(optimizer for _, optimizer in self._optimizers.values())
            variables = tuple(self._variables)
            fetches = any(name == "fetch" for name, *_ in self._code)
            updates = bool(self._updated)
            program = replace(program, variables=variables, optimizers=optimizers, updates=updates, fetches=fetches)
        return program

    def _text(self, outputs: Sequence[int]) -> str:
        """Return the program as text, given the places of its outputs.

        Small ones are remembered, by what is recorded: they tend to be the same again and again, and a look-up takes a
        fifth of the time. Arguments are compared as they are shown, since 1, 1.0 and True are equal.
        """
        if len(self._code) > _REMEMBERED_INSTRUCTIONS or self._variables:
            return self._written(outputs)
        inputs = [self._places[number] for number in self._inputs]
        key = self.mesh, f"{self._code} {inputs} {outputs}", *self._types
        if (text := _texts.get(key)) is None:
            if len(_texts) >= _REMEMBERED_TEXTS:
                _texts.clear()
            text = _texts[key] = self._written(outputs)
        return text

    def _written(self, outputs: Sequence[int]) -> str:
        inputs = [self._places[number] for number in self._inputs]
        made = [place for instruction in self._code for place in reads_and_writes(instruction)[1]]
        order = inputs + made
        register = {place: position for position, place in enumerate(order)}
        code: list[list[Any]] = []
        for instruction in ordered(self._code, self._is_exchange):
            name, *rest = with_places(instruction, register.__getitem__)
            match name:
                case "compute" | "call":
                    del rest[-1]  # which is for people
                case "move" | "update":
                    rest[:2] = reversed(rest[:2])
            code.append([name, *rest])
        return encode(
            self.mesh,
            [self._types[place] for place in order],
            len(inputs),
            code,
            [register[place] for place in outputs],
            [variable.type for variable in self._variables],
            len(self._optimizers),
        )

    def _is_exchange(self, instruction: Recorded) -> bool:
        """Return whether an instruction brings something from one device to another."""
        if instruction[0] != "move":
            return False
        source, of = (self._types[place] for place in instruction[1:])
        return not moving(source.layout, of.layout, of.shape, source.partial).is_free

    def _read(self, ref: Ref) -> int:
        if ref.number not in self._made:
            self._inputs[ref.number] = ref
        return self._place(ref)

    def _write(self, ref: Ref) -> int:
        self._made[ref.number] = weakref.ref(ref)
        return self._place(ref)

    def _place(self, ref: Ref) -> int:
        if (place := self._places.get(ref.number)) is None:
            place = self._places[ref.number] = len(self._types)
            self._types.append(ref.type)
        return place


def payloads_by_task(
    mesh: Mesh, tasks: Sequence[int], payloads: Sequence[tuple[Mapping[int, Array], ArrayType]]
) -> list[list[Mapping[int, Array]]]:
    """Return, for each of these tasks, the blocks of each array that its devices have."""
    if not payloads:
        return [[] for _ in tasks]
    by_task: list[list[Mapping[int, Array]]] = []
    for task in tasks:
        devices = mesh.devices_of(task)
        wanted = [sorted({of.layout.shard_of(device) for device in devices}) for _, of in payloads]
        by_task.append(
            [{shard: blocks[shard] for shard in shards} for (blocks, _), shards in zip(payloads, wanted, strict=True)]
        )
    return by_task
