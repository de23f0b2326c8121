"""Sources of the examples of a distributed dataset: one for each kind of data that has a length.

A source has a length and `read(numbers, start, stop)`, which returns a block with the examples of these numbers, all in
[start, stop). A block is a structure (dict, tuple) of arrays whose first axis is that of the examples, or a list of
examples: see `blocks`, which also makes batches of them.
"""

from __future__ import annotations

import math
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.functions.policy import chosen_policy
from pscluster.core.handles import Handle
from pscluster.core.values import describe
from pscluster.core.values.arrays import described, plain_dtype
from pscluster.worker.data.blocks import check_block, leaves, map_leaves, size_of, take

Numbers = npt.NDArray[np.int64]

_KEPT_BLOCKS = 2  # of a source that reads only ranges: successive batches are often in the same one


class Listed(NamedTuple):
    """A file of a source, as a position is of it."""

    name: str
    size: int  # in bytes
    blocks: int  # in which it is read
    digest: str = ""  # of its contents, if its size says little about them


class Source(Protocol):
    """A source: see the module's docstring."""

    def __len__(self) -> int: ...

    def read(self, numbers: Numbers, start: int, stop: int, /) -> Any:
        """Return the examples with these numbers, in this order."""


class Sent:
    """Base of dataclasses that are sent without their cached properties, which hold what they have read."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(cast("Any", self))}


@dataclass(init=False, eq=False)
class _Sized(Sent):
    """A source with the length of the object that it reads."""

    _of: Any
    _length: int

    def __init__(self, of: Any) -> None:
        self._of = of
        self._length = len(of)

    def __len__(self) -> int:
        return self._length


@dataclass(frozen=True)
class MappedArray:
    """An array in a file, or a slice of one: sent by the file's name, and mapped where it is read.

    A peer's description is not trusted: see `open`.
    """

    path: str
    dtype: Any  # as `described` says
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, array: np.memmap[Any, Any]) -> MappedArray | None:
        """Describe an array. Return None if its data is not in a file with a name."""
        root: Any = array
        while isinstance(root.base, np.memmap):
            root = root.base
        if root.filename is None or root.mode == "c" or not np.may_share_memory(root, array):  # "c": not in the file
            return None
        first, here = (mapped.__array_interface__["data"][0] for mapped in (root, array))
        return cls(str(root.filename), described(array.dtype), array.shape, array.strides, root.offset + here - first)

    def open(self) -> npt.NDArray[Any]:
        """Map it read-only.

        Raises:
            MisuseError: it is not a regular file; or pickles are off, and it lies outside this worker's folders.
            ProtocolError: its elements hold pointers, or it does not lie within the file.
            OSError: the file can't be read.
        """
        dtype = plain_dtype(self.dtype)
        if dtype.itemsize == 0 or dtype.subdtype is not None:
            raise ProtocolError(f"a file's array can't have the element type {dtype!r:.80}")
        path = chosen_policy().data_file(str(self.path))
        # A pipe or device must neither block the worker nor be read. Open first, then check what was opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise MisuseError(f"{str(path)[:1000]!r} is not a file to map an array from")
        with open(descriptor, "rb") as file:
            raw = np.memmap(file, np.uint8, "r")
        try:
            return np.ndarray(self.shape, dtype, raw, self.offset, self.strides)  # compares with the file's size
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(
                f"an array of {dtype}, {self.shape!r:.80} and strides {self.strides!r:.80} does not lie within the "
                f"{len(raw):,} bytes of {str(path)[:1000]}: {error}"
            ) from None


@dataclass(init=False, eq=False)
class Arrays(_Sized):
    """Arrays whose first axis is that of the examples; tuples and dicts of such. Mapped ones are read from files."""

    example_bytes: int

    def __init__(self, structure: Any) -> None:
        self._of = map_leaves(_named, structure)
        lengths = {len(leaf) for leaf in leaves(structure)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays of a source have {sorted(lengths)} examples: give arrays of one length")
        self._length = lengths.pop()
        self.example_bytes = sum(leaf.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves(structure))

    @cached_property
    def _opened(self) -> Any:
        return map_leaves(lambda leaf: leaf.open() if isinstance(leaf, MappedArray) else leaf, self._of)

    def read(self, numbers: Numbers, _start: int, _stop: int, /) -> Any:
        """Return a copy, to which the step may write."""
        return map_leaves(lambda leaf: leaf.take(numbers, 0), self._opened)


@dataclass(init=False, eq=False)
class Examples(_Sized):
    """Data with a length, indexed by number: a list, a PyTorch or Hugging Face dataset."""

    def read(self, numbers: Numbers, _start: int, _stop: int, /) -> list[Any]:
        """Read one by one, or all at once if the dataset can (`__getitems__`, as in PyTorch)."""
        wanted = numbers.tolist()
        if callable(several := getattr(self._of, "__getitems__", None)):
            examples = list(several(wanted))
            if len(examples) != len(wanted):
                raise ValueError(f"__getitems__ returned {len(examples)} examples for {len(wanted)} numbers")
            return examples
        return [self._of[index] for index in wanted]


class RowFiles(Sent):
    """Base of what reads ranges of rows from files."""

    @property
    def listed(self) -> list[Listed]:
        """The files, which a position is of."""
        raise NotImplementedError


@dataclass(init=False, eq=False)
class Ranges(_Sized):
    """Data whose `read(start, stop)` returns a range of examples as a block. Keeps the last blocks."""

    @property
    def listed(self) -> list[Listed] | None:
        """The files that it reads; None: these are not known."""
        return self._of.listed if isinstance(self._of, RowFiles) else None

    @cached_property
    def _blocks(self) -> OrderedDict[tuple[int, int], Any]:
        return OrderedDict()

    def read(self, numbers: Numbers, start: int, stop: int, /) -> Any:
        """Return the examples from the whole range, which is read if it is not kept."""
        if (start, stop) not in self._blocks:
            block = self._of.read(start, stop)
            check_block(block, stop - start)
            self._blocks[start, stop] = block
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end((start, stop))
        return take(self._blocks[start, stop], numbers - start)


@dataclass(init=False, eq=False)
class Made(_Sized):
    """A function that makes the source, called where it is read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._of = make
        self._length = len(self._source)

    @cached_property
    def _source(self) -> Source:
        source = source_of(self._of())
        if isinstance(source, Blocks):
            raise TypeError("a function can't make a source that is read in blocks: give the source itself")
        return source

    def read(self, numbers: Numbers, start: int, stop: int, /) -> Any:
        """Read from the source that the function makes. ValueError if its length is not that on the coordinator."""
        source = self._source
        if len(source) != self._length:
            raise ValueError(
                f"the function makes a source of {len(source):,} examples here, and one of {self._length:,} on the "
                "coordinator: it must be the same everywhere"
            )
        return source.read(numbers, start, stop)


