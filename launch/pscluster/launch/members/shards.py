"""A member's part of a dataset: each row once an epoch, in an order that a seed fixes.

The rows of an epoch, shuffled or not, are cut among the members like `numpy.array_split`. A position is an epoch and
how many of the member's rows were given out in it; it is reported with each report, and a member that restarts from a
checkpoint goes on there. Rows that it had been given after that are given out again, and counted.

In an elastic run the number of members changes, so rows are not cut beforehand: each member asks the trainer for the
next ones, a few batches at a time. See `elastic.rows` for what becomes of those of members that leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.values import map_structure

Split: TypeAlias = Literal["all", "drop", "pad"]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How far a member has come in a dataset."""

    epoch: int = 0
    rows: int = 0  # of this member, in this epoch
    again: int = 0  # rows that it has been given once more, in all attempts


def bounds(rows: int, rank: int, size: int, split: Split) -> tuple[int, int]:
    """Return the first row of a member, and the first after its last one.

    All rows, with parts that differ by one at most ("all"); as many for each member, and the rest for none ("drop"); or
    as many for each, where the last ones get some rows twice ("pad"): then the end may be above the number of rows.
    """
    if split == "all":
        each, more = divmod(rows, size)
        return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)
    each = rows // size if split == "drop" else -(-rows // size)
    return rank * each, (rank + 1) * each


def made(source: Any) -> Any:
    """Return a source, or what it returns if it is a function."""
    return source() if callable(source) and not hasattr(source, "__len__") else source


