"""Functions without pickles: what is put together at the other end is what was sent, or it is refused."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import operator
import os
import pickle
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import search

from pscluster.coordinator import api
from pscluster.core.errors import ConfigurationError, MisuseError, ProtocolError, PsClusterError
from pscluster.core.functions import policy
from pscluster.core.functions.definitions import (
    UnresolvedReference,
    capture,
    class_definition,
    record_resolver,
    resolve,
    split_off_bulk,
)
from pscluster.core.functions.nameable import EVERYWHERE, MODULES, ON_WORKERS
from pscluster.core.functions.policy import Trust
from pscluster.core.values import encode
from pscluster.core.values.handles import Handle
from pscluster.ps import initializers, optim
from pscluster.ps.optim import schedules
from pscluster.v1 import definition_pb2

OFF = Trust(pickles=False, why="pickles are off here")

MODULE = """
from __future__ import annotations
import dataclasses, enum, functools, json, math, os, pickle, threading
from abc import ABC
from collections.abc import Sequence
from os import system
from pathlib import Path
import numpy as np
from users_helpers import HELD, handle_of_helpers, scaled
import users_helpers
try:
    import tomllib as reader
except ImportError:
    import json as reader

RATE = 0.5
CHANGED = 1
TABLE = np.arange(5) * 2
HERE = Path(__file__).parent
LOCK = threading.Lock()
HANDLE = None

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass(frozen=True)
class Batch:
    x: int
    of: object = None

class Windows(Sequence, ABC):
    def __len__(self):
        return len(self.ids)
    def __getitem__(self, number):
        return self.ids[number]
    def __init__(self, ids):
        raise AssertionError("objects are made without it")
    def read(self, start, stop):
        return self.ids[start:stop]
    @classmethod
    def named(cls, x):
        return cls.__name__, x
    def __call__(self, x):
        return self.ids[x]

class Slotted:
    __slots__ = ("a", "b")

class Stateful:
    def __getstate__(self):
        return {"kept": self.kept}
    def __setstate__(self, state):
        self.kept, self.made = state["kept"], "anew"

class Event(threading.Event):
    pass

class Tensor:
    dtype, shape = np.dtype("f4"), ()
    def __array__(self, *args, **kwargs):
        return np.zeros(())

TENSOR, COUNTED = Tensor(), __import__("collections").Counter("aab")

def uses_what_stays():
    return type(TENSOR).__name__, COUNTED.most_common(1)

class Reduced:
    def __reduce__(self):
        return system, ("true",)

def plain(x):
    return x * RATE

def uses_changed(x):
    return x + CHANGED

def uses_table():
    return TABLE.sum(), HERE.name, LOCK.locked(), math.floor(1.5)

def uses_handle():
    return HANDLE, inner_use()

def inner_use():
    return HANDLE

class Uses:
    @staticmethod
    def handle():
        return HANDLE

def uses_class():
    return Uses.handle()

def uses_helpers():
    return handle_of_helpers(), users_helpers.OTHER, scaled(2)

def uses_held():
    return HELD["w"]

def uses_lock_handle():
    return UNSENDABLE

@functools.cache
def cached(x):
    return x - 1

def outer(y, big=None):
    def inner(x, offset=3, *, times=2):
        return (x + y + offset) * times, None if big is None else big.sum()
    return inner

def recursive():
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)
    return factorial

def two_lambdas(y):
    return (lambda x: x + y, 0), (lambda x: x * y, 1)

def closure_on_handle():
    return lambda: HANDLE

def reads_json():
    import json
    def read(text):
        return json.loads(text)
    return read

def dumps(text):
    return json.dumps(text)

def computes_with(library):
    return lambda x: library.sqrt(x)

def local_class():
    class Local:
        pass
    return lambda: Local
"""

HELPERS = """
HELD = {}
FACTOR, OTHER, SECRET = 3, None, None
def scaled(x):
    return x * FACTOR
def handle_of_helpers():
    return SECRET
