"""Steps that overlap: `schedule(lookups=)` and `fit(overlap=, lookups=)` on a cluster: values, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    Checkpoint,
    ClusterCoordinator,
    EmbeddingTable,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    SynchronousStrategy,
    Variable,
    callbacks,
    embedding_lookup,
    exact_reads,
    optimizers,
)
from pscluster.core.errors import EndOfDatasetError, FunctionError, FunctionTimeoutError, MisuseError

ROWS, WIDTH, STEPS = 60, 3, 80


@pytest.fixture(scope="module")
def one_worker() -> Iterator[LocalCluster]:
    """Two servers and one worker, whose functions have an order."""
    yield from run_cluster(2, 1)


@pytest.fixture
def strategy(one_worker: LocalCluster) -> Iterator[ParameterServerStrategy]:
    """A strategy for this test alone."""
    with ParameterServerStrategy(one_worker) as strategy:
        yield strategy


def table_of(strategy: ParameterServerStrategy) -> Variable:
    """A table of zeros."""
    with strategy.scope():
        return Variable(np.zeros((ROWS, WIDTH), np.float32), name="table")


def batches(distinct: bool) -> list[Any]:
    """Ids for each step; `distinct`: no row is in two neighbouring steps."""
    rng = np.random.default_rng(3)
    if distinct:
        return [np.arange(7) + 10 * (step % 6) for step in range(STEPS)]
    return [rng.integers(0, ROWS, (4, 2)) for _ in range(STEPS)]


def test_rows_lack_at_most_the_last_two_steps(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """A row counts the steps: one reads all but the last two, whichever lookup asks for them; no update is lost.

    So does a variable that is named whole.
    """
    table = table_of(strategy)
    everything = np.arange(ROWS)
    with strategy.scope():
        whole, other = (Variable(np.zeros(4), name=name) for name in ("whole", "other"))

    def named(_index: int) -> Any:
        return [whole, (table, everything), other, whole]

    def step(index: int) -> tuple[int, float, float]:
        rows = embedding_lookup(table, everything) if index % 2 else table.sparse_read(everything)
        assert len(set(rows.reshape(-1).tolist())) == 1
        delta = np.ones((ROWS, WIDTH), np.float32)
        table.scatter_add(IndexedSlices(delta, everything))
        delta[:] = 1000  # it was taken as it was
        first, again, _ = strategy.read([whole, whole, other])
        assert first.tolist() == again.tolist()
        seen = float(first[0])
        again[:] = -1  # they are its own
        assert first[0] == seen
        whole.assign_add(np.ones(4))
        assert whole.numpy()[0] == index + 1  # with its own update
        return index, float(rows[0, 0]), seen

    seen = coordinator.fetch([coordinator.schedule(step, args=(at,), lookups=named) for at in range(STEPS)], TIMEOUT)
    for lag in ([index - count for index, count, _ in seen], [index - count for index, _, count in seen]):
        assert min(lag) >= 0
        assert max(lag) in (1, 2)
    assert np.all(table.numpy() == STEPS)
    assert np.all(whole.numpy() == STEPS)


def test_exact_reads_are_not_of_what_was_fetched(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """That came as `wire_dtype` says."""
    values = np.linspace(0, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    with strategy.scope():
        table = Variable(values, wire_dtype="int8")

    def step(ids: Any) -> Any:
        with exact_reads():
            exact = embedding_lookup(table, ids), table.numpy()
        return *exact, embedding_lookup(table, ids), table.numpy()

    ids = np.array([40, 3])
    *exact, rows, whole = coordinator.schedule(step, args=(ids,), lookups=lambda ids: [(table, ids), table]).fetch()
    for got, expected in zip(exact, (values[ids], values), strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in ((rows, values[ids]), (whole, values)):
        assert 0 < np.abs(got - expected).max() < 0.01


def test_values_are_those_of_steps_in_turn(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """Where neighbouring steps have no rows in common, the values are bit for bit those without overlap."""
    results = []
    for overlaps in (False, True):
        with strategy.scope():
            table = Variable(np.zeros((ROWS, WIDTH), np.float32), name=f"table-{overlaps}")
            adam = optimizers.Adam(0.1)

        def named(ids: Any, table: Variable = table) -> Any:
            return [(table, ids)]

        def step(ids: Any, table: Variable = table, adam: Any = adam) -> float:
            rows = embedding_lookup(table, ids)
            adam.apply_gradients([(IndexedSlices(np.cos(rows + ids[:, None]), ids), table)])
            return float(rows.sum())

        lookups = named if overlaps else None
        values = [coordinator.schedule(step, args=(ids,), lookups=lookups) for ids in batches(distinct=True)]
        results.append((coordinator.fetch(values, TIMEOUT), table.numpy().tobytes(), adam.iterations))
    assert results[0] == results[1]


def test_a_step_reads_what_it_has_pushed(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """After a push, rows that were fetched before are not given out; whole reads wait for the push, too."""
    table = table_of(strategy)

    def named(ids: Any) -> Any:
        return [(table, ids), (table, ids)]

    def step(ids: Any) -> tuple[Any, Any, Any]:
        before = embedding_lookup(table, ids)
        table.scatter_add(IndexedSlices(np.ones((len(ids), WIDTH), np.float32), ids))
        return before, embedding_lookup(table, ids), table.numpy()[ids]

    for at in range(20):
        before, after, whole = coordinator.schedule(step, args=(np.arange(3),), lookups=named).fetch(TIMEOUT)
        assert np.all(before == at)
        assert np.all(after == at + 1)
        assert np.all(whole == at + 1)


@pytest.mark.parametrize("ids", [np.arange(3, dtype=np.int32), np.arange(3)[::-1], [0, 1], ["a", "b"]])
def test_ids_of_any_type_are_looked_up_in_what_was_fetched(
    strategy: ParameterServerStrategy, coordinator: Any, ids: Any
) -> None:
    """Nothing is read again."""
    with strategy.scope():
        table = (
            EmbeddingTable(WIDTH, ids=str, name="words")
            if isinstance(ids, list) and ids[0] == "a"
            else table_of(strategy)
        )

    def named(ids: Any) -> Any:
        return [(table, np.asarray(ids))]

    def step(ids: Any) -> Any:
        before = table.client.exchanges.pulled
        embedding_lookup(table, np.asarray(ids))
        return table.client.exchanges.pulled - before

    assert coordinator.schedule(step, args=(ids,), lookups=named).fetch(TIMEOUT) == 0


def test_a_push_that_fails_fails_its_function(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """A function that has returned long before its push fails has failed, with the error of the push."""
    table = table_of(strategy)
    with strategy.scope():
        gone = Variable(np.zeros(2, np.float32), name="gone")

    def step(deleted: bool) -> str:
        if deleted:
            gone.assign_add(np.ones(2, np.float32))
        table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [0]))
        return "returned"

    run = [(table, [0])]
    assert coordinator.schedule(step, args=(False,), lookups=lambda _: run).fetch(TIMEOUT) == "returned"
    coordinator.schedule(lambda: gone.name).fetch(TIMEOUT)
    strategy.delete_variable(gone)
    coordinator.schedule(step, args=(True,), lookups=lambda _: run)
    with pytest.raises(FunctionError, match="was deleted") as caught:
        coordinator.join()
    assert caught.value.partly_applied
    assert table.numpy()[0, 0] == 1  # what the step pushed after that was not sent


def test_errors_of_lookups_and_steps(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """Both are the function's errors. What a step has pushed before it raises is applied, as without overlap."""
    table = table_of(strategy)
    with strategy.scope():
        adam = optimizers.Adam(0.1)

    def raises(_: Any) -> Any:
        raise KeyError("no such table")

    for lookups, error, words in (
        (raises, KeyError, "no such table"),
        (lambda _: table, MisuseError, "pairs"),
        (lambda _: [table.id], MisuseError, "pairs"),
        (lambda _: [adam.slot(table, "m")], MisuseError, "whole"),
        (lambda _: [(table, [ROWS])], Exception, str(ROWS)),
        (lambda _: table.assign_add(1.0), MisuseError, "must not change"),
    ):
        value = coordinator.schedule(lambda _: "ran", args=(0,), lookups=lookups)
        with pytest.raises(error, match=words):
            value.fetch(TIMEOUT)
        with pytest.raises(FunctionError):
            coordinator.join()
    assert np.all(table.numpy() == 0)

    def step(at: int) -> None:
        table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [at]))
        raise ValueError(f"step {at}")

    coordinator.schedule(step, args=(5,), lookups=lambda at: [(table, [at])])
    with pytest.raises(ValueError, match="step 5") as caught:
        coordinator.join()
    assert isinstance(caught.value, FunctionError)
    assert caught.value.partly_applied
    assert table.numpy()[:, 0].tolist() == [float(at == 5) for at in range(ROWS)]


