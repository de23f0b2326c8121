"""Steps of a SynchronousStrategy on a real cluster: several a call, their results, the end of the data, what is
refused, and that whatever dies the parameters are those of one process that has read the same batches."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.coordinator.synchronous.support import rank
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    PerReplica,
    SynchronousStrategy,
    Variable,
    errors,
    metrics,
    optimizers,
    replica_context,
)
from pscluster.core.context import current_function

REPLICAS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


# Several steps


def test_the_whole_gradient_is_clipped(strategy: SynchronousStrategy) -> None:
    """Not those of the replicas: as in one process with all examples."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        rows = Variable(np.zeros((4, 1)), name="rows", partitioner=FixedShardsPartitioner(2))
        sgd = optimizers.SGD(1.0, global_clipnorm=1.0)

    def step(mean: bool) -> None:
        gradient = np.array([3.0 * rank(), 0.0]) / (1 if mean else 3)
        of_rows = IndexedSlices(np.array([[2.0], [2.0]]) / (1 if mean else 3), np.array([3, rank()]))
        sgd.apply_gradients([(gradient, w), (of_rows, rows)], examples=2 if mean else None)

    whole, whole_rows = np.array([3.0, 0.0]), np.array([2.0, 2.0, 2.0, 6.0]) / 3
    norm = np.sqrt((whole**2).sum() + (whole_rows**2).sum())
    for times, mean in ((1, False), (2, True)):
        strategy.run(step, (mean,))
        np.testing.assert_allclose(w.numpy(), -times * whole / norm, rtol=1e-12)
        np.testing.assert_allclose(rows.numpy()[:, 0], -times * whole_rows / norm, rtol=1e-12)