"""


class Thing(Handle):
    """A handle."""

    handle_kind = "thing"
    handle_key: str

    def __init__(self, key: str) -> None:
        self.handle_key = key


def things(kind: str, key: str) -> Any:
    """Stands for the receiver's own handles."""
    return f"the receiver's {kind} {key}"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules of the user's, which both ends have."""
    (tmp_path / "users_steps.py").write_text(MODULE)
    (tmp_path / "users_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("users_steps")
    for name in ("users_steps", "users_helpers"):
        sys.modules.pop(name, None)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """Pickles are off in this process, and peers may name what is in a folder."""
    before = policy.trust()
    policy.settle(Trust(False, "pickles are off here", (tmp_path.resolve(),)))
    yield tmp_path
    policy.settle(before)


def sent(function: Any, **options: Any) -> tuple[bytes, bytes]:
    """The one form of a function: the message, and what travels behind it."""
    (form,) = capture(function, trusted=OFF, **options).forms()
    bulk = split_off_bulk(form)
    return form.SerializeToString(), bulk


def received(message: bytes, bulk: bytes) -> Any:
    """What the other end makes of it."""
    return resolve(definition_pb2.Definition.FromString(message), memoryview(bulk), things)


def there(function: Any) -> Any:
    """The function as it arrives, in modules of its own: those that the receiver imports anew from the same files."""
    message = sent(function)
    mine = {name: sys.modules.pop(name) for name in ("users_steps", "users_helpers")}
    try:
        return received(*message)
    finally:
        sys.modules.update(mine)


def test_functions_arrive_with_what_they_capture(module: Any) -> None:
    """Named ones, closures, lambdas of one line, partials, methods, objects; data, records and handles in them."""
    big = np.arange(100_000)
    windows = object.__new__(module.Windows)
    windows.ids, windows.again = big, windows
    adds, multiplies = (function for function, _ in module.two_lambdas(5))
    assert there(module.plain)(3) == 1.5
    assert there(module.plain).__globals__ is not module.plain.__globals__
    assert there(module.cached)(3) == 2
    assert there(module.outer(4, big))(1) == ((1 + 4 + 3) * 2, big.sum())
    assert there(module.recursive())(5) == 120
    assert (there(adds)(2), there(multiplies)(2)) == (7, 10)
    assert there(module.Windows.named)(1) == ("Windows", 1)
    assert there(windows)(7) == 7
    read = there(windows.read)
    assert read(1, 3).tolist() == [1, 2]
    assert read.__self__.again is read.__self__
    assert type(read.__self__) is not module.Windows
    things_inside = {
        "path": Path("/a/b"),
        "dtype": np.dtype([("a", "<f4"), ("b", ">i2")]),
        "enum": module.Color.RED,
        "module": os,
        "class": module.Batch,
        "record": module.Batch(1, [module.plain, Thing("w")]),
        "handle": Thing("v"),
    }
    found = there(module.functools.partial(module.functools.partial(dict, things_inside).func, **things_inside))
    assert found.keywords["path"] == Path("/a/b")
    assert found.keywords["dtype"] == things_inside["dtype"]
    assert found.keywords["enum"].name == "RED"
    assert found.keywords["module"] is os
    record = found.keywords["record"]
    assert isinstance(record, found.keywords["class"])
    assert (record.x, record.of[0](4), record.of[1]) == (1, 2.0, "the receiver's thing w")
    assert found.keywords["handle"] == "the receiver's thing v"


def test_objects_arrive_without_their_init(module: Any) -> None:
    """Those with slots, and those that say what their state is, too."""
    slotted = module.Slotted()
    slotted.a = 1
    stateful = module.Stateful()
    stateful.kept, stateful.lock = 2, module.LOCK

    def step(x: int = 0) -> Any:
        return x

    found = there(module.functools.partial(module.plain, slotted, stateful))
    assert found.args[0].a == 1
    assert not hasattr(found.args[0], "b")
    assert (found.args[1].kept, found.args[1].made) == (2, "anew")


def test_globals_are_the_senders(module: Any) -> None:
    """A handle, a changed literal, data that the file computes; through other functions, classes and modules."""
    assert there(module.uses_changed)(1) == 2
    module.TABLE[0] = 100
    assert there(module.uses_table) is not module.uses_table
    assert there(module.uses_table)() == (120, Path(module.__file__).parent.name, False, 1)
    assert there(module.uses_what_stays)() == ("Tensor", [("a", 2)]), "they would have been of other types"
    module.HANDLE = Thing("w")
    assert there(module.uses_handle)() == ("the receiver's thing w", "the receiver's thing w")
    assert there(module.uses_class)() == "the receiver's thing w"
    helpers: Any = sys.modules["users_helpers"]
    helpers.SECRET, helpers.OTHER = Thing("s"), (1, Thing("o"))
    assert there(module.uses_helpers)() == ("the receiver's thing s", (1, "the receiver's thing o"), 6)


def test_a_module_has_one_of_each_global(module: Any) -> None:
    """What one function was sent with can't be another value for the next one: it would change for the first, too."""
    there(module.uses_changed)
    module.CHANGED = 2
    with pytest.raises(TypeError, match=r"uses the global 'CHANGED' of users_steps.py, which was another one when"):
        sent(module.uses_changed)
    module.HANDLE = Thing("w")
    sent(module.uses_handle)
    with pytest.raises(TypeError, match=r"through the global 'HANDLE' of users_steps.py, by way of another function"):
        sent(module.uses_handle, rename=lambda handle: (handle.handle_kind, "copy"))


def test_handles_of_a_closure_can_be_renamed(module: Any) -> None:
    """For an evaluation that is to have copies of variables; what was captured stays in use."""
    captured = capture(module.outer(Thing("w")), lambda handle: (handle.handle_kind, "copy"), trusted=OFF)
    assert [handle.handle_key for handle in captured.handles] == ["w"]
    (form,) = captured.forms()
    cells: Any = resolve(form, form.arrays, things).__closure__
    assert [cell.cell_contents for cell in cells] == [None, "the receiver's thing copy"]


def test_a_closure_has_renamed_globals_of_its_own(module: Any) -> None:
    """They are copies for one evaluation: other functions of the module go on with what they had."""
    module.HANDLE = Thing("w")
    message = sent(module.closure_on_handle(), rename=lambda handle: (handle.handle_kind, "copy"))
    plain = sent(module.closure_on_handle())
    assert received(*plain)() == "the receiver's thing w"
    assert received(*message)() == "the receiver's thing copy"
    assert module.HANDLE == "the receiver's thing w", "this process is the receiver, too"


def made_by_exec() -> Any:
    """A function that no file has."""
    found: dict[str, Any] = {}
    exec("def step(): pass", found)
    return found["step"]


def test_what_can_not_go_says_why(module: Any) -> None:
    """The function, what of it, and how to mend it."""
    reduced, event = module.Reduced(), module.Event()
    module.UNSENDABLE = event
    cases: list[tuple[Any, str]] = [
        (
            module.outer(module.LOCK),
            r"^inner can't be sent without a pickle: its variable 'y' is ",
        ),
        (module.outer([event]), r"its variable 'y'\[0\] is an? users_steps\.Event, which is a threading\.Event"),
        (module.outer(reduced), r"its variable 'y' is an? users_steps\.Reduced, whose class has a __reduce__"),
        (module.outer([module.TENSOR]), r"its variable 'y'\[0\] is an? users_steps\.Tensor, which would arrive as an"),
        (module.local_class(), r"the class local_class\.<locals>\.Local is not at the top of its module users_steps"),
        (module.uses_lock_handle, r"the global 'UNSENDABLE' of users_steps\.py is an? users_steps\.Event"),
        (made_by_exec(), r"step is of no module that is imported: put it into a file"),
        (module.functools.partial(module.plain, np.random.default_rng(0)), r"its arguments .*\[0\] is a numpy"),
    ]
    for function, said in cases:
        with pytest.raises(TypeError, match=said) as caught:
            sent(function)
        assert str(caught.value).endswith("And pickles are off here")
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("x * RATE", "x * RATE * 2").replace("return (x + y", "return (y + x"))
    for function in (module.plain, module.outer(1)):
        with pytest.raises(TypeError, match=r"the code of .* is not in .*users_steps.py: the file was changed"):
            sent(function)


