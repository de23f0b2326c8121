"""Where the examples of a distributed dataset come from: one way to read each kind of thing that has a length.

A source has a length and `read(numbers, start, stop)`: a block with the examples of these numbers, all of which lie
in [start, stop). A block is a structure (dict, tuple) of arrays whose first axes are the examples', or a list of
examples. `take` and `stacked` make batches of blocks.
"""

from __future__ import annotations

import math
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.functions.policy import chosen_policy
from pscluster.core.handles import Handle
from pscluster.core.values import describe
from pscluster.core.values.arrays import described, plain_dtype

Numbers = npt.NDArray[np.int64]

_KEPT_BLOCKS = 2  # by a source that reads ranges only: batches that follow one another lie in the same


class Source(Protocol):
    """See the module's docstring."""

    def __len__(self) -> int: ...

    def read(self, numbers: Numbers, start: int, stop: int, /) -> Any:
        """The examples with these numbers, in this order."""


class Sent:
    """Base of dataclasses that are sent without what they have read so far, their cached properties."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(cast("Any", self))}


@dataclass(frozen=True)
class MappedArray:
    """An array in a file, or a part of one: sent by the file's name, and mapped where it is read.

    What a peer says of it is not believed: see `open`.
    """

    path: str
    dtype: Any  # as `described` says
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, array: np.memmap[Any, Any]) -> MappedArray | None:
        """None if it is not the file's: a computed one, or one of a file without a name."""
        root: Any = array
        while isinstance(root.base, np.memmap):
            root = root.base
        if root.filename is None or root.mode == "c" or not np.may_share_memory(root, array):  # "c": not in the file
            return None
        first, here = (each.__array_interface__["data"][0] for each in (root, array))
        return cls(str(root.filename), described(array.dtype), array.shape, array.strides, root.offset + here - first)

    def open(self) -> npt.NDArray[Any]:
        """Mapped, to be read only.

        Raises:
            MisuseError: where pickles are off: a file outside of the folders that this worker was given.
            ProtocolError: elements that hold pointers, or an array that does not lie within the file.
            OSError: the file can't be read.
        """
        dtype = plain_dtype(self.dtype)
        if dtype.itemsize == 0 or dtype.subdtype is not None:
            raise ProtocolError(f"{dtype!r:.80} came as the element type of a file's array, which none has")
        path = chosen_policy().data_file(str(self.path))
        # What is no file (a pipe, a device) must neither hold the worker nor be read; opened first, then looked at.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise MisuseError(f"{str(path)[:1000]!r} is no file to map an array from")
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
class Arrays(Sent):
    """Arrays whose first axes are the examples'; tuples and dicts of such. Mapped ones are read where they lie."""

    _structure: Any
    _length: int
    example_bytes: int

    def __init__(self, structure: Any) -> None:
        self._structure = map_leaves(_named, structure)
        lengths = {len(leaf) for leaf in leaves(structure)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays of a source have {sorted(lengths)} examples: give arrays of one length")
        self._length = lengths.pop()
        self.example_bytes = sum(leaf.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves(structure))

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _opened(self) -> Any:
        return map_leaves(lambda leaf: leaf.open() if isinstance(leaf, MappedArray) else leaf, self._structure)

    def read(self, numbers: Numbers, _start: int, _stop: int, /) -> Any:
        """A copy, which the step may write to."""
        return map_leaves(lambda leaf: leaf.take(numbers, 0), self._opened)


@dataclass(init=False, eq=False)
class Examples(Sent):
    """What has a length and gives an example for a number: a list, a PyTorch or Hugging Face dataset."""

    _items: Any
    _length: int

    def __init__(self, items: Any) -> None:
        self._items = items
        self._length = len(items)

    def __len__(self) -> int:
        return self._length

    def read(self, numbers: Numbers, _start: int, _stop: int, /) -> list[Any]:
        """One by one, or all at once where the dataset can (`__getitems__`, as PyTorch asks for)."""
        wanted = numbers.tolist()
        if callable(several := getattr(self._items, "__getitems__", None)):
            found = list(several(wanted))
            if len(found) != len(wanted):
                raise ValueError(f"__getitems__ gave {len(found)} examples for {len(wanted)} numbers")
            return found
        return [self._items[number] for number in wanted]


@dataclass(init=False, eq=False)
class Ranges(Sent):
    """What can read a range: `read(start, stop)` of it gives the examples, as a block. The last ones are kept."""

    _reader: Any
    _length: int

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._length = len(reader)

    @cached_property
    def _blocks(self) -> OrderedDict[tuple[int, int], Any]:
        return OrderedDict()

    def __len__(self) -> int:
        return self._length

    def read(self, numbers: Numbers, start: int, stop: int, /) -> Any:
        """Out of the range, which is read whole."""
        place = start, stop
        if place not in self._blocks:
            block = self._reader.read(start, stop)
            check_block(block, stop - start)
            self._blocks[place] = block
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(place)
        return take(self._blocks[place], numbers - start)


@dataclass(init=False, eq=False)
class Made(Sent):
    """A function that makes the source, called where it is read."""

    _make: Callable[[], Any]
    _length: int

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._length = len(self._source)

    @cached_property
    def _source(self) -> Source:
        return source_of(self._make())

    def __len__(self) -> int:
        return self._length

    def read(self, numbers: Numbers, start: int, stop: int, /) -> Any:
        """As the source that was made; it must be as long here as where it was asked for its length."""
        source = self._source
        if len(source) != self._length:
            raise ValueError(
                f"the function makes a source of {len(source):,} examples here, and one of {self._length:,} on the "
                "coordinator: it must be the same everywhere"
            )
        return source.read(numbers, start, stop)


@dataclass(init=False, eq=False)
class Files:
    """Files, each with as many examples as its reader finds; a file is visited as a whole."""

    paths: list[Any]
    _reader: Callable[[Any], Any]

    def __init__(self, paths: Sequence[Any], reader: Callable[[Any], Any]) -> None:
        self.paths = list(paths)
        self._reader = reader

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, number: int) -> Any:
        """The block of one file; or, where its reader yields them, an iterator over its examples, which may be many."""
        block = self._reader(self.paths[number])
        if not isinstance(block, list | tuple | dict | np.ndarray):
            return iter(block)
        size_of(block)
        return block


