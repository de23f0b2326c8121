"""Per-worker datasets: built where they are used, restarted by each iter(), released when unused."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.conftest import NUM_WORKERS, Everywhere, Gate, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    InputContext,
    LocalCluster,
    ParameterServerStrategy,
    PerWorkerDataset,
    PerWorkerIterator,
    Variable,
    errors,
    experimental_get_current_worker_index,
)


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """A step that takes some elements."""
    return list(itertools.islice(iterator, count))


def double(x: int) -> int:
    """A step that uses no dataset."""
    return 2 * x


class Tracked:
    """A dataset of which the workers can count how many there are."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def count_tracked() -> int:
    """How many there are in this process."""
    gc.collect()
    return sum(type(thing).__name__ == "Tracked" for thing in gc.get_objects())


# dataset_fn


def no_argument() -> Iterable[int]:
    """The simplest one."""
    return [1, 2, 3]


def one_argument(context: InputContext) -> Iterable[int]:
    """TensorFlow's."""
    return [context.worker_index]


def generator(context: InputContext) -> Iterator[tuple[int, int]]:
    """A generator function."""
    for i in itertools.count():
        yield context.worker_index, i


def with_default(context: InputContext, size: int = 5) -> Iterable[int]:
    """Asks for one argument, and could take two."""
    return range(context.worker_index, size)


def only_defaults(size: int = 2) -> Iterable[int]:
    """Asks for none."""
    return range(size)


class Sharded:
    """A callable object that knows what it shards."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, context: InputContext) -> Iterable[int]:
        return range(self.size)[context.worker_index :: context.num_workers]

    def method(self) -> Iterable[int]:
        """A method that asks for none."""
        return range(self.size)


@pytest.mark.parametrize(
    ("dataset_fn", "expected"),
    [
        pytest.param(no_argument, lambda w: [1, 2, 3], id="no argument"),
        pytest.param(one_argument, lambda w: [w], id="context"),
        pytest.param(generator, lambda w: [(w, 0), (w, 1), (w, 2), (w, 3)], id="generator"),
        pytest.param(with_default, lambda w: [*range(w, 5)][:4], id="context and a default"),
        pytest.param(only_defaults, lambda w: [0, 1], id="only defaults"),
        pytest.param(lambda *args: [len(args)], lambda w: [1], id="any arguments"),
        pytest.param(lambda **kwargs: [len(kwargs)], lambda w: [0], id="any keywords"),
        pytest.param(Sharded(8), lambda w: [*range(8)][w::NUM_WORKERS][:4], id="callable object"),
        pytest.param(Sharded(3).method, lambda w: [0, 1, 2], id="method"),
        pytest.param(functools.partial(with_default, size=2), lambda w: [*range(w, 2)], id="partial"),
        pytest.param(itertools.count, lambda w: [0, 1, 2, 3], id="builtin"),
        pytest.param(lambda: {"a": 1, "b": 2}, lambda w: ["a", "b"], id="dict"),
        pytest.param(lambda: np.arange(6).reshape(3, 2).tolist(), lambda w: [[0, 1], [2, 3], [4, 5]], id="list"),
        pytest.param(lambda: [experimental_get_current_worker_index()], lambda w: [w], id="asks where it is"),
    ],
)
def test_dataset_functions(
    coordinator: ClusterCoordinator, everywhere: Everywhere, dataset_fn: Any, expected: Callable[[int], list[Any]]
) -> None:
    """dataset_fn is called on every worker, with a context if it asks for one, and returns any iterable (row 55)."""
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert everywhere(coordinator, take, iterator, 4) == [expected(worker) for worker in range(NUM_WORKERS)]


def contexts(context: InputContext) -> Iterable[Any]:
    """All that a context says."""
    yield (
        context.worker_index,
        context.num_workers,
        context.input_pipeline_id,
        context.num_input_pipelines,
        context.num_replicas_in_sync,
        context.get_per_replica_batch_size(64),
    )
    while True:
        yield context.seed


def test_the_context(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """The context distinguishes workers, under our names and TensorFlow's (row 19, for the better)."""
    iterator = iter(coordinator.create_per_worker_dataset(contexts))
    seen = everywhere(coordinator, next, iterator)
    assert seen == [(worker, NUM_WORKERS, worker, NUM_WORKERS, 1, 64) for worker in range(NUM_WORKERS)]