def test_what_was_sent_decides_the_digest(module: Any) -> None:
    """The same function with the same values has the same; another value, another one."""
    digests = [capture(module.outer(value), trusted=OFF).digest for value in (1, 1, 2, np.arange(9999), np.ones(9999))]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_another_version_is_refused(module: Any) -> None:
    """Of the module that has it, and of any other file of the user's that it reaches."""
    message, helped = sent(module.outer(1)), sent(module.uses_helpers)
    for name, said in (("users_helpers", "users_helpers"), ("users_steps", "users_steps")):
        path = Path(str(sys.modules[name].__file__))
        path.write_text(path.read_text() + "\n# another version")
        with pytest.raises(UnresolvedReference, match=f"module {said} is another version here"):
            received(*(helped if name == "users_helpers" else message))


# What a peer may name


def named(module: str, name: str, file: Path | None = None) -> tuple[bytes, bytes]:
    """A function by reference, by hand."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else ""
    return definition_pb2.Definition(
        digest="d", module=module, qualname=name, source_path=str(file or ""), source_digest=digest
    ).SerializeToString(), b""


def part_of(module: str, name: str) -> tuple[bytes, bytes]:
    """The same inside of an assembly."""
    form = definition_pb2.Definition(digest="d")
    form.assembly.parts.add(kind=definition_pb2.AssemblyPart.NAMED, module=module, name=name)
    return form.SerializeToString(), b""


@pytest.mark.parametrize("form", [named, part_of])
@pytest.mark.parametrize(
    ("module_name", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "exec"),
        ("subprocess", "Popen"),
        ("pickle", "loads"),
        ("cloudpickle", "loads"),
        ("numpy", "load"),
        ("pscluster.core.functions.by_value", "load"),
        ("pscluster.coordinator.cli.run", "run_script"),
        ("__main__", "anything"),
        ("users_steps", "os.system"),
        ("users_steps", "system"),
        ("users_steps", "np.load"),
        ("users_steps", "plain.__globals__"),
        ("users_steps", "Color.__class__"),
        ("pscluster.worker.training", "np.load"),
        ("pscluster.worker.main", "click.launch"),
        ("pscluster.worker.data.sources", "map_leaves"),
        ("pscluster.worker.data.sources", "MappedArray.open"),
        ("pscluster.worker.data.per_worker", "WorkerIterator"),
        ("pscluster.ps.handles.variable", "_put"),
        ("pscluster.ps.initializers", "from_spec"),
        ("pscluster.ps.handles.metrics", "Metric.__init_subclass__"),
    ],
)
@pytest.mark.usefixtures("closed")
def test_what_peers_may_not_name(
    module: Any, form: Callable[[str, str], tuple[bytes, bytes]], module_name: str, name: str
) -> None:
    """Installed functions, and what a module of the user's has only imported."""
    with pytest.raises((MisuseError, UnresolvedReference)):
        received(*form(module_name, name))


