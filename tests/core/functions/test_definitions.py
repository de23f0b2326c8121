"""Definitions: what is sent by reference and by value, and that a worker in another process gets the same.

The script tests run a user's script as `__main__` in one process (the coordinator), which writes down what it
would send, and follow that in another (the worker), where the script is the same, another one, or missing.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import math
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
import numpy as np
import pytest
from tests.core.functions.support import Thing, things

from pscluster.coordinator.queue.captured_functions import CapturedFunctions
from pscluster.core.errors import ProtocolError, UnknownVariableError
from pscluster.core.functions.definitions import CapturedFunction, capture, record_resolver, resolve
from pscluster.core.functions.loading import UnresolvedReference
from pscluster.core.functions.policy import SerializationPolicy, policy_of
from pscluster.core.functions.sources import importer_of
from pscluster.core.handles import Handle
from pscluster.core.values import decode, encode
from pscluster.core.values.records import imported_class
from pscluster.v1 import definition_pb2, value_pb2


def called(captured: CapturedFunction, *args: Any, form: int = 0) -> Any:
    """The result of what a worker in this process would make of the captured function."""
    definition = list(captured.forms())[form]
    return resolve(definition, b"", things)(*args)


# Two processes

SENDER = '''
import pickle, sys
from pscluster.core.values import decode, encode_call
from pscluster.v1 import definition_pb2, value_pb2
from pscluster.core.functions.definitions import capture
from pscluster.core.functions.sources import is_library


def talk(*calls):
    """What a coordinator does with the functions of a script: send calls, or read their results."""
    if sys.argv[2:]:
        value = value_pb2.Value.FromString(open(sys.argv[2], "rb").read())
        print(decode(value))
        return
    sent, classes = [], {}

    def forms(captured):
        return [form.SerializeToString() for form in captured.forms()]

    def define(cls):
        if is_library(cls.__module__):
            return ""
        definition = capture(cls)
        classes[definition.digest] = forms(definition)
        return definition.digest

    for function, *args in calls:
        sent.append((forms(capture(function)), encode_call(args, {}, define=define).SerializeToString()))
    pickle.dump((classes, sent), open(sys.argv[1], "wb"))
'''

FOLLOWER = """
import pickle, sys
from pscluster.core.values import decode_call, encode
from pscluster.v1 import definition_pb2, value_pb2
from pscluster.core.functions.definitions import record_resolver, resolve
from pscluster.core.functions.loading import UnresolvedReference


def follow(forms):
    for number, form in enumerate(forms):
        try:
            definition = definition_pb2.Definition.FromString(form)
            function = resolve(definition, b"", lambda kind, key: (kind, key))
        except UnresolvedReference as error:
            print(f"unresolved: {error}.", end=" ")
        else:
            print("by value" if definition.pickle else "by reference")
            return function
    sys.exit(3)


classes, sent = pickle.load(open(sys.argv[1], "rb"))
defined = {digest: follow(forms) for digest, forms in classes.items()}
results = []
for forms, call in sent:
    function = follow(forms)
    args, kwargs = decode_call(
        value_pb2.Value.FromString(call), resolve_record=record_resolver(defined.__getitem__)
    )
    results.append(function(*args))