class DatasetShard:
    """One member's rows of a dataset. Iterate over it, or its batches, once for each epoch."""

    def __init__(self, source: Any, rank: int, size: int, *, split: str = "all", seed: int = 0) -> None:
        """Take a member's part of a source.

        Args:
            source: arrays with one row each along the first axis, or a tuple or dict of them; a sequence of examples;
                an iterable, which is read into a list; or a function that returns one of these.
        """
        if split not in get_args(Split):
            raise ValueError(f"split is {split!r}; give one of {', '.join(map(repr, get_args(Split)))}")
        self._take, self._rows = _reader_of(made(source))
        self._rank, self._size, self._seed = rank, size, seed
        self._split = cast("Split", split)
        self._at = Position()
        self._furthest = Position()

    def restore(self, position: Position, furthest: Position) -> None:
        """Go on at a position, where the member had been at another one before."""
        self._at = Position(position.epoch, position.rows, furthest.again)
        self._furthest = furthest

    @property
    def position(self) -> Position:
        """Return how far this member has come."""
        if self._at.rows and self._at.rows == len(self):
            return Position(self._at.epoch + 1, 0, self._at.again)
        return self._at

    @property
    def epoch(self) -> int:
        """Return the epoch, from 0, that the next batch is from: of the next one, once all rows are given out."""
        return self.position.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epoch until `count` of them are over, counted from the beginning of the run.

        So a member that goes on from a checkpoint, or joins a run, does what is left. Each time, iterate over the rows:
        in an elastic run, rows that lost members have left behind are given out by another iteration of that epoch.
        """
        count = checks.whole("count", count, at_least=0)
        while self.epoch < count:
            yield self.epoch

    def __len__(self) -> int:
        """Return the number of this member's rows in an epoch."""
        first, after = bounds(self._rows, self._rank, self._size, self._split)
        return after - first

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of the next epoch, or the rest of the one that was begun, one by one."""
        for batch in self.iter_batches(1):
            yield map_structure(lambda leaf: leaf[0], batch) if not isinstance(batch, list) else batch[0]

    def iter_batches(self, batch_size: int, *, shuffle: bool = False, drop_last: bool = False) -> Iterator[Any]:
        """Yield batches of the next epoch, or of the rest of the one that was begun.

        Args:
            batch_size: rows in each; the last one has what is left.
            shuffle: draw another order of all rows for each epoch, and cut that among the members. All of them must
                say the same, and say so again after a restart.
            drop_last: leave out a last batch with fewer rows.

        Returns:
            Structures like the source's with arrays of `batch_size` rows; of a sequence, lists of examples.
        """
        batch_size = checks.whole("batch_size", batch_size, at_least=1)
        if self._at.rows and self._at.rows >= len(self):
            self._at = Position(self._at.epoch + 1, 0, self._at.again)
        epoch = self._at.epoch
        order = self._order(epoch) if shuffle else None
        first, after = bounds(self._rows, self._rank, self._size, self._split)
        if first == after:  # there is nothing in any epoch
            self._at = Position(epoch + 1, 0, self._at.again)
        while self._at.epoch == epoch and self._at.rows < after - first:
            begin = self._at.rows
            end = min(begin + batch_size, after - first)
            rows = np.arange(first + begin, first + end) % max(self._rows, 1)
            whole = end - begin == batch_size or not drop_last
            batch = self._take(rows if order is None else order[rows]) if whole else None
            self._give(epoch, begin, end)
            if whole:
                yield batch

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        """Return the rows in the order of an epoch."""
        return np.random.default_rng([self._seed, epoch]).permutation(self._rows)

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> Any:
        """Return the batches of the next epoch as a `tf.data.Dataset` of (features, labels).

        Each iteration over it is an epoch. TensorFlow's strategies must not cut it once more: its automatic sharding is
        turned off.

        Args:
            feature_columns, label_columns: a name gives an array, several names a dict of them.

        Raises:
            TypeError: the dataset is no dict of arrays.
            KeyError: it has no such column.
        """
        import tensorflow as tf

        first = self._take(np.arange(0, 1)) if self._rows else None
        if not isinstance(first, Mapping):
            raise TypeError("to_tf needs a dataset that is a dict of arrays, with rows in it")

        def columns(batch: Any, names: str | Sequence[str]) -> Any:
            return batch[names] if isinstance(names, str) else {name: batch[name] for name in names}

        def batches() -> Iterator[Any]:
            for batch in self.iter_batches(batch_size, shuffle=shuffle, drop_last=drop_last):
                yield columns(batch, feature_columns), columns(batch, label_columns)

        def signature(names: str | Sequence[str]) -> Any:
            return map_structure(lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), columns(first, names))

        both = signature(feature_columns), signature(label_columns)
        dataset = tf.data.Dataset.from_generator(batches, output_signature=both)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return dataset.with_options(options)

    def _give(self, epoch: int, begin: int, end: int) -> None:
        """Count rows as given out."""
        before = self._furthest
        known = end - begin if epoch < before.epoch else max(min(end, before.rows) - begin, 0)
        self._at = Position(epoch, end, self._at.again + (known if epoch <= before.epoch else 0))


class ElasticShard(DatasetShard):
    """A dataset whose rows are given out to the members that are there. Iterate over it once for each epoch.

    An iteration ends when all rows of the epoch have been given out, to whichever member.
    """

    def __init__(self, source: Any, ask: Callable[[dict[str, Any]], dict[str, Any]], *, seed: int = 0) -> None:
        """Begin where the run is. `ask` asks the trainer for rows."""
        super().__init__(source, 0, 1, seed=seed)
        self._ask = ask
        self._epoch: int = ask({"do": "open", "length": self._rows})["epoch"]
        self._held = (0, 0, 0)  # an epoch, and the rows in it that were leased and not given out: first, and after last
        self._given: list[list[int]] = []  # ranges that are not reported

    @property
    def position(self) -> Position:
        """Return the epoch that the next batch is from."""
        return Position(self._epoch)

    def __len__(self) -> int:
        """Raise TypeError: it is not known before the epoch is over."""
        raise TypeError(
            "in an elastic run a member has no fixed number of rows in an epoch: use `rows`, the number of all"
        )

    @property
    def rows(self) -> int:
        """Return how many rows all members together have in an epoch."""
        return self._rows

    def take_given(self) -> list[list[int]]:
        """Return what was given out since this was last called: epoch, first row, and the first after the last one."""
        given, self._given = self._given, []
        return given

    def not_reported(self, given: list[list[int]]) -> None:
        """Take note that these rows, which `take_given` had returned, are not reported."""
        self._given = [*given, *self._given]

    def go_on_in(self, epoch: int) -> None:
        """Take note of the lowest epoch that has rows to give out."""
        if self._held[1] == self._held[2]:
            self._epoch = epoch

    def iter_batches(self, batch_size: int, *, shuffle: bool = False, drop_last: bool = False) -> Iterator[Any]:
        """Yield batches of the epoch, as they are free, until none is left. Otherwise as `DatasetShard`'s."""
        batch_size = checks.whole("batch_size", batch_size, at_least=1)
        epoch, begin, stop = self._held
        if begin == stop:
            epoch = self._epoch
        order = self._order(epoch) if shuffle else None
        while True:
            _, begin, stop = self._held
            if begin == stop:
                lease = self._ask({"do": "take", "epoch": epoch, "batch": batch_size})
                begin, stop = lease["start"], lease["stop"]
                if begin == stop:
                    self._epoch = lease["epoch"]
                    return
            end = min(begin + batch_size, stop)
            self._epoch, self._held = epoch, (epoch, end, stop)
            rows = np.arange(begin, end)
            whole = end - begin == batch_size or not drop_last
            batch = self._take(rows if order is None else order[rows]) if whole else None
            self._give_out(epoch, begin, end)
            if whole:
                yield batch

    def _give_out(self, epoch: int, begin: int, end: int) -> None:
        if self._given and self._given[-1][0] == epoch and self._given[-1][2] == begin:
            self._given[-1][2] = end
        else:
            self._given.append([epoch, begin, end])


def _reader_of(source: Any) -> tuple[Callable[[np.ndarray[Any, Any]], Any], int]:
    """Return what gives rows by number, and how many there are."""
    leaves: list[Any] = []
    if isinstance(source, tuple | Mapping) or hasattr(source, "shape"):
        map_structure(leaves.append, source)
        if not leaves or not all(getattr(leaf, "shape", ()) for leaf in leaves):
            raise TypeError(f"a dataset of arrays has arrays with rows in it; this is {type_of(source)}")
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) > 1:
            raise ValueError(f"the arrays of a dataset have {sorted(lengths)} rows: all need the same number")
        return lambda rows: map_structure(lambda leaf: leaf[rows], source), lengths.pop()
    if not isinstance(source, Sequence) and not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        try:
            source = list(source)
        except TypeError:
            raise TypeError(
                f"a dataset is arrays, a sequence, an iterable, or a function that returns one, not {type_of(source)}"
            ) from None
    if isinstance(source, str | bytes):
        raise MisuseError("a dataset is a text: give a function that reads the file, such as lambda: np.load(path)")
    return lambda rows: [source[int(row)] for row in rows], len(source)