def test_what_peers_may_name(module: Any, closed: Path) -> None:
    """The user's own, the library's for workers, and those of packages that were named to the role."""
    assert received(*named("users_steps", "plain", Path(module.__file__)))(3) == 1.5
    assert received(*named("users_steps", "Windows.named"))(3) == ("Windows", 3)
    for form in (named, part_of):
        assert received(*form("pscluster.ps.initializers", "Zeros")) is initializers.Zeros
        with pytest.raises(MisuseError, match=r"peers may not name (what is in )?pscluster\.worker\.data\.per_worker"):
            received(*form("pscluster.worker.data.per_worker", "given"))  # workers alone take datasets
        with pytest.raises(MisuseError, match=r"peers may not name .*pscluster\.worker\.data\.sources"):
            received(*form("pscluster.worker.data.sources", "MappedArray"))
    policy.settle(Trust(False, "", (closed,), ("numpy",), is_worker=True))
    assert received(*named("pscluster.worker.data.per_worker", "given"))([1]) == [1]
    assert received(*named("numpy", "sum")) is np.sum
    with pytest.raises(MisuseError, match=r"peers may not name what is in os, .* --functions-from os"):
        received(*named("os", "system"))


NOT_FOR_PEERS = {
    *("Checkpoint", "CheckpointManager", "ClusterCoordinator", "ClusterResolver", "ClusterSpec", "Dashboard"),
    *("DataPart", "DistributedDataset", "FixedShardsPartitioner", "History", "LocalCluster", "MaxSizePartitioner"),
    *("MinSizePartitioner", "ParameterServerStrategy", "Partitioner", "PerWorkerDataset", "PerWorkerIterator"),
    *("ProgressLine", "RemoteValue", "RemoteValueStatus", "RestoredFrom", "SavedVariables", "Server"),
    *("SidecarEvaluator", "SimpleClusterResolver", "TFConfigClusterResolver", "callbacks", "optimizers"),
}
"""Of the public names those that make sense on the coordinator alone."""