def test_a_gradient_that_is_not_finite_on_one_replica_is_skipped_on_all(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        sgd = optimizers.SGD(1.0, nonfinite="skip")

    def step(bad: int) -> None:
        sgd.apply_gradients([(np.array([1.0, np.nan if rank() == bad else 1.0]), w)])

    for bad in (2, -1):
        strategy.run(step, (bad,))
    assert w.numpy().tolist() == [-3.0, -3.0]
    assert sgd.nonfinite_count == 1


def test_one_call_takes_several_steps(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(3), name="w")
        sgd = optimizers.SGD(1.0)

    def step(x: float) -> float:
        before = float(w.read_value()[0])
        sgd.apply_gradients([(np.full(3, x * (rank() + 1)), w)])
        return before

    first = strategy.run(step, (1.0,))
    assert strategy.local_results(first) == (0.0, 0.0, 0.0)
    assert strategy.local_results(strategy.run(step, (1.0,), steps=4)) == (-24.0, -24.0, -24.0)
    each = strategy.run(step, (0.5,), steps=3, collect="all")
    assert strategy.local_results(each) == ([-30.0, -33.0, -36.0],) * REPLICAS
    assert strategy.local_results(strategy.run(step, (1.0,), steps=2, collect="mean"))[1] == -42.0
    assert w.numpy().tolist() == [-51.0] * 3
    assert sgd.iterations == 10


def test_other_updates_and_metrics_are_applied_with_the_step(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        seen = Variable(np.int64(0), name="seen")
        rows = Variable(np.zeros((6, 2)), name="rows", partitioner=FixedShardsPartitioner(2))
        loss = metrics.Mean(name="loss")

    def step() -> int:
        before = int(seen.read_value())
        seen.assign_add(rank() + 1)
        if rank() == 2:
            rows.scatter_add(IndexedSlices(np.ones((1, 2)), np.array([5])))
        loss.update_state(float(rank()))
        return before

    assert strategy.local_results(strategy.run(step, steps=3)) == (12, 12, 12)
    assert seen.numpy() == 18
    assert rows.numpy()[:, 0].tolist() == [0, 0, 0, 0, 0, 3]
    assert loss.result() == 1.0


def test_large_gradients_are_sent_once(strategy: SynchronousStrategy) -> None:
    """Not by each replica; and of any type, summed or averaged, with the same bits in every run."""
    with strategy.scope():
        large = [
            Variable(np.zeros((301, 300), dtype), name=dtype, partitioner=FixedShardsPartitioner(2))
            for dtype in ("float16", "float32", "float64")
        ]
        small = Variable(np.zeros(3), name="small")
        sgd = optimizers.SGD(1.0)
    gradient = np.random.default_rng(0).normal(size=(301, 300))

    def step(mean: bool) -> int:
        before = strategy.traffic().pushed
        pairs = [((rank() + 1) * gradient.astype(w.dtype), w) for w in large]
        sgd.apply_gradients([*pairs, (np.full(3, rank() + 1.0), small)], examples=rank() if mean else None)
        return before

    first, second = strategy.run(step, (False,), steps=2, collect="all")
    sent = [after - before for before, after in zip(first.values, second.values, strict=True)]
    assert sum(sent) == gradient.size * (2 + 4 + 8) + REPLICAS * 24
    assert min(sent) > gradient.size, "each has sent a block"
    for mean, weight in ((False, 6.0), (True, 8 / 3)):
        once = []
        for _ in range(2):
            for variable in (*large, small):
                variable.assign(np.zeros(variable.shape))
            strategy.run(step, (mean,))
            once.append([variable.numpy().tobytes() for variable in large])
            for variable in large:
                limit = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12}[variable.dtype.name]
                np.testing.assert_allclose(variable.numpy(), -weight * gradient, rtol=limit, atol=limit)
            np.testing.assert_allclose(small.numpy(), -weight)
        assert once[0] == once[1]


def test_replicas_with_other_large_gradients_are_named(strategy: SynchronousStrategy) -> None:
    """Also the one that the others miss, and nobody waits: nor if the data of one of them has ended."""
    with strategy.scope():
        w, v = (Variable(np.zeros((300, 300)), name=name) for name in "wv")
        sgd = optimizers.SGD(1.0)
    gradient = np.ones((300, 300))

    def different() -> None:
        sgd.apply_gradients([(gradient, w if rank() else v)])

    def none() -> None:
        if rank() != 1:
            sgd.apply_gradients([(gradient, w)])

    def both_ways() -> None:
        sgd.apply_gradients([(IndexedSlices(gradient[:1], np.array([0])) if rank() == 1 else gradient, w)])

    def take(numbers: Iterator[int]) -> int:
        sgd.apply_gradients([(gradient, w)])
        return next(numbers)

    _raise(strategy, different, r"replica \d has applied gradients to '[wv]', and replica \d to '[wv]'")
    _raise(strategy, none, r"replica \d has applied gradients to ('w'|nothing), and replica \d to ('w'|nothing)")
    _raise(strategy, both_ways, r"replicas \d and \d have applied gradients to 'w', but not alike")
    assert not w.numpy().any()
    uneven = strategy.distribute_datasets_from_function(lambda context: range(3 if context.input_pipeline_id else 2))
    with pytest.raises(errors.EndOfDatasetError) as end:
        strategy.run(take, (iter(uneven),), steps=5)
    assert end.value.steps == 2
    assert (w.numpy() == -2 * REPLICAS).all()


def test_what_steps_send_is_traffic(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(1000), name="w", partitioner=FixedShardsPartitioner(2))
        rows = Variable(np.zeros((4, 2)), name="rows")

    def step() -> int:
        before = strategy.traffic().pushed
        w.assign_add(np.ones(1000))
        rows.scatter_add(IndexedSlices(np.ones((1, 2)), np.array([rank()])))
        return before

    first, second = strategy.run(step, steps=2, collect="all")
    for before, after in zip(first.values, second.values, strict=True):
        assert after - before == 8 * 1000 + 16 + 8, "values, and the row's number"


def test_a_table_may_run_free(strategy: SynchronousStrategy) -> None:
    """Dense parameters in step, and a table whose updates count at once, also within the step."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        table = Variable(np.zeros((4, 2)), name="table", consistency="async")
        sgd = optimizers.SGD(1.0)

    def step() -> float:
        sgd.apply_gradients([(np.ones(2), w), (IndexedSlices(np.ones((1, 2)), np.array([rank()])), table)])
        return float(table.gather([rank()])[0, 0])

    assert strategy.local_results(strategy.run(step, steps=5)) == (-5.0, -5.0, -5.0)
    assert w.numpy().tolist() == [-15.0, -15.0]
    assert table.numpy()[:, 1].tolist() == [-5, -5, -5, 0]


def test_the_end_of_the_data_of_one_ends_the_step_for_all(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.float64(0), name="w")
        sgd = optimizers.SGD(1.0)

    def step(numbers: Iterator[int]) -> int:
        number = next(numbers)
        sgd.apply_gradients([(np.float64(number), w)])
        return number

    numbers = iter(strategy.distribute_datasets_from_function(lambda context: range(7 + context.input_pipeline_id)))
    strategy.run(step, (numbers,), steps=4)
    with pytest.raises(errors.EndOfDatasetError, match="ended after 3 of 10 steps") as caught:
        strategy.run(step, (numbers,), steps=10)
    assert caught.value.steps == 3
    assert strategy.local_results(caught.value.results) == (6, 6, 6)
    assert w.numpy() == -3 * sum(range(7))

    def following(numbers: Iterator[int]) -> int | None:
        return next(numbers, None)

    again = strategy.run(following, (numbers,))
    assert strategy.local_results(again) == (None, 7, 7), "what a step took that was not committed is given again"


@pytest.mark.parametrize("ends", range(REPLICAS))
def test_the_end_of_the_data_of_one_ends_collectives_of_the_others(strategy: SynchronousStrategy, ends: int) -> None:
    """Also those of an optimizer, which sums gradients before it clips them."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        sgd = optimizers.SGD(1.0, global_clipnorm=1e9)

    def step(numbers: Iterator[int]) -> int:
        number = next(numbers)
        sgd.apply_gradients([(np.ones(2), w)])
        return number

    data = strategy.distribute_datasets_from_function(
        lambda context: range(3 if context.input_pipeline_id == ends else 9)
    )
    with pytest.raises(errors.EndOfDatasetError, match="ended after 3 of 8 steps") as caught:
        strategy.run(step, (iter(data),), steps=8)
    assert strategy.local_results(caught.value.results) == (2, 2, 2)
    assert w.numpy().tolist() == [-9.0, -9.0]


# Errors


def test_a_step_that_raises_leaves_nothing(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros((4, 1)), name="w", partitioner=FixedShardsPartitioner(2))
        sgd = optimizers.SGD(1.0)

    def step(numbers: Iterator[int], bad: int) -> int:
        number = next(numbers)
        sgd.apply_gradients([(np.ones((4, 1)), w)])
        if number == bad and rank() == 1:
            raise ValueError(f"no {number}")
        return number

    numbers = iter(strategy.distribute_datasets_from_function(lambda: range(100)))
    with pytest.raises(ValueError, match="no 3"):
        strategy.run(step, (numbers, 3), steps=10)
    assert w.numpy().tolist() == [[-9.0]] * 4, "three steps of three replicas"
    assert strategy.local_results(strategy.run(step, (numbers, -1))) == (3, 3, 3), "the same elements again"
    assert w.numpy().tolist() == [[-12.0]] * 4


def test_retries_are_those_of_a_step(strategy: SynchronousStrategy, tmp_path: Path) -> None:
    """An error counts until the step that it is of is committed, and some after it."""
    with strategy.scope():
        w = Variable(np.float64(0), name="w")

    def step(numbers: Iterator[int], folder: str, always: int) -> int:
        number = next(numbers)
        mark = Path(folder) / str(number)
        if rank() == 1 and (number == always or (number in (3, 9, 15) and not mark.exists())):
            with mark.open("a") as file:
                file.write("x")
            raise ValueError(f"no {number}")
        w.assign_add(number)
        return number

    numbers = iter(strategy.distribute_datasets_from_function(lambda: range(100)))
    last = strategy.run(step, (numbers, str(tmp_path), -1), steps=20, retries=1)
    assert last.values == (19,) * REPLICAS
    assert w.numpy() == REPLICAS * sum(range(20))
    with pytest.raises(ValueError, match="no 30"):
        strategy.run(step, (numbers, str(tmp_path), 30), steps=20, retries=1)
    assert {mark.name: mark.read_text() for mark in tmp_path.iterdir()} == {"3": "x", "9": "x", "15": "x", "30": "xx"}


def _raise(strategy: SynchronousStrategy, step: Callable[[], Any], match: str) -> None:
    with pytest.raises(errors.MisuseError, match=match) as caught:
        strategy.run(step)
    assert "may have been applied" not in str(caught.value), "nothing of a step that fails is"


@pytest.mark.parametrize("size", [2, 40_000], ids=["small", "large"])
def test_a_broadcast_that_a_replica_leaves_out_is_named(strategy: SynchronousStrategy, size: int) -> None:
    """Though its source waits for nobody: by server 0, before anything of the step is applied."""
    with strategy.scope():
        w = Variable(np.zeros(size), name="w")
        sgd = optimizers.SGD(1.0)

    def step() -> None:
        if rank() != 2:
            replica_context().broadcast(np.ones(3))
        sgd.apply_gradients([(np.ones(size), w)])

    calls = r"replica . has called 1 collective \(the last: broadcast\(source=0\) at test_steps\.py:\d+\)"
    match = rf"in one step {calls}, and replica 2 no collective: all replicas must make the same calls"
    _raise(strategy, step, rf"{match}|has called broadcast\(source=0\) .*at test_steps\.py")
    assert not w.numpy().any()


def test_what_replicas_may_not_do(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w, v = (Variable(np.zeros(2), name=name) for name in "wv")
        sgd = optimizers.SGD(1.0)

    def different() -> None:
        sgd.apply_gradients([(np.ones(2), w if rank() else v)])

    def none() -> None:
        if rank() != 1:
            sgd.apply_gradients([(np.ones(2), w)])

    def both_ways() -> None:
        gradient = IndexedSlices(np.ones((1,)), np.array([0])) if rank() else np.ones(2)
        sgd.apply_gradients([(gradient, w)])

    def read_again() -> Any:
        sgd.apply_gradients([(np.ones(2), w)])
        return strategy.read([v, w])

    _raise(strategy, different, r"replica \d has applied gradients to '[wv]', and replica \d to '[wv]'")
    _raise(strategy, none, r"replica \d has applied gradients to ('w'|nothing), and replica \d to ('w'|nothing)")
    _raise(strategy, both_ways, r"gradients of 'w'( \(rows\))? in a synchronous step, and replica \d of 'w'")
    _raise(strategy, lambda: w.assign(np.ones(2)), "'w' is assigned in a synchronous step")
    _raise(strategy, read_again, "'w' is read after this synchronous step has updated it")
    assert w.numpy().tolist() == v.numpy().tolist() == [0.0, 0.0]
    strategy.run(lambda: sgd.apply_gradients([(np.ones(2), w)]))
    assert w.numpy().tolist() == [-3.0, -3.0], "and the next run works"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"steps": 0}, "steps is 0"), ({"steps": 2.5}, "steps is 2.5"), ({"collect": "some"}, "collect is 'some'")],
)
def test_arguments_are_checked(strategy: SynchronousStrategy, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        strategy.run(rank, **arguments)


def test_variables_say_how_consistent_they_are(strategy: SynchronousStrategy) -> None:
    with (
        strategy.scope(),
        pytest.raises(errors.MisuseError, match="consistency is 'none'; it must be 'sync' or 'async'"),
    ):
        Variable(np.zeros(2), name="w", consistency="none")  # type: ignore[arg-type]


# Deaths

DEATHS_AT = 7, 22
STEPS = 30


def expected() -> tuple[Any, Any]:
    """The parameters of one process that has read the batches of all replicas."""
    w, table = np.zeros(4), np.zeros((6, 2))
    for number in range(STEPS):
        gradient, rows = np.zeros(4), np.zeros((6, 2))
        for replica in range(REPLICAS):
            gradient += w * 0.01 + number * (replica + 1)
            for row in (replica, 3):
                rows[row] += replica + 1 + table[0] * 0.01
        w = w - 0.5 * gradient
        table = table - 0.5 * rows
    return w, table


@pytest.mark.parametrize("dies", [("worker", 1), ("ps", 0), ("ps", 1)], ids=lambda task: "-".join(map(str, task)))
def test_whatever_dies_the_parameters_are_those_of_one_process(dies: tuple[str, int], tmp_path: Path) -> None:
    """A task is killed in the middle of some steps, after the updates of one replica and before those of the others."""
    with LocalCluster(2, REPLICAS, log_level="ERROR", durability="log", state_dir=tmp_path / "state") as cluster:
        pids = tmp_path / "pids"
        pids.mkdir()
        with SynchronousStrategy(cluster) as strategy:
            coordinator = ClusterCoordinator(strategy)
            until(lambda: coordinator.workers_up == REPLICAS, "all workers are up")
            with strategy.scope():
                w = Variable(np.zeros(4), name="w")
                table = Variable(np.zeros((6, 2)), name="table", partitioner=FixedShardsPartitioner(2))
                sgd = optimizers.SGD(0.5)

            def step(numbers: Iterator[int], victim: int) -> int:
                number = next(numbers)
                weights, rows = strategy.read([w, table])
                gradient = weights * 0.01 + number * (rank() + 1)
                row_gradients = np.full((2, 2), rank() + 1.0) + rows[0] * 0.01
                if number in DEATHS_AT and rank() == (1 if not victim else 2):
                    mark = pids / str(number)
                    if not mark.exists():
                        mark.touch()
                        os.kill(victim or os.getpid(), signal.SIGKILL)
                sgd.apply_gradients([(gradient, w), (IndexedSlices(row_gradients, np.array([rank(), 3])), table)])
                return number

            numbers = iter(strategy.distribute_datasets_from_function(lambda: range(STEPS)))
            for start in range(0, STEPS, 10):
                victim = 0 if dies[0] == "worker" else cluster.pids[dies]
                last = strategy.run(step, (numbers, victim), steps=10, timeout=TIMEOUT)
                assert strategy.local_results(last) == (start + 9,) * REPLICAS
            weights, rows = expected()
            assert w.numpy().tolist() == weights.tolist()
            assert table.numpy().tolist() == rows.tolist()
            assert sgd.iterations == STEPS
            assert len(list(pids.iterdir())) == len(DEATHS_AT)
            assert strategy.lost_updates() == {}


def end_process(marks: Path) -> None:
    """End this process, once the coordinator has what its replica has told it."""
    function = current_function()
    assert function is not None
    with suppress(errors.ProtocolError):  # steps have nothing that answers; but this comes after what was told before
        function.ask("are you there?")
    (marks / str(len(list(marks.iterdir())))).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_deaths_do_not_add_up_over_steps_that_are_committed(tmp_path: Path) -> None:
    """One call outlives more deaths than `max_attempts`, but not as many without a committed step between them."""
    deaths, fatal = (3, 10, 17, 24), 32  # far enough apart for workers that come back, which begins an attempt, too
    with LocalCluster(2, 2, log_level="ERROR") as cluster, SynchronousStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy, max_attempts=2)
        until(lambda: coordinator.workers_up == 2, "all workers are up")
        with strategy.scope():
            w = Variable(np.zeros(40_000), name="w")
            sgd = optimizers.SGD(0.5, use_ema=True)  # with averages of large variables steps are not taken together

        def step(numbers: Iterator[int], marks: str) -> int:
            number = next(numbers)
            gradient = w.read_value() * 0.01 + number * (rank() + 1)
            if rank() and number == fatal:
                end_process(Path(marks))
            if rank() and number in deaths[len(os.listdir(marks)) :]:
                end_process(Path(marks))
            sgd.apply_gradients([(gradient, w)])
            return number

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(40)))
        assert strategy.run(step, (numbers, str(tmp_path)), steps=30, timeout=TIMEOUT).values == (29, 29)
        assert len(os.listdir(tmp_path)) == len(deaths)
        weights = 0.0
        for number in range(30):
            weights -= 0.5 * sum(weights * 0.01 + number * (replica + 1) for replica in range(2))
        assert (w.numpy() == weights).all()
        assert sgd.iterations == 30
        with pytest.raises(errors.FunctionError, match="step was running on 2 workers that died"):
            strategy.run(step, (numbers, str(tmp_path)), steps=10, timeout=TIMEOUT)
        assert len(os.listdir(tmp_path)) == len(deaths) + 2
        assert sgd.iterations == fatal