open(sys.argv[2], "wb").write(encode(results).SerializeToString())
"""


class Cluster:
    """The two processes' folders, and what is sent between them."""

    def __init__(self, root: Path) -> None:
        self.coordinator, self.worker, self.tools = root / "coordinator", root / "worker", root / "tools"
        for folder in (self.coordinator, self.worker, self.tools):
            folder.mkdir()
        (self.tools / "sender.py").write_text(SENDER)
        (self.tools / "follower.py").write_text(FOLLOWER)
        self.script = self.coordinator / "train.py"
        self.sent, self.results = root / "sent", root / "results"

    def send(self, script: str) -> None:
        """Run a script as the coordinator; its guard calls `sender.talk`."""
        self.script.write_text(textwrap.dedent(script))
        self._run(self.coordinator, self.script, self.sent)

    def follow(self) -> list[str]:
        """Act as the worker, and return how it found each function."""
        return self._run(self.worker, self.tools / "follower.py", self.sent, self.results).splitlines()

    def read(self) -> str:
        """Run the script again to read the results."""
        return self._run(self.coordinator, self.script, self.sent, self.results).strip()

    def values(self) -> Any:
        """The results, if they are not of a class in the script."""
        return decode(value_pb2.Value.FromString(self.results.read_bytes()))

    def _run(self, folder: Path, *command: Path) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(self.tools), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two folders for two processes."""
    return Cluster(tmp_path)


SAFE = '''
"""A script that only defines."""
from __future__ import annotations

import math
import os.path
from collections import Counter as Count

import beside

RATE = 0.5
TABLE: dict[str, int] = {"one": 1}
later: int


def helper(x, *, times=2):
    return [(lambda y: y * RATE)(x) * n for n in range(times)]


def step(x, offset=1):
    count = Count(os.path.basename("/a/bb"))
    return sum(helper(x)) + offset + TABLE["one"] + math.floor(1.5), count["b"], beside.NAME, step.__module__[:18]


if __name__ == "__main__":
    from sender import talk

    talk((step, 8))
'''


def test_a_script_that_only_defines_goes_by_reference(cluster: Cluster) -> None:
    """It is resolved in the same file, wherever the worker has it, and sent by value if that differs or is missing."""
    (cluster.coordinator / "beside.py").write_text("NAME = 'beside'")
    cluster.send(SAFE)
    assert cluster.follow() == ["by reference"]
    assert cluster.values() == [(7.0, 2, "beside", "_pscluster_script_")]

    (cluster.coordinator / "beside.py").rename(cluster.worker / "beside.py")
    moved = cluster.script.rename(cluster.worker / "train.py")
    assert cluster.follow() == ["by reference"]

    moved.write_text(moved.read_text().replace("0.5", "0.25"))
    (said,) = cluster.follow()
    assert "train.py is missing here, or of another version; looked at" in said
    assert said.endswith("by value")
    assert cluster.values() == [(7.0, 2, "beside", "__main__")]

    moved.unlink()
    (said,) = cluster.follow()
    assert said.endswith("by value")
    assert cluster.values()[0][0] == 7.0


def test_a_script_that_cannot_be_loaded_comes_by_value(cluster: Cluster) -> None:
    """An import that only the coordinator can resolve does not stop a function that does not use it."""
    (cluster.coordinator / "only_here.py").write_text(
        "import os\nif 'worker' in os.getcwd(): raise RuntimeError('no display')"
    )
    cluster.send(
        """
        import only_here
        def step(x):
            return x + 1
        if __name__ == "__main__":
            from sender import talk
            talk((step, 1))
        """
    )
    (said,) = cluster.follow()
    assert "can't be loaded here: RuntimeError: no display" in said
    assert said.endswith("by value")
    assert cluster.values() == [2]


def test_a_worker_looks_beside_the_script(cluster: Cluster) -> None:
    """A function by value finds the modules beside the coordinator's script, if the worker has that folder."""
    (cluster.coordinator / "beside.py").write_text("def double(x): return x * 2")
    cluster.send(
        """
        import beside
        if __name__ == "__main__":
            from sender import talk
            talk((lambda x: beside.double(x), 4))
        """
    )
    assert cluster.follow() == ["by value"]
    assert cluster.values() == [8]


OF_MODULES = {
    "a step, in a function of the library": "partial_of('evaluate', states_of, beside.predict, {}), []",
    "a class, in a container": "partial_of('evaluate', states_of, len, {'largest': beside.Metric()}), []",
    "an object": "partial_of('evaluate', states_of, abs, {}, beside.Elements())",
    "in a partial of a builtin": "functools.partial(max, [1, 2], key=beside.double)",
    "of another folder": "lambda: elsewhere.NAME",
    "imported when it runs": "lambda: lazily()",
}


@pytest.mark.parametrize("call", OF_MODULES.values(), ids=OF_MODULES.keys())
def test_a_worker_looks_where_the_coordinator_does(cluster: Cluster, call: str, tmp_path: Path) -> None:
    """Whatever is sent may name modules beside the script, or in a folder that the script added."""
    (cluster.coordinator / "beside.py").write_text(
        textwrap.dedent(
            """
            class Elements:
                def __iter__(self): return iter([1])
            class Metric:
                def initial(self): return {}
            def predict(batch): return batch
            def double(x): return x * 2
            """
        )
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "elsewhere.py").write_text("NAME = 'elsewhere'")
    cluster.send(
        f"""
        import functools, sys
        sys.path.append({str(tmp_path / "more")!r})
        import beside, elsewhere
        from pscluster.core.functions.definitions import partial_of
        from pscluster.worker.steps.evaluation import states_of
        def lazily():
            import later
            return later.NAME
        if __name__ == "__main__":
            from sender import talk
            talk(({call},))
        """
    )
    (cluster.coordinator / "later.py").write_text("NAME = 'later'")
    assert cluster.follow() == ["by value"]


