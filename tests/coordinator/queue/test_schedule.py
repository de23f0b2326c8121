"""schedule, join and done against real workers: what may be scheduled, in which order it runs, what it is given."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import operator
import os
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.conftest import NUM_WORKERS, Gate, leave_mark, marks, run_cluster, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    ReduceOp,
    RemoteValue,
    RemoteValueStatus,
    Variable,
    errors,
    experimental_get_current_worker_index,
    metrics,
    optimizers,
)
from pscluster.coordinator.queue import captured_functions
from pscluster.coordinator.strategy import _warn_outside
from pscluster.core.functions.definitions import FunctionHandle, capture
from pscluster.core.functions.sources import holds_handle

FACTOR = 3


class Pair(NamedTuple):
    """A named tuple that both sides know."""

    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    """A dataclass that both sides know."""

    x: np.ndarray[Any, Any]
    label: str = ""
    more: Any = None


def triple(x: Any) -> Any:
    """A function of a module, with a global."""
    return FACTOR * x


def echo(*args: Any, **kwargs: Any) -> Any:
    """What it was given."""
    return args, kwargs


def type_of(value: Any) -> str:
    """How the type of the argument is called on the worker."""
    return type(value).__name__


class Scaler:
    """A callable object, and methods of all kinds."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: float) -> float:
        return self.factor * x

    def method(self, x: float) -> float:
        """Of an object."""
        return self.factor * x

    @staticmethod
    def static(x: float) -> float:
        """Of no object."""
        return 5 * x

    @classmethod
    def of_class(cls, x: float) -> float:
        """Of the class."""
        return cls(7)(x)


def identical(a: Any, b: Any) -> bool:
    """Equal in value and type all through, NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        both = np.asarray(a), np.asarray(b)
        same = both[0].dtype == both[1].dtype and both[0].shape == both[1].shape
        return same and np.array_equal(*both, equal_nan=both[0].dtype.kind in "fcmM")
    if dataclasses.is_dataclass(a):
        return all(identical(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return list(map(identical, a, b)) == [True] * len(a) == [True] * len(b) and identical(
            [*a.values()], [*b.values()]
        )
    return bool(a == b or (a != a and b != b))


@pytest.fixture(scope="module")
def single() -> Iterator[LocalCluster]:
    """A cluster of one worker, where the order is certain."""
    yield from run_cluster(1, 1)


# Functions


def closure() -> Callable[[int], int]:
    """A closure over a local, with a function in it that is one, too."""
    factor = 3

    def inner(x: int) -> int:
        def innermost() -> int:
            return factor * x

        return innermost()

    return inner


def recursive() -> Callable[[int], int]:
    """A nested function that calls itself and a function of the module."""

    def factorial(n: int) -> int:
        return 1 if n <= 1 else n * factorial(n - 1)

    return lambda n: triple(factorial(n))


def with_defaults(x: int, y: int = 10, *, z: int = 100) -> int:
    """Defaults of both kinds."""
    return x + y + z


@functools.lru_cache(maxsize=8)
def cached(x: int) -> int:
    """A function in a decorator's wrapper."""
    return 2 * x


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        pytest.param(triple, (2,), 6, id="of a module"),
        pytest.param(closure(), (2,), 6, id="closure"),
        pytest.param(recursive(), (4,), 72, id="nested and recursive"),
        pytest.param(lambda x: x + 1, (2,), 3, id="lambda"),
        pytest.param(with_defaults, (1,), 111, id="defaults"),
        pytest.param(cached, (4,), 8, id="lru_cache"),
        pytest.param(Scaler(4), (2.5,), 10.0, id="callable object"),
        pytest.param(Scaler(4).method, (2.5,), 10.0, id="method"),
        pytest.param(Scaler.static, (2,), 10, id="static method"),
        pytest.param(Scaler.of_class, (2,), 14, id="class method"),
        pytest.param(functools.partial(with_defaults, 1, z=0), (2,), 3, id="partial"),
        pytest.param(functools.partial(functools.partial(Scaler(2), 3)), (), 6, id="partial of a partial"),
        pytest.param(len, ([1, 2],), 2, id="builtin"),
        pytest.param(operator.itemgetter(1), ((4, 5),), 5, id="itemgetter"),
        pytest.param(math.hypot, (3, 4), 5.0, id="of the library"),
        pytest.param(np.add, (1.5, 2), np.float64(3.5), id="ufunc"),
        pytest.param(Pair, (1, 2), Pair(1, 2), id="class"),
        pytest.param(list, (), [], id="built-in class"),
    ],
)
def test_kinds_of_functions(
    coordinator: ClusterCoordinator, function: Callable[..., Any], args: tuple[Any, ...], expected: Any
) -> None:
    """Whatever can be called can be scheduled, with nothing declared beforehand (row 37, for the better)."""
    assert identical(coordinator.schedule(function, args=args).fetch(TIMEOUT), expected)


def test_positional_and_keyword_arguments(coordinator: ClusterCoordinator) -> None:
    """Arguments arrive under their names; a list does for a tuple of them, and none at all is fine."""
    value = coordinator.schedule(echo, args=[1, "b"], kwargs={"c": 3})
    assert value.fetch(TIMEOUT) == ((1, "b"), {"c": 3})
    assert coordinator.schedule(echo).fetch(TIMEOUT) == ((), {})
    assert coordinator.schedule(echo, args=(), kwargs={}).fetch(TIMEOUT) == ((), {})