@pytest.mark.parametrize("dies", [0, 1])
def test_a_server_that_comes_back_with_an_older_state_stops_training(dies: int, tmp_path: Path) -> None:
    """Without a log; and training goes on from a checkpoint."""
    with LocalCluster(2, 2, log_level="ERROR") as cluster, SynchronousStrategy(cluster) as strategy:
        with strategy.scope():
            w = Variable(np.zeros((4, 1)), name="w", partitioner=FixedShardsPartitioner(2))
            sgd = optimizers.SGD(1.0)

        def step(victim: int) -> None:
            w.read_value()
            if victim and rank():
                with suppress(ProcessLookupError):  # the second step may begin before the first one is committed
                    os.kill(victim, signal.SIGKILL)
            sgd.apply_gradients([(np.ones((4, 1)), w)])

        with CheckpointManager(str(tmp_path / "saved"), strategy=strategy) as manager:
            strategy.run(step, (0,), steps=5)
            manager.save()
            strategy.run(step, (0,), steps=5)
            for victim in (cluster.pids["ps", dies], 0):
                with pytest.raises(errors.StaleError, match=f"ps {dies} has . of the .* Restore a checkpoint"):
                    strategy.run(step, (victim,), steps=2)
            manager.restore_or_initialize()
            strategy.run(step, (0,), steps=2)
            assert w.numpy().tolist() == [[-14.0]] * 4


