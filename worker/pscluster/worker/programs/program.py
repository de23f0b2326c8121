"""Programs as data: instructions from a closed list, over registers, as JSON.

    {"mesh": [[["x", 3], ["y", 2]], ["/job:worker/task:0/device:CPU:0", ...], ""],
     "arrays": [[[6, 4], "float32", ["x", "unsharded"], [], "add"], ...],        a type for each register
     "inputs": 2,                                                                the first registers
     "code": [["load", 2, 0], ["compute", [3], "matmul", [0, 1], [["in", 0], ["in", 1]], {}], ["move", 4, 3], ...],
     "outputs": [4]}

    ["load", out, k]                  the k-th payload: its blocks for this task
    ["create", out, maker, numbers]   made in place: see `makers`
    ["move", out, in]                 to the layout of `out`, combining terms
    ["compute", outs, name, ins, args, kwargs]  a function of `operations`, called on each device's blocks
    ["call", outs, k, ins, layouts, check]  the k-th function that came with the program, called for each device: see
                                      `local`. With `layouts` in place of `outs` its results are further outputs of
                                      the program; their types follow from what it returns, and are fetched
    ["fetch", in, every]              return blocks: of every device here, or of those that own one

Registers are written once, before they are read. Arguments are JSON's plain values, or tagged: ["in", k] is the k-th
input's block, ["shape", k] the shape of the k-th output's block, ["list", ...], ["tuple", ...], ["slice", a, b, c],
["..."] and ["complex", re, im].

Nothing in a program is trusted: `reading.parse` refuses whatever makes no sense, before anything runs.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh


@dataclass(frozen=True, slots=True)
class ArrayType:
    """What is known of an array before it is there."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout
    partial: tuple[str, ...] = ()  # dimensions over which devices have terms of it
    combine: str = "add"  # the ufunc that combines them

    @property
    def size(self) -> int:
        """The elements of the whole array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


_json = json.JSONEncoder(separators=(",", ":")).encode


@functools.lru_cache(maxsize=4096)
def _encoded_type(of: ArrayType) -> str:
    return _json([of.shape, of.dtype.name, of.layout.specs, of.partial, of.combine])


@functools.lru_cache(maxsize=64)
def _encoded_mesh(mesh: Mesh) -> str:
    return _json([mesh.dims, [str(device) for device in mesh.devices], mesh.name])


@dataclass(frozen=True, slots=True)
class Load:
    """Takes blocks that came with the program."""

    output: int
    payload: int


@dataclass(frozen=True, slots=True)
class Create:
    """Makes blocks in place."""

    output: int
    maker: str
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Brings an array into another layout."""

    output: int
    input: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Calls a function on each device's blocks."""

    outputs: tuple[int, ...]
    function: str
    inputs: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a plain function for each device."""

    outputs: tuple[int, ...]
    function: int
    inputs: tuple[int, ...]
    layouts: tuple[Layout, ...]  # of results whose types are not known before
    check: bool  # that replicas are equal


@dataclass(frozen=True, slots=True)
class Fetch:
    """Returns blocks."""

    input: int
    every_device: bool


@dataclass(frozen=True, slots=True)
class Read:
    """Reads a variable: each device its block."""

    output: int
    variable: int


@dataclass(frozen=True, slots=True)
class Update:
    """Updates a variable at the end of the program, by an array in any layout, which may have terms."""

    kind: str
    input: int
    variable: int
    optimizer: int | None  # of a gradient


Instruction = Load | Create | Move | Compute | Call | Fetch | Read | Update

UPDATES = ("assign", "add", "sub", "gradient")
"""Kinds of them."""


@dataclass(frozen=True)
class Program:
    """A program that makes sense."""

    mesh: Mesh
    arrays: tuple[ArrayType, ...]
    inputs: int
    code: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    groups: tuple[tuple[Instruction, ...], ...]  # the code; what is moved, or updated, together is one group
    last_use: tuple[tuple[int, ...], ...]  # for each group: registers that no later one needs
    variables: tuple[ArrayType, ...] = ()
    optimizers: int = 0
    _local_shapes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, compare=False)
    settled: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False)  # for runs: see `interpreter`

    def local_shape(self, register: int, device: int) -> tuple[int, ...]:
        """Return the shape of a device's block of an array."""
        known = self._local_shapes.get((register, device))
        if known is None:
            of = self.arrays[register]
            known = self._local_shapes[register, device] = of.layout.local_shape(of.shape, device)
        return known

    @functools.cached_property
    def reads(self) -> list[Read]:
        """Which variables it reads, in order."""
        return [item for item in self.code if isinstance(item, Read)]

    @functools.cached_property
    def updates(self) -> list[Update]:
        """What it does to variables, in order."""
        return [item for item in self.code if isinstance(item, Update)]

    @functools.cached_property
    def payloads(self) -> int:
        """How many payloads it takes."""
        return max((item.payload + 1 for item in self.code if isinstance(item, Load)), default=0)

    @functools.cached_property
    def functions(self) -> int:
        """How many functions it takes."""
        return max((item.function + 1 for item in self.code if isinstance(item, Call)), default=0)

    @functools.cached_property
    def untyped(self) -> int:
        """How many outputs it has beside those in registers."""
        return sum(len(item.layouts) for item in self.code if isinstance(item, Call))


def encode(
    mesh: Mesh,
    arrays: Sequence[ArrayType],
    inputs: int,
    code: Sequence[Sequence[Any]],
    outputs: Sequence[int],
    variables: Sequence[ArrayType] = (),
    optimizers: int = 0,
) -> str:
    """Return the text of a program."""
    stored = f',"variables":{_encoded_types(variables)},"optimizers":{optimizers}' if variables else ""
    return (
        f'{{"mesh":{_encoded_mesh(mesh)},"arrays":{_encoded_types(arrays)},"inputs":{inputs},"code":{_json(code)},'
        f'"outputs":{_json(outputs)}{stored}}}'
    )


def _encoded_types(types: Sequence[ArrayType]) -> str:
    return f"[{','.join([_encoded_type(of) for of in types])}]"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Which arrays one run of a program is about, by number."""

    inputs: Sequence[int]  # of its first registers
    outputs: Sequence[int]
    forgotten: Sequence[int]  # of arrays that are no longer needed
    sent: Sequence[int] = ()  # the registers of those inputs whose blocks come with it

    def encoded(self) -> bytes:
        """Return them as 64-bit numbers: how many there are of each kind, then they. See `reading.read_numbers`."""
        lists = self.inputs, self.outputs, self.forgotten, self.sent
        numbers = [*map(len, lists), *itertools.chain(*lists)]
        return struct.pack(f"<{len(numbers)}Q", *numbers)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Stands for a block ("in") or the shape of one ("shape") in arguments."""

    kind: str
    number: int
