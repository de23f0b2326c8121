"""When a function fails: the first error wins and is raised once, the rest is cancelled, nothing runs on."""

from __future__ import annotations

import copy
import itertools
import pickle
import signal
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import NUM_WORKERS, Everywhere, Gate, leave_mark, marks, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    RemoteValueStatus,
    Variable,
    embedding_lookup,
    errors,
    experimental_get_current_worker_index,
    optimizers,
)


class ModelError(ValueError):
    """An exception of the user's, with more than a message."""

    def __init__(self, layer: str, *, loss: float) -> None:
        super().__init__(f"layer {layer} diverged")
        self.layer = layer
        self.loss = loss


def fails(message: str = "it failed") -> None:
    """A step that fails."""
    raise ValueError(message)


def double(x: int) -> int:
    """A step that does not."""
    return 2 * x


@pytest.fixture
def counter(strategy: ParameterServerStrategy) -> Variable:
    """A counter."""
    with strategy.scope():
        return Variable(np.zeros((), np.int64), name="counter")


# Once


def test_join_raises_it_once(coordinator: ClusterCoordinator) -> None:
    """join raises what a function raised, once; afterwards all is as if nothing had been (rows 44, 45)."""
    for round_ in range(3):
        failing = coordinator.schedule(fails, args=(f"round {round_}",))
        with pytest.raises(ValueError, match=f"round {round_}"):
            coordinator.join(TIMEOUT)
        coordinator.join(TIMEOUT)
        assert coordinator.done()
        assert coordinator.schedule(double, args=(4,)).fetch(TIMEOUT) == 8
        coordinator.join(TIMEOUT)
        assert failing.status is RemoteValueStatus.FAILED


def test_done_raises_it_once(coordinator: ClusterCoordinator) -> None:
    """done raises it as join does (row 42)."""
    failing = coordinator.schedule(fails)
    until(lambda: failing.status is RemoteValueStatus.FAILED, "it has failed")
    with pytest.raises(ValueError, match="it failed"):
        coordinator.done()
    assert coordinator.done() is True


def test_schedule_raises_it_once(coordinator: ClusterCoordinator, counter: Variable) -> None:
    """A schedule raises the error of an earlier function, and has not scheduled its own (row 44)."""
    failing = coordinator.schedule(fails)
    until(lambda: failing.status is RemoteValueStatus.FAILED, "it has failed")
    with pytest.raises(ValueError, match="it failed"):
        coordinator.schedule(counter.assign_add, args=(1,))
    coordinator.schedule(counter.assign_add, args=(10,))
    coordinator.join(TIMEOUT)
    assert counter.numpy() == 10


def test_fetch_raises_it_as_often_as_asked(coordinator: ClusterCoordinator) -> None:
    """The function's own RemoteValue raises the error at every fetch, and that does not count as raised (row 46)."""
    failing = coordinator.schedule(fails)
    fetches: list[Callable[[], Any]] = [failing.fetch, failing.get, lambda: coordinator.fetch([failing])]
    for fetch in fetches:
        with pytest.raises(ValueError, match="it failed"):
            fetch()
    with pytest.raises(ValueError, match="it failed"):
        coordinator.join(TIMEOUT)
    with pytest.raises(ValueError, match="it failed"):
        failing.fetch()


def test_an_error_that_was_fetched_says_that_it_is_old(coordinator: ClusterCoordinator, counter: Variable) -> None:
    """Raised again by an innocent call it says whose it is, since when, that it was raised, and is cleared (row 44)."""
    innocent: list[tuple[str, Callable[[], Any]]] = [
        ("schedule", lambda: coordinator.schedule(counter.assign_add, args=(1,))),
        ("join", lambda: coordinator.join(TIMEOUT)),
        ("done", coordinator.done),
    ]
    for name, call in innocent:
        with pytest.raises(ValueError, match="it failed") as first:
            coordinator.schedule(fails).fetch(TIMEOUT)
        assert not hasattr(first.value, "__notes__")
        until(lambda: not coordinator._dispatcher.status.stats().in_flight, "nothing runs")
        with pytest.raises(ValueError, match="it failed") as again:
            call()
        (note,) = again.value.__notes__
        for words in ("error of fails, which failed at ", ", and fetch() has raised it before", "cleared now"):
            assert words in note
        assert ("has not been scheduled" in note) == (name == "schedule")
        assert note in "".join(traceback.format_exception(again.value))
        coordinator.join(TIMEOUT)
    failing = coordinator.schedule(fails)
    until(lambda: failing.status is RemoteValueStatus.FAILED, "it has failed")
    with pytest.raises(ValueError, match="it failed") as news:
        coordinator.join(TIMEOUT)
    assert not hasattr(news.value, "__notes__"), "it had not been raised before"
    assert counter.numpy() == 0


