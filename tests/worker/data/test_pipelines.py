"""What a dataset gives for a position in its order: orders, sources, batches, and the answer to bad input."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.core.errors import DatasetError
from pscluster.worker.data.order import Order
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.sources import Arrays, Files, source_of


def elements(pipeline: Pipeline, epoch: int = 0, start: int = 0, stop: int | None = None) -> list[Any]:
    """The elements at these positions; the first error is raised."""
    yielded = list(pipeline.elements(epoch, start, pipeline.visited_length if stop is None else stop))
    for element in yielded:
        if isinstance(element, DatasetError):
            raise element
    return yielded


@given(
    length=st.integers(1, 60),
    split=st.integers(1, 70),
    seed=st.none() | st.integers(0, 3),
    epoch=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_an_order_is_a_permutation(length: int, split: int, seed: int | None, epoch: int, cuts: list[int]) -> None:
    """However it is requested, in pieces, each number comes once, in the same order, within its split's bounds."""
    order = Order(length, split, seed)
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    visited: list[int] = []
    for start, stop in itertools.pairwise(bounds):
        for numbers, first, after in order.pieces(epoch, start, stop):
            assert ((first <= numbers) & (numbers < after)).all()
            assert first % split == 0
            assert after == min(first + split, length)
            visited += numbers.tolist()
    assert sorted(visited) == list(range(length))
    whole = [example for numbers, _, _ in Order(length, split, seed).pieces(epoch, 0, length) for example in numbers]
    assert visited == whole
    if seed is None:
        assert visited == list(range(length))