def test_the_list_has_all_that_is_public() -> None:
    """Each public function and class is in the list or known as the coordinator's, and what is listed is there."""
    modules = ("callbacks", "errors", "initializers", "metrics", "optimizers")
    public = {name: getattr(api, name) for name in (*api.__all__, *modules)}
    for library in (api.errors, api.initializers, api.metrics, schedules, optim):
        classes = {name: found for name, found in vars(library).items() if isinstance(found, type)}
        public |= {
            name: found
            for name, found in classes.items()
            if not name.startswith("_") and found.__module__.startswith(library.__name__)
        }
    for name, found in public.items():
        listed = getattr(found, "__qualname__", "") in EVERYWHERE.get(getattr(found, "__module__", ""), ())
        assert listed or name in NOT_FOR_PEERS or getattr(found, "__name__", "") in MODULES, name
    for module_name, listed_names in [*EVERYWHERE.items(), *ON_WORKERS.items()]:
        for name in listed_names:
            assert operator.attrgetter(name)(importlib.import_module(module_name)) is not None


@pytest.mark.usefixtures("closed")
def test_no_dtype_of_objects(module: Any) -> None:
    """Neither sent nor taken: bytes under such a dtype would be taken for pointers."""
    for dtype in (np.dtype("O"), np.dtype([("a", "i4"), ("b", "O")]), np.dtype((object, (2,)))):
        with pytest.raises(TypeError, match=r"whose elements are Python objects"):
            sent(module.outer(dtype))
    for descr in ("|O", [("a", "<i4"), ("b", "|O")], ("|O", (3,)), [("a", [("b", "|O")])], "|O8", "i4, |O", "T", 5, []):
        form = definition_pb2.Definition(digest="d")
        form.assembly.parts.add(kind=definition_pb2.AssemblyPart.DTYPE, value=encode(descr))
        if descr != []:
            with pytest.raises(ProtocolError, match=r"element type"):
                received(form.SerializeToString(), b"")


@pytest.mark.usefixtures("closed")
def test_records_of_ours_are_those_of_the_list() -> None:
    """A record is made without its class' own code: of pscluster's, only those that may be named."""
    resolve_record = record_resolver()
    assert resolve_record("", "pscluster.worker.data.per_worker", "InputContext") is api.InputContext
    for module_name, name in (
        ("pscluster.worker.data.sources", "MappedArray"),
        ("pscluster.core.functions.policy", "Trust"),
    ):
        with pytest.raises(MisuseError, match="peers may not name"):
            resolve_record("", module_name, name)


def code_with(module: Any, function: types.FunctionType, **values: str) -> tuple[bytes, bytes]:
    """Code of a module by hand, with modules as globals of its own, or in cells."""
    form = definition_pb2.Definition(digest="d")
    file = form.assembly.files.add(module=module.__name__)
    code = function.__code__
    part = form.assembly.parts.add(
        kind=definition_pb2.AssemblyPart.CODE, file=1, name=code.co_name, line=code.co_firstlineno
    )
    part.value.dict.SetInParent()
    for number, (name, value) in enumerate(values.items(), 1):
        held = part.value.dict if name in code.co_freevars else file.own_globals.dict
        held.keys.add(text=f"cell {name}" if name in code.co_freevars else name)
        handle = held.values.add().handle
        handle.kind, handle.key = "pscluster-part", str(number)
        form.assembly.parts.add(kind=definition_pb2.AssemblyPart.MODULE, module=value)
    return form.SerializeToString(), b""