def test_what_is_refused(one_worker: LocalCluster, strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """Datasets that begin anew in each function; wrong arguments; and functions of a synchronous strategy."""
    table = table_of(strategy)
    dataset = coordinator.create_per_worker_dataset([1, 2, 3])
    with pytest.raises(MisuseError, match="starts over"):
        coordinator.schedule(lambda _: None, args=([dataset],), lookups=lambda _: [(table, [0])])
    with pytest.raises(TypeError, match="lookups must be a function"):
        coordinator.schedule(lambda: None, lookups=[(table, [0])])
    data = coordinator.distribute_dataset(np.arange(10)).batch(5)
    with pytest.raises(ValueError, match="overlap=1"):
        coordinator.fit(lambda _: None, data, lookups=lambda _: [])
    with pytest.raises(ValueError, match="overlap is -1"):
        coordinator.fit(lambda _: None, data, overlap=-1)
    strategy.close()
    with SynchronousStrategy(one_worker) as in_step, pytest.raises(MisuseError, match="runs a function on one worker"):
        ClusterCoordinator(in_step).schedule(lambda: None, lookups=list)


def counting(table: Variable) -> Any:
    """Return what adds 1 to all rows of a table, and returns what they were before: as many as steps it has seen."""
    everything = np.arange(ROWS)

    def count() -> float:
        rows = embedding_lookup(table, everything)
        table.scatter_add(IndexedSlices(np.ones((ROWS, WIDTH), np.float32), everything))
        return float(rows[0, 0])

    return count


def is_named(folder: Path, element: int) -> bool:
    """Wait a while until `lookups` was called with an element, and return whether it was."""
    end = time.monotonic() + 10
    while not (found := (folder / str(element)).exists()) and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.fixture
def known(coordinator: Any) -> None:
    """A worker that has run a function: before that it gets no two at once."""
    coordinator.schedule(lambda: None).fetch(TIMEOUT)


@pytest.mark.parametrize("taken", [[1], [2], [3, 1], [1, 0, 2]])
def test_elements_of_iterators(
    strategy: ParameterServerStrategy, coordinator: Any, tmp_path: Any, taken: list[int]
) -> None:
    """`lookups` takes those that its function gets: in order, each once, whatever is cut in between, to the end."""
    table = table_of(strategy)
    count, everything = counting(table), np.arange(ROWS)
    counts = [taken[at % len(taken)] for at in range(30)]

    def elements() -> Iterator[int]:
        yield from range(sum(counts))

    def named(iterator: Any, number: int) -> Any:
        if number:
            next(iterator)
        return [(table, everything)]

    def step(iterator: Any, number: int) -> tuple[list[int], float]:
        return [next(iterator) for _ in range(number)], count()

    iterator = iter(coordinator.create_per_worker_dataset(elements))
    values = [coordinator.schedule(step, args=(iterator, n), lookups=named) for n in counts[:20]]
    Checkpoint(strategy).write(tmp_path / "cut")  # what waits is called back, with what was taken for it
    values += [coordinator.schedule(step, args=(iterator, n), lookups=named) for n in counts[20:]]
    results = coordinator.fetch(values, TIMEOUT)
    assert [element for elements, _ in results for element in elements] == list(range(sum(counts)))
    assert [len(elements) for elements, _ in results] == counts
    lag = [at - seen for at, (_, seen) in enumerate(results)]
    assert 0 <= min(lag) <= max(lag) <= 2
    coordinator.schedule(step, args=(iterator, 1), lookups=named)
    with pytest.raises(EndOfDatasetError, match=f"after {sum(counts)} elements"):
        coordinator.join()


def test_elements_of_parts(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """`lookups` takes the first ones of its function's own part, which the function gets again."""
    table = table_of(strategy)
    count, everything = counting(table), np.arange(ROWS)

    def named(part: Any) -> Any:
        next(part)
        return [(table, everything)]

    def step(part: Any) -> tuple[list[Any], float]:
        return [batch.tolist() for batch in part], count()

    data = coordinator.distribute_dataset(np.arange(96)).batch(4).parts(3)
    values = [coordinator.schedule(step, args=(part,), lookups=named) for part in data]
    results = coordinator.fetch(values, TIMEOUT)
    assert [row for batches, _ in results for batch in batches for row in batch] == list(range(96))
    assert (data.epoch, data.visited) == (1, 0)
    lag = [at - seen for at, (_, seen) in enumerate(results)]
    assert 0 <= min(lag) <= max(lag) <= 2

    def skips(part: Any) -> Any:
        part.skip_rest()

    part = next(iter(data))
    coordinator.schedule(step, args=(part,), lookups=skips)
    with pytest.raises(MisuseError, match="must not skip"):
        coordinator.join()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("source", ["part", "iterator"])
def test_rows_of_elements_are_fetched_ahead(
    strategy: ParameterServerStrategy, coordinator: Any, tmp_path: Path, source: str
) -> None:
    """While a function runs, `lookups` is called for the next one, once that one's element is the next."""
    table = table_of(strategy)

    def named(elements: Any) -> Any:
        (tmp_path / str(next(elements))).touch()
        return [(table, [0])]

    def step(elements: Any) -> bool:
        return (at := next(elements)) == 7 or is_named(tmp_path, at + 1)

    if source == "part":
        arguments: list[Any] = list(coordinator.distribute_dataset(np.arange(8)))
    else:
        arguments = [iter(coordinator.create_per_worker_dataset(range(8)))] * 8
    values = [coordinator.schedule(step, args=(argument,), lookups=named) for argument in arguments]
    assert coordinator.fetch(values, TIMEOUT) == [True] * 8


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("per_execution", [1, 3])
def test_fit_fetches_ahead_across_functions(
    strategy: ParameterServerStrategy, coordinator: Any, tmp_path: Path, distributed: bool, per_execution: int
) -> None:
    """So it does for a function's first step, in the last step of the one before; its rows lack that, and perhaps the
    one before that, but no more."""
    table = table_of(strategy)
    count, everything = counting(table), np.arange(ROWS)
    seen: list[dict[str, float]] = []

    class Watch(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(logs)

    def named(at: Any) -> Any:
        (tmp_path / str(at)).touch()
        return [(table, everything)]

    def step(at: Any) -> dict[str, float]:
        return {"lag": float(at) - count(), "ahead": float(at == 23 or is_named(tmp_path, at + 1))}

    data = (
        coordinator.distribute_dataset(np.arange(24))
        if distributed
        else coordinator.create_per_worker_dataset(range(24))
    )
    coordinator.fit(
        step, data, steps_per_epoch=None if distributed else 24, steps_per_execution=per_execution, verbose=0,
        lookups=named, overlap=1, callbacks=[Watch()],
    )  # fmt: skip
    assert {logs["lag"] for logs in seen} <= {0, 1, 2}
    assert [logs["ahead"] for logs in seen] == [1] * 24
    assert np.all(table.numpy() == 24)


def test_nothing_is_cut_while_pushes_are_under_way(
    strategy: ParameterServerStrategy, coordinator: Any, tmp_path: Any
) -> None:
    """A checkpoint and `join` have all updates of all functions that have begun; a cancelled one is over."""
    table = table_of(strategy)

    def step(at: int) -> int:
        for row in range(ROWS):
            table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [row]))
        return at

    values = [coordinator.schedule(step, args=(at,), lookups=lambda at: [(table, [at])]) for at in range(12)]
    until_one = values[2].fetch(TIMEOUT)
    Checkpoint(strategy).write(tmp_path / "cut")
    coordinator.join()
    assert until_one == 2
    final = table.numpy()
    assert np.all(final == 12)
    Checkpoint(strategy).read(tmp_path / "cut")
    cut = table.numpy()
    assert np.all(cut == cut[0, 0])  # no half of a function
    assert 3 <= cut[0, 0] <= 12
    many = [coordinator.schedule(step, args=(at,), lookups=lambda at: [(table, [at])]) for at in range(40)]
    many[0].fetch(TIMEOUT)
    coordinator.cancel(many)
    coordinator.join()
    after = table.numpy()
    coordinator.schedule(time.sleep, args=(0.05,)).fetch(TIMEOUT)
    assert np.array_equal(after, table.numpy())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("per_execution", [1, 7])
def test_fit(strategy: ParameterServerStrategy, coordinator: Any, named: bool, per_execution: int) -> None:
    """Every element is a step, in the data's order; updates count once, and losses are those of the steps."""
    table = table_of(strategy)
    with strategy.scope():
        order = Variable(np.zeros(1, np.float32), name="order")
        sgd = optimizers.SGD(1.0)

    def step(ids: Any) -> float:
        rows = embedding_lookup(table, ids)
        sgd.apply_gradients([(IndexedSlices(-np.ones_like(rows), ids), table)])
        order.assign(ids[:1].astype(np.float32))
        return float(ids[0])

    data = coordinator.distribute_dataset(np.arange(ROWS)).batch(5)
    lookups = (lambda ids: [(table, ids)]) if named else None
    history = coordinator.fit(
        step, data, epochs=2, steps_per_execution=per_execution, verbose=0, overlap=1, lookups=lookups
    )
    assert np.all(table.numpy() == 2)
    assert order.numpy()[0] == ROWS - 5
    assert history.history["loss"] == [np.arange(0, ROWS, 5).mean()] * 2


def test_fit_of_per_worker_data_takes_no_element_too_many(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """An iterator goes on where the training has ended, though elements are taken ahead."""
    table = table_of(strategy)
    data = coordinator.create_per_worker_dataset(lambda: iter(range(1000)))
    seen: list[float] = []

    def step(at: int) -> float:
        table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [at]))
        return float(at)

    history = coordinator.fit(
        step, data, epochs=3, steps_per_epoch=10, steps_per_execution=4, verbose=0, overlap=2,
        lookups=lambda at: [(table, [at])],
    )  # fmt: skip
    seen += history.history["loss"]
    assert seen == [4.5, 14.5, 24.5]
    assert table.numpy()[:, 0].tolist() == [1.0] * 30 + [0.0] * 30