def source_of(data: Any) -> Source:
    """The way to read this.

    Raises:
        TypeError: there is none; the message says what to give.
        ValueError: its arrays are of several lengths.
    """
    columns = list(leaves(data)) if isinstance(data, tuple | dict | np.ndarray) else []
    if columns and all(map(_is_column, columns)):
        return Arrays(map_leaves(lambda leaf: leaf if isinstance(leaf, np.ndarray) else array_of(leaf), data))
    if isinstance(data, dict):
        odd = [f"{name!r} is {describe(column)}" for name, column in data.items() if not _is_column(column)]
        found = f"a dict whose {odd[0]}" if odd else "a dict without anything in it"
        raise TypeError(f"{found} is no source of examples: give arrays with one example a row, by name")
    if hasattr(data, "iloc"):
        mend = "its columns, {name: frame[name].to_numpy() for name in frame}"
        if getattr(data, "ndim", 2) == 1:
            mend = "its values, series.to_numpy()"
        raise TypeError(f"{describe(data)} is no source: give {mend}")
    if hasattr(data, "dataset") and hasattr(data, "batch_size"):
        raise TypeError(
            f"{describe(data)} is no source, as it goes through one in an order of its own: pass loader.dataset, and "
            "cut and shuffle it here, .shuffle(seed=...).batch(n)"
        )
    if isinstance(data, Sized) and callable(getattr(data, "read", None)):
        return Ranges(data)
    if isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | dict | set):
        return Examples(data)
    if callable(data):
        return Made(data)
    raise TypeError(
        f"{describe(data)} is no source of examples: it has no length, or no way to read its examples by number. Give "
        "arrays, a sequence, a dataset with __len__ and __getitem__, something with __len__ and read(start, stop), "
        "files with reader=, or a function that returns one of these. What has no length goes to "
        "create_per_worker_dataset"
    )