@pytest.mark.usefixtures("closed")
def test_code_keeps_what_its_file_imports(module: Any) -> None:
    """No other module takes its place, though the file imports that, too; nor is one imported that it does not."""
    library: Any = importlib.import_module("pscluster.ps.handles.metrics")
    kept = r"was sent, but the file imports or defines it, or it is built in"
    not_own = r"metrics\.py is no file of this role's own folders"
    swaps: list[tuple[tuple[bytes, bytes], str]] = [
        (code_with(library, library.Metric.of, json="pickle"), not_own),
        (code_with(library, library.Metric.of), not_own),
        (code_with(module, module.dumps, json="pickle"), kept),
        (code_with(module, module.plain, reader="pickle"), kept),
        (code_with(module, module.plain, print="os"), kept),
        (code_with(module, module.plain, Color="os"), kept),
        (code_with(module, module.reads_json(), json="pickle"), "imports json as json, but pickle was sent"),
        (code_with(module, module.computes_with(math), library="this"), "peers may not name what is in this"),
    ]
    for message, said in swaps:
        with pytest.raises(MisuseError, match=said):
            received(*message)
    assert "this" not in sys.modules, "it would have printed something"
    form = definition_pb2.Definition.FromString(swaps[0][0][0])
    form.assembly.files[0].globals.CopyFrom(form.assembly.files[0].own_globals)
    del form.assembly.parts[0]
    with pytest.raises(MisuseError, match=not_own):
        resolve(form, b"", things)
    assert library.json.__name__ == "json"


@pytest.mark.usefixtures("closed")
def test_code_has_what_it_is_made_with(module: Any) -> None:
    """Modules that its file imports, in a closure by whatever name; variables in what another file of its holds."""
    assert received(*sent(module.reads_json()))("[1]") == [1]
    assert received(*sent(module.computes_with(math)))(4) == 2
    assert received(*sent(module.computes_with(np)))(4) == 2
    sys.modules["users_helpers"].HELD["w"] = Thing("w")
    assert there(module.uses_held)() == "the receiver's thing w"
    module.scaled = module.plain
    with pytest.raises(TypeError, match=r"global 'scaled' of users_steps.py, which is another one than the file impo"):
        sent(module.uses_helpers)


def test_files_elsewhere_are_not_looked_at(tmp_path: Path, closed: Path) -> None:
    """Nothing is imported or run of a module or a script that lies in no folder of the role's, by whatever path."""
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    mark = elsewhere / "mark"
    text = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ndef step(): pass\n"
    for name in ("elsewhere_script.py", "elsewhere_module.py"):
        (elsewhere / name).write_text(text)
    script = elsewhere / "elsewhere_script.py"
    (closed / "link.py").symlink_to(script)
    for path in (script, closed / ".." / elsewhere.name / script.name, closed / "link.py"):
        form = definition_pb2.Definition.FromString(named("__main__", "step", path)[0])
        with pytest.raises(UnresolvedReference, match="is not here, or is another version"):
            resolve(form, b"", things)
    sys.path.append(str(elsewhere))
    try:
        with pytest.raises(MisuseError, match=r"lies at .*, outside of the folders whose functions peers may name"):
            received(*named("elsewhere_module", "step", elsewhere / "elsewhere_module.py"))
    finally:
        sys.path.remove(str(elsewhere))
    assert not mark.exists()
    (closed / "deep").mkdir()
    (closed / "deep" / script.name).write_text(text)
    form = definition_pb2.Definition.FromString(named("__main__", "step", script)[0])
    form.source_path = f"/somewhere/deep/{script.name}"
    assert resolve(form, b"", things)() is None
    assert mark.exists(), "the same file in a folder of the role's own"


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.usefixtures("closed")
def test_a_pickle_is_not_looked_at(tmp_path: Path) -> None:
    """Wherever it stands in the message, and whatever else is there."""
    mark = tmp_path / "mark"
    data = f"{sys.implementation.cache_tag}\n".encode() + cloudpickle.dumps(Bomb(mark))
    for form, bulk in (
        (definition_pb2.Definition(digest="d", pickle=data), b""),
        (definition_pb2.Definition(digest="d"), data),
        (definition_pb2.Definition(digest="d", module="users_steps", source_digest="0"), data),
    ):
        with pytest.raises(MisuseError, match=r"came by value, as a pickle, and pickles are off here"):
            resolve(form, bulk, things)
    form = definition_pb2.Definition(digest="d", pickle=data)
    form.assembly.SetInParent()
    with pytest.raises(ProtocolError):
        resolve(form, data, things)
    assert not mark.exists()
    policy.settle(Trust())
    with pytest.raises(UnresolvedReference, match="can't be called"):
        resolve(definition_pb2.Definition(digest="d", pickle=data), b"", things)
    assert mark.exists(), "the bomb is one"


