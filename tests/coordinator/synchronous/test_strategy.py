"""A SynchronousStrategy on a cluster with four workers: run, values of replicas, datasets, losses, errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    InputContext,
    LocalCluster,
    ParameterServerStrategy,
    PerReplica,
    SynchronousStrategy,
    Variable,
    compute_average_loss,
    errors,
    experimental_get_current_worker_index,
    metrics,
    optimizers,
    replica_context,
    scale_regularization_loss,
)

REPLICAS = 4
A = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
B = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
PRODUCT = [[22, 28], [49, 64]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(1, REPLICAS)


def rank() -> int:
    """A step that says which replica it is."""
    return replica_context().replica_id


# run, and the values of replicas


def test_run_gives_the_values_of_all_replicas(strategy: SynchronousStrategy) -> None:
    """Rows T3 to T6: TensorFlow's results with four replicas."""

    def matmul(a: Any, b: Any) -> Any:
        return a @ b

    assert strategy.num_replicas_in_sync == REPLICAS
    products = strategy.run(matmul, args=(A, B))
    assert isinstance(products, PerReplica)
    assert [product.tolist() for product in products] == [PRODUCT] * REPLICAS
    for op, axis, expected in (
        ("sum", None, [[88, 112], [196, 256]]),
        ("mean", None, PRODUCT),
        ("sum", 0, [284, 368]),
        ("mean", 0, [35.5, 46]),
    ):
        assert strategy.reduce(op, products, axis=axis).tolist() == expected
    assert strategy.gather(products, axis=0).tolist() == PRODUCT * REPLICAS
    for local_results in (strategy.local_results, strategy.experimental_local_results):
        assert [local.tolist() for local in local_results(products)] == [PRODUCT] * REPLICAS
    with pytest.raises(TypeError, match="reduce needs an axis: give axis=None to combine"):
        strategy.reduce("sum", products)
    with pytest.raises(TypeError, match="gather needs an axis: give axis=0"):
        strategy.gather(products)


def test_the_strategy_comes_first_and_lists_all_tasks(cluster: LocalCluster) -> None:
    """Rows T1 and T2: a variable needs the connection, which making the strategy is."""
    with pytest.raises(errors.MisuseError, match="created outside a strategy's scope"):
        Variable(np.zeros(2))
    with SynchronousStrategy(cluster) as strategy:
        assert [task.task for task in strategy.tasks] == ["ps 0", *(f"worker {index}" for index in range(REPLICAS))]


def test_a_function_can_be_placed(strategy: SynchronousStrategy) -> None:
    """Row T3: on a worker that is named, and the result says where it was computed."""
    coordinator = ClusterCoordinator(strategy)

    def matmul(a: Any, b: Any) -> tuple[Any, int]:
        return a @ b, experimental_get_current_worker_index()

    for worker in (2, 0):
        (value,) = coordinator.schedule_together(matmul, (A, B), workers=[worker])
        product, place = value.fetch(TIMEOUT)
        assert (product.tolist(), place) == (PRODUCT, worker)


def test_another_number_of_steps_ships_nothing_anew(strategy: SynchronousStrategy) -> None:
    """Rows T6 and T19: a function is sent once; how many steps to take is an argument."""
    with strategy.scope():
        count = Variable(np.int64(0), name="count")

    def step() -> None:
        count.assign_add(1)

    def shipped() -> list[int]:
        dispatcher = strategy.context.dispatcher
        assert dispatcher is not None
        return [len(handle.known) for handle in dispatcher.state.workers]

    strategy.run(step)
    before = shipped()
    for steps in (2, 5, 50):
        strategy.run(step, steps=steps)
    assert count.numpy() == REPLICAS * 58
    assert shipped() == before == [before[0]] * REPLICAS


def test_arguments_and_results_are_nested(strategy: SynchronousStrategy) -> None:
    def step(base: int, own: dict[str, int], *, scale: int) -> dict[str, Any]:
        return {"values": (base + own["x"] * scale, rank()), "none": None}

    result = strategy.run(step, (100, {"x": PerReplica([1, 2, 3, 4])}), {"scale": PerReplica([1, 1, 1, 10])})
    assert result["values"][0].values == (101, 102, 103, 140)
    assert result["values"][1].values == (0, 1, 2, 3)
    assert strategy.local_results(result)[3] == {"values": (140, 3), "none": None}
    again = strategy.run(step, (result["values"][0], {"x": 1}), {"scale": 1})
    assert again["values"][0].values == (102, 103, 104, 141)