def test_what_a_script_forgot_is_said(cluster: LocalCluster, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """The log says at the job's end how many functions have not run, and which error was never raised; nothing else."""

    def said() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.getMessage().startswith("the job ended")]
        caplog.clear()
        return messages

    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        with pytest.raises(ValueError, match="it failed"):
            coordinator.schedule(fails).fetch(TIMEOUT)
        assert coordinator._dispatcher._scheduler.idle
    assert said() == [], "fetch has told of it, and nothing else was lost"

    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        values = [coordinator.schedule(wait_for_file, args=(gate.path,)) for _ in range(20)]
        until(lambda: coordinator._dispatcher.status.stats().in_flight == NUM_WORKERS, "every worker runs one")
    (text,) = said()
    assert f"{len(values) - NUM_WORKERS} waiting, {NUM_WORKERS} running;" in text
    gate.open()

    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        blocked = [coordinator.schedule(fails, args=("nobody looks",))]
        blocked += [coordinator.schedule(double, args=(blocked[0],)) for _ in range(3)]
        until(lambda: blocked[-1].status is RemoteValueStatus.CANCELLED, "the first has failed")
        until(lambda: not coordinator._dispatcher.status.stats().in_flight, "nothing runs")
    first, second = said()
    assert "0 waiting, 0 running, 3 cancelled after the error of another one" in first
    assert "an error that was never raised" in second
    assert "ValueError: nobody looks" in second