def test_shuffled_within_and_across_splits() -> None:
    """Both the splits and their contents are shuffled; other epochs and seeds have other orders, equal ones the
    same."""

    def order(seed: int, epoch: int) -> list[int]:
        return [int(n) for numbers, _, _ in Order(1000, 50, seed).pieces(epoch, 0, 1000) for n in numbers]

    first = order(1, 0)
    splits = [example // 50 for example in first[::50]]
    assert splits != sorted(splits)
    assert [sorted(first[at : at + 50]) for at in range(0, 1000, 50)] == [
        list(range(split * 50, split * 50 + 50)) for split in splits
    ]
    assert first[:50] != sorted(first[:50])
    assert order(1, 0) == first
    assert order(1, 1) != first
    assert order(2, 0) != first


class Pair(NamedTuple):
    """An example, or a batch of them."""

    x: Any
    y: Any


class Dataset:
    """A dataset like PyTorch's, indexed by number."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < 10:
            raise IndexError(index)
        return {"x": np.full(3, index), "y": index}


class Several(Dataset):
    """A dataset that reads several at once."""

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [{"x": np.full(3, index), "y": index} for index in numbers]


class Reader:
    """A source that can read ranges, and counts its reads."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return 10

    def read(self, start: int, stop: int) -> dict[str, Any]:
        """Read a block."""
        self.asked.append((start, stop))
        return {"x": np.repeat(np.arange(start, stop), 3).reshape(-1, 3), "y": np.arange(start, stop)}


def arrays() -> dict[str, Any]:
    """The same examples, as arrays."""
    return {"x": np.repeat(np.arange(10), 3).reshape(-1, 3), "y": np.arange(10)}


@pytest.mark.parametrize(
    "make", [arrays, Dataset, Several, Reader, lambda: [Dataset()[index] for index in range(10)], lambda: arrays]
)
@pytest.mark.parametrize("seed", [None, 5])
def test_sources_give_the_same(make: Any, seed: int | None) -> None:
    """Elements are the same whatever source the examples come from, even after being sent to a worker."""
    pipeline = Pipeline(source_of(make()), "data", seed=seed, split=4, batch=3)
    expected = elements(Pipeline(Arrays(arrays()), "data", seed=seed, split=4, batch=3), epoch=2)
    for one in (pipeline, pickle.loads(pickle.dumps(pipeline)) if make is not None else pipeline):
        batches = elements(one, epoch=2)
        assert [len(batch["y"]) for batch in batches] == [3, 3, 3, 1]
        for mine, theirs in zip(batches, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for key in mine:
                np.testing.assert_array_equal(mine[key], theirs[key])


def test_ranges_are_read_once_while_they_are_needed() -> None:
    """Batches within a split do not read it again."""
    reader = Reader()
    pipeline = Pipeline(source_of(reader), "data", seed=0, split=5, batch=2)
    elements(pipeline)
    assert sorted(reader.asked) == [(0, 5), (5, 10)]


def test_structures() -> None:
    """Named tuples, tuples and plain arrays come back as such; without batch() elements are examples."""
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    (first, _) = elements(Pipeline(Arrays(Pair(x, y)), "data", batch=2))
    assert isinstance(first, Pair)
    assert first.y.tolist() == [0, 1]
    assert [type(element) for element in elements(Pipeline(Arrays((x, y)), "data"))] == [tuple] * 3
    assert [element.tolist() for element in elements(Pipeline(Arrays(y), "data"))] == [0, 1, 2]
    stacked = elements(Pipeline(source_of([Pair(1, 2), Pair(3, 4)]), "data", batch=2))
    assert stacked[0].x.tolist() == [1, 3]


def test_a_step_may_write_to_its_batch() -> None:
    """Writing to a batch does not change the source."""
    x = np.arange(6.0)
    for seed in (None, 1):
        for batch in elements(Pipeline(Arrays(x), "data", seed=seed, batch=2)):
            batch[:] = -1
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    items = [np.zeros(2), np.ones(2)]
    for element in elements(Pipeline(source_of(items), "data")):
        element += 7
    assert items[0].tolist() == [0, 0]


@given(width=st.sampled_from([1, 3000, 40_000]), batch=st.none() | st.integers(1, 40), seed=st.none() | st.just(0))
def test_small_batches_are_read_together(width: int, batch: int | None, seed: int | None) -> None:
    """They equal those read one by one, at any size; writing to one changes no other."""
    rows = np.repeat(np.arange(90, dtype=np.float32)[:, None], width, axis=1)
    pipeline = Pipeline(source_of({"row": rows, "number": np.arange(90)}), "data", seed=seed, split=32, batch=batch)
    step = batch or 1
    for start, stop in ((0, 90), (7, 85)):
        copies = []
        for element in pipeline.elements(1, start, stop):
            copies.append({name: leaf.copy() for name, leaf in element.items()})
            element["row"][...] = -1
        alone = [elements(pipeline, 1, first, min(first + step, stop))[0] for first in range(start, stop, step)]
        assert len(copies) == len(alone)
        for together, one in zip(copies, alone, strict=True):
            np.testing.assert_equal(together, one)
    assert rows.min() == 0


def test_map_stands_where_it_was_put() -> None:
    """Before batch() it sees examples, after it batches."""
    pipeline = Pipeline(
        Arrays(np.arange(4)),
        "data",
        example_functions=(lambda x: x + 1, lambda x: (x, x * 10)),
        batch=2,
        batch_functions=(lambda b: b[1].sum(),),
    )
    assert elements(pipeline) == [30, 70]


def test_drop_remainder() -> None:
    """The last examples of the order are dropped, not those of the source."""
    pipeline = Pipeline(Arrays(np.arange(10)), "data", seed=3, batch=4, drop_remainder=True)
    assert pipeline.visited_length == 8
    assert [len(batch) for batch in elements(pipeline)] == [4, 4]


def test_a_mapped_array_travels_by_name(tmp_path: Path) -> None:
    """Views of it are sent by name, too, with steps and offsets; a computed one by value."""
    np.save(tmp_path / "x.npy", np.arange(100_000).reshape(-1, 10))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for array in (mapped, mapped[5:9000:3, ::-2], mapped.T[:, 7:].T):
        pipeline = Pipeline(source_of(array), "data", seed=1, batch=7)
        data = pickle.dumps(pipeline)
        assert len(data) < 2000
        for mine, theirs in zip(
            elements(pickle.loads(data)), elements(Pipeline(Arrays(np.array(array)), "", seed=1, batch=7)), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed[0] = -1
    assert pickle.loads(pickle.dumps(source_of(changed))).read(np.arange(1), 0, 1)[0].tolist() == [-1] * 10
    computed = source_of(mapped + 1)
    assert isinstance(computed, Arrays)
    np.testing.assert_array_equal(computed.read(np.arange(3), 0, 3), np.array(mapped[:3]) + 1)


def test_files(tmp_path: Path) -> None:
    """The reader reads each file; batches stay within a file, and both files and examples are shuffled."""
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text("\n".join(f"{index}-{line}" for line in range(index + 1)))

    def read(path: Path) -> Iterator[str]:
        yield from path.read_text().split("\n")

    paths = sorted(tmp_path.iterdir())
    pipeline = Pipeline(Files(paths, read), "data", batch=2)
    assert [batch.tolist() for batch in elements(pipeline)] == [
        ["0-0"],
        ["1-0", "1-1"],
        ["2-0", "2-1"],
        ["2-2"],
        ["3-0", "3-1"],
        ["3-2", "3-3"],
    ]
    shuffled = [batch.tolist() for batch in elements(Pipeline(Files(paths, read), "data", batch=2, seed=4))]
    assert shuffled != [batch.tolist() for batch in elements(pipeline)]
    assert sorted(itertools.chain.from_iterable(shuffled)) == sorted(
        f"{n}-{line}" for n in range(4) for line in range(n + 1)
    )
    dropped = elements(Pipeline(Files(paths, read), "data", batch=2, drop_remainder=True))
    assert [len(batch) for batch in dropped] == [2, 2, 2, 2]


@pytest.mark.parametrize(("seed", "held"), [(None, 0), (3, 16)])
@pytest.mark.parametrize("batch", [None, 5])
def test_a_reader_that_yields_more_than_can_be_held(seed: int | None, held: int, batch: int | None) -> None:
    """No more is read than an element needs, and of a shuffled file a split; each example comes once."""
    step, taken, sizes = batch or 1, itertools.count(), {"endless": None, "short": 39}

    def read(name: str) -> Iterator[int]:
        for example in itertools.islice(itertools.count(), sizes[name]):
            next(taken)
            yield example

    def flat(batches: Iterator[Any]) -> list[int]:
        return [example for element in batches for example in np.atleast_1d(element).tolist()]

    stream = Pipeline(Files(["endless"], read), "data", batch=batch, seed=seed, split=16).elements(0, 0, 1)
    for nth in range(1, 9):
        assert len(np.atleast_1d(next(stream))) == step
        assert next(taken) - (nth - 1) <= nth * step + held, "with those that were counted here"
    short = Pipeline(Files(["short"], read), "data", batch=batch, seed=seed, split=16)
    order = flat(short.elements(0, 0, 1))
    assert sorted(order) == list(range(39))
    assert (order == sorted(order)) == (seed is None)
    assert order == flat(short.elements(0, 0, 1))
    assert (order == flat(short.elements(1, 0, 1))) == (seed is None), "another order every epoch"
    assert [sorted(order[at : at + 16])[0] for at in (0, 16, 32)] == [0, 16, 32]


def test_a_reader_that_fails_on_its_way() -> None:
    """What it has yielded is kept, with an error that says how much that was."""

    def read(_: str) -> Iterator[int]:
        yield from range(5)
        raise OSError("bad sector")

    first, failure = Pipeline(Files(["a"], read), "mine", batch=4).elements(0, 0, 1)
    assert first.tolist() == [0, 1, 2, 3]
    assert isinstance(failure, DatasetError)
    said = "after the first 4 examples of the file 'a', number 0 of the source, in epoch 0, can't be read: OSError: bad"
    assert said in str(failure)


# Bad input


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        (iter([1]), TypeError, "has no length, or its examples can't be read by number"),
        (3, TypeError, "not a source of examples"),
        ("text", TypeError, "not a source of examples"),
        ({"x": [1, 2]}, TypeError, "not a source of examples"),
        ((np.zeros(3), np.zeros(4)), ValueError, r"the arrays of a source have \[3, 4\] examples"),
        (np.float32(3), TypeError, "not a source of examples"),
    ],
)
def test_what_is_no_source(data: Any, error: type[Exception], sentence: str) -> None:
    """The error says what may be given."""
    with pytest.raises(error, match=sentence):
        source_of(data)


def test_a_frame_is_told_how_it_can_be_given() -> None:
    """The error says that its columns have a length and can be indexed."""

    class Frame:
        iloc = None

        def __len__(self) -> int:
            return 3

    with pytest.raises(TypeError, match=r"give its columns, \{name: frame"):
        source_of(Frame())


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ([np.zeros(2), np.zeros(3)], r"example 1 of the batch has the shape \(3,\), and the first one \(2,\)"),
        ([{"x": 1}, {"y": 1}], r"examples with keys other than the first one's, \['x'\]"),
        ([(1, 2), (1, 2, 3)], "examples that are not tuples of 2"),
    ],
)
def test_examples_that_do_not_fit(items: list[Any], sentence: str) -> None:
    """The message names the dataset, the examples and the reason."""
    with pytest.raises(DatasetError, match=f"dataset 'mine': the examples at 0 to 1 of epoch 0, .*{sentence}"):
        elements(Pipeline(source_of(items), "mine", batch=2))