def test_records_of_the_script_go_there_and_back(cluster: Cluster) -> None:
    """Dataclasses and named tuples of `__main__` work as arguments and results, for functions sent either way."""
    cluster.send(
        """
        from dataclasses import dataclass, field
        from typing import NamedTuple

        class Pair(NamedTuple):
            a: int
            b: object

        @dataclass(frozen=True)
        class Batch:
            x: int
            y: list = field(default_factory=list)

            def total(self):
                return self.x + sum(self.y)

        @dataclass(slots=True)
        class Result:
            total: int
            batch: Batch

        def same(batch):                 # by reference: it names no class
            return batch, batch.total()

        def step(batch, pair):           # by value
            assert isinstance(batch, Batch) and isinstance(pair, Pair)
            return Pair(pair.b, Result(batch.total(), batch))

        if __name__ == "__main__":
            from sender import talk
            batch = Batch(1, [2, 3])
            def local(pair):
                return isinstance(pair, Pair), Batch(5)
            talk((same, batch), (step, batch, Pair(1, 2)), (local, Pair(3, 4)), (Batch, 7))
        """
    )
    ways = cluster.follow()
    assert ways == ["by value", "by value", "by reference", "by value", "by value", "by value"]
    assert cluster.read() == (
        "[(Batch(x=1, y=[2, 3]), 6), Pair(a=2, b=Result(total=6, batch=Batch(x=1, y=[2, 3]))), "
        "(True, Batch(x=5, y=[])), Batch(x=7, y=[])]"
    )


def test_functions_of_modules_go_by_reference_or_whole(cluster: Cluster) -> None:
    """Functions of a module that the worker has are sent by reference; otherwise by value, with the module's
    helpers."""
    module = cluster.coordinator / "steps.py"
    module.write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            FACTOR = 3
            @dataclass
            class Out:
                x: int
            def helper(x):
                return Out(x * FACTOR)
            def step(x):
                return helper(x).x, __name__
            def closure(y):
                def inner(x):
                    return helper(x).x + y
                return inner
            """
        )
    )
    cluster.send(
        """
        from steps import closure, step
        if __name__ == "__main__":
            from sender import talk
            talk((step, 2), (closure(1), 2))
        """
    )
    assert cluster.follow() == ["by reference", "by value"], "the file is here, at its own path"
    assert cluster.values() == [(6, "steps"), 7]
    module.rename(cluster.worker / "steps.py")
    (cluster.worker / "steps.py").write_text("def step(x): return 'another'\ndef helper(x): return 'another'")
    (cluster.worker / "steps.py").rename(cluster.tools / "steps.py")
    said = cluster.follow()
    assert "unresolved: module steps is another version here" in said[0]
    assert "unresolved: module steps is another version here" in said[1], "though it has what the closure uses"
    assert cluster.values() == [(6, "steps"), 7]
    (cluster.tools / "steps.py").unlink()
    said = cluster.follow()
    assert "step can't be loaded on this worker (ModuleNotFoundError: No module named 'steps')" in said[0]
    assert "No module named 'steps'" in said[1]
    assert cluster.values() == [(6, "steps"), 7]


# A script as `__main__`, what is decided

BASE = """
import math
RATE = 0.5
class Result: pass
def helper(x, *, times=2):
    return [x * RATE * n for n in range(times)]
def step(x, offset=1):
    return sum(helper(x)) + offset + math.floor(1.5)
def makes():
    return Result()
def file():
    return __file__
def unset():
    return handle
def main():
    CHANGE
    from pscluster.core.functions.definitions import capture
    for function in (step, makes, file, unset, lambda: 1, Result):
        print(function.__name__, capture(function).by_reference is not None, end=" ")
if __name__ == "__main__":
    main()
