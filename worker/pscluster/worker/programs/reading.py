"""Reads programs: refuses whatever makes no sense, before anything runs, and groups what is done together."""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import LayoutError, MeshError, ProtocolError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.worker.programs.makers import MAKERS
from pscluster.worker.programs.operations import COMBINES, OPERATIONS
from pscluster.worker.programs.program import (
    UPDATES,
    ArrayType,
    Call,
    Compute,
    Create,
    Fetch,
    Instruction,
    Load,
    Move,
    Numbers,
    Placeholder,
    Program,
    Read,
    Update,
)

MAX_TEXT = 16 << 20  # characters of a program

TOGETHER_BYTES = 4 << 20
"""Of arrays that move together: larger ones gain nothing, and would be held in memory, and copied, at once."""

_MAX_AXES = 64  # as in NumPy
_NUMBER_BYTES = 8
_KINDS = 4  # of numbers of arrays that come with a program


@functools.lru_cache(maxsize=64)
def _the_same(mesh: Mesh) -> Mesh:
    """Return the first of equal meshes: arrays of all programs are compared quickly if they are of one."""
    return mesh


@functools.lru_cache(maxsize=1024)
def _one_type(of: ArrayType) -> ArrayType:
    """Return the first of equal types: what one program stores and another one reads is compared quickly."""
    return of