def test_a_module_that_only_the_coordinator_imports(
    coordinator: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions and classes of a module in a folder that the workers never heard of, one written just now, go."""
    name = f"steps_{uuid.uuid4().hex}"
    text = """
        import dataclasses

        BASE = 40

        @dataclasses.dataclass
        class Point:
            x: int

        def helper(x):
            return BASE + x

        def step(point):
            assert isinstance(point, Point)
            return Point(helper(point.x))
    """
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    for _ in range(2 * NUM_WORKERS):
        assert coordinator.schedule(module.step, args=(module.Point(2),)).fetch(TIMEOUT) == module.Point(42)


def test_a_module_whose_file_is_gone(
    coordinator: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of a module that the workers can't import goes by value, with what it uses of its module."""
    name = f"steps_{uuid.uuid4().hex}"
    path = tmp_path / f"{name}.py"
    path.write_text("BASE = 40\ndef helper(x):\n    return BASE + x\ndef step(x):\n    return helper(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    path.unlink()
    assert coordinator.schedule(module.step, args=(2,)).fetch(TIMEOUT) == 42


def test_captured_at_the_first_schedule(coordinator: ClusterCoordinator) -> None:
    """What a function captured counts as it was at its first schedule: what changes is an argument."""
    factor, scaler = 2, Scaler(2)

    def step(x: int) -> int:
        return factor * x

    def fetched(function: Callable[[int], float]) -> float:
        return coordinator.schedule(function, args=(10,)).fetch(TIMEOUT)  # type: ignore[no-any-return]

    assert [fetched(step), fetched(scaler), fetched(scaler.method)] == [20, 20, 20]
    factor, scaler.factor = 3, 3
    assert [fetched(step), fetched(scaler), fetched(scaler.method)] == [20, 20, 20]
    assert [fetched(lambda x: step(x)), fetched(Scaler(3)), fetched(Scaler(3).method)] == [30, 30, 30]


CELL = """
rate, offset = 1.0, [0.0]
def helper(x): return x * rate + offset[0]
def loss(batch): return helper(float(batch.sum()))
def scores(batch): return (loss(batch),)
"""


def test_one_rule_for_what_is_captured(coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    """Scheduled, evaluated or trained with: a function has its first values, until its code, or a helper's, changes."""
    names: dict[str, Any] = {"__name__": "a notebook"}
    exec(CELL, names)
    loss, scores = names["loss"], names["scores"]
    data = coordinator.distribute_dataset(np.ones(4)).batch(2)

    def scores_of_all() -> set[float]:
        training = coordinator.fit(loss, data, verbose=0).history["loss"]
        sums = [
            coordinator.evaluate(scores, data, {"sum": metrics.Sum()}, concurrent=concurrent)["sum"]
            for concurrent in (False, True)
        ]
        (scheduled,) = coordinator.schedule(scores, args=(np.ones(2),)).fetch(TIMEOUT)
        return {*training, *(total / 2 for total in sums), scheduled}

    assert scores_of_all() == {2.0}
    names["rate"], names["offset"][0] = 10.0, 5.0
    assert scores_of_all() == {2.0}
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(" that it was")[0] for text in told] == [
        "loss keeps using the rate",
        "scores keeps using the rate",
    ]
    names["helper"].__code__ = (lambda x: -x).__code__
    assert scores_of_all() == {-2.0}
    exec("def helper(x): return x * rate + offset[0]", names)
    assert scores_of_all() == {25.0}, "a new function has the values of now"


class Alike(Scaler):
    """Callable, and equal to every other one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 1


def test_a_line_that_makes_many_functions(
    coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, once; not what is scheduled again and again, nor methods of the same object."""
    monkeypatch.setattr(captured_functions, "MANY_MADE", 20)

    class Model:
        def step(self, index: int) -> int:
            return index

    def warned() -> list[str]:
        coordinator.join(TIMEOUT)
        messages = [record.getMessage() for record in caplog.records if "was created again" in record.getMessage()]
        caplog.clear()
        return messages

    model = Model()
    for index in range(50):
        coordinator.schedule(model.step, args=(index,))
        coordinator.schedule(operator.neg, args=(index,))
    assert warned() == []
    for index in range(50):
        coordinator.schedule(lambda index=index: index)
    (text,) = warned()
    assert "<lambda> (" in text
    assert f"{Path(__file__).name}:" in text
    for index in range(50):
        coordinator.schedule(functools.partial(operator.add, index), args=(1,))
        coordinator.schedule(Model().step, args=(index,))
    partial, method = sorted(warned())
    assert partial.startswith("a partial of add was created again for 20 calls")
    assert method.startswith("test_a_line_that_makes_many_functions.<locals>.Model.step (")


def test_functions_are_told_apart_by_identity(coordinator: ClusterCoordinator) -> None:
    """Callable objects that compare equal are different functions all the same, and so are their methods."""
    two, three = Alike(2), Alike(3)
    functions: list[Callable[[float], float]] = [two, three, two.method, three.method, two]
    values = [coordinator.schedule(function, args=(10,)) for function in functions]
    assert coordinator.fetch(values, TIMEOUT) == [20, 30, 20, 30, 20]


def test_captured_arrays_are_copied(coordinator: ClusterCoordinator) -> None:
    """An array that a function captured may be changed by the caller afterwards, a large one too."""
    array = np.ones(200_000)

    def total() -> float:
        return float(array.sum())

    first = coordinator.schedule(total)
    array[:] = 0
    assert [first.fetch(TIMEOUT), coordinator.schedule(total).fetch(TIMEOUT)] == [200_000, 200_000]


def test_a_dropped_function_is_forgotten_here(coordinator: ClusterCoordinator) -> None:
    """Functions that are made in a loop are kept by the coordinator no longer than by the caller."""

    class Token:
        pass

    def make(i: int) -> Callable[[], int]:
        return lambda: i

    import gc
    import weakref

    functions = [make(i) for i in range(20)]
    alive = [weakref.ref(function) for function in functions]
    values = [coordinator.schedule(function) for function in functions]
    assert coordinator.fetch(values, TIMEOUT) == list(range(20))
    coordinator.join(TIMEOUT)
    functions.clear()
    gc.collect()
    assert not any(function() is not None for function in alive)


SCRIPT = """
import dataclasses
import sys

import numpy as np

from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable

# top
BASE = 40


@dataclasses.dataclass
class Point:
    x: int


class Offset:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return helper(x) + self.by


def helper(x):
    return BASE + x


def plain(x):
    return helper(x)


def of_point(point):
    assert isinstance(point, Point), type(point)
    return Point(helper(point.x))


def fails(x):
    raise LookupError(x, sys._getframe().f_globals["__name__"])


def main():
    strategy = ParameterServerStrategy(TFConfigClusterResolver())
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        w = Variable(np.zeros(3, np.float32), name="w")

    def add(x):
        w.assign_add(np.full(3, helper(x), np.float32))

    for _ in range(4):  # on all workers
        found = [
            coordinator.schedule(plain, args=(1,)),
            coordinator.schedule(lambda x: helper(x), args=(2,)),
            coordinator.schedule(Offset(100), args=(3,)),
            coordinator.schedule(Offset(100).__call__, args=(4,)),
            coordinator.schedule(of_point, args=(Point(5),)),
        ]
        found.append(coordinator.schedule(of_point, args=(found[-1],)))
        coordinator.schedule(add, args=(2,))
        assert coordinator.fetch(found) == [41, 42, 143, 144, Point(45), Point(85)], coordinator.fetch(found)
    coordinator.join()
    assert w.numpy().tolist() == [168.0] * 3
    coordinator.schedule(fails, args=(6,))
    try:
        coordinator.join()
    except LookupError as error:
        assert error.args[0] == 6
        assert error.args[1].startswith(sys.argv[1]), error.args
        assert "in fails" in error.remote_traceback
    else:
        raise AssertionError("nothing was raised")
    print("all is well")


# bottom
"""


@pytest.mark.parametrize(
    ("top", "bottom", "module"),
    [
        pytest.param("", 'if __name__ == "__main__":\n    main()', "_pscluster_script_", id="one that only defines"),
        pytest.param("STAMP = np.zeros(3).sum()", "main()", "__main__", id="one that acts when it is loaded"),
    ],
)
def test_functions_of_the_script(tmp_path: Path, top: str, bottom: str, module: str) -> None:
    """What is defined in `__main__` runs on the workers, whether the script can be loaded there or not."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("# top", top).replace("# bottom", bottom))
    pscluster = str(Path(sys.executable).with_name("pscluster"))
    command = [pscluster, "run", "--ps", "1", "--workers", "2", str(script), module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == ["all is well"]


# Arguments and results

VALUES = [
    None,
    True,
    -(2**70),
    2**63,
    1.5,
    math.inf,
    math.nan,
    1 + 2j,
    "",
    "été \0 \U0001f600",
    b"\0\xff",
    [],
    (),
    {},
    set(),
    [1, [2, (3, {"a": [None]})]],
    {1: "int", "1": "str", (1, 2): "tuple", None: "none", 2.5: "float", b"x": "bytes"},
    {1, "a", (2, 3)},
    frozenset([1, 2]),
    np.float32(1.5),
    np.int8(-3),
    np.bool_(True),
    np.float64(math.nan),
    np.array(7),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(20)[::-3],
    np.zeros((0, 3), np.float32),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    np.array(["a", "bcd", ""]),
    np.array([b"a", b"bcd"]),
    np.array(["2026-01-01", "NaT"], "datetime64[D]"),
    np.array([1.5], np.float16),
    Pair(1, Pair(np.arange(3), None)),
    Batch(np.eye(2), "one", Batch(np.zeros(1))),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)  # a set's text differs by process
def test_values_both_ways(coordinator: ClusterCoordinator, value: Any) -> None:
    """What can be sent arrives as it was, as an argument, inside of one, and as a result."""
    back = coordinator.schedule(echo, args=(value, [value]), kwargs={"k": {"v": value}}).fetch(TIMEOUT)
    assert identical(back, ((value, [value]), {"k": {"v": value}}))


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, (1 << 20) + 1, (5 << 20) + 8, 24 << 20])
def test_large_values_both_ways(coordinator: ClusterCoordinator, size: int) -> None:
    """Arrays, bytes and texts of every size go both ways, beside the message where they are large."""
    rng = np.random.default_rng(size)
    array = rng.integers(0, 256, size, np.uint8)
    data = rng.bytes(size)
    args, _ = coordinator.schedule(echo, args=(array, data, {"t": "é" * (size // 2)}, [array[::2]])).fetch(TIMEOUT)
    assert identical(args, (array, data, {"t": "é" * (size // 2)}, [array[::2]]))
    assert args[0].flags.writeable


def test_many_arrays_of_middling_size(coordinator: ClusterCoordinator) -> None:
    """Hundreds of arrays that are no large ones each come through in one call, in order."""
    arrays = [np.full(2000, i, np.float64) for i in range(400)]
    args, _ = coordinator.schedule(echo, args=(arrays,)).fetch(TIMEOUT)
    assert [array[0] for array in args[0]] == list(range(400))


@pytest.mark.parametrize("size", [10, 100_000])
def test_arguments_are_copied(coordinator: ClusterCoordinator, gate: Gate, size: int) -> None:
    """The caller may change its arrays as soon as schedule has returned, though the function has not begun."""
    for _ in range(NUM_WORKERS):
        coordinator.schedule(wait_for_file, args=(gate.path,))
    array = np.ones(size)
    value = coordinator.schedule(np.sum, args=(array,))
    array[:] = 0
    gate.open()
    assert value.fetch(TIMEOUT) == size


@pytest.mark.parametrize("size", [10, 100_000])
def test_results_are_copied(coordinator: ClusterCoordinator, size: int) -> None:
    """A function may use again, and change, an array that it has returned."""
    array = np.zeros(size)

    def step() -> Any:
        array[:] += 1
        return array

    values = [coordinator.schedule(step) for _ in range(50)]
    for value in coordinator.fetch(values, TIMEOUT):
        assert np.all(value == value[0]), "half of a result is of the next call"


def test_classes_inside_functions(coordinator: ClusterCoordinator) -> None:
    """An instance of a dataclass that is defined in a function can be an argument; as a result it can't be read."""

    @dataclasses.dataclass
    class Local:
        x: int

    value = coordinator.schedule(lambda local: (type(local).__name__, local.x), args=(Local(3),))
    assert value.fetch(TIMEOUT) == ("Local", 3)
    with pytest.raises(errors.ProtocolError, match=r"a record of class .*Local, but there is no such class here"):
        coordinator.schedule(lambda: [Local(3)]).fetch(TIMEOUT)


def test_handles_as_arguments_and_results(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """Variables, optimizers, the strategy and iterators go both ways by name, inside of structures too."""
    with strategy.scope():
        w = Variable(np.arange(3, dtype=np.float32), name="w")
        sgd = optimizers.SGD(1.0, name="opt")
    iterator = iter(coordinator.create_per_worker_dataset([1, 2]))

    def step(things: dict[str, Any], own: Any) -> Any:
        things["opt"].apply_gradients([(np.ones(3, np.float32), things["w"])])
        assert own is things["w"], "one handle a worker"
        return {"w": own, "same": [things["strategy"], things["iterator"], things["opt"]]}

    things = {"w": w, "opt": sgd, "strategy": strategy, "iterator": iterator}
    back = coordinator.schedule(step, args=(things, w)).fetch(TIMEOUT)
    assert back["w"].name == "w"
    assert back["w"].numpy().tolist() == w.numpy().tolist() == [-1, 0, 1]
    assert back["same"][0] is strategy
    assert back["same"][1] is iterator
    assert (back["same"][2].name, back["same"][2].iterations) == ("opt", 1)


def test_an_iterator_as_a_result_that_nobody_has(coordinator: ClusterCoordinator) -> None:
    """A per-worker iterator that comes back when the coordinator no longer has it can't be fetched."""
    value = coordinator.schedule(echo, args=(iter(coordinator.create_per_worker_dataset([1])),))
    coordinator.join(TIMEOUT)
    until(lambda: value.status is RemoteValueStatus.READY, "the function has ended")
    until(lambda: not coordinator._resources._handles, "the thread that sent it has let go of it, too")
    with pytest.raises(errors.MisuseError, match="iterator that this coordinator no longer has"):
        value.fetch(TIMEOUT)


class Odd:
    """No plain data."""


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1, LOCK), {}, r"args\[1\] is a _thread.lock, which can't be sent"),
        (([{"model": Odd()}],), {}, r"args\[0\]\[0\]\['model'\] is a .*Odd, which can't be sent"),
        ((), {"layers": (1, 2, Odd())}, r"kwargs\['layers'\]\[2\] is a .*Odd"),
        ((Batch(np.zeros(1), more=[Odd()]),), {}, r"args\[0\].more\[0\] is a .*Odd"),
        ((Pair(1, {2: Odd()}),), {}, r"args\[0\].right\[2\] is a .*Odd"),
        ((np.array([object()]),), {}, r"args\[0\] is an array of Python objects"),
        (({Odd(): 1},), {}, r"args\[0\].keys\(\) is a .*Odd"),
        ((ReduceOp.SUM,), {}, r"args\[0\] is a .*ReduceOp, an enum"),
        ((triple,), {}, r"args\[0\] is a function, which can't be sent"),
        (((i for i in range(3)),), {}, r"args\[0\] is a generator"),
        ((), {1: 2}, "kwargs has the key 1"),
        ("abc", {}, "args must be a tuple or list of arguments, not a str: write args=.x,."),
        (5, {}, "args must be a tuple or list of arguments, not an int"),
        (np.zeros(2), {}, "args must be a tuple or list of arguments, not an ndarray"),
        ((), [1], "kwargs must be a dict of arguments, not a list"),
    ],
)
def test_arguments_that_cannot_be_sent(coordinator: ClusterCoordinator, args: Any, kwargs: Any, message: str) -> None:
    """They raise TypeError on the caller's line, with their path in the structure, and nothing is scheduled."""
    with pytest.raises(TypeError, match=message):
        coordinator.schedule(echo, args=args, kwargs=kwargs)
    assert "0 functions waiting, 0 with workers" in coordinator.describe()
    assert coordinator.done()