def test_in_a_step_the_strategy_is_that_of_a_replica(strategy: SynchronousStrategy) -> None:
    """It knows how many they are, on any thread, and its `run` calls the function there."""

    def inner(x: int) -> int:
        return 10 * x

    def step() -> tuple[int, int, int]:
        counted: list[int] = []
        thread = threading.Thread(target=lambda: counted.append(strategy.num_replicas_in_sync))
        thread.start()
        thread.join()
        return strategy.num_replicas_in_sync, counted[0], strategy.run(inner, (rank(),))

    assert strategy.local_results(strategy.run(step)) == tuple((4, 4, 10 * rank) for rank in range(REPLICAS))
    assert ClusterCoordinator(strategy).schedule(step).fetch(TIMEOUT) == (1, 1, 0), "alone it is the only replica"
    with pytest.raises(errors.MisuseError, match=r"strategy.reduce\(\) has only this replica's value, of 4, in"):
        strategy.run(lambda: strategy.reduce("sum", 1, axis=None))


def test_replicas_share_the_variables(strategy: SynchronousStrategy) -> None:
    """Rows T7, T16: what is made in the scope is the same for all, and the optimizer sums their gradients."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        sgd = optimizers.SGD(1.0)

    def step(x: Any) -> None:
        sgd.apply_gradients([(x, w)])

    strategy.run(step, (PerReplica([np.full(2, rank) for rank in range(REPLICAS)]),))
    assert w.numpy().tolist() == [-6, -6]


# Errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.run(3), TypeError, "run takes a function, not an int"),
        (lambda s: s.run(rank, 3), TypeError, r"args must be a tuple or list .*, not an int: write args=\(x,\)"),
        (lambda s: s.run(rank, A), TypeError, "not an ndarray"),
        (lambda s: s.run(rank, (), [1]), TypeError, "kwargs must be a dict of arguments, not a list"),
        (lambda s: s.run(rank, (PerReplica([1]),)), ValueError, "has 1 values, but there are 4 replicas"),
        (
            lambda s: s.run(lambda: [1] * (1 + (rank() == 2))),
            errors.MisuseError,
            "replica 2 returned a list of 2 where replica 0 returned a list of 1: all replicas must return the same",
        ),
        (lambda s: s.distribute_dataset(3), TypeError, "distribute_dataset takes global batches or a function, not an"),
        (lambda s: s.distribute_dataset(iter([1])), ValueError, "an iterator can be iterated over only once"),
        (lambda s: s.distribute_dataset(lambda context: [A]), TypeError, "calls its function without arguments"),
        (lambda s: s.distribute_dataset([A], uneven=1), ValueError, "uneven is 1; it must be True or False"),
        (
            lambda s: s.distribute_dataset(s.distribute_dataset([A])),
            TypeError,
            "not a PerWorkerDataset, which is distributed already",
        ),
        (lambda s: s.distribute_datasets_from_function([A]), TypeError, "takes a function, not a list: an iterable of"),
        (
            lambda s: ClusterCoordinator(s).fit(next, ClusterCoordinator(s).distribute_dataset(A)),
            errors.MisuseError,
            r"give fit what strategy\.distribute_dataset\(\) returns",
        ),
    ],
)
def test_wrong_calls_say_how_to_mend_them(
    strategy: SynchronousStrategy, call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(strategy)
    assert strategy.run(rank).values == (0, 1, 2, 3), "the next one works"


def test_an_error_of_a_replica_is_raised_once_and_leaves_nothing(strategy: SynchronousStrategy) -> None:
    """The others, which wait for it, are stopped; neither join() nor the next run raise it again."""
    coordinator = ClusterCoordinator(strategy)

    def step(odd: int) -> int:
        if rank() == odd:
            raise LookupError("not here")
        return int(replica_context().all_reduce("sum", 1))

    for odd in (1, 3):
        with pytest.raises(LookupError, match="not here") as raised:
            strategy.run(step, (odd,))
        assert isinstance(raised.value, errors.FunctionError)
        assert "It is cleared now" not in str(getattr(raised.value, "__notes__", [])), "it is that of this call"
        assert strategy.run(step, (-1,)).values == (REPLICAS,) * REPLICAS
        coordinator.join(TIMEOUT)
        assert coordinator.done()


def test_an_error_of_a_function_scheduled_before_is_raised_as_schedule_does(strategy: SynchronousStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)

    def fails() -> None:
        raise LookupError("alone")

    coordinator.schedule(fails).wait(TIMEOUT)
    with pytest.raises(LookupError, match="alone") as raised:
        strategy.run(rank)
    assert "What was given to schedule() has not been scheduled" in raised.value.__notes__[0]
    assert strategy.run(rank).values == (0, 1, 2, 3)


def test_ctrl_c_ends_a_run(strategy: SynchronousStrategy, tmp_path: Path) -> None:
    """The replicas are stopped, and the next run works."""
    with strategy.scope():
        counted = Variable(np.zeros(()), name="counted")

    def step() -> None:
        (tmp_path / f"{rank()}").touch()
        until(lambda: counted.numpy() < 0, "a read stops it")  # it never is: a read that stops the function

    def interrupt() -> None:
        until(lambda: len(os.listdir(tmp_path)) == REPLICAS, "all replicas are here")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    thread.join(TIMEOUT)
    ClusterCoordinator(strategy).join(TIMEOUT)
    assert strategy.run(rank).values == (0, 1, 2, 3)


def test_strategies_are_not_mixed(strategy: SynchronousStrategy) -> None:
    """Row T4: entering the scope of one within that of another is refused; its own may be entered again."""
    with LocalCluster(1, 1, log_level="ERROR") as elsewhere, ParameterServerStrategy(elsewhere) as other:
        with strategy.scope(), strategy.scope():
            w = Variable(1.0, name="w")
            with (
                pytest.raises(errors.MisuseError, match="one strategy was entered inside that of another one"),
                other.scope(),
            ):
                pass
            v = Variable(2.0, name="v")
        with other.scope():
            Variable(3.0, name="w")
        assert strategy.variables == [w, v]


# Datasets


def test_datasets_from_a_function(strategy: SynchronousStrategy) -> None:
    """Rows T10, T13 and T14: the function has the replica's batch size, and knows which input pipeline it makes."""

    def dataset_fn(context: InputContext) -> Iterator[Any]:
        size = context.get_per_replica_batch_size(200)
        about = (context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync, size)
        inside = (strategy.num_replicas_in_sync, replica_context().num_replicas, replica_context().replica_id)
        return (
            (*about, *inside, number) for number in range(context.input_pipeline_id, 100, context.num_input_pipelines)
        )

    expected = [(replica, 4, 4, 50, 4, 4, replica, replica) for replica in range(REPLICAS)]
    coordinator = ClusterCoordinator(strategy)
    for distribute in (
        strategy.distribute_datasets_from_function,
        strategy.experimental_distribute_datasets_from_function,
        coordinator.create_per_worker_dataset,
    ):
        iterator = iter(distribute(dataset_fn))
        assert [*strategy.local_results(strategy.run(next, (iterator,)))] == expected
        assert [last[-1] for last in strategy.local_results(strategy.run(next, (iterator,)))] == [4, 5, 6, 7]


