"""Tokens, which are texts or integers: from arrays, as arrays, counted, and looked up.

Of large batches of texts pyarrow, if it is installed, finds the different ones, without an object for each text: a
batch of 100,000 words by Zipf's law takes half the time, and a column that pyarrow has read a fifth. Smaller batches
are faster without.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from pscluster.core.numbers.splitmix import GOLDEN, MASK, mixed

Ints = npt.NDArray[np.int64]

_MANY = 1 << 15  # texts of a batch for which pyarrow pays
_SHOWN = 5  # values in an error


@functools.cache
def _pyarrow() -> Any:
    """Return pyarrow; None without it."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        return None


def some(values: Sequence[Any]) -> str:
    """Return the first values, for an error."""
    return ", ".join(map(repr, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")


def array_of(label: str, values: Any) -> npt.NDArray[Any]:
    """Return values as an array. TypeError or ValueError if they are none."""
    if isinstance(values, dict):
        raise TypeError(f"{label} was given a dict with {some(list(values))}: give it one of these")
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(
            f"{label} was given rows of different lengths: pad them, for instance with the mask token"
        ) from None


def texts_of(label: str, values: Any) -> tuple[list[str], tuple[int, ...]]:
    """Return the texts in an array, in order, and its shape. Bytes are decoded as UTF-8. TypeError if it has others."""
    array = array_of(label, values)
    flat: list[Any] = array.ravel().tolist()
    kinds = {str} if array.dtype.kind in "UT" else set(map(type, flat))
    if kinds <= {str} and (array.dtype.kind in "UTO" or not flat):
        return flat, array.shape
    if kinds <= {str, bytes, np.str_, np.bytes_}:
        return [item.decode() if isinstance(item, bytes) else str(item) for item in flat], array.shape
    wrong = next(item for item in flat if not isinstance(item, str | bytes))
    if wrong is None or wrong != wrong:  # NaN, as pandas has it
        hint = "replace what is missing by a string"
    else:
        hint = "use an IntegerLookup" if isinstance(wrong, int) else "convert them, for instance with astype(str)"
    raise TypeError(f"{label} takes strings, not {wrong!r} of type {type(wrong).__name__}: {hint}")


def different_texts_of(label: str, values: Any) -> tuple[list[str], npt.NDArray[Any] | None, tuple[int, ...]]:
    """Return texts, for each text of an array in order its place among them, and the array's shape.

    Without places, None, the texts are those of the array. TypeError if it has others.
    """
    is_column = type(values).__module__ == "pyarrow.lib"
    array = None if is_column else array_of(label, values)
    is_large = array is not None and array.size >= _MANY and array.dtype.kind in "UO"
    if (is_column or is_large) and (arrow := _pyarrow()):
        try:
            column = values if array is None else arrow.array(array.ravel(), arrow.large_string())
            texts, places = _encoded(arrow, column)
            if not column.null_count and set(map(type, texts)) <= {str}:
                return texts, places, (len(column),) if array is None else array.shape
        except (arrow.ArrowException, UnicodeError):  # such as lone surrogates, which UTF-8 does not have
            pass
    flat, shape = texts_of(label, values if array is None else array)
    return flat, None, shape


def _encoded(arrow: Any, column: Any) -> tuple[list[Any], npt.NDArray[Any]]:
    """Return the different values of a column of pyarrow, and the place of each value among them."""
    if isinstance(column, arrow.ChunkedArray):
        column = column.combine_chunks()
    if not arrow.types.is_dictionary(column.type):
        column = column.dictionary_encode()
        return column.dictionary.to_pylist(), column.indices.to_numpy()
    used, places = np.unique(column.indices.to_numpy(), return_inverse=True)  # a file's batches share a dictionary
    return column.dictionary.take(arrow.array(used)).to_pylist(), places


def ints_of(label: str, values: Any) -> Ints:
    """Return an array of integers as one of int64. TypeError if they are none."""
    array = array_of(label, values)
    if array.dtype.kind in "iu" or not array.size:
        return array.astype(np.int64, copy=False)
    if array.dtype.kind in "USOT" and isinstance(array.ravel()[0], str | bytes):
        raise TypeError(f"{label} takes integers, not strings such as {array.item(0)!r}: use a StringLookup")
    raise TypeError(f"{label} takes integers, not {array.dtype}: convert them, for instance with astype(np.int64)")


# Texts as arrays: their UTF-8, and the number of bytes of each


def pack(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint8], Ints]:
    """Return the UTF-8 of texts, one after another, and the bytes of each."""
    encoded = [text.encode() for text in texts]
    return np.frombuffer(b"".join(encoded), np.uint8), np.fromiter(map(len, encoded), np.int64, len(encoded))


def unpack(text: npt.NDArray[np.uint8], lengths: Ints) -> list[str]:
    """Return what `pack` was given. ValueError if these are no packed texts."""
    ends = np.cumsum(lengths)
    if lengths.ndim != 1 or text.ndim != 1 or np.any(lengths < 0) or (int(ends[-1]) if len(ends) else 0) != text.size:
        raise ValueError(f"{lengths.size} texts of {text.size} bytes together do not fit their lengths")
    whole = text.astype(np.uint8, copy=False).tobytes()
    bounds = [0, *ends.tolist()]
    return [whole[begin:end].decode() for begin, end in itertools.pairwise(bounds)]


# Hashes: the same on every machine and in every run


def hash_texts(texts: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """Return the 64-bit XXH3 of the UTF-8 of each text."""
    return np.fromiter((xxh3_64_intdigest(text.encode(), seed) for text in texts), np.uint64, len(texts))


def hash_ints(values: Ints, seed: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each integer, which is a bijection: of SplitMix64, which each seed begins elsewhere."""
    return mixed(values.view(np.uint64) + np.uint64(seed * GOLDEN & MASK))


# Vocabularies: different tokens in order, of which each has its number, from 0


class Texts:
    """A vocabulary of texts. What looks them up is made at the first lookup, once. Thread-safe."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = list(tokens)
        self._making = threading.Lock()
        self._numbers: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def as_array(self) -> npt.NDArray[np.object_]:
        array = np.empty(len(self.tokens), object)
        array[:] = self.tokens
        return array

    def numbers_of(self, texts: list[str]) -> Ints:
        """Return the number of each text; -1 of those that are not in the vocabulary."""
        if (numbers := self._numbers) is None:
            with self._making:
                if self._numbers is None:
                    self._numbers = {token: number for number, token in enumerate(self.tokens)}
                numbers = self._numbers
        get = numbers.get
        return np.fromiter((get(text, -1) for text in texts), np.int64, len(texts))


class Integers:
    """A vocabulary of integers."""

    def __init__(self, tokens: Ints) -> None:
        self.as_array = tokens
        self._order = np.argsort(tokens, kind="stable")
        self._sorted = tokens[self._order]

    @property
    def tokens(self) -> list[int]:
        return list(self.as_array.tolist())

    def __len__(self) -> int:
        return len(self.as_array)

    def numbers_of(self, values: Ints) -> Ints:
        """Return the number of each integer; -1 of those that are not in the vocabulary."""
        if not len(self):
            return np.full(values.shape, -1, np.int64)
        places = np.minimum(np.searchsorted(self._sorted, values), len(self) - 1)
        return np.where(self._sorted[places] == values, self._order[places], -1)


def repeated(tokens: Sequence[Any]) -> list[Any]:
    """Return the tokens that are there more than once."""
    if len(set(tokens)) == len(tokens):
        return []
    seen, twice = set[Any](), dict[Any, None]()
    for token in tokens:
        if token in seen:
            twice[token] = None
        seen.add(token)
    return list(twice)


def by_frequency(counts: dict[Any, int]) -> list[Any]:
    """Return tokens, the most frequent first, and those of the same frequency in reverse order, as Keras does.

    Python's order of texts, by code point, is that of their UTF-8.
    """
    return sorted(counts, key=lambda token: (operator.getitem(counts, token), token), reverse=True)