def mutated(message: bytes, changes: list[tuple[int, int]]) -> bytes:
    """With some bytes changed."""
    data = bytearray(message)
    for place, byte in changes:
        data[place % len(data)] = byte
    return bytes(data)


@pytest.mark.timeout(300)
def test_rubbish_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bytes are changed in a message, the outcome is a function or an error of ours."""
    (tmp_path / "users_steps.py").write_text(MODULE)
    (tmp_path / "users_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("users_steps")
    windows = object.__new__(module.Windows)
    windows.ids = np.arange(3)
    module.HANDLE = Thing("w")
    messages = [
        sent(module.outer(windows, np.arange(3000))),
        sent(module.uses_handle),
        sent(module.functools.partial(windows.read, np.dtype("f4"), Path("/a"), module.Batch(1))),
    ]
    before = policy.trust()
    policy.settle(Trust(False, "pickles are off here", (tmp_path.resolve(),)))

    @search(200, 1)
    @given(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=6))
    def attempt(which: int, changes: list[tuple[int, int]]) -> None:
        message, bulk = messages[which]
        try:
            form = definition_pb2.Definition.FromString(mutated(message, changes))
        except DecodeError:
            return
        with contextlib.suppress(PsClusterError):
            resolve(form, memoryview(bulk), things)

    try:
        attempt()
    finally:
        policy.settle(before)
        for name in ("users_steps", "users_helpers"):
            sys.modules.pop(name, None)


# Trust


def test_who_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option beats the environment; what listens to anybody takes no pickles unless it was told to."""
    monkeypatch.chdir(tmp_path)
    exposed = "this role listens on 0.0.0.0:1"
    assert policy.asked_for(None, {}) is None
    assert policy.asked_for(None, {"PSCLUSTER_ALLOW_PICKLE": " No "}) is False
    assert policy.asked_for(True, {"PSCLUSTER_ALLOW_PICKLE": "0"}) is True
    with pytest.raises(ConfigurationError, match=r"PSCLUSTER_ALLOW_PICKLE is 'maybe'; it must be 1 or 0"):
        policy.asked_for(None, {"PSCLUSTER_ALLOW_PICKLE": "maybe"})
    assert policy.trust_of(None, environ={}).pickles
    assert policy.trust_of(True, exposed, environ={}).pickles
    found = policy.trust_of(None, exposed, environ={})
    assert not found.pickles
    assert "since this role listens on 0.0.0.0:1: give all roles a token" in found.why
    assert "--no-pickle, or PSCLUSTER_ALLOW_PICKLE=0" in policy.trust_of(False, exposed, environ={}).why


def test_where_functions_are_taken_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and packages as they are named; the current folder and those of PYTHONPATH where none are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "on_path").mkdir()
    found = policy.trust_of(False, environ={"PYTHONPATH": f"{tmp_path / 'on_path'}{os.pathsep}/not/there"})
    assert found.folders == (tmp_path.resolve(), (tmp_path / "on_path").resolve())
    environ = {"PSCLUSTER_FUNCTIONS_FROM": f"{tmp_path}{os.pathsep}my.package", "PYTHONPATH": "/"}
    found = policy.trust_of(False, environ=environ)
    assert (found.folders, found.packages) == ((tmp_path.resolve(),), ("my.package",))
    assert policy.trust_of(False, "", ["on_path"], environ).folders == ((tmp_path / "on_path").resolve(),)
    with pytest.raises(ConfigurationError, match=r"names '/not/there', which is neither a folder here nor a package"):
        policy.trust_of(False, "", ["/not/there"])
    library = Path(pickle.__file__)
    assert not Trust(False, "", (Path("/"),)).owns(library)


def test_a_class_goes_by_its_name(module: Any) -> None:
    """That of a record among the arguments, as the script's own do without pickles."""
    definition = class_definition(module.Batch, trusted=OFF)
    (form,) = definition.forms()
    assert not form.pickle
    assert resolve(form, b"", things) is module.Batch
    assert isinstance(module, types.ModuleType)
    assert textwrap.dedent(repr(definition)).startswith("<CapturedFunction Batch by reference")