def test_errors_of_dataset_functions_are_raised_in_the_step(strategy: SynchronousStrategy) -> None:
    for dataset_fn, message in (
        (lambda context: [context.get_per_replica_batch_size(10)], "a global batch of 10 examples does not divide"),
        (lambda context: [replica_context().all_reduce("sum", 1)], "a dataset function can't exchange anything"),
    ):
        with pytest.raises(errors.FunctionError, match=message):
            strategy.run(next, (iter(strategy.distribute_datasets_from_function(dataset_fn)),))
    iterator = iter(strategy.distribute_datasets_from_function(lambda: [1]))
    assert strategy.run(next, (iterator,)).values == (1,) * REPLICAS
    with pytest.raises(errors.EndOfDatasetError, match="ended after 0 of 1 steps"):
        strategy.run(next, (iterator,))
    assert strategy.run(rank).values == (0, 1, 2, 3)


def shares(strategy: SynchronousStrategy, iterator: object) -> list[Any]:
    """The next element of each replica."""
    return [share.tolist() for share in strategy.local_results(strategy.run(next, (iterator,)))]


def test_distributed_batches_are_shared_out(strategy: SynchronousStrategy) -> None:
    batches = [np.arange(8), np.arange(10, 14), np.arange(20, 30)]
    for source in (batches, lambda: iter(batches)):
        for distribute in (strategy.distribute_dataset, strategy.experimental_distribute_dataset):
            dataset = distribute(source)
            iterator = iter(dataset)
            assert shares(strategy, iterator) == [[0, 1], [2, 3], [4, 5], [6, 7]]
            assert shares(strategy, iterator) == [[10], [11], [12], [13]]
            with pytest.raises(ValueError, match="batch 2 of 10 examples does not divide evenly among 4 replicas"):
                shares(strategy, iterator)
            assert shares(strategy, iter(dataset)) == [[0, 1], [2, 3], [4, 5], [6, 7]], "each iter() begins again"
    uneven = iter(strategy.distribute_dataset([np.arange(10), np.arange(2)], uneven=True))
    assert shares(strategy, uneven) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert shares(strategy, uneven) == [[0], [1], [], []]