def seeds(cluster: LocalCluster, everywhere: Everywhere, seed: int) -> list[int]:
    """Of two iterators of a dataset and one of another, on every worker."""
    with ParameterServerStrategy(cluster, seed=seed) as strategy:
        coordinator = ClusterCoordinator(strategy)
        dataset, other = (coordinator.create_per_worker_dataset(contexts) for _ in range(2))
        drawn = []
        for iterator in (iter(dataset), iter(dataset), iter(other)):
            drawn += [elements[1] for elements in everywhere(coordinator, take, iterator, 2)]
        return drawn


def test_seeds(cluster: LocalCluster, everywhere: Everywhere) -> None:
    """Every iterator has its own seed on every worker; a run with the same seed of the strategy has the same ones."""
    first, again, other = (seeds(cluster, everywhere, seed) for seed in (0, 0, 1))
    assert first == again
    assert len({*first, *other}) == 6 * NUM_WORKERS
    assert all(0 <= seed < 1 << 63 for seed in first)


def test_each_iter_begins_anew(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """Two iterators of one dataset are independent; a dataset is an iterable, not an iterator."""
    dataset = coordinator.create_per_worker_dataset(lambda: iter(range(100)))
    first, second = iter(dataset), iter(dataset.build())
    assert everywhere(coordinator, take, first, 3) == [[0, 1, 2]] * NUM_WORKERS
    assert everywhere(coordinator, take, second, 2) == [[0, 1]] * NUM_WORKERS
    assert everywhere(coordinator, take, first, 2) == [[3, 4]] * NUM_WORKERS
    assert iter(first) is first
    assert repr(dataset) == "<PerWorkerDataset of <lambda>>"
    assert isinstance(dataset, PerWorkerDataset)


@pytest.mark.parametrize(
    "dataset_fn", [no_argument, lambda: itertools.islice(itertools.count(1), 3)], ids=["a list", "an iterator"]
)
def test_a_dataset_as_an_argument(coordinator: ClusterCoordinator, everywhere: Everywhere, dataset_fn: Any) -> None:
    """A step has its worker's own, built or not, and goes through it from the beginning each time; also captured."""
    for dataset in (
        coordinator.create_per_worker_dataset(dataset_fn).build(),
        coordinator.create_per_worker_dataset(dataset_fn),
    ):

        def twice(dataset: Any) -> list[list[int]]:
            return [list(dataset), [next(iter(dataset))], list(iter(dataset))]

        expected = [[1, 2, 3], [1], [1, 2, 3]]
        assert everywhere(coordinator, twice, dataset) == [expected] * NUM_WORKERS
        assert everywhere(coordinator, lambda dataset=dataset: twice(dataset)) == [expected] * NUM_WORKERS
        assert everywhere(coordinator, take, iter(dataset.build()), 2) == [[1, 2]] * NUM_WORKERS
        returned = coordinator.schedule(iter, args=(dataset,))
        with pytest.raises(
            errors.MisuseError, match="returned a per-worker iterator that this coordinator no longer has"
        ):
            returned.fetch(TIMEOUT)
        assert coordinator.schedule(lambda dataset: dataset, args=(dataset,)).fetch(TIMEOUT) is dataset


def test_the_peers_wrapper(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """distribute_datasets_from_function changes nothing, around a dataset_fn or in one as in the tutorial (row 19)."""

    def per_worker_dataset_fn() -> Any:
        return strategy.distribute_datasets_from_function(generator)

    for dataset_fn in (per_worker_dataset_fn, strategy.distribute_datasets_from_function(generator)):
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        worker, element = coordinator.schedule(next, args=(iterator,)).fetch(TIMEOUT)
        assert worker in range(NUM_WORKERS)
        assert element == 0


def test_elements_are_whatever_they_are(coordinator: ClusterCoordinator) -> None:
    """Elements stay on the worker, so they need not be such as can be sent."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: itertools.repeat(threading.Lock())))
    assert coordinator.schedule(lambda it: next(it).acquire(), args=(iterator,)).fetch(TIMEOUT) is True


def test_a_dataset_that_reads_a_variable(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """A dataset may use variables, where it is built and as it goes on; it can't make any."""
    with strategy.scope():
        w = Variable(7, name="w")

    def dataset_fn() -> Iterator[int]:
        start = int(w.read_value())
        while True:
            yield start + int(w.read_value())

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert coordinator.schedule(next, args=(iterator,)).fetch(TIMEOUT) == 14
    w.assign(1)
    values = [coordinator.schedule(next, args=(iterator,)) for _ in range(10)]
    assert set(coordinator.fetch(values, TIMEOUT)) <= {8, 2}
    makes = iter(coordinator.create_per_worker_dataset(lambda: [Variable(1)]))
    coordinator.schedule(next, args=(makes,))
    with pytest.raises(errors.MisuseError, match="a step function, which is not allowed"):
        coordinator.join(TIMEOUT)


# Iterables


@pytest.mark.parametrize("iterable", [[1, 2], (1, 2), range(1, 3), {1: 0, 2: 0}, np.array([1, 2]), "12"])
def test_plain_iterables(coordinator: ClusterCoordinator, iterable: Any) -> None:
    """An iterable in the place of a function is sent to every worker, which goes through it from its start."""
    dataset = coordinator.create_per_worker_dataset(iterable)
    for _ in range(2):
        elements = coordinator.schedule(take, args=(iter(dataset), 5)).fetch(TIMEOUT)
        assert [int(element) for element in elements] == [1, 2]


@pytest.mark.parametrize("iterator", [(i for i in range(3)), iter([1]), map(str, []), zip([], [], strict=True)])
def test_iterators_are_refused(coordinator: ClusterCoordinator, iterator: Any) -> None:
    """What can be gone through once only can't be sent to several workers: a sentence says what to give instead."""
    with pytest.raises(ValueError, match="iterated over only once: give a list, or a function that makes one"):
        coordinator.create_per_worker_dataset(iterator)


def test_a_dataset_is_not_begun_in_the_script(coordinator: ClusterCoordinator) -> None:
    """What opens something where it is gone through does so on workers alone."""
    here = os.getpid()

    class Opens:
        def __iter__(self) -> Iterator[int]:
            assert os.getpid() != here, "it was begun in the script"
            return iter([4])

    dataset = coordinator.create_per_worker_dataset(Opens())
    assert coordinator.schedule(next, args=(iter(dataset),)).fetch(TIMEOUT) == 4


@pytest.mark.parametrize("wrong", [None, 3, 2.5, threading.Lock()])
def test_what_is_no_dataset(coordinator: ClusterCoordinator, wrong: Any) -> None:
    """Anything else raises ValueError on the caller's line (row 55)."""
    with pytest.raises(ValueError, match="takes a function or an iterable, not "):
        coordinator.create_per_worker_dataset(wrong)


def test_a_dataset_that_cannot_be_sent(coordinator: ClusterCoordinator) -> None:
    """What can't be pickled raises TypeError on the caller's line, with the variable's name."""
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"its variable 'lock' is a _thread.lock, which can't be pickled"):
        coordinator.create_per_worker_dataset(lambda: [lock])
    with pytest.raises(TypeError, match=r"_thread.lock, which can't be pickled"):
        coordinator.create_per_worker_dataset([1, lock])


def test_next_on_the_coordinator(coordinator: ClusterCoordinator) -> None:
    """A per-worker iterator has no elements here: a sentence says where to call next (row 54)."""
    iterator = iter(coordinator.create_per_worker_dataset([1]))
    with pytest.raises(
        errors.MisuseError, match=r"pass it to schedule\(\) or run\(\), and call next\(\) on it in the step"
    ):
        next(iterator)
    assert isinstance(iterator, PerWorkerIterator)


# Errors


def fails() -> Iterable[int]:
    """A dataset_fn that fails."""
    raise LookupError("no such file of records")


def fails_later() -> Iterator[int]:
    """A dataset that fails at its third element."""
    yield 1
    yield 2
    raise OSError(5, "the disk is gone")


def exits() -> Iterable[int]:
    """A dataset_fn that ends Python."""
    sys.exit("no data")


def test_an_error_in_dataset_fn(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """It surfaces in the function that uses the dataset, with its traceback, as often as that is used (row 57)."""
    iterator = iter(coordinator.create_per_worker_dataset(fails))
    assert everywhere(coordinator, double, 2) == [4] * NUM_WORKERS, "functions that do not use it are unaffected"
    coordinator.join(TIMEOUT)
    tracebacks = set()
    for _ in range(3 * NUM_WORKERS):
        coordinator.schedule(take, args=(iterator, 1))
        with pytest.raises(LookupError, match="no such file of records") as caught:
            coordinator.join(TIMEOUT)
        assert isinstance(caught.value, errors.FunctionError)
        assert caught.value.function == "take"
        assert "in fails" in caught.value.remote_traceback
        tracebacks.add(caught.value.remote_traceback)
    assert len(tracebacks) == 1, "it does not grow from time to time"
    assert coordinator.schedule(double, args=(1,)).fetch(TIMEOUT) == 2


def test_an_error_in_the_iteration(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """Elements before it are given; the error stays, for every function that asks for more."""
    iterator = iter(coordinator.create_per_worker_dataset(fails_later))
    assert everywhere(coordinator, take, iterator, 2) == [[1, 2]] * NUM_WORKERS
    for _ in range(2 * NUM_WORKERS):
        coordinator.schedule(next, args=(iterator,))
        with pytest.raises(OSError, match="the disk is gone") as caught:
            coordinator.join(TIMEOUT)
        assert caught.value.errno == 5


class Unloadable:
    """A dataset that can be pickled, and not loaded again."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index

    def __reduce__(self) -> Any:
        return refuse_to_load, ()


def refuse_to_load() -> None:
    """What workers call for an `Unloadable`."""
    raise RuntimeError("this object does not like workers")


def test_a_dataset_that_cannot_be_loaded(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """Only the functions that use it, as an argument, captured or as a part, fail with the error."""
    dataset = coordinator.create_per_worker_dataset(Unloadable())
    iterator = iter(dataset)
    parts = [*coordinator.distribute_dataset(Unloadable(), name="odd", retries=0).repeat(2)]
    for _ in range(2):
        assert everywhere(coordinator, double, 2) == [4] * NUM_WORKERS
        for fn, args in ((next, (iterator,)), (lambda: next(iterator), ()), (list, (parts.pop(),)), (list, (dataset,))):
            value = coordinator.schedule(fn, args=args)
            with pytest.raises(errors.MisuseError, match=r"used on worker \d.*does not like workers") as caught:
                value.fetch(TIMEOUT)
            assert isinstance(caught.value, errors.FunctionError)
            with pytest.raises(errors.FunctionError) as joined:
                coordinator.join(TIMEOUT)
            assert joined.value is caught.value
            assert args != (iterator,) or "elements" in str(caught.value)
            assert args in [(), (iterator,), (dataset,)] or "dataset 'odd'" in str(caught.value)


def test_an_error_that_a_step_takes_care_of(coordinator: ClusterCoordinator) -> None:
    """A step may catch the error of its dataset as if the dataset were its own."""
    iterator = iter(coordinator.create_per_worker_dataset(fails))

    def step(iterator: Iterator[int]) -> str:
        try:
            next(iterator)
        except LookupError as error:
            return str(error)
        return "nothing"

    assert coordinator.schedule(step, args=(iterator,)).fetch(TIMEOUT) == "no such file of records"


@pytest.mark.parametrize(
    ("dataset_fn", "error", "message"),
    [
        (lambda: 3, TypeError, "dataset_fn returned an int: it must return something to iterate over"),
        (lambda: None, TypeError, "dataset_fn returned None"),
        (exits, errors.FunctionError, "SystemExit: no data"),
        (lambda context, more: [], TypeError, "missing 1 required positional argument: 'more'"),
    ],
)
def test_dataset_functions_that_are_none(
    coordinator: ClusterCoordinator, dataset_fn: Any, error: type[Exception], message: str
) -> None:
    """What is no dataset is an error of the function that uses it, a sys.exit() as well; the workers live on."""
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert coordinator.schedule(double, args=(1,)).fetch(TIMEOUT) == 2
    coordinator.join(TIMEOUT)
    coordinator.schedule(next, args=(iterator,))
    with pytest.raises(error, match=message):
        coordinator.join(TIMEOUT)


# The end


def test_the_end_of_a_dataset(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """A step that asks for more than there is fails with EndOfDatasetError, which says what to do (row 59)."""
    iterator = iter(coordinator.create_per_worker_dataset([1, 2]))
    assert everywhere(coordinator, take, iterator, 2) == [[1, 2]] * NUM_WORKERS

    def asks(iterator: Iterator[int]) -> int:
        return next(iterator)

    def asks_as_the_peer(iterator: Any) -> int:
        return iterator.get_next()  # type: ignore[no-any-return]

    def asks_in_a_generator(iterator: Iterator[int]) -> int:
        return next(map(operator.neg, iterator))

    for step in (asks, asks_as_the_peer, asks_in_a_generator):
        coordinator.schedule(step, args=(iterator,))
        with pytest.raises(
            errors.EndOfDatasetError, match="ended after 2 elements: schedule fewer steps, make it endl"
        ) as it:
            coordinator.join(TIMEOUT)
        assert isinstance(it.value, errors.FunctionError)
        assert f"in {step.__name__}" in it.value.remote_traceback
    assert coordinator.schedule(next, args=(iterator, "nothing")).fetch(TIMEOUT) == "nothing"


def test_the_end_of_a_loop(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """A `for` in the step goes through a finite dataset and ends; going on after the end is an empty loop."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda context: range(10 + context.worker_index)))

    def epoch(iterator: Iterable[int]) -> int:
        return sum(element for element in iterator)

    assert everywhere(coordinator, epoch, iterator) == [sum(range(10 + worker)) for worker in range(NUM_WORKERS)]
    assert everywhere(coordinator, epoch, iterator) == [0] * NUM_WORKERS
    assert everywhere(coordinator, list, iterator) == [[]] * NUM_WORKERS


# Lifetime


def test_a_temporary_iterator(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """An iterator lives on the workers while a scheduled function uses it, even if the script dropped it."""
    dataset = coordinator.create_per_worker_dataset(itertools.count)
    held = [coordinator.schedule(wait_for_file, args=(gate.path,)) for _ in range(NUM_WORKERS)]
    values = [coordinator.schedule(take, args=(iter(dataset), 2)) for _ in range(5)]
    values += [coordinator.schedule(lambda _, it: take(it, 2), args=(held[0], iter(dataset))) for _ in range(2)]
    gc.collect()
    gate.open()
    assert coordinator.fetch(values, TIMEOUT) == [[0, 1]] * 7


def test_a_new_iterator_every_epoch(coordinator: ClusterCoordinator) -> None:
    """A loop may drop its iterator for a new one without waiting for the functions that have the old one."""
    dataset = coordinator.create_per_worker_dataset(lambda: range(1000))
    values = []
    for _ in range(20):
        iterator = iter(dataset)
        values += [coordinator.schedule(next, args=(iterator,)) for _ in range(3)]
    elements = coordinator.fetch(values, TIMEOUT)
    assert all(0 in elements[at : at + 3] for at in range(0, len(elements), 3)), "each began at its start"


def test_a_captured_iterator(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """An iterator may be captured by a closure, and lives as long as the closure or a scheduled call of it does."""
    dataset = coordinator.create_per_worker_dataset(itertools.count)

    def make() -> Callable[[], object]:
        iterator = iter(dataset)
        return lambda: next(iterator)

    step = make()
    assert everywhere(coordinator, step) == [0] * NUM_WORKERS
    assert everywhere(coordinator, step) == [1] * NUM_WORKERS
    values = [coordinator.schedule(make()) for _ in range(20)]
    gc.collect()
    assert coordinator.fetch(values, TIMEOUT) == [0] * 20


def test_built_before_the_function_that_uses_it(coordinator: ClusterCoordinator) -> None:
    """However fast iterators are made and used, each is there before the function that uses it."""

    def slow() -> Iterator[int]:
        time.sleep(0.001)
        return itertools.count()

    dataset = coordinator.create_per_worker_dataset(slow)
    iterators, values = [], []
    for _ in range(100):
        iterators.append(iter(dataset))
        values.append(coordinator.schedule(take, args=(iterators[-1], 1)))
    assert coordinator.fetch(values, TIMEOUT) == [[0]] * 100


def test_iterators_are_released(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """Dropped iterators leave the workers, whether they were used or not: 200 of them leave no trace (row 56)."""
    dataset = coordinator.create_per_worker_dataset(Tracked)
    kept = iter(dataset)
    assert everywhere(coordinator, take, kept, 1) == [[0]] * NUM_WORKERS
    before = everywhere(coordinator, count_tracked)
    for i in range(200):
        iterator = iter(dataset)
        if i % 10 == 0:
            assert coordinator.schedule(take, args=(iterator, 1)).fetch(TIMEOUT) == [0]
    del iterator
    gc.collect()
    until(lambda: everywhere(coordinator, count_tracked) == before, "the workers have as many as before")
    assert everywhere(coordinator, take, kept, 1) == [[1]] * NUM_WORKERS


def test_a_dataset_by_several_threads_of_a_step(coordinator: ClusterCoordinator) -> None:
    """Threads of a step may share its iterator: every element goes to one of them."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: range(1000)))

    def step(iterator: Iterator[int]) -> list[int]:
        elements: list[int] = []
        threads = [threading.Thread(target=lambda: elements.extend(iterator)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(elements)

    assert coordinator.schedule(step, args=(iterator,)).fetch(TIMEOUT) == list(range(1000))