@functools.lru_cache(maxsize=128)
def parse(text: str) -> Program:
    """Return the program of a text. Raise ProtocolError, which says what is wrong, if it makes no sense."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise ProtocolError(f"a program is a text of at most {MAX_TEXT:,} characters")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a program is JSON, which this is not: {type(error).__name__}: {error!s:.200}") from None
    try:
        return _Reader(data).program()
    except (MeshError, LayoutError) as error:
        raise ProtocolError(f"a program: {error}") from None
    except RecursionError:
        raise ProtocolError("a program: its arguments are nested too deep") from None


def read_numbers(data: bytes) -> Numbers:
    """Return the numbers of a run. Raise ProtocolError if the bytes are none of `Numbers.encoded`."""
    count = len(data) // _NUMBER_BYTES if isinstance(data, bytes) else 0
    if count < _KINDS or len(data) % _NUMBER_BYTES:
        raise ProtocolError(f"{_KINDS} lists of numbers of arrays come with a program, not {data!r:.100}")
    numbers = list(struct.unpack(f"<{count}Q", data))
    ends = list(itertools.accumulate(numbers[:_KINDS], initial=_KINDS))
    if ends[-1] != count:
        raise ProtocolError(f"{_KINDS} lists of numbers of arrays come with a program, not {data!r:.100}")
    return Numbers(*[numbers[start:end] for start, end in itertools.pairwise(ends)])


class _Reader:
    """Reads one program. Every method raises ProtocolError for what makes no sense."""

    def __init__(self, data: Any) -> None:
        self._place = "a program"
        parts = {"mesh", "arrays", "inputs", "code", "outputs"}
        if not isinstance(data, dict) or data.keys() - {"variables", "optimizers"} != parts:
            self._refuse("it has a mesh, arrays, inputs, code and outputs, perhaps variables, and nothing else")
        self._data = data

    def _refuse(self, why: str) -> NoReturn:
        raise ProtocolError(f"{self._place}: {why}")

    def _list(self, value: Any, label: str, length: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            self._refuse(f"{label} is {value!r:.100}, not a list{'' if length is None else f' of {length}'}")
        return value

    def _whole(self, value: Any, label: str, below: int | None = None) -> int:
        if type(value) is not int or value < 0 or (below is not None and value >= below):
            self._refuse(f"{label} is {value!r:.100}; it is a whole number{'' if below is None else f' below {below}'}")
        return value

    def _text(self, value: Any, label: str) -> str:
        if not isinstance(value, str):
            self._refuse(f"{label} is {value!r:.100}, not a text")
        return value

    def program(self) -> Program:
        """Return it."""
        dims, devices, name = self._list(self._data["mesh"], "the mesh", 3)
        pairs = [tuple(self._list(pair, "a dimension", 2)) for pair in self._list(dims, "the dimensions")]
        given = Mesh(pairs, self._list(devices, "the devices"), name=self._text(name, "the mesh's name"))
        self._mesh = _the_same(given)
        self._arrays = [self._array(item) for item in self._list(self._data["arrays"], "arrays")]
        self._variables = [self._array(item) for item in self._list(self._data.get("variables", []), "variables")]
        if any(variable.partial for variable in self._variables):
            self._refuse("a variable has no terms")
        self._optimizers = self._whole(self._data.get("optimizers", 0), "optimizers", 1 << 20)
        self._updated: set[int] = set()
        inputs = self._whole(self._data["inputs"], "inputs", len(self._arrays) + 1)
        self._written = [register < inputs for register in range(len(self._arrays))]
        code = []
        for nth, item in enumerate(self._list(self._data["code"], "code")):
            self._place = f"instruction {nth}"
            code.append(self._instruction(item))
        self._place = "a program"
        outputs = tuple(self._read(register) for register in self._list(self._data["outputs"], "outputs"))
        if len(set(outputs)) < len(outputs):
            self._refuse("an output occurs twice")
        groups = _groups(code, self._arrays)
        return Program(
            self._mesh,
            tuple(self._arrays),
            inputs,
            tuple(code),
            outputs,
            groups,
            _last_uses(groups, outputs),
            tuple(self._variables),
            self._optimizers,
        )

    def _array(self, item: Any) -> ArrayType:
        lengths, dtype, specs, partial, combine = self._list(item, "the type of an array", 5)
        shape = tuple(self._whole(length, "a length") for length in self._list(lengths, "a shape"))
        if len(shape) > _MAX_AXES:
            self._refuse(f"an array has {len(shape)} axes; the most are {_MAX_AXES}")
        layout = Layout(self._list(specs, "specs"), self._mesh)
        layout.check_shape(shape)
        dims = tuple(self._list(partial, "partial dimensions"))
        for dim in dims:
            if self._text(dim, "a partial dimension") not in self._mesh or dim in layout.used or dims.count(dim) > 1:
                self._refuse(f"an array that is {layout!r} can't be partial over {dims}")
        if self._text(combine, "what combines terms") not in COMBINES:
            self._refuse(f"terms can't be combined by {combine!r:.100}")
        return _one_type(ArrayType(shape, dtype_named(self._text(dtype, "an element type")), layout, dims, combine))

    def _read(self, register: Any) -> int:
        if not self._written[self._whole(register, "a register", len(self._arrays))]:
            self._refuse(f"register {register} is read before it is written")
        return int(register)

    def _write(self, register: Any) -> int:
        if self._written[self._whole(register, "a register", len(self._arrays))]:
            self._refuse(f"register {register} is written twice")
        self._written[register] = True
        return int(register)

    def _instruction(self, item: Any) -> Instruction:
        kinds: dict[str, Callable[..., Instruction]] = {
            "load": self._load,
            "create": self._create,
            "move": self._move,
            "compute": self._compute,
            "call": self._call,
            "fetch": self._fetch,
            "read": self._read_variable,
            "update": self._update,
        }
        name, *rest = self._list(item, "it") or [None]
        if not isinstance(name, str) or name not in kinds:
            self._refuse(f"there is no instruction {name!r:.100}; there are {', '.join(kinds)}")
        try:
            return kinds[name](*rest)
        except TypeError:
            self._refuse(f"{name} does not take {len(rest)} values")

    def _load(self, output: Any, payload: Any) -> Load:
        return Load(self._whole_type(self._write(output)), self._whole(payload, "a payload", 1 << 20))

    def _create(self, output: Any, maker: Any, numbers: Any) -> Create:
        if self._text(maker, "a maker") not in MAKERS:
            self._refuse(f"there is no maker {maker!r:.100}; there are {', '.join(MAKERS)}")
        for number in self._list(numbers, "a maker's numbers", MAKERS[maker].numbers):
            if type(number) not in (int, float, bool):
                self._refuse(f"{maker} takes numbers, not {number!r:.100}")
        return Create(self._whole_type(self._write(output)), maker, tuple(numbers))

    def _move(self, output: Any, source: Any) -> Move:
        of, to = self._read(source), self._whole_type(self._write(output))
        if (self._arrays[of].shape, self._arrays[of].dtype) != (self._arrays[to].shape, self._arrays[to].dtype):
            self._refuse(f"an array that moves keeps shape and type: {self._arrays[of]} is not {self._arrays[to]}")
        return Move(to, of)

    def _compute(self, outputs: Any, function: Any, inputs: Any, args: Any, kwargs: Any) -> Compute:
        if self._text(function, "a function") not in OPERATIONS:
            self._refuse(f"there is no function {function!r:.100} for arrays")
        read = tuple(self._whole_type(self._read(register)) for register in self._list(inputs, "inputs"))
        written = tuple(self._write(register) for register in self._list(outputs, "outputs"))
        if not written:
            self._refuse("a computation has at least one output")
        if not isinstance(kwargs, dict) or "out" in kwargs:
            self._refuse("named arguments are given by name, and blocks do not change: there is no 'out'")
        counts = len(read), len(written)
        return Compute(
            written,
            function,
            read,
            tuple(self._argument(value, counts) for value in self._list(args, "arguments")),
            {name: self._argument(value, counts) for name, value in kwargs.items()},
        )

    def _call(self, outputs: Any, function: Any, inputs: Any, layouts: Any, check: Any) -> Call:
        read = tuple(self._whole_type(self._read(register)) for register in self._list(inputs, "inputs"))
        written = tuple(self._whole_type(self._write(register)) for register in self._list(outputs, "outputs"))
        untyped = tuple(Layout(self._list(specs, "specs"), self._mesh) for specs in self._list(layouts, "layouts"))
        if bool(written) == bool(untyped) or not isinstance(check, bool):
            self._refuse("a call has outputs, or layouts in place of them, and checks replicas or not")
        return Call(written, self._whole(function, "a function", 1 << 20), read, untyped, check)

    def _fetch(self, source: Any, every: Any) -> Fetch:
        if not isinstance(every, bool):
            self._refuse(f"{every!r:.100} is not true or false")
        return Fetch(self._whole_type(self._read(source)), every)

    def _read_variable(self, output: Any, variable: Any) -> Read:
        number = self._whole(variable, "a variable", len(self._variables))
        if number in self._updated:
            self._refuse(f"variable {number} is read after it is updated")
        register = self._whole_type(self._write(output))
        self._check_same(self._arrays[register], self._variables[number])
        return Read(register, number)

    def _update(self, kind: Any, source: Any, variable: Any, optimizer: Any) -> Update:
        if self._text(kind, "a kind of update") not in UPDATES:
            self._refuse(f"a variable can't be updated by {kind!r:.100}; there are {', '.join(UPDATES)}")
        register, number = self._read(source), self._whole(variable, "a variable", len(self._variables))
        self._check_same(self._arrays[register], self._variables[number])
        if (optimizer is None) == (kind == "gradient"):
            self._refuse("a gradient, and nothing else, has an optimizer")
        if optimizer is not None:
            self._whole(optimizer, "an optimizer", self._optimizers)
        self._updated.add(number)
        return Update(kind, register, number, optimizer)

    def _check_same(self, array: ArrayType, variable: ArrayType) -> None:
        if (array.shape, array.dtype) != (variable.shape, variable.dtype):
            self._refuse(f"a variable has one shape and type: {array} is not {variable}")

    def _whole_type(self, register: int) -> int:
        """Return a register. Refuse it if its array is partial."""
        if self._arrays[register].partial:
            self._refuse(f"register {register} has terms, which have to be combined first")
        return register

    def _argument(self, value: Any, counts: tuple[int, int]) -> Any:
        """Return an argument, with `Placeholder`s for blocks and shapes."""
        if not isinstance(value, list):
            if isinstance(value, dict):
                self._refuse("an argument is a plain value, or a tagged list")
            return value
        tag, *rest = value or [None]
        if tag in ("in", "shape") and len(rest) == 1:
            return Placeholder(tag, self._whole(rest[0], f"a number of {tag!r}", counts[tag == "shape"]))
        if tag == "slice" and len(rest) == 3 and all(part is None or type(part) is int for part in rest):
            return slice(*rest)
        if tag == "..." and not rest:
            return ...
        if tag == "complex" and len(rest) == 2 and all(type(part) in (int, float) for part in rest):
            return complex(*rest)
        if tag not in ("list", "tuple"):
            self._refuse(f"{value!r:.100} is not an argument")
        items = [self._argument(item, counts) for item in rest]
        return items if tag == "list" else tuple(items)


def _groups(code: Sequence[Instruction], arrays: Sequence[ArrayType]) -> tuple[tuple[Instruction, ...], ...]:
    """Return the code, with moves that follow each other, and need nothing of each other, in one group; and updates."""
    groups: list[list[Instruction]] = []
    moved: set[int] = set()  # by the last group
    room = 0
    for item in code:
        nbytes, follows = 0, False
        if isinstance(item, Move):
            nbytes = arrays[item.output].nbytes
            follows = bool(moved) and item.input not in moved
        elif isinstance(item, Update):
            nbytes = arrays[item.input].nbytes
            follows = bool(groups) and isinstance(groups[-1][0], Update)
        if follows and nbytes <= room:
            groups[-1].append(item)
        else:
            groups.append([item])
            moved, room = set(), TOGETHER_BYTES
        if isinstance(item, Move):
            moved.add(item.output)
        room -= nbytes
    return tuple(map(tuple, groups))


def _last_uses(groups: Sequence[Sequence[Instruction]], outputs: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    last: dict[int, int] = {}
    for nth, item in ((nth, item) for nth, group in enumerate(groups) for item in group):
        match item:
            case Compute() | Call():
                last.update(dict.fromkeys((*item.inputs, *item.outputs), nth))
            case Move():
                last.update(dict.fromkeys((item.input, item.output), nth))
            case Fetch() | Update():
                last[item.input] = nth
            case _:
                last[item.output] = nth
    over: list[list[int]] = [[] for _ in groups]
    for register, nth in last.items():
        if register not in outputs:
            over[nth].append(register)
    return tuple(map(tuple, over))