def test_an_error_that_waits_for_a_function_that_hangs(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """Every wait that ends by its timeout says which error there is and who it waits for; to cancel that frees it."""

    def hangs(path: str) -> None:
        leave_mark(path, "begun")
        wait_for_file(path)

    hanging = coordinator.schedule(hangs, args=(gate.path,))
    until(lambda: marks(gate), "it runs")
    failing = coordinator.schedule(fails, args=("the cause",))
    with pytest.raises(ValueError, match="the cause"):
        failing.fetch(TIMEOUT)
    waits: list[Callable[[], Any]] = [
        lambda: coordinator.join(0.1),
        lambda: coordinator.schedule(double, args=(1,), wait=0.1),
        lambda: hanging.fetch(0.1),
        lambda: coordinator.fetch([hanging], 0.1),
    ]
    for wait in waits:
        with pytest.raises(errors.WaitTimeoutError, match=r"hangs on worker \d.*fails failed on worker .*the cause"):
            wait()
    assert "fails failed on worker" in coordinator.explain()
    assert "hangs on worker" in coordinator.explain()
    assert not coordinator.done()
    assert hanging.cancel()
    with pytest.raises(ValueError, match="the cause"):
        coordinator.join(TIMEOUT)
    with pytest.raises(errors.CancelledError):
        hanging.fetch()
    assert coordinator.schedule(double, args=(4,), wait=TIMEOUT).fetch(TIMEOUT) == 8
    gate.open()
    until(lambda: "still runs" not in coordinator.explain(), "it has ended")


@pytest.mark.parametrize("wrong", [-1, True, "3", float("nan")])
def test_bad_seconds(coordinator: ClusterCoordinator, wrong: Any) -> None:
    """They are refused where they are given."""
    with pytest.raises(ValueError, match=r"wait is .*; it must be a number of seconds, 0 or more, or None"):
        coordinator.schedule(double, args=(1,), wait=wrong)
    with pytest.raises(ValueError, match=r"kill_after is .*; it must be a number of seconds, 0 or more, or None"):
        coordinator.cancel(kill_after=wrong)


def test_one_of_several_threads_gets_it(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """When several threads join, one of them raises the error; the others return when all has ended."""

    def step(path: str) -> None:
        wait_for_file(path)
        fails()

    coordinator.schedule(step, args=(gate.path,))
    outcomes: list[str] = []

    def joins() -> None:
        try:
            coordinator.join(TIMEOUT)
            outcomes.append("returned")
        except ValueError:
            outcomes.append("raised")

    threads = [threading.Thread(target=joins) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(outcomes) == ["raised", "returned", "returned", "returned"]


def test_the_first_of_many_wins(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """Of many functions that fail one is the first: it has failed, all others were cancelled, and none is heard of."""

    def step(i: int, path: str) -> None:
        leave_mark(path, str(i))
        wait_for_file(path)
        raise ValueError(f"number {i}")

    values = [coordinator.schedule(step, args=(i, gate.path)) for i in range(50)]
    until(lambda: len(marks(gate)) == NUM_WORKERS, "every worker runs one")
    gate.open()
    with pytest.raises(ValueError, match="number") as caught:
        coordinator.join(TIMEOUT)
    coordinator.join(TIMEOUT)
    statuses = [value.status for value in values]
    assert statuses.count(RemoteValueStatus.FAILED) == 1
    assert statuses.count(RemoteValueStatus.CANCELLED) == 49
    first = statuses.index(RemoteValueStatus.FAILED)
    assert f"number {first}" in str(caught.value)
    assert len(marks(gate)) <= 2 * NUM_WORKERS, "the others were not run"


# At once


def test_what_is_queued_is_cancelled(coordinator: ClusterCoordinator, counter: Variable, gate: Gate) -> None:
    """Queued functions never run; their RemoteValues raise CancelledError, which says why and what to do (row 46)."""

    def failing(path: str) -> None:
        wait_for_file(path)
        fails()

    first = [coordinator.schedule(failing, args=(gate.path,)) for _ in range(NUM_WORKERS)]
    queued = [coordinator.schedule(counter.assign_add, args=(1,)) for _ in range(100)]
    gate.open()
    with pytest.raises(ValueError, match="it failed"):
        coordinator.join(TIMEOUT)
    assert counter.numpy() == 0
    assert sorted(value.status.name for value in first) == ["CANCELLED"] * (NUM_WORKERS - 1) + ["FAILED"]
    for value in queued:
        assert value.status is RemoteValueStatus.CANCELLED
        with pytest.raises(
            errors.CancelledError,
            match=r"assign_add was cancelled because another function failed first .*: schedule it",
        ) as caught:
            value.fetch(0)
        assert isinstance(caught.value.__cause__, ValueError)


def read_for_ever(variable: Any) -> None:
    """Read a variable."""
    while True:
        variable.read_value()


def update_for_ever(variable: Any) -> None:
    """Update a variable."""
    while True:
        variable.assign_add(np.zeros(variable.shape, np.float32))


def scatter_for_ever(variable: Any) -> None:
    """Update rows."""
    while True:
        variable.scatter_add(IndexedSlices(np.zeros((1, 2), np.float32), [0]))


def gather_for_ever(variable: Any) -> None:
    """Read rows."""
    while True:
        embedding_lookup(variable, [1])


def read_in_a_thread(variable: Any) -> None:
    """Read a variable in a thread of the step's own, and when that has ended once more."""
    thread = threading.Thread(target=quietly, args=(read_for_ever, variable))
    thread.start()
    thread.join()
    variable.read_value()


def quietly(function: Callable[[Any], None], argument: Any) -> None:
    """As a thread pool would: keep what was raised."""
    try:
        function(argument)
    except BaseException:
        return


def swallow_all_exceptions(variable: Any) -> None:
    """Go on, whatever a read raises."""
    while True:
        try:
            variable.read_value()
        except Exception:
            continue


def iterate_for_ever(iterator: Any) -> None:
    """Take elements of an endless dataset."""
    for _ in iterator:
        pass


@pytest.mark.parametrize(
    "step",
    [
        read_for_ever,
        update_for_ever,
        scatter_for_ever,
        gather_for_ever,
        read_in_a_thread,
        swallow_all_exceptions,
        iterate_for_ever,
    ],
)
def test_what_runs_stops_at_its_next_library_call(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator, step: Callable[[Any], None]
) -> None:
    """A blocked join raises although another function would run forever: its next call of the library ends it."""
    with strategy.scope():
        w = Variable(np.zeros((3, 2), np.float32), name="w")
        begun = Variable(0, name="begun")
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter(int, 1)))

    def endless(argument: Any) -> None:
        begun.assign_add(1)
        step(argument)

    running = coordinator.schedule(endless, args=(iterator if step is iterate_for_ever else w,))
    until(lambda: begun.numpy() == 1, "it runs")
    coordinator.schedule(fails)
    with pytest.raises(ValueError, match="it failed"):
        coordinator.join(TIMEOUT)
    assert running.status is RemoteValueStatus.CANCELLED
    with pytest.raises(errors.CancelledError, match="another function failed first"):
        running.fetch()
    assert coordinator.schedule(next, args=(iterator,)).fetch(TIMEOUT) == 0


def test_what_does_not_call_the_library_is_awaited(
    coordinator: ClusterCoordinator, counter: Variable, gate: Gate
) -> None:
    """join does not raise before a running function has ended, so that nothing runs when it has (row 45)."""

    def step(path: str) -> None:
        leave_mark(path, "begun")
        wait_for_file(path)
        while True:
            counter.assign_add(1)  # stopped here, as soon as the worker has heard that it is cancelled

    running = coordinator.schedule(step, args=(gate.path,))
    until(lambda: marks(gate) == {"begun"}, "it runs")
    queued = coordinator.schedule(double, args=(running,))
    coordinator.schedule(fails)
    until(lambda: queued.status is RemoteValueStatus.CANCELLED, "the error is known")
    raised: list[BaseException] = []

    def joins() -> None:
        try:
            coordinator.join(TIMEOUT)
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=joins)
    thread.start()
    with pytest.raises(errors.WaitTimeoutError, match="1 with workers"):
        coordinator.join(0.01)
    assert running.status.value == "not ready"
    assert raised == []
    gate.open()
    thread.join(TIMEOUT)
    assert len(raised) == 1
    assert running.status is RemoteValueStatus.CANCELLED


def test_nothing_runs_when_join_has_raised(
    coordinator: ClusterCoordinator, counter: Variable, everywhere: Everywhere
) -> None:
    """When join has raised, no update of what it cancelled is made any more (row 45)."""

    def endless(i: int) -> None:
        while True:
            counter.assign_add(1)
            if i == 30 and counter.read_value() > 20:
                fails()

    for i in range(NUM_WORKERS - 1):
        coordinator.schedule(endless, args=(i,))
    coordinator.schedule(endless, args=(30,))
    for i in range(20):
        coordinator.schedule(endless, args=(i,))
    with pytest.raises(ValueError, match="it failed"):
        coordinator.join(TIMEOUT)
    stopped_at = counter.numpy()
    assert stopped_at > 20
    assert everywhere(coordinator, double, 4) == [8] * NUM_WORKERS
    assert counter.numpy() == stopped_at


def test_iterators_and_variables_are_usable_afterwards(coordinator: ClusterCoordinator, counter: Variable) -> None:
    """After an error per-worker iterators go on where they were, and variables have what was applied (row 45)."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: range(10**9)))

    def step(iterator: Iterator[int]) -> tuple[int, int]:
        counter.assign_add(1)
        return experimental_get_current_worker_index(), next(iterator)

    def elements_of(count: int) -> list[tuple[int, int]]:
        fetched: list[tuple[int, int]] = coordinator.fetch(
            [coordinator.schedule(step, args=(iterator,)) for _ in range(count)], TIMEOUT
        )
        return fetched

    before = elements_of(20)
    coordinator.schedule(fails)
    with pytest.raises(ValueError, match="it failed"):
        coordinator.join(TIMEOUT)
    both = before + elements_of(20)
    for worker in range(NUM_WORKERS):
        elements = sorted(element for index_, element in both if index_ == worker)
        assert elements == list(range(len(elements))), "no element was lost, none came twice"
    assert counter.numpy() == 40


# What it says


def test_the_error_says_where_and_how_often(coordinator: ClusterCoordinator) -> None:
    """It has the function, the worker, the attempts and the remote traceback, and shows them all when it is printed."""

    def layer(x: int) -> None:
        numbers = {"weights": x}
        fails(f"bad {numbers}")

    def step() -> None:
        layer(7)

    coordinator.schedule(step)
    with pytest.raises(ValueError, match="bad") as caught:
        coordinator.join(TIMEOUT)
    error = caught.value
    assert isinstance(error, errors.FunctionError)
    assert error.args == ("bad {'weights': 7}",)
    assert (error.function, error.attempts) == ("step", 1)
    assert error.worker in range(NUM_WORKERS)
    lines = error.remote_traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: bad {'weights': 7}"
    for where in ("in step", "layer(7)", "in layer", "in fails", "raise ValueError(message)"):
        assert where in error.remote_traceback
    assert "runner.py" not in error.remote_traceback, "it begins with the user's own frames"
    shown = str(error)
    assert shown.startswith(f"step failed on worker {error.worker} (attempt 1): ValueError: bad {{'weights': 7}}\n")
    assert error.remote_traceback in shown
    assert error.remote_traceback in "".join(traceback.format_exception(error))


def test_an_error_of_the_users_own_class(coordinator: ClusterCoordinator) -> None:
    """It can be caught by its class and has its attributes; copies and pickles of it lose only the class."""

    def step() -> None:
        raise ModelError("dense_1", loss=float("inf"))

    coordinator.schedule(step)
    with pytest.raises(ModelError, match="layer dense_1 diverged") as caught:
        coordinator.join(TIMEOUT)
    assert (caught.value.layer, caught.value.loss) == ("dense_1", float("inf"))
    again = pickle.loads(pickle.dumps(copy.copy(caught.value)))
    assert isinstance(again, errors.FunctionError)
    assert str(again) == str(caught.value)


def exits() -> None:
    """A step that ends Python."""
    raise SystemExit(3)


def interrupts() -> None:
    """A step that does as if Ctrl-C had been pressed."""
    raise KeyboardInterrupt


def recurses() -> None:
    """A step without an end."""
    recurses()


def misses_key() -> None:
    """A KeyError, which shows its argument's repr."""
    dict[str, int]()["missing"]


def opens_nothing() -> None:
    """An OSError, with its number."""
    open("/no/such/file")  # noqa: SIM115  (it does not)


def unsendable() -> None:
    """An error whose arguments can't be sent."""
    raise ValueError("with a lock", threading.Lock())


def unshowable() -> None:
    """An error that can't be shown."""

    class BadError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raise BadError


def stops() -> None:
    """An end of another iterator than a dataset's."""
    next(iter([]))


def group() -> None:
    """Several at once."""
    raise ExceptionGroup("two", [ValueError("one"), KeyError("two")])


def imports_nothing() -> None:
    """A module that is not there."""
    import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401


def chained() -> None:
    """An error with a cause."""
    try:
        fails("the cause")
    except ValueError as error:
        raise LookupError("the effect") from error


@pytest.mark.parametrize(
    ("step", "caught_as", "said"),
    [
        (exits, errors.FunctionError, "SystemExit: 3"),
        (interrupts, errors.FunctionError, "KeyboardInterrupt"),
        (recurses, RecursionError, "maximum recursion depth"),
        (misses_key, KeyError, "'missing'"),
        (opens_nothing, FileNotFoundError, "No such file or directory: '/no/such/file'"),
        (unsendable, ValueError, "with a lock"),
        (unshowable, errors.FunctionError, "its message can't be shown"),
        (stops, RuntimeError, "the function raised StopIteration"),
        (group, errors.FunctionError, "two .2 sub-exceptions."),
        (imports_nothing, ModuleNotFoundError, "No module named 'no_such_module_anywhere'"),
        (chained, LookupError, "the cause"),
    ],
)
def test_whatever_is_raised(
    coordinator: ClusterCoordinator, step: Callable[[], None], caught_as: type[Exception], said: str
) -> None:
    """Every kind of exception comes through, as an Exception, with its text; the worker lives on."""
    value = coordinator.schedule(step)
    with pytest.raises(caught_as, match=said) as caught:
        coordinator.join(TIMEOUT)
    assert isinstance(caught.value, errors.FunctionError)
    assert f"in {step.__name__}" in caught.value.remote_traceback
    with pytest.raises(caught_as, match=said):
        value.fetch(0)
    assert coordinator.schedule(double, args=(1,)).fetch(TIMEOUT) == 2


def test_an_error_with_a_number(coordinator: ClusterCoordinator) -> None:
    """An OSError keeps errno and filename."""
    coordinator.schedule(opens_nothing)
    with pytest.raises(OSError, match="No such file") as caught:
        coordinator.join(TIMEOUT)
    assert (caught.value.errno, caught.value.filename) == (2, "/no/such/file")


def test_an_error_with_a_huge_message(coordinator: ClusterCoordinator) -> None:
    """A message of megabytes comes shortened, and harms nothing."""
    coordinator.schedule(fails, args=("x" * (8 << 20),))
    with pytest.raises(ValueError, match="characters left out") as caught:
        coordinator.join(TIMEOUT)
    assert len(str(caught.value)) < 200_000


def test_a_refused_update_inside_a_function(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """What the library refuses in a step has the same class there, at the coordinator, and outside of functions."""
    with strategy.scope():
        w = Variable(np.zeros((3, 2), np.float32), name="w")
        sgd = optimizers.SGD(0.1)

    def step() -> None:
        with pytest.raises(errors.InvalidUpdateError):
            w.assign(np.zeros((2, 2), np.float32))
        sgd.apply_gradients([(np.zeros((2, 3), np.float32), w)])

    coordinator.schedule(step)
    with pytest.raises(
        errors.InvalidUpdateError, match=r"'w': the gradient has shape .2, 3., but must have shape .3, 2."
    ) as it:
        coordinator.join(TIMEOUT)
    assert isinstance(it.value, ValueError | errors.MisuseError | errors.FunctionError)


class Unloadable:
    """A callable that can be pickled, and not loaded again."""

    def __call__(self) -> None:
        """Never called."""

    def __setstate__(self, state: object) -> None:
        raise RuntimeError("this object does not like workers")

    def __getstate__(self) -> object:
        return {"some": "state"}


def test_a_function_that_cannot_be_loaded(coordinator: ClusterCoordinator) -> None:
    """A function that fails to load on the worker fails alone, by name, with the reason; the workers live on."""
    value = coordinator.schedule(Unloadable())
    with pytest.raises(errors.FunctionError, match=r"Unloadable can't be started on worker \d.*does not like") as it:
        coordinator.join(TIMEOUT)
    assert isinstance(it.value, errors.MisuseError)
    assert value.status is RemoteValueStatus.FAILED
    assert coordinator.schedule(double, args=(1,)).fetch(TIMEOUT) == 2


# Waiting with a timeout


def test_a_join_that_takes_too_long(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """join raises WaitTimeoutError, a TimeoutError, that says what waits; a later join waits on as if nothing were."""
    values = [coordinator.schedule(wait_for_file, args=(gate.path,)) for _ in range(NUM_WORKERS)]
    values += [coordinator.schedule(double, args=(value,)) for value in values for _ in range(3)]
    for timeout in (0, 0.05):
        with pytest.raises(errors.WaitTimeoutError) as caught:
            coordinator.join(timeout)
        assert isinstance(caught.value, TimeoutError)
        assert str(caught.value).startswith(f"not done after {timeout:g} s: ")
    until(lambda: coordinator._dispatcher.status.stats().in_flight == NUM_WORKERS, "every worker runs one")
    with pytest.raises(
        errors.WaitTimeoutError,
        match=f"{3 * NUM_WORKERS} functions waiting, {NUM_WORKERS} with workers; 2 of 2 workers up",
    ):
        coordinator.join(0)
    gate.open()
    with pytest.raises(TypeError, match="unsupported operand"):  # 2 * None
        coordinator.join(TIMEOUT)
    coordinator.join(TIMEOUT)


def test_a_join_names_missing_workers(cluster: LocalCluster, gate: Gate) -> None:
    """The message of join names the missing workers, and why they are; a job that is over misses none."""
    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy, worker_lease=1)
        until(lambda: coordinator.workers_up == NUM_WORKERS, "all workers are up")
        assert "missing" not in coordinator.describe()
        cluster.kill("worker", 0, signal.SIGSTOP)
        try:
            until(lambda: coordinator.workers_up == NUM_WORKERS - 1, "one is given up")
            coordinator.schedule(wait_for_file, args=(gate.path,))
            with pytest.raises(errors.WaitTimeoutError, match="1 of 2 workers up, missing: worker 0 at "):
                coordinator.join(0)
        finally:
            cluster.kill("worker", 0, signal.SIGCONT)
        gate.open()
        coordinator.join(TIMEOUT)
        until(lambda: coordinator.workers_up == NUM_WORKERS, "all workers are up")
    assert "missing" not in coordinator.describe()


def test_a_fetch_that_takes_too_long(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """fetch raises WaitTimeoutError with the function's name; the function is still scheduled, to be fetched later."""
    values = [coordinator.schedule(wait_for_file, args=(gate.path,)) for _ in range(2 * NUM_WORKERS)]
    calls: list[Callable[[], Any]] = [
        lambda: values[-1].fetch(0.01),
        lambda: values[0].get(timeout=0),
        lambda: coordinator.fetch({"a": [values]}, timeout=0.01),
    ]
    for call in calls:
        with pytest.raises(
            errors.WaitTimeoutError, match=r"wait_for_file has no result after 0(.01)? s; it is still sched"
        ):
            call()
    gate.open()
    assert coordinator.fetch(values, TIMEOUT) == [None] * (2 * NUM_WORKERS)
    coordinator.join(TIMEOUT)


def test_the_timeout_is_for_the_whole_structure(
    coordinator: ClusterCoordinator, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout of a fetch of many values is for all of them together, not for each."""
    values = [coordinator.schedule(double, args=(i,)) for i in range(3)]
    coordinator.join(TIMEOUT)
    clock = types.SimpleNamespace(monotonic=itertools.count(step=400).__next__)
    monkeypatch.setattr("pscluster.coordinator.waiting.time", clock)
    late = coordinator.schedule(wait_for_file, args=(gate.path,))
    assert coordinator.fetch(values, timeout=1000) == [0, 2, 4], "what is ready is given, however late it is"
    with pytest.raises(errors.WaitTimeoutError, match="no result after 1000 s"):
        coordinator.fetch([*values, late], timeout=1000)


# Again


def test_a_function_that_raises_is_run_again(coordinator: ClusterCoordinator, counter: Variable, gate: Gate) -> None:
    """As often as was allowed; its updates count once, and the error of the last run tells how many there were."""

    path = gate.path

    def moody(failures: int) -> int:
        counter.assign_add(1)
        runs = len(list(Path(path).parent.glob("mark-*"))) + 1
        leave_mark(path, f"run-{runs}")
        if runs <= failures:
            raise ValueError("not yet")
        return runs

    assert coordinator.schedule(moody, args=(2,), retries=2).fetch(TIMEOUT) == 3
    assert int(counter) == 1
    coordinator.join(TIMEOUT)
    coordinator.schedule(fails, retries=3)
    with pytest.raises(errors.FunctionError) as caught:
        coordinator.join(TIMEOUT)
    assert caught.value.attempts == 4
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"retries is .*; it must be a whole number, 0 or more"):
            coordinator.schedule(double, args=(1,), retries=wrong)  # type: ignore[arg-type]


def test_what_is_waited_for_is_said(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """By function and worker."""
    path = gate.path

    def held() -> None:
        wait_for_file(path)

    value = coordinator.schedule(held)
    until(lambda: "held" in coordinator.explain(), "it has begun", coordinator.explain)
    assert "1 with workers" in coordinator.explain()
    assert "held; no message for" in coordinator.explain()
    gate.open()
    value.fetch(TIMEOUT)