"""

SCRIPTS = {
    "as it is": ("", "", "pass"),
    "with a handle": (
        "",
        "",
        "global handle; from pscluster.core.handles import Handle as H; "
        "handle = type('T', (H,), dict(handle_kind='a', handle_key='b'))()",
    ),
    "code at the top level": ("RATE = 0.5", "RATE = 0.5\nprint(end='')", "pass"),
    "a computed global": ("RATE = 0.5", "RATE = 1 / 2", "pass"),
    "a global in two steps": ("RATE = 0.5", "RATE = 0.5\nRATE += 0.25", "pass"),
    "a changed global": ("", "", "global RATE; RATE = 0.25"),
    "a global of another type": ("RATE = 0.5", "RATE = 1", "global RATE; RATE = 1.0"),
    "a changed default": ("", "", "step.__defaults__ = (2,)"),
    "a computed default": ("times=2", "times=int('2')", "pass"),
    "a decorated helper": ("def helper", "@(lambda function: function)\ndef helper", "pass"),
    "a replaced helper": ("", "", "global helper; helper = lambda x: [x]"),
    "a replaced code": ("", "", "helper.__code__ = makes.__code__"),
    "an attribute": ("", "", "step.seen = 1"),
    "a replaced import": ("", "", "global math; import cmath as math"),
    "an edited file": ("", "", "open(__file__, 'a').write('\\n#'); text = open(__file__).read(); "
                       "open(__file__, 'w').write(text.replace('offset', 'another'))"),
}  # fmt: skip


def test_what_lets_a_script_go_by_reference(tmp_path: Path) -> None:
    """A function that uses anything that the file does not say, or no longer says, is sent by value."""
    paths = []
    for index, (old, new, change) in enumerate(SCRIPTS.values()):
        text = BASE.replace(old, new) if old else BASE
        paths.append(tmp_path / f"script_{index}.py")
        paths[-1].write_text(text.replace("CHANGE", change))
    # Like `pscluster coordinator SCRIPT`; one process for all.
    runner = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__'); print()"
    command = [sys.executable, "-c", runner, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    outcome = dict(zip(SCRIPTS, done.stdout.splitlines(), strict=True))
    always = "makes False file False unset {} <lambda> False Result False "
    assert outcome.pop("as it is") == f"step True {always.format(True)}"
    assert outcome.pop("with a handle") == f"step True {always.format(False)}"
    for name, said in outcome.items():
        assert said.startswith("step False"), name


# In one process

MODULE = """
import functools
from pscluster.core.handles import Handle
SET = None
def plain(x):
    return x + 1
def other(x):
    return plain(x) * 2
class Cell:
    def __init__(self, value): self.value = value
    def method(self, x): return self.value + x
    @classmethod
    def make(cls, value): return cls, value
    @staticmethod
    def static(x): return x * 10
    def __call__(self, x): return self.value * x
class Sub(Cell): pass
def wrap(function):
    @functools.wraps(function)
    def wrapped(*args): return function(*args)
    return wrapped