def test_a_structure_that_contains_itself(coordinator: ClusterCoordinator) -> None:
    """It is refused on the caller's line, not followed forever."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="does the structure contain itself"):
        coordinator.schedule(echo, args=(loop,))


@pytest.mark.parametrize("function", [None, 3, "echo", [echo]])
def test_what_is_no_function(coordinator: ClusterCoordinator, function: Any) -> None:
    """It raises TypeError on the caller's line (row 37)."""
    with pytest.raises(TypeError, match=r"schedule takes a function, not (a |an |None)"):
        coordinator.schedule(function)


def test_a_captured_value_that_cannot_be_sent(coordinator: ClusterCoordinator) -> None:
    """It raises TypeError on the caller's line, with the variable's name."""
    guard = {"lock": threading.Lock()}
    with pytest.raises(TypeError, match=r"its variable .guard\['lock'\]. is a _thread.lock, which can't be pickled"):
        coordinator.schedule(lambda: guard)
    assert coordinator.done()


def test_what_stays_in_the_script(
    cluster: LocalCluster, strategy: ParameterServerStrategy, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    """Captured or as an argument, by the name that it has there, and with what to do; not what lies inside of it."""
    value = coordinator.schedule(triple, args=(1,))
    data = coordinator.distribute_dataset(np.arange(4)).batch(2)
    with CheckpointManager(str(tmp_path), strategy=strategy) as manager:
        for thing, hint in [
            (coordinator, "schedule functions in the script"),
            (cluster, "use variables in the function, or the strategy"),
            (data, r"pass its parts, `for part in dataset: coordinator.schedule\(fn, args=\(part,\)\)`"),
            (value, r"pass it as an argument, `schedule\(fn, args=\(value,\)\)`"),
            (manager, "save and restore in the script"),
        ]:
            held, kind = {"it": [thing]}, type(thing).__name__
            reason = rf"is a pscluster\..*\.{kind}, which stays in the script: {hint}"
            ways: list[tuple[Callable[..., object], str]] = [
                (lambda thing=thing: thing, "thing"),
                (lambda held=held: held, r"held\['it'\]\[0\]"),
                (functools.partial(triple, thing), r"args\[0\]"),
            ]
            for captured, name in ways:
                with pytest.raises(TypeError, match=f"its variable .{name}. {reason}"):
                    coordinator.schedule(captured)
            if thing is not value:
                with pytest.raises(TypeError, match=rf"args\[0\]\['it'\]\[0\] {reason}"):
                    coordinator.schedule(triple, args=(held,))
    assert value.fetch(TIMEOUT) == 3
    assert coordinator.done()


def test_what_is_made_in_the_script_alone(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """In a function it is an error that says so, and what to do, however one tries."""
    tries: list[tuple[Callable[[], Any], str]] = [
        (lambda: Variable(1.0), "a Variable was created in a step function, .* in the script, inside .* or pass it"),
        (lambda: optimizers.SGD(0.1), "optimizer SGD was created in a step function, .* in the script, inside"),
        (lambda: strategy.scope(), "a strategy has no 'scope', only .*: create variables, .* in the script"),
        (lambda: strategy.variables, "a strategy has no 'variables', only read"),
        (lambda: ClusterCoordinator(strategy), "in a step function: schedule functions in the script"),
    ]
    for step, said in tries:
        with pytest.raises((errors.MisuseError, AttributeError), match=said):
            coordinator.schedule(step).fetch(TIMEOUT)
        with pytest.raises(errors.FunctionError):
            coordinator.join(TIMEOUT)
    assert coordinator.schedule(lambda: hasattr(strategy, "scope")).fetch(TIMEOUT) is False


def test_results_that_cannot_be_sent(coordinator: ClusterCoordinator) -> None:
    """They fail the function with a TypeError that has their path in the structure."""
    for make, message in [
        (lambda: {"a": [1, threading.Lock()]}, r"the result\['a'\]\[1\] is a _thread.lock"),
        (lambda: (i for i in range(3)), "the result is a generator, which can't be sent"),
        (lambda: np.array([None]), "the result is an array of Python objects"),
    ]:
        value = coordinator.schedule(make)
        with pytest.raises(TypeError, match=message) as caught:
            coordinator.join(TIMEOUT)
        assert isinstance(caught.value, errors.FunctionError)
        with pytest.raises(TypeError, match=message):
            value.fetch(TIMEOUT)


def test_results_that_nobody_wants(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """The result of a function whose RemoteValue was dropped is not sent, so it may be anything (row 53)."""
    for _ in range(NUM_WORKERS):
        coordinator.schedule(wait_for_file, args=(gate.path,))
    coordinator.schedule(threading.Lock)
    gate.open()
    coordinator.join(TIMEOUT)


# RemoteValues as arguments


def test_remote_values_as_arguments(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """A RemoteValue may stand anywhere in the arguments, ready or not; the function gets its value."""
    ready = coordinator.schedule(triple, args=(1,))
    coordinator.join(TIMEOUT)

    def later(x: Any, path: str) -> Any:
        wait_for_file(path)
        return x

    late = coordinator.schedule(later, args=([1, np.arange(3)], gate.path))
    args = (ready, [late, {"k": late, ready: "key"}], Pair(late, ready), {ready}, Batch(np.zeros(1), more=late))
    value = coordinator.schedule(echo, args=args, kwargs={"late": late})
    assert value.status is RemoteValueStatus.NOT_READY
    gate.open()
    x = [1, np.arange(3)]
    expected = (3, [x, {"k": x, 3: "key"}], Pair(x, 3), {3}, Batch(np.zeros(1), more=x))
    assert identical(value.fetch(TIMEOUT), (expected, {"late": x}))


def test_a_remote_value_twice(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """The same RemoteValue may occur twice in one call."""
    wait = coordinator.schedule(wait_for_file, args=(gate.path,))
    one = coordinator.schedule(lambda _: np.ones(100_000), args=(wait,))
    value = coordinator.schedule(lambda *arrays: sum(float(array.sum()) for array in arrays), args=(one, one, one))
    gate.open()
    assert value.fetch(TIMEOUT) == 300_000


def test_chains_of_remote_values(coordinator: ClusterCoordinator) -> None:
    """A long chain, each function taking the result of the one before, needs nothing fetched in between."""
    value = coordinator.schedule(triple, args=(1,))
    for _ in range(100):
        value = coordinator.schedule(lambda x: x + 1, args=(value,))
    assert value.fetch(TIMEOUT) == 103


def test_a_tree_of_remote_values(coordinator: ClusterCoordinator) -> None:
    """Many values into one, and one into many, large arrays among them."""
    leaves = [coordinator.schedule(np.full, args=(50_000, i)) for i in range(16)]
    totals = [coordinator.schedule(lambda pair: pair[0] + pair[1], args=(leaves[i : i + 2],)) for i in range(0, 16, 2)]
    value = coordinator.schedule(lambda arrays: float(np.sum(arrays)), args=(totals,))
    del leaves, totals
    assert value.fetch(TIMEOUT) == 50_000 * sum(range(16))


def test_what_the_user_does_to_a_fetched_array(coordinator: ClusterCoordinator) -> None:
    """A fetched array is the user's own: a function that takes the RemoteValue gets the value as it came."""
    for size in (10, 100_000):
        value = coordinator.schedule(np.ones, args=(size,))
        value.fetch(TIMEOUT)[:] = 0
        assert coordinator.schedule(np.sum, args=(value,)).fetch(TIMEOUT) == size


def test_a_record_of_a_class_that_the_other_worker_has_not_met(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """A dataclass instance that one worker returned is taken by another, which has to be told of the class."""
    first = coordinator.schedule(Batch, args=(np.arange(3), "x"))
    assert first.fetch(TIMEOUT).label == "x"

    def step(batch: Any, path: str) -> tuple[int, str]:
        leave_mark(path, str(experimental_get_current_worker_index()))
        wait_for_file(path)  # so that every worker gets one
        return experimental_get_current_worker_index(), batch.label

    values = [coordinator.schedule(step, args=(first, gate.path)) for _ in range(NUM_WORKERS)]
    until(lambda: len(marks(gate)) == NUM_WORKERS, "every worker has one")
    gate.open()
    assert sorted(coordinator.fetch(values, TIMEOUT)) == [(i, "x") for i in range(NUM_WORKERS)]


def nested(levels: int, inside: Any = 0) -> Any:
    """A list in a list in a list."""
    for _ in range(levels):
        inside = [inside]
    return inside


def test_arguments_that_are_too_deep_together(coordinator: ClusterCoordinator) -> None:
    """A deep value in a deep argument, each of which could be sent, fails the function and nothing else."""
    value = coordinator.schedule(nested, args=(40,))
    deep = coordinator.schedule(echo, args=(nested(38, value),))
    with pytest.raises(errors.FunctionError, match="nested more than 44 levels deep"):
        coordinator.join(TIMEOUT)
    with pytest.raises(errors.FunctionError, match="nested more than 44 levels deep"):
        deep.fetch(TIMEOUT)
    assert coordinator.schedule(triple, args=(1,)).fetch(TIMEOUT) == 3


def test_an_argument_whose_function_failed(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """Functions that wait for a value that will never be are cancelled; later ones are refused at their schedule."""

    def fails(path: str) -> None:
        wait_for_file(path)
        raise ValueError("no value")

    failing = coordinator.schedule(fails, args=(gate.path,))
    waiting = coordinator.schedule(triple, args=(failing,))
    after = coordinator.schedule(triple, args=([waiting],))
    gate.open()
    with pytest.raises(ValueError, match="no value"):
        coordinator.join(TIMEOUT)
    for value in (waiting, after):
        with pytest.raises(errors.CancelledError, match="schedule it again"):
            value.fetch(TIMEOUT)
    for value in (failing, waiting):
        with pytest.raises(
            errors.CancelledError, match=r"an argument has no value: <RemoteValue of .*: (failed|cancelled)>"
        ):
            coordinator.schedule(triple, args=(value,))
    coordinator.join(TIMEOUT)


# The queue


def test_order_of_the_queue(single: LocalCluster, gate: Gate) -> None:
    """Functions start first in, first out (row 39)."""
    with ParameterServerStrategy(single) as strategy:
        coordinator = ClusterCoordinator(strategy)
        order: list[int] = []

        def step(i: int) -> list[int]:
            order.append(i)
            return order

        coordinator.schedule(wait_for_file, args=(gate.path,))
        for i in range(300):
            last = coordinator.schedule(step, args=(i,))
        gate.open()
        assert last.fetch(TIMEOUT) == list(range(300))


def test_order_after_what_waits(single: LocalCluster, gate: Gate) -> None:
    """A function whose argument is not ready lets others by."""
    with ParameterServerStrategy(single) as strategy:
        coordinator = ClusterCoordinator(strategy)
        order: list[str] = []

        def step(name: str, _: Any = None) -> list[str]:
            order.append(name)
            return order

        first = coordinator.schedule(wait_for_file, args=(gate.path,))
        waiting = coordinator.schedule(step, args=("waits", first))
        coordinator.schedule(step, args=("goes",))
        gate.open()
        assert waiting.fetch(TIMEOUT) == ["goes", "waits"]


def test_no_function_waits_for_a_long_one(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """While a worker is busy for long, functions go to the one that is idle, and not into the busy one's queue."""
    coordinator.fetch([coordinator.schedule(triple, args=(1,)) for _ in range(100)], TIMEOUT)  # they seem quick now
    long = coordinator.schedule(wait_for_file, args=(gate.path,))
    for i in range(50):
        assert coordinator.schedule(triple, args=(i,)).fetch(TIMEOUT) == 3 * i
    values = [coordinator.schedule(triple, args=(i,)) for i in range(50)]
    assert coordinator.fetch(values, TIMEOUT) == [3 * i for i in range(50)]
    assert long.status is RemoteValueStatus.NOT_READY


def test_join_and_done(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """join returns at once when nothing is scheduled, and may be repeated; done never waits (rows 41, 42)."""
    coordinator.join(TIMEOUT)
    coordinator.join()
    assert coordinator.done() is True
    values = [coordinator.schedule(wait_for_file, args=(gate.path,)) for _ in range(3 * NUM_WORKERS)]
    assert coordinator.done() is False
    gate.open()
    coordinator.join(TIMEOUT)
    assert coordinator.done() is True
    assert all(value.status is RemoteValueStatus.READY for value in values)
    coordinator.join(TIMEOUT)


def test_many_functions_run_once_each(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """Every one of thousands of functions runs, and runs once."""
    with strategy.scope():
        counter = Variable(np.zeros((), np.int64), name="counter")
    for _ in range(3000):
        coordinator.schedule(counter.assign_add, args=(1,))
    coordinator.join(TIMEOUT)
    assert counter.numpy() == 3000


def test_schedule_from_several_threads(coordinator: ClusterCoordinator) -> None:
    """Threads may schedule, fetch and join at the same time; each gets its own results."""
    failures: list[BaseException] = []

    def produce(thread: int) -> None:
        try:
            values = []
            for i in range(100):
                values.append(coordinator.schedule(operator.mul, args=(thread, i)))
                if i % 30 == 0:
                    coordinator.join(TIMEOUT)
            assert coordinator.fetch(values, TIMEOUT) == [thread * i for i in range(100)]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=produce, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert failures == []
    coordinator.join(TIMEOUT)


def test_schedule_during_join(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """While one thread is in join another one may schedule, and join waits for that as well (better than row 41)."""
    values = [coordinator.schedule(wait_for_file, args=(gate.path,)) for _ in range(NUM_WORKERS)]
    begun, ready_at_return = threading.Event(), list[bool]()

    def joins() -> None:
        begun.set()
        coordinator.join(TIMEOUT)
        ready_at_return.extend(value.status is RemoteValueStatus.READY for value in values)

    thread = threading.Thread(target=joins)
    thread.start()
    begun.wait(TIMEOUT)
    # A join that blocked these would block them for good.
    values += [coordinator.schedule(triple, args=(i,)) for i in range(20)]
    assert thread.is_alive()
    gate.open()
    thread.join(TIMEOUT)
    assert ready_at_return == [True] * (NUM_WORKERS + 20)


def held_by_workers(coordinator: ClusterCoordinator) -> tuple[int, int]:
    """(functions that wait, functions with workers)."""
    words = coordinator.describe().split()
    return int(words[0]), int(words[3])


def test_a_full_queue_blocks_the_producer(strategy: ParameterServerStrategy, gate: Gate) -> None:
    """With max_queued functions waiting schedule blocks, and goes on when there is room (row 38)."""
    coordinator = ClusterCoordinator(strategy, max_queued=5)
    scheduled: list[RemoteValue] = []

    def produce() -> None:
        for _ in range(40):
            scheduled.append(coordinator.schedule(wait_for_file, args=(gate.path,)))  # noqa: PERF401  (it is watched)

    thread = threading.Thread(target=produce)
    thread.start()
    until(lambda: held_by_workers(coordinator)[0] == 5, "the queue is full")
    until(lambda: len(scheduled) == sum(held_by_workers(coordinator)), "the producer has seen it")
    assert thread.is_alive()
    assert len(scheduled) < 40
    gate.open()
    thread.join(TIMEOUT)
    coordinator.join(TIMEOUT)
    assert [value.status for value in scheduled] == [RemoteValueStatus.READY] * 40


def test_an_error_frees_a_blocked_producer(strategy: ParameterServerStrategy, gate: Gate) -> None:
    """A producer that waits for room in the queue gets the error if no thread joins."""
    coordinator = ClusterCoordinator(strategy, max_queued=2)
    raised: list[BaseException] = []

    def fails(path: str) -> None:
        wait_for_file(path)
        raise ValueError("the queue is full, and this fails")

    def produce() -> None:
        try:
            for _ in range(40):
                coordinator.schedule(fails, args=(gate.path,))
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    until(lambda: held_by_workers(coordinator)[0] == 2, "the queue is full")
    gate.open()
    thread.join(TIMEOUT)
    assert len(raised) == 1
    assert "the queue is full, and this fails" in str(raised[0])
    assert held_by_workers(coordinator) == (0, 0)
    coordinator.join(TIMEOUT)


def test_blocked_functions_count_in_the_queue(strategy: ParameterServerStrategy, gate: Gate) -> None:
    """Functions that wait for their arguments fill the queue too, and empty it once they have them."""
    coordinator = ClusterCoordinator(strategy, max_queued=3)
    first = coordinator.schedule(wait_for_file, args=(gate.path,))
    values = [coordinator.schedule(lambda _, i: i, args=(first, i)) for i in range(3)]
    thread = threading.Thread(target=lambda: values.append(coordinator.schedule(triple, args=(1,))))
    thread.start()
    assert held_by_workers(coordinator)[0] == 3
    assert thread.is_alive()
    gate.open()
    thread.join(TIMEOUT)
    assert coordinator.fetch(values, TIMEOUT) == [0, 1, 2, 3]


# What a step function may ask for


def test_the_current_worker_index(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """Inside a function it is the worker's, in a thread of the function's too; elsewhere RuntimeError (row 48)."""

    def step(path: str) -> list[int]:
        indices = [experimental_get_current_worker_index()]
        thread = threading.Thread(target=lambda: indices.append(experimental_get_current_worker_index()))
        thread.start()
        thread.join()
        leave_mark(path, str(indices[0]))
        wait_for_file(path)
        return indices

    values = [coordinator.schedule(step, args=(gate.path,)) for _ in range(NUM_WORKERS)]
    until(lambda: marks(gate) == {str(i) for i in range(NUM_WORKERS)}, "every worker has one")
    gate.open()
    assert sorted(coordinator.fetch(values, TIMEOUT)) == [[i, i] for i in range(NUM_WORKERS)]
    with pytest.raises(RuntimeError, match="only inside a function that runs on a worker"):
        experimental_get_current_worker_index()


def test_run_and_reduce_as_in_the_tutorial(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """As in TensorFlow's tutorial: strategy.run of a replica function, then strategy.reduce (row 14)."""
    with strategy.scope():
        w = Variable(np.zeros(2, np.float32), name="w")
        sgd = optimizers.SGD(1.0)

    def step(x: Any) -> Any:
        def replica_fn(x: Any, scale: float) -> dict[str, Any]:
            sgd.apply_gradients([(scale * x, w)])
            return {"losses": x**2, "batch": len(x)}

        out = strategy.run(replica_fn, args=(x,), kwargs={"scale": 2.0})
        losses = out["losses"]
        return {
            "sum": strategy.reduce(ReduceOp.SUM, losses, axis=0),
            "mean": strategy.reduce("MEAN", {"l": losses}, axis=None),
            "mean over": strategy.reduce(ReduceOp.MEAN, {"l": [losses]}, axis=0),
            "replicas": strategy.num_replicas_in_sync,
            "local": strategy.experimental_local_results(out["batch"]),
        }

    x = np.array([1.0, 3.0], np.float32)
    results = coordinator.schedule(step, args=(x,)).fetch(TIMEOUT)
    assert results["sum"] == 10
    assert results["mean"]["l"].tolist() == [1, 9]
    assert results["mean over"] == {"l": [5]}
    assert (results["replicas"], results["local"]) == (1, (2,))
    assert w.numpy().tolist() == [-2, -6]
    assert strategy.num_replicas_in_sync == 1
    assert strategy.experimental_distribute_dataset(results) is results
    assert strategy.experimental_distribute_datasets_from_function(triple) is triple


def test_run_and_reduce_in_the_script(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """They do what they say, and the log warns, once each, that no worker does it."""
    _warn_outside.cache_clear()
    for _ in range(2):
        assert strategy.run(triple, args=(2,)) == 6
        assert strategy.reduce("sum", np.arange(4), axis=0) == 6
    told = [record.getMessage() for record in caplog.records if "outside a scheduled function" in record.getMessage()]
    assert [message.split("(")[0] for message in told] == ["strategy.run", "strategy.reduce"]
    assert "call it in a function that is given to ClusterCoordinator.schedule()" in told[0]
    assert coordinator.schedule(lambda: strategy.run(triple, args=(2,))).fetch(TIMEOUT) == 6
    with pytest.raises(ValueError, match="median"):
        strategy.reduce("median", [1], axis=0)


def test_nothing_is_made_inside_a_step(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """A variable or an optimizer can't be made in a step function, whatever scope the script is in."""
    for make in (lambda: Variable(1.0), lambda: optimizers.SGD(0.1)):
        with strategy.scope():
            coordinator.schedule(make)
        with pytest.raises(errors.MisuseError, match="created in a step function, which is not allowed"):
            coordinator.join(TIMEOUT)


# Strategies and coordinators


def test_one_coordinator_a_strategy(strategy: ParameterServerStrategy) -> None:
    """Making the coordinator of a strategy again gives the same one, from several threads too (row 20)."""
    coordinators: list[ClusterCoordinator] = []
    barrier = threading.Barrier(4)

    def make() -> None:
        barrier.wait(TIMEOUT)
        coordinators.append(ClusterCoordinator(strategy))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(coordinators) == 4
    assert len(set(map(id, [*coordinators, ClusterCoordinator(strategy=strategy)]))) == 1
    assert coordinators[0].strategy is strategy
    assert coordinators[0].schedule(triple, args=(1,)).fetch(TIMEOUT) == 3


@pytest.mark.parametrize("wrong", [None, "strategy", LocalCluster, 3])
def test_a_coordinator_of_something_else(wrong: Any) -> None:
    """Any other strategy is refused with ValueError, as by TensorFlow (row 20)."""
    with pytest.raises(ValueError, match=r"a ClusterCoordinator needs a ParameterServerStrategy, not (a |an |None)"):
        ClusterCoordinator(wrong)


def test_impossible_limits(strategy: ParameterServerStrategy) -> None:
    """A queue for nothing and functions without an attempt are refused, by name."""
    with pytest.raises(ValueError, match="max_queued is 0; it must be a number, 1 or more"):
        ClusterCoordinator(strategy, max_queued=0)
    with pytest.raises(ValueError, match="max_attempts is -1; it must be a number, 1 or more"):
        ClusterCoordinator(strategy, max_attempts=-1)


def test_strategies_one_after_the_other(cluster: LocalCluster) -> None:
    """On one cluster a new strategy begins, empty, when the one before is closed; closing twice is fine."""
    names = []
    for round_ in range(3):
        strategy = ParameterServerStrategy(cluster)
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            w = Variable(float(round_), name="w")
            names.append(Variable(0).name)
        assert coordinator.schedule(w.read_value).fetch(TIMEOUT) == round_
        strategy.close()
        strategy.close()
    assert names == [names[0]] * 3


def test_a_second_strategy_at_the_same_time(cluster: LocalCluster, coordinator: ClusterCoordinator) -> None:
    """While one strategy has the cluster another one is refused, with the holder's name, and harms nothing."""
    with pytest.raises(errors.BusyError, match=r"works for chief 0 .*; end that job"):
        ParameterServerStrategy(cluster)
    assert coordinator.schedule(triple, args=(1,)).fetch(TIMEOUT) == 3


def test_after_the_strategy_is_closed(cluster: LocalCluster, gate: Gate) -> None:
    """What was ready stays; what was not is cancelled, a join and a fetch that wait are told; nothing new is taken."""
    strategy = ParameterServerStrategy(cluster)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        w = Variable(1.0, name="w")
    ready = coordinator.schedule(np.arange, args=(100_000,))
    coordinator.join(TIMEOUT)

    def hold(path: str) -> None:
        leave_mark(path, str(experimental_get_current_worker_index()))
        wait_for_file(path)

    running = [coordinator.schedule(hold, args=(gate.path,)) for _ in range(NUM_WORKERS)]
    until(lambda: len(marks(gate)) == NUM_WORKERS, "every worker is held, so that the next function can't run")
    queued = coordinator.schedule(triple, args=(1,))
    raised: list[BaseException] = []

    def waits(call: Callable[[], object]) -> None:
        try:
            call()
        except errors.CancelledError as error:
            raised.append(error)

    calls: list[Callable[[], object]] = [coordinator.join, queued.fetch, running[0].fetch]
    threads = [threading.Thread(target=waits, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    strategy.close("the test is over")
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(raised) == 3
    assert any("the job is over: the test is over" in str(error) for error in raised)
    assert ready.fetch(TIMEOUT).sum() == sum(range(100_000))
    for value in (*running, queued):
        assert value.status is RemoteValueStatus.CANCELLED
    with pytest.raises(errors.CancelledError, match="the job is over"):
        coordinator.schedule(triple, args=(1,))
    with pytest.raises(errors.PsClusterError):
        w.read_value()
    gate.open()


def test_what_is_said_of_a_job_that_is_over(cluster: LocalCluster) -> None:
    """Not that the script has ended, which it has not, nor that something is missing, or could be done again."""
    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset(np.arange(4)).batch(2)
        assert repr(coordinator) == f"<ClusterCoordinator of {strategy!r}>"
    assert repr(strategy) == f"<ParameterServerStrategy 2 ps, {NUM_WORKERS} workers, closed>"
    calls: list[Callable[[], object]] = [
        coordinator.join,
        lambda: coordinator.schedule(triple, args=(1,)),
        lambda: coordinator.evaluate(triple, data, [metrics.Mean()]),
        lambda: coordinator.evaluate(triple, data, [metrics.Mean()], concurrent=True),
        lambda: coordinator.fit(triple, data, verbose=0),
    ]
    for call in calls:
        with pytest.raises(errors.CancelledError) as caught:
            call()
        assert str(caught.value) == "the job is over: its strategy was closed"
    assert coordinator.describe() == "the job is over: nothing is waiting or running"
    assert "missing" not in coordinator.explain()


def test_options_of_a_coordinator_that_there_is(strategy: ParameterServerStrategy) -> None:
    """One a strategy: other options than it was made with are an error, and would change nothing in silence."""
    coordinator = ClusterCoordinator(strategy, max_attempts=2)
    assert ClusterCoordinator(strategy) is coordinator
    assert ClusterCoordinator(strategy, max_attempts=2, max_queued=262_144, worker_lease=30) is coordinator
    for options, said in (({"max_queued": 2}, "max_queued is 2.* 262144"), ({"max_attempts": 3}, "is 3.* with 2")):
        with pytest.raises(errors.MisuseError, match=f"{said}, and a strategy has only one"):
            ClusterCoordinator(strategy, **options)


def test_a_coordinator_of_a_closed_strategy(cluster: LocalCluster) -> None:
    """A coordinator can't be made of a strategy that is closed: it would take workers for a job that is over."""
    strategy = ParameterServerStrategy(cluster)
    strategy.close()
    with pytest.raises(errors.MisuseError, match="this strategy is closed: make another"):
        ClusterCoordinator(strategy)


def test_a_step_that_outlives_its_job(cluster: LocalCluster, gate: Gate) -> None:
    """What still runs for a closed strategy changes nothing of the next one's, which waits for it."""

    def stubborn(variable: Any, path: str) -> None:
        leave_mark(path, str(experimental_get_current_worker_index()))
        wait_for_file(path)
        variable.assign_add(100)

    with ParameterServerStrategy(cluster) as strategy, strategy.scope():
        coordinator = ClusterCoordinator(strategy)
        w = Variable(0.0, name="w")
        for _ in range(NUM_WORKERS):
            coordinator.schedule(stubborn, args=(w, gate.path))
        until(lambda: len(marks(gate)) == NUM_WORKERS, "they run")
    with ParameterServerStrategy(cluster) as strategy, strategy.scope():
        coordinator = ClusterCoordinator(strategy)
        w = Variable(0.0, name="w")
        values = [coordinator.schedule(w.assign_add, args=(1,)) for _ in range(20)]
        assert {value.status for value in values} == {RemoteValueStatus.NOT_READY}
        gate.open()
        coordinator.join(TIMEOUT)
        assert w.numpy() == 20


def test_the_environment_of_workers(coordinator: ClusterCoordinator) -> None:
    """Functions run in other processes than this one."""
    pids = set(coordinator.fetch([coordinator.schedule(os.getpid) for _ in range(20)], TIMEOUT))
    assert os.getpid() not in pids


def test_a_record_with_a_captured_function_and_handles(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator
) -> None:
    """As the adapters of frameworks use it: an argument, or captured; the worker gets the function itself."""
    with strategy.scope():
        variable = Variable(np.float32(3))
    made = Pair(FunctionHandle(capture(lambda x: x + FACTOR)), {"v": variable})

    def call(pair: Pair) -> float:
        return float(pair.left(pair.right["v"].numpy()))

    assert coordinator.schedule(call, args=(made,)).fetch() == 6.0
    assert coordinator.schedule(lambda: float(made.left(made.right["v"].numpy()))).fetch() == 6.0
    assert holds_handle(made)
    assert holds_handle(Batch(np.zeros(1), more=[variable]))
    assert not holds_handle(Batch(np.zeros(1)))