class Blocks(Sent):
    """Base of sources that are read in blocks, each visited as a whole by one function, with any number of examples."""

    noun = "file"  # what a block is, for messages and progress

    @property
    def sizes(self) -> Numbers | None:
        """The number of examples of each block; None if that is known only when they are read."""
        return None

    @property
    def nbytes(self) -> Numbers | None:
        """About how many bytes of a file each block takes; None: unknown."""
        return None

    @property
    def listed(self) -> list[Listed] | None:
        """The files; None: what it reads has no names."""
        return None

    @property
    def neighbours(self) -> Numbers | None:
        """For each block a number; those with the same one stay together in shuffled epochs. None: all differ."""
        return None

    def __len__(self) -> int:
        raise NotImplementedError

    def load(self, index: int) -> Any:
        """Return a block of examples; or an iterator over them."""
        raise NotImplementedError

    def name_of(self, index: int) -> str:
        """Return a name for a block, for errors."""
        raise NotImplementedError


@dataclass(init=False, eq=False)
class Files(Blocks):
    """Files, each with any number of examples. A file is visited as a whole."""

    paths: list[Any]
    _reader: Callable[[Any], Any]

    def __init__(self, paths: Sequence[Any], reader: Callable[[Any], Any]) -> None:
        self.paths = list(paths)
        self._reader = reader

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def listed(self) -> list[Listed] | None:
        """The paths, with the sizes of those that are files here, else 0."""
        if not all(isinstance(path, str | os.PathLike) for path in self.paths):
            return None
        names = [os.fsdecode(path) for path in self.paths]
        return [Listed(name, os.path.getsize(name) if os.path.isfile(name) else 0, 1) for name in names]

    def name_of(self, index: int) -> str:
        return f"the file {self.paths[index]!r}, number {index} of the source"

    def load(self, index: int) -> Any:
        """Return the block of one file; or an iterator over its examples if the reader is a generator or the like."""
        block = self._reader(self.paths[index])
        if not isinstance(block, list | tuple | dict | np.ndarray):
            return iter(block)
        size_of(block)
        return block


def source_of(data: Any) -> Source | Blocks:
    """Return a source for the data, or the data if it is one.

    Raises:
        TypeError: there is none; with advice.
        ValueError: lengths differ.
    """
    if isinstance(data, Blocks | Arrays | Examples | Ranges):
        return data
    columns = list(leaves(data)) if isinstance(data, tuple | dict | np.ndarray) else []
    if columns and all(map(_is_column, columns)):
        return Arrays(map_leaves(lambda leaf: leaf if isinstance(leaf, np.ndarray) else array_of(leaf), data))
    if isinstance(data, dict):
        odd = [f"{name!r} is {describe(column)}" for name, column in data.items() if not _is_column(column)]
        given = f"a dict whose {odd[0]}" if odd else "an empty dict"
        raise TypeError(f"{given} is not a source of examples: give arrays with one example per row, by name")
    if hasattr(data, "iloc"):
        hint = "its columns, {name: frame[name].to_numpy() for name in frame}"
        if getattr(data, "ndim", 2) == 1:
            hint = "its values, series.to_numpy()"
        raise TypeError(f"{describe(data)} is not a source: give {hint}")
    if hasattr(data, "dataset") and hasattr(data, "batch_size"):
        raise TypeError(
            f"{describe(data)} is not a source, as it has its own order: pass loader.dataset, and shuffle and batch it "
            "here, .shuffle(seed=...).batch(n)"
        )
    if isinstance(data, Sized) and callable(getattr(data, "read", None)):
        return Ranges(data)
    if isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | dict | set):
        return Examples(data)
    if callable(data):
        return Made(data)
    raise TypeError(
        f"{describe(data)} is not a source of examples: it has no length, or its examples can't be read by number. "
        "Give arrays, a sequence, a dataset with __len__ and __getitem__, something with __len__ and read(start, "
        "stop), files with reader=, or a function that returns one of these. Without a length, use "
        "create_per_worker_dataset"
    )


def _is_column(leaf: Any) -> bool:
    """Return whether it is an array of examples, or convertible to one, such as a torch tensor or pandas Series."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return not isinstance(leaf, Handle) and hasattr(leaf, "__array__") and len(getattr(leaf, "shape", ())) > 0


def _named(leaf: Any) -> Any:
    return (isinstance(leaf, np.memmap) and MappedArray.of(leaf)) or leaf