def test_a_timeline_shows_pull_step_and_push_side_by_side(
    strategy: ParameterServerStrategy, coordinator: Any, tmp_path: Any
) -> None:
    """While a step runs rows of the next are pulled, and gradients pushed, each in a row of its own."""
    table = table_of(strategy)

    def step(ids: Any) -> None:
        table.scatter_add(IndexedSlices(embedding_lookup(table, ids) + 1, ids))
        time.sleep(0.005)

    ids = np.arange(ROWS)

    def side_by_side() -> set[str]:
        """Take some steps, and return which requests, of any until now, have begun and ended while a step ran."""
        for _ in range(20):
            coordinator.schedule(step, args=(ids,), lookups=lambda ids: [(table, ids)])
        coordinator.join()
        coordinator.timeline(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        workers = [event for event in events if event["pid"] == 2]
        rows = {event["tid"]: event["args"]["name"] for event in workers if event["name"] == "thread_name"}
        assert {name.partition(", ")[2] for name in rows.values()} == {"", "pull", "push"}
        steps = [event for event in workers if event["ph"] == "X" and rows[event["tid"]].endswith("0")]
        return {
            request["name"]
            for request in workers
            for run in steps
            if request["name"] in ("pull", "push")
            and run["ts"] < request["ts"]
            and request["ts"] + request["dur"] < run["ts"] + run["dur"]
        }

    # On a busy machine a step may end before what was begun beside it.
    until(lambda: side_by_side() == {"pull", "push"}, "both were seen beside a step")


def test_a_function_that_runs_too_long(strategy: ParameterServerStrategy, coordinator: Any) -> None:
    """It is stopped at its next update, though that would return at once; nothing of it arrives later."""
    table = table_of(strategy)

    def step(at: int) -> int:
        while at == 1:
            table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [1]))
        table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [0]))
        return at

    def named(at: int) -> Any:
        return [(table, [at])]

    assert coordinator.schedule(step, args=(0,), lookups=named).fetch(TIMEOUT) == 0
    coordinator.schedule(step, args=(1,), lookups=named, timeout=0.3)
    with pytest.raises(FunctionTimeoutError):
        coordinator.join()
    before = table.numpy()
    assert coordinator.schedule(step, args=(2,), lookups=named).fetch(TIMEOUT) == 2
    assert np.array_equal(before[1:], table.numpy()[1:])
    assert table.numpy()[0, 0] == 2