@wrap
def decorated(x): return x - 1
@functools.lru_cache(maxsize=7)
def cached(x): return plain(x)
def uses(x): return x, SET
@functools.cache
def cached_use(x): return x, SET
def outer(y):
    def inner(x): return plain(x) + y
    return inner
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An importable module of the user's."""
    (tmp_path / "users_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("users_module")
    sys.modules.pop("users_module", None)


def test_what_a_module_has_by_name_goes_by_reference(module: Any) -> None:
    """Functions, classes, class and static methods, and decorated ones are found by name, so sent by name."""
    for function in (module.plain, module.Cell, module.Cell.make, module.Cell.static, module.decorated, module.cached):
        captured = capture(function)
        assert captured.by_reference is not None, function
        assert captured.by_reference.module == "users_module"
        assert len(captured.by_reference.source_digest) == 64
        assert captured.digest == captured.by_reference.digest == capture(function).digest
        resolved = resolve(captured.by_reference, b"", things)
        assert resolved == function
    for function in (math.sqrt, np.mean, len, dict, textwrap.dedent):
        captured = capture(function)
        assert captured.by_reference is not None
        assert resolve(captured.by_reference, b"", things) is function
    assert called(capture(np.add), 1, 2) == 3


def test_everything_else_that_can_be_called_goes_by_value(module: Any) -> None:
    """Lambdas, closures, partials, bound methods and callable objects work, and are the same each time."""
    offset = 5
    cell = module.Cell(3)

    def nested(x: int) -> int:
        return x + offset

    cases: list[tuple[Callable[..., Any], str, Any]] = [
        (lambda x: x + offset, "<lambda>", 7),
        (nested, "nested", 7),
        (functools.partial(nested), "nested", 7),
        (functools.partial(module.plain), "plain", 3),
        (cell.method, "Cell.method", 5),
        (cell, "Cell", 6),
        (module.outer(2), "inner", 5),
        (functools.lru_cache(nested), "nested", 7),
    ]
    for function, name, result in cases:
        captured = capture(function)
        assert captured.by_reference is None, name
        assert captured.name == name
        assert captured.digest == capture(function).digest
        assert called(captured, 2) == result
    assert called(capture(module.Sub.make), 1)[0] is module.Sub
    assert len({capture(function).digest for function, _, _ in cases}) == len(cases)


def test_captured_values_are_those_of_the_moment(module: Any) -> None:
    """What a function by value captured may change later: the worker gets what it was."""
    values = [1]

    def step() -> list[int]:
        return [*values, module.plain(1)]

    captured, inner = capture(step), capture(module.outer(values[0]))
    values.append(2)
    assert called(captured) == [1, 2]
    assert capture(step).digest != captured.digest
    forms = list(inner.forms())
    assert len(forms) == 2, "for a worker that has the module, and for one that has not"
    assert all(resolve(form, b"", things)(1) == 3 for form in forms)
    assert inner.by_value() == forms[0].pickle
    assert resolve(definition_pb2.Definition(), memoryview(inner.by_value()), things)(1) == 3


def test_helpers_of_a_module_that_was_edited(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker keeps an imported module: functions of another version of the file are sent by value."""
    names: dict[str, Any] = {"__name__": "a notebook", "plain": module.plain}
    exec("def step(x): return plain(x)", names)
    (tmp_path / "users_steps.py").write_text("from users_module import plain\ndef step(x): return plain(x)\n")
    steps: Any = importlib.import_module("users_steps")
    monkeypatch.delitem(sys.modules, "users_steps")
    monkeypatch.setitem(sys.modules, "users_steps", steps)
    before = [capture(names["step"]), capture(steps.step)]
    assert [definition.by_reference is None for definition in before] == [True, False]
    first = [called(definition, 1) for definition in before]
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("def plain(", "def plain(x): return 'edited'\ndef old(", 1))
    importlib.reload(module)
    names["plain"] = steps.plain = module.plain
    after = [capture(names["step"]), capture(steps.step)]
    module.plain = steps.step = None  # on the worker there are the first versions
    assert not {definition.digest for definition in before} & {definition.digest for definition in after}
    assert "edited" not in first
    assert [called(definition, 1) for definition in after] == ["edited"] * 2


def test_a_function_by_value_is_not_kept_alive() -> None:
    """The pickle is what was captured: a cache with weak references to the functions forgets them."""
    kept = np.zeros(3)

    def step() -> Any:
        return kept

    captured, alive = capture(step), weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None
    assert called(captured).shape == (3,)


def test_a_reference_has_a_fallback(module: Any) -> None:
    """A function by reference can be sent by value too, with what it uses of its module, under the same digest."""
    captured = capture(module.other)
    reference, by_value = captured.forms()
    assert reference.digest == by_value.digest
    assert b"plain" in by_value.pickle
    other = resolve(by_value, b"", things)
    assert other is not module.other
    assert other(1) == 4
    assert cloudpickle.list_registry_pickle_by_value() == set()
    assert "by reference" in repr(captured)


def test_handles_are_captured_by_name() -> None:
    """A handle in a closure, a default or a container becomes the worker's own."""
    thing, nest = Thing("w"), {"all": [Thing("b")]}

    def step(default: Any = thing) -> Any:
        return thing, nest, default

    worker = "the receiver's thing "
    assert called(capture(step)) == (worker + "w", {"all": [worker + "b"]}, worker + "w")
    assert called(capture(functools.partial(lambda *args: args, thing))) == (worker + "w",)


def test_handles_under_other_names(module: Any) -> None:
    """Handles can be replaced in whatever is captured, in every form, without changing the original."""
    thing = Thing("w")
    seen: list[Handle] = []

    def rename(handle: Handle) -> tuple[str, str]:
        seen.append(handle)
        return handle.handle_kind, f"another {handle.handle_key}"

    def step() -> Any:
        return thing, [thing]

    captured = capture(step).renamed(rename)
    assert called(captured)[0] == "the receiver's thing another w"
    assert seen[0] is thing
    assert captured.handles[0] is thing
    assert captured.digest != capture(step).digest
    module.SET = Thing("v")
    captured = capture(module.uses).renamed(rename)
    forms = len(list(captured.forms()))
    assert {called(captured, 1, form=form)[1] for form in range(forms)} == {"the receiver's thing another v"}
    assert called(capture(step))[0] == "the receiver's thing w"


def test_a_module_with_a_handle_goes_by_value(module: Any) -> None:
    """A worker that imported it would not have the handle, so nothing in that module is sent by name."""
    assert capture(module.uses).by_reference is not None
    for held in (Thing("w"), {"a": [Thing("w")]}, module.Cell(Thing("w"))):
        module.SET = held
        for function in (module.uses, module.cached_use, module.plain, module.Cell):
            assert capture(function).by_reference is None
        for function in (module.uses, module.cached_use, functools.partial(module.uses)):
            _, got = called(capture(function), 1)
            got = got["a"][0] if isinstance(got, dict) else getattr(got, "value", got)
            assert got == "the receiver's thing w"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_an_edited_module_goes_by_value(module: Any) -> None:
    """Running code differs from the file then, and a worker that imports the file would run something else."""
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("x + 1", "x + 100"))
    assert capture(module.plain).by_reference is None
    assert called(capture(module.plain), 1) == 2
    assert capture(module.Cell.static).by_reference is not None


@pytest.mark.parametrize("where", ["closure", "global helper", "attribute", "default", "partial", "item"])
def test_what_cannot_be_pickled_is_named(where: str, module: Any) -> None:
    """The error names the function, the variable, its type and the remedy."""
    lock = threading.Lock()
    cell = module.Cell(lock)
    items = {"key": [1, lock]}

    def helper() -> Any:
        return lock

    def with_default(x: Any = lock) -> Any:
        return x

    function, name, label = {
        "closure": (lambda: lock, "<lambda>", "lock"),
        "global helper": (lambda: helper(), "<lambda>", "lock"),
        "attribute": (lambda: cell, "<lambda>", "cell.value"),
        "default": (with_default, "with_default", "x"),
        "partial": (functools.partial(print, 1, lock), "print", "args[1]"),
        "item": (lambda: items, "<lambda>", "items['key'][1]"),
    }[where]
    with pytest.raises(TypeError) as caught:
        capture(function)
    message = str(caught.value)
    assert message.startswith(f"{name} can't be sent to the workers: its variable {label!r} is a _thread.lock")
    assert message.endswith("Make it inside the function, or pass plain data, arrays or handles")


class Holder:
    """Has arrays inside."""

    def __init__(self, size: int) -> None:
        self.tables = {"small": np.zeros(10, np.int8), "large": np.zeros(size, np.int8)}

    def step(self) -> int:
        """Uses none."""
        return 1


@pytest.mark.parametrize("pickles", [True, False])
def test_what_is_very_large_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, module: Any, pickles: bool
) -> None:
    """The size is shown if a function takes this much to every worker; a dataset would be the remedy."""
    monkeypatch.setattr("pscluster.core.functions.definitions.LARGE_BYTES", 1 << 20)
    large, holder = np.zeros(3 << 20, np.int8), Holder(5 << 20)
    few, many = [1, "x" * (4 << 20)], [np.zeros(1 << 18, np.int8) for _ in range(8)]
    policy = policy_of(pickles, "")
    for function, said in [
        (functools.partial(module.plain, large), "3 MiB ..., 3 MiB of it in its variable 'args[0]', a numpy"),
        (functools.partial(module.plain, x=few), "4 MiB ..., 4 MiB of it in its variable \"keywords['x'][1]\", a str"),
        (functools.partial(module.plain, many), "2 MiB ..., 2 MiB of it in its variable 'args[0]', a list"),
        *([(holder.step, "5 MiB ..., 5 MiB of it in its variable \"self.tables['large']\", a numpy")] * pickles),
    ]:
        caplog.clear()
        capture(function, policy=policy)
        assert said.replace("...", "to every worker") in caplog.text
        assert caplog.text.rstrip().endswith("make that a Variable or a dataset, or load it in the function")
        caplog.clear()
        capture(function, policy=policy, holds_data=True)
        capture(functools.partial(module.plain, 1), policy=policy)
        assert caplog.text == ""