# Losses


def test_losses_and_gradients_of_replicas_add_up_to_those_of_the_batch(strategy: SynchronousStrategy) -> None:
    """Rows T15 and T16: with uneven shares, too, if the global batch size is given."""
    with strategy.scope():
        w = Variable(np.array([0.5, -1.0]), name="w")
    source = np.random.default_rng(1)
    x, y = source.normal(size=(10, 2)), source.normal(size=10)

    def step(iterator: Any, size: int | None) -> tuple[Any, Any]:
        x, y = next(iterator)
        weights = w.numpy()
        error = x @ weights - y
        loss = compute_average_loss(error**2, global_batch_size=size)
        loss += scale_regularization_loss(0.1 * np.sum(weights**2))
        gradient = x.T @ (2 * error) / (size or len(x) * strategy.num_replicas_in_sync)
        gradient += scale_regularization_loss([0.1 * 2 * weights[:1]]) * np.array([1, 0])
        gradient += scale_regularization_loss([0.1 * 2 * weights[1:]]) * np.array([0, 1])
        return loss, gradient

    for examples, size in ((8, None), (8, 8), (10, 10)):
        batch = x[:examples], y[:examples]
        iterator = iter(strategy.distribute_dataset([batch], uneven=True))
        loss, gradient = strategy.reduce("sum", strategy.run(step, (iterator, size)), axis=None)
        error = batch[0] @ w.numpy() - batch[1]
        np.testing.assert_allclose(loss, np.mean(error**2) + 0.1 * np.sum(w.numpy() ** 2))
        np.testing.assert_allclose(gradient, batch[0].T @ (2 * error) / examples + 0.1 * 2 * w.numpy())


# What else a strategy does


def test_evaluation_checkpoints_and_metrics_work_as_ever(strategy: SynchronousStrategy, tmp_path: Path) -> None:
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        mean = metrics.Mean(name="mean")
    coordinator = ClusterCoordinator(strategy)

    def step(x: int) -> None:
        mean.update_state(x)
        if rank() == 0:
            w.assign_add(np.ones(2))

    strategy.run(step, (PerReplica([1, 2, 3, 6]),))
    assert mean.result() == 3
    data = coordinator.distribute_dataset(np.arange(10.0)).batch(5)
    assert coordinator.evaluate(lambda x: x, data, [metrics.Mean(name="mean of x")]) == {"mean of x": 4.5}
    with CheckpointManager(str(tmp_path), strategy=strategy) as manager:
        manager.save()
        strategy.run(step, (0,))
        assert w.numpy().tolist() == [2, 2]
        manager.restore()
    assert w.numpy().tolist() == [1, 1]
    assert repr(strategy) == "<SynchronousStrategy 1 ps, 4 workers>"