def test_a_reader_of_another_length() -> None:
    """A reader that gives more or fewer examples than requested is refused."""

    class Short(Reader):
        def read(self, start: int, stop: int) -> dict[str, Any]:
            return super().read(start, stop - 1)

    with pytest.raises(DatasetError, match="the reader returned 9 examples for a range of 10"):
        elements(Pipeline(source_of(Short()), "data", batch=2))

    class Few(Several):
        def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
            return super().__getitems__(numbers)[1:]

    with pytest.raises(DatasetError, match="__getitems__ returned 1 examples for 2 numbers"):
        elements(Pipeline(source_of(Few()), "data", batch=2))


def test_what_fails_leaves_the_rest_readable() -> None:
    """An element that can't be read is an error in its place; the next ones can be read."""

    def picky(x: int) -> int:
        if x == 2:
            raise RuntimeError("not this one")
        return x

    yielded = list(Pipeline(Arrays(np.arange(6)), "data", example_functions=(picky,), batch=2).elements(0, 0, 6))
    assert [type(element) for element in yielded] == [np.ndarray, DatasetError, np.ndarray]
    assert "numbers 2, 3 of the source, can't be read: RuntimeError: not this one" in str(yielded[1])
    assert yielded[1].examples == 2


@pytest.mark.parametrize("kind", ["arrays", "lists", "streams"])
def test_blocks_that_are_shuffled_together(kind: str) -> None:
    """Every example comes once, whatever a part has; its neighbours are of several blocks, others in each epoch."""
    make: dict[str, Any] = {
        "arrays": lambda number: {"n": np.arange(10 * number, 10 * number + 10)},
        "lists": lambda number: [{"n": n} for n in range(10 * number, 10 * number + 10)],
        "streams": lambda number: ({"n": n} for n in range(10 * number, 10 * number + 10)),
    }

    def read(number: int) -> Any:
        if number == 5 and broken:
            raise OSError("gone")
        return make[kind](number)

    broken = False
    pipeline = Pipeline(Files(list(range(12)), read), "data", seed=1, split=20, window=3, batch=4)
    parts = [[batch["n"].tolist() for batch in elements(pipeline, 0, first, first + 3)] for first in range(0, 12, 3)]
    assert parts == [
        [batch["n"].tolist() for batch in elements(pipeline, 0, first, first + 3)] for first in (0, 3, 6, 9)
    ]
    assert sorted(n for part in parts for batch in part for n in batch) == list(range(120))
    for part in parts:
        assert [len(batch) for batch in part] == [4] * 7 + [2]
        assert len({n // 10 for batch in part[:2] for n in batch}) == 3
    others = [batch["n"].tolist() for batch in elements(pipeline, 1, 0, 3)]
    assert others not in parts
    whole = [batch["n"].tolist() for batch in elements(pipeline)]
    assert whole == [batch for part in parts for batch in part]
    broken = True
    found = list(pipeline.elements(0, 0, 12))
    (error,) = [element for element in found if isinstance(element, DatasetError)]
    assert "file 5, number 5 of the source, in epoch 0, can't be read: OSError: gone" in str(error)
    assert sum(len(element["n"]) for element in found if not isinstance(element, DatasetError)) == 110