def test_only_what_can_be_called_is_captured() -> None:
    """A value in the place of a function is refused."""
    with pytest.raises(TypeError, match="an int can't be scheduled: pass a function"):
        capture(3)


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ({"module": "no_such_module", "qualname": "f"}, "f can't be loaded on this worker .ModuleNotFoundError: No"),
        ({"module": "math", "qualname": "nothing"}, "math defines no nothing here"),
        ({"module": "math", "qualname": "pi"}, "math.pi can't be called here"),
        ({"module": "textwrap", "qualname": "dedent", "source_digest": "0" * 64}, "textwrap is another version here"),
        ({"module": "__main__", "qualname": "f", "source_path": "/no/x.py", "source_digest": "0"}, "x.py is missing"),
        ({}, "can't be loaded on this worker"),
        ({"pickle": b"cpython-27\nrest"}, "pickled for 'cpython-27' and this worker runs"),
        ({"pickle": b"\xff"}, "run coordinator and workers with the same minor version of Python"),
        ({"pickle": f"{sys.implementation.cache_tag}\ngarbage".encode()}, "can't be loaded on this worker"),
    ],
)  # fmt: skip
def test_references_that_lead_nowhere(definition: dict[str, Any], reason: str) -> None:
    """The worker says why it can't resolve it."""
    with pytest.raises(UnresolvedReference, match=reason):
        resolve(definition_pb2.Definition(**definition), b"", things)