def _is_column(leaf: Any) -> bool:
    """Is it an array of examples, NumPy's or, as a torch tensor or a pandas Series, one that it can take?"""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return not isinstance(leaf, Handle) and hasattr(leaf, "__array__") and len(getattr(leaf, "shape", ())) > 0


# Blocks and batches


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """The same structure of dicts and tuples (named ones, too), with `fn(leaf)` for each leaf."""
    if isinstance(structure, np.ndarray):  # nearly always: to ask whether it is a mapping takes ten times as long
        return fn(structure)
    if isinstance(structure, tuple):
        mapped = [map_leaves(fn, item) for item in structure]
        return type(structure)(*mapped) if hasattr(structure, "_fields") else tuple(mapped)
    if isinstance(structure, Mapping):
        return {key: map_leaves(fn, item) for key, item in structure.items()}
    return fn(structure)


def leaves(structure: Any) -> list[Any]:
    """In order."""
    found: list[Any] = []
    map_leaves(found.append, structure)
    return found


def _named(leaf: Any) -> Any:
    return (isinstance(leaf, np.memmap) and MappedArray.of(leaf)) or leaf


def size_of(block: Any) -> int:
    """Examples in it. ValueError if its arrays do not agree."""
    if isinstance(block, list):
        return len(block)
    sizes = {len(leaf) for leaf in leaves(block)}
    if len(sizes) != 1:
        raise ValueError(f"a block whose arrays have {sorted(sizes)} examples: they must have one number of them")
    return sizes.pop()


def check_block(block: Any, size: int) -> None:
    """ValueError if it has not so many examples."""
    if (found := size_of(block)) != size:
        raise ValueError(f"the reader gave {found:,} examples for a range of {size:,}")


def take(block: Any, places: Any) -> Any:
    """The examples at these places of a block, as a block of their own."""
    if isinstance(block, list):
        return [block[place] for place in places]
    return map_leaves(lambda leaf: array_of(leaf)[places], block)


def joined(blocks: Sequence[Any]) -> Any:
    """One behind the other. ValueError if they do not fit."""
    if len(blocks) == 1:
        return blocks[0]
    if all(isinstance(block, list) for block in blocks):
        return [example for block in blocks for example in block]
    return _together(np.concatenate, blocks)


def unstacked(block: Any) -> list[Any]:
    """Its examples."""
    if isinstance(block, list):
        return block
    return [map_leaves(lambda leaf, place=place: leaf[place], block) for place in range(size_of(block))]  # type: ignore[misc]


def stacked(block: Any) -> Any:
    """A batch: of a list of examples, arrays of one axis more. ValueError if they have several shapes or structures."""
    return _together(np.stack, block) if isinstance(block, list) else block


def _together(how: Callable[[Any], Any], parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        if any(not isinstance(part, Mapping) or part.keys() != first.keys() for part in parts):
            raise ValueError(f"examples with other keys than the first one's, {sorted(first)}")
        return {key: _together(how, [part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        if any(not isinstance(part, tuple) or len(part) != len(first) for part in parts):
            raise ValueError(f"examples that are no tuples of {len(first)}, as the first one is")
        columns = [_together(how, column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    arrays = [array_of(part) for part in parts]
    if how is np.stack and len({array.shape for array in arrays}) > 1:
        other = next(place for place, array in enumerate(arrays) if array.shape != arrays[0].shape)
        raise ValueError(
            f"example {other} of the batch has the shape {arrays[other].shape}, and the first one {arrays[0].shape}: "
            "pad them in a map(), or leave batch() out"
        )
    return how(arrays)
