"""A member's part of a dataset: each row once an epoch, and where it goes on after a restart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.core.errors import MisuseError
from pscluster.launch.answers.session import Answer
from pscluster.launch.elastic.session import ElasticSession
from pscluster.launch.members.shards import DatasetShard, ElasticShard, Position, bounds


@given(st.integers(0, 500), st.integers(1, 9))
def test_all_rows_are_cut_like_array_split(rows: int, size: int) -> None:
    parts = [range(*bounds(rows, rank, size, "all")) for rank in range(size)]
    assert [list(part) for part in parts] == [part.tolist() for part in np.array_split(np.arange(rows), size)]


@given(st.integers(0, 500), st.integers(1, 9))
def test_drop_and_pad_give_each_as_many(rows: int, size: int) -> None:
    assert {after - first for first, after in (bounds(rows, rank, size, "drop") for rank in range(size))} == {
        rows // size
    }
    assert {after - first for first, after in (bounds(rows, rank, size, "pad") for rank in range(size))} == {
        -(-rows // size)
    }


def test_201_rows_for_two() -> None:
    """No row is lost, and none comes twice."""
    shards = [DatasetShard(np.arange(201), rank, 2) for rank in range(2)]
    batches = [[len(batch) for batch in shard.iter_batches(32)] for shard in shards]
    assert batches == [[32, 32, 32, 5], [32, 32, 32, 4]]
    rows = [row for shard in shards for row in shard]
    assert sorted(int(row) for row in rows) == list(range(201))


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_row_comes_once_an_epoch(shuffle: bool) -> None:
    source = {"x": np.arange(50).reshape(25, 2), "y": np.arange(25)}
    shards = [DatasetShard(source, rank, 3, seed=7) for rank in range(3)]
    orders = []
    for _ in range(3):
        ids = []
        for shard in shards:
            for batch in shard.iter_batches(4, shuffle=shuffle):
                assert (batch["x"][:, 0] == 2 * batch["y"]).all()
                ids += batch["y"].tolist()
        assert sorted(ids) == list(range(25))
        orders.append(ids)
    assert (orders[0] != orders[1]) == shuffle


@given(st.data())
def test_a_restart_goes_on_where_it_was(data: Any) -> None:
    """What was given before the restored position and after it is each row once; the rest is counted."""
    rows, batch = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 7))
    before = DatasetShard(np.arange(rows), 0, 2, seed=1)
    given_out: list[list[int]] = []
    positions = [before.position]
    for _ in range(2):
        for taken in before.iter_batches(batch, shuffle=True):
            given_out.append(taken.tolist())
            positions.append(before.position)
    at = data.draw(st.integers(0, len(positions) - 1))
    after = DatasetShard(np.arange(rows), 0, 2, seed=1)
    after.restore(positions[at], positions[-1])
    again = []
    while after.position < Position(2) and len(after):
        again += [taken.tolist() for taken in after.iter_batches(batch, shuffle=True)]
    assert given_out[:at] + again == given_out
    assert after.position.again == sum(map(len, given_out[at:]))


def test_epochs_are_counted_from_the_beginning() -> None:
    """Also by a member that goes on within one, and by one for which there are no rows."""
    shard = DatasetShard(np.arange(10), 0, 2)
    shard.restore(Position(1, 3), Position(1, 3))
    assert [(epoch, list(shard)) for epoch in shard.epochs(3)] == [(1, [3, 4]), (2, [0, 1, 2, 3, 4])]
    none = DatasetShard(np.arange(1), 1, 2)
    assert [(epoch, list(none)) for epoch in none.epochs(2)] == [(0, []), (1, [])]


class Run:
    """An elastic run, as its datasets see it."""

    def __init__(self, *members: int) -> None:
        self.session = ElasticSession(1, 4)
        self.session.schedule()
        for member in members:
            self.session.join(member, "begins")

    def shard(self, member: int, source: Any) -> ElasticShard:
        def ask(asked: dict[str, Any]) -> dict[str, Any]:
            if asked["do"] == "open":
                actions = self.session.open(member, "d", asked["length"], "asks")
            else:
                actions = self.session.take(member, "d", asked["epoch"], asked["batch"], "asks")
            (answer,) = actions
            assert isinstance(answer, Answer)
            value: dict[str, Any] = answer.value
            return value

        return ElasticShard(source, ask)


@pytest.mark.parametrize("shuffle", [False, True])
def test_members_of_an_elastic_run_share_the_rows(shuffle: bool) -> None:
    run = Run(1, 2)
    one, other = (run.shard(member, np.arange(50)) for member in (1, 2))
    batches = one.iter_batches(3, shuffle=shuffle)
    rows = next(batches).tolist()
    rows += [row for batch in other.iter_batches(3, shuffle=shuffle) for row in batch.tolist()]
    rows += [row for batch in batches for row in batch.tolist()]
    assert sorted(rows) == list(range(50))
    assert (one.epoch, other.epoch, one.rows) == (1, 1, 50)
    assert list(one.epochs(1)) == []
    with pytest.raises(TypeError, match="use `rows`, the number of all"):
        len(one)


def test_an_iteration_that_was_left_goes_on() -> None:
    """With the rows that the member has leased; a last batch that is too small may be left out."""
    shard = Run(1).shard(1, np.arange(50))
    assert [next(shard.iter_batches(4)).tolist()[0] for _ in range(3)] == [0, 4, 8]
    shard.go_on_in(0)
    assert [batch.tolist() for batch in shard.iter_batches(4, drop_last=True)][-1] == [44, 45, 46, 47]
    assert shard.take_given() == [[0, 0, 50]]


def test_what_can_not_be_reported_is_reported_later() -> None:
    shard = Run(1).shard(1, np.arange(20))
    batches = shard.iter_batches(5)
    next(batches)
    given = shard.take_given()
    next(batches)
    shard.not_reported(given)
    assert shard.take_given() == [[0, 0, 5], [0, 5, 10]]
    assert shard.take_given() == []


def test_rows_of_a_member_that_has_left_make_another_iteration_of_the_epoch() -> None:
    run = Run(1, 2)
    one, other = (run.shard(member, np.arange(50)) for member in (1, 2))
    left = next(other.iter_batches(5))
    first = [row for batch in one.iter_batches(5) for row in batch.tolist()]
    assert one.epoch == 1
    run.session.leave(2)
    one.go_on_in(run.session.rows["d"].epoch)  # as it is told with its report
    again = [(epoch, row) for epoch in one.epochs(1) for row in one]
    assert {epoch for epoch, _ in again} == {0}
    assert sorted([*first, *(row for _, row in again)]) == list(range(50))
    assert set(left.tolist()) <= {row for _, row in again}


def test_sequences_iterables_and_functions() -> None:
    examples = [{"a": number} for number in range(5)]
    assert list(DatasetShard(examples, 0, 2)) == examples[:3]
    assert list(DatasetShard(iter(examples), 1, 2)) == examples[3:]
    assert list(DatasetShard(lambda: examples, 0, 1)) == examples
    assert next(DatasetShard(examples, 0, 1).iter_batches(2)) == examples[:2]
    first = next(iter(DatasetShard((np.arange(4), np.arange(8).reshape(4, 2)), 1, 2)))
    assert first[0] == 2
    assert first[1].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (3, TypeError, "a dataset is arrays, a sequence, an iterable, or a function that returns one, not an int"),
        ("rows.csv", MisuseError, "a dataset is a text: give a function that reads the file"),
        ({"x": np.arange(3), "y": np.arange(4)}, ValueError, r"have \[3, 4\] rows: all need the same number"),
        (np.float64(3), TypeError, "arrays with rows in it"),
    ],
)
def test_what_is_no_dataset(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DatasetShard(source, 0, 1)
    with pytest.raises(ValueError, match="split is 'some'; give one of 'all', 'drop', 'pad'"):
        DatasetShard(np.arange(3), 0, 1, split="some")