def test_a_package_that_lacks_another_is_named() -> None:
    """Such as Keras, which imports the backend that its environment names: its user has not imported that one."""
    halfway: dict[str, Any] = {"__name__": "halfway.backend"}
    exec(compile("def load(): import no_such_module", "/env/site-packages/halfway/backend.py", "exec"), halfway)
    with pytest.raises(ImportError) as caught:
        halfway["load"]()
    assert importer_of(caught.value) == "halfway"
    with pytest.raises(ImportError) as caught:
        importlib.import_module("no_such_module")
    assert importer_of(caught.value) == ""


def test_errors_about_handles_come_through() -> None:
    """A deleted variable is not reported as a function that can't be loaded."""

    def gone(kind: str, key: str) -> Any:
        raise UnknownVariableError(f"there is no {kind} {key!r}")

    thing = Thing("w")
    captured = capture(lambda: thing)
    with pytest.raises(UnknownVariableError, match="there is no thing 'w'"):
        resolve(definition_pb2.Definition(), captured.by_value(), gone)


@dataclasses.dataclass
class Record:
    """A record of this module, which tests import under a name that a worker does not know."""

    x: int


class Named(NamedTuple):
    """A named tuple of this module."""

    x: int


def test_classes_of_records_are_found_by_definition_or_name(module: Any) -> None:
    """A definition takes precedence over the name; a worker may import, the coordinator must not."""

    @dataclasses.dataclass
    class Local:
        x: int

    definition = capture(Local)
    captured = CapturedFunctions(SerializationPolicy())
    assert captured.of_class(Local) is not None
    assert captured.of_class(threading.Thread) is None
    known = {definition.digest: resolve(next(definition.forms()), b"", things)}
    assert known[definition.digest] is Local, "in one process it is one class"
    value = encode([Local(1), Record(2)], define=lambda cls: definition.digest if cls is Local else "")
    resolver = record_resolver(known.__getitem__)
    assert decode(value, resolve_record=resolver) == [Local(1), Record(2)]

    sys.modules.pop("users_module")
    assert resolver("", "users_module", "Cell").__name__ == "Cell"
    sys.modules.pop("users_module")
    with pytest.raises(ProtocolError, match="not imported here"):
        imported_class("", "users_module", "Cell")
    with pytest.raises(ProtocolError, match="can't be imported"):
        resolver("", "no_such_module", "Cell")
    with pytest.raises(ProtocolError, match="which was not defined on this worker"):
        resolver("", "__main__", "NoSuchClass")
    with pytest.raises(ProtocolError, match="not a class"):
        record_resolver(lambda digest: len)("digest", "m", "q")


def test_capturing_is_thread_safe(module: Any) -> None:
    """Threads that capture at the same time get the same as they would alone."""
    module.SET = Thing("w")
    expected = capture(module.uses).digest
    digests: list[str] = []

    def work() -> None:
        digests.extend(capture(module.uses).digest for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(digests) == {expected}
    assert len(digests) == 80