def test_per_replica_arguments_and_collectives_work_in_steps(strategy: SynchronousStrategy) -> None:
    def step(x: float) -> tuple[float, float]:
        return x, float(replica_context().all_reduce("sum", x))

    result = strategy.run(step, (PerReplica([1.0, 2.0, 3.0]),), steps=3)
    assert strategy.local_results(result) == ((1.0, 6.0), (2.0, 6.0), (3.0, 6.0))


@pytest.mark.parametrize("odd_one", range(REPLICAS))
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_replica_that_leaves_a_collective_out_is_named(
    strategy: SynchronousStrategy, odd_one: int, together: bool
) -> None:
    """It waits for the end of the step, and the others for it: they would for a minute, three times."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        sgd = optimizers.SGD(1.0)

    def step(numbers: Iterator[int]) -> None:
        number = next(numbers)
        if number == 3 and rank() != odd_one:
            replica_context().all_reduce("sum", 1.0)
        sgd.apply_gradients([(np.ones(2), w)])

    numbers = iter(strategy.distribute_datasets_from_function(lambda _: range(8)))
    if not together:
        strategy.run(step, (numbers,), steps=3)
    with pytest.raises(errors.MisuseError, match=r"replica . .* has called all_reduce\(sum\) .* at .*test_steps\.py"):
        strategy.run(step, (numbers,), steps=5 if together else 1)
    committed = 1 if together else 3  # nothing is committed any more once the replicas disagree
    assert w.numpy().tolist() == [-3.0 * committed] * 2


@pytest.mark.parametrize("odd_one", range(REPLICAS))
def test_an_error_of_a_collective_can_not_be_passed_over(strategy: SynchronousStrategy, odd_one: int) -> None:
    """One that catches it would wait for the end of the step, and the others in the collective for that one."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        sgd = optimizers.SGD(1.0)

    def step() -> None:
        with suppress(Exception):
            replica_context().all_reduce("sum", np.ones(3 if rank() == odd_one else 4))
        sgd.apply_gradients([(np.ones(2), w)])

    with pytest.raises(errors.MisuseError, match=r"the replicas disagree: .* has called all_reduce\(sum\)"):
        strategy.run(step, steps=2)
    assert w.numpy().tolist() == [0.0, 0.0]
