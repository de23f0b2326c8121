"""Hashing, CategoryCrossing and HashedCrossing: layers that learn nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.worker.features.encoding import checked_mode, encoded
from pscluster.worker.features.layer import Layer
from pscluster.worker.features.tokens import Ints, array_of, hash_ints, hash_texts, ints_of, texts_of


class Hashing(Layer):
    """Turn strings or integers into bins by a hash, without a vocabulary. Different values may share a bin.

    The same value has the same bin everywhere and always: by XXH3 of a string's UTF-8, and SplitMix64's finalizer of an
    integer. The bins are not those of Keras, which uses FarmHash64 or SipHash64.

    Args:
        num_bins: how many bins, that of the mask value included.
        mask_value: the value whose bin is 0, and that of no other value. None: there is none.
        salt: 0 or more: another salt gives other bins.
        output_mode: "int": int64 bins; "one_hot", "multi_hot", "count": float32, with an entry for each bin.
        name: what errors call it.
    """

    default_name = "hashing"

    def __init__(
        self,
        num_bins: int,
        mask_value: str | int | None = None,
        salt: int = 0,
        output_mode: str = "int",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.num_bins = checks.whole(f"{self._label}: num_bins", num_bins, at_least=1)
        self.salt = checks.whole(f"{self._label}: salt", salt, at_least=0, below=1 << 63)
        self.mask_value = mask_value
        if mask_value is not None and self.num_bins == 1:
            raise ValueError(f"{self._label}: num_bins is 1, and mask_value has that bin: give at least 2")
        self.output_mode = checked_mode(self._label, output_mode)

    def get_config(self) -> dict[str, Any]:
        return {
            "num_bins": self.num_bins,
            "mask_value": self.mask_value,
            "salt": self.salt,
            "output_mode": self.output_mode,
            "name": self.name,
        }

    def __call__(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the bins of an array of strings or integers, in the output mode.

        Raises:
            TypeError: it has other values.
        """
        array = array_of(self._label, inputs)
        bins = self._bins(array)
        if self.output_mode == "int":
            return bins
        return encoded(bins, self.output_mode, self.num_bins, np.float32)

    def _bins(self, array: npt.NDArray[Any]) -> Ints:
        first = 0 if self.mask_value is None else 1
        buckets = np.uint64(self.num_bins - first)
        masked: npt.NDArray[np.bool_] | None = None
        if array.dtype.kind in "iu":
            values = ints_of(self._label, array)
            hashes = hash_ints(values.ravel(), self.salt)
            if first:
                masked = values.ravel() == self.mask_value
        else:
            flat, _ = texts_of(self._label, array)
            hashes = hash_texts(flat, self.salt)
            if first:
                masked = np.fromiter((text == self.mask_value for text in flat), bool, len(flat))
        bins = (hashes % buckets).astype(np.int64) + first
        if masked is not None:
            bins[masked] = 0
        return bins.reshape(array.shape)


class CategoryCrossing(Layer):
    """Combine several features into one: "a" and "b" become "a_X_b".

    TensorFlow 2 had this layer; its successor `HashedCrossing` makes bins of the result. Look the result up, or hash
    it.

    Args:
        separator: what is between the parts.
        name: what errors call it.
    """

    default_name = "category_crossing"

    def __init__(self, separator: str = "_X_", name: str | None = None) -> None:
        super().__init__(name)
        if not isinstance(separator, str):
            raise TypeError(f"{self._label}: separator is {separator!r}; it must be a string")
        self.separator = separator

    def get_config(self) -> dict[str, Any]:
        return {"separator": self.separator, "name": self.name}

    def __call__(self, inputs: Sequence[Any]) -> npt.NDArray[np.object_]:
        """Return the crosses of the values in each row.

        Args:
            inputs: two or more arrays of strings or integers, of shape (n,) or (n, values of each row).

        Returns:
            An array of strings (objects): of shape (n,) if all are, else (n, product of the numbers of values), in
            which the values of the last array change first.

        Raises:
            ValueError: there are fewer than two arrays, or they do not have as many rows.
            TypeError: an array has other values.
        """
        columns, flat = _columns(self._label, inputs)
        crossed = columns[0]
        for column in columns[1:]:
            joined = crossed[:, :, np.newaxis] + self.separator + column[:, np.newaxis, :]
            crossed = joined.reshape(len(joined), joined.shape[1] * joined.shape[2])
        return crossed[:, 0] if flat else crossed


class HashedCrossing(Layer):
    """Combine several features into one, as `CategoryCrossing`, and hash the result, as `Hashing`.

    Args:
        num_bins: how many bins.
        output_mode: "int": int64 bins; "one_hot": float32, with an entry for each bin.
        name: what errors call it.
    """

    default_name = "hashed_crossing"

    def __init__(self, num_bins: int, output_mode: str = "int", name: str | None = None) -> None:
        super().__init__(name)
        self.num_bins = checks.whole(f"{self._label}: num_bins", num_bins, at_least=1)
        self.output_mode = checked_mode(self._label, output_mode, ("int", "one_hot"))

    def get_config(self) -> dict[str, Any]:
        return {"num_bins": self.num_bins, "output_mode": self.output_mode, "name": self.name}

    def __call__(self, inputs: Sequence[Any]) -> npt.NDArray[Any]:
        """Return the bins of the crosses of two or more arrays of shape (n,) or (n, 1), in the output mode.

        Raises:
            ValueError: there are fewer than two arrays, or their shapes differ.
            TypeError: an array has other values than strings or integers.
        """
        columns, flat = _columns(self._label, inputs)
        if any(column.shape[1] != 1 for column in columns):
            raise ValueError(f"{self._label} takes one value a row: give arrays of shape (n,) or (n, 1)")
        texts = CategoryCrossing("_X_")([column[:, 0] for column in columns]).tolist()
        bins = (hash_texts(texts, 0) % np.uint64(self.num_bins)).astype(np.int64)
        return encoded(
            bins if flat else bins[:, np.newaxis], self.output_mode, self.num_bins, _DTYPES[self.output_mode]
        )


_DTYPES: dict[str, npt.DTypeLike] = {"int": np.int64, "one_hot": np.float32}


def _columns(label: str, inputs: Sequence[Any]) -> tuple[list[npt.NDArray[np.object_]], bool]:
    """Return arrays of strings with two axes, and whether all had one."""
    if isinstance(inputs, np.ndarray | str | dict) or len(inputs) < 2:
        raise ValueError(f"{label} takes a list of two or more arrays, one for each feature: layer([a, b])")
    arrays = [array_of(label, values) for values in inputs]
    shapes = [array.shape for array in arrays]
    if any(not 1 <= len(shape) <= 2 or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            f"{label} was given arrays of the shapes {shapes}: give (n,) or (n, values), the same n for all"
        )
    columns = []
    for array in arrays:
        if array.dtype.kind in "iu":
            texts = list(map(str, array.ravel().tolist()))
        else:
            texts = texts_of(label, array)[0]
        column = np.empty(len(texts), object)
        column[:] = texts
        columns.append(column.reshape(len(array), 1 if array.ndim == 1 else array.shape[1]))
    return columns, all(len(shape) == 1 for shape in shapes)
