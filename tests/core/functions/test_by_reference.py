"""Functions without pickles: the receiver finds exactly what was sent, or refuses it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
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
from tests.core.functions.support import Thing, things

from pscluster.coordinator import api
from pscluster.core.errors import ConfigurationError, MisuseError, ProtocolError, PsClusterError
from pscluster.core.functions import policy
from pscluster.core.functions.definitions import capture, record_resolver, resolve, split_off_bulk
from pscluster.core.functions.loading import UnresolvedReference
from pscluster.core.functions.nameable import EVERYWHERE, ON_WORKERS
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.core.values import encode_call
from pscluster.ps import initializers, optim
from pscluster.ps.optim import schedules
from pscluster.v1 import definition_pb2

OFF = SerializationPolicy(pickles=False, why="pickles are off here")

MODULE = """
from __future__ import annotations
import dataclasses, enum, functools, math, os, pickle, threading
from os import system
from pathlib import Path
import numpy as np
from users_helpers import scaled
import users_helpers
try:
    import tomllib as reader
except ImportError:
    import json as reader

RATE = 0.5
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

class Windows:
    def read(self, start, stop):
        return start, stop
    @classmethod
    def named(cls, x):
        return cls.__name__, x
    @staticmethod
    def twice(x):
        return 2 * x

def plain(x):
    return x * RATE

def everything(*args, **keywords):
    return args, keywords

def uses_what_the_file_makes():
    return TABLE.sum(), HERE.name, LOCK.locked(), math.floor(1.5), scaled(2), users_helpers.FACTOR, reader.__name__

def uses_handle():
    return HANDLE

def uses_by_another():
    return uses_handle()

class Uses:
    @staticmethod
    def handle():
        return HANDLE

def uses_by_class():
    return Uses.handle()

def uses_helpers():
    return users_helpers.SECRET

def uses_late():
    return LATE

def wrap(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args)
    return wrapped

@wrap
def decorated():
    return HANDLE

@functools.cache
def cached(x):
    return x - 1

def outer(y, big=None):
    def inner(x):
        return x + y, big
    return inner

def local_class():
    class Local:
        pass
    return Local
"""

HELPERS = """
FACTOR, SECRET = 3, None
def scaled(x):
    return x * FACTOR
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The user's modules, which both sides have."""
    (tmp_path / "users_steps.py").write_text(MODULE)
    (tmp_path / "users_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("users_steps")
    for name in ("users_steps", "users_helpers"):
        sys.modules.pop(name, None)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """Forbid pickles in this process, and let peers name functions in a folder."""
    before = policy.chosen_policy()
    policy.choose(SerializationPolicy(False, "pickles are off here", (tmp_path.resolve(),)))
    yield tmp_path
    policy.choose(before)


def sent(function: Any) -> tuple[bytes, bytes]:
    """The one form of a function: the message, and the attachments sent with it."""
    (form,) = capture(function, policy=OFF).forms()
    bulk = split_off_bulk(form)
    return form.SerializeToString(), bulk


def received(message: bytes, bulk: bytes) -> Any:
    """What the receiver makes of it."""
    return resolve(definition_pb2.Definition.FromString(message), memoryview(bulk), things)


def there(function: Any) -> Any:
    """The function as it arrives, in separate modules, which the receiver imports anew from the same files."""
    message = sent(function)
    mine = {name: sys.modules.pop(name) for name in ("users_steps", "users_helpers")}
    try:
        return received(*message)
    finally:
        sys.modules.update(mine)


def test_functions_arrive_with_their_arguments(module: Any) -> None:
    """They are sent by name; partials with data, records and handles, and with functions and classes by name in
    them."""
    assert there(module.plain)(3) == 1.5
    assert there(module.plain).__globals__ is not module.plain.__globals__
    assert there(module.cached)(3) == 2
    assert there(module.Windows.named)(1) == ("Windows", 1)
    assert there(module.Windows.twice)(1) == 2
    assert there(module.uses_what_the_file_makes)()[1:6] == (Path(module.__file__).parent.name, False, 1, 6, 3)
    big, small, thing = np.arange(100_000), np.ones(3), Thing("w")
    inner = functools.partial(module.plain, big)
    inner.__qualname__ = "what keeps it from being joined with the outer one"  # type: ignore[attr-defined]
    resolved = there(
        functools.partial(
            functools.partial(module.everything, 1, a=2),
            {"functions": [module.plain, functools.partial(module.everything, big, module.Windows.named), len, np.sum]},
            module.Batch,
            module.Batch(1, [module.Batch(2, thing), module.plain]),
            a=[thing, small, "x" * 100_000],
            inner=inner,
        )
    )
    args, keywords = resolved(4)
    assert (args[0], args[-1]) == (1, 4)
    plain, nested, *installed = args[1]["functions"]
    assert plain(4) == 2.0
    assert installed == [len, np.sum]
    (same, named), _ = nested()
    assert same.tolist() == big.tolist()
    assert named(1) == ("Windows", 1)
    record = args[3]
    assert type(record) is args[2] is not module.Batch
    assert (record.x, record.of[0].of, record.of[1]) == (1, "the receiver's thing w", plain)
    assert keywords["a"][0] == "the receiver's thing w"
    assert keywords["a"][1].tolist() == [1, 1, 1]
    assert len(keywords["a"][2]) == 100_000
    assert keywords["inner"]().tolist() == (big * 0.5).tolist()


def test_handles_can_be_renamed(module: Any) -> None:
    """An evaluation gets copies of variables; the captured ones stay in use."""
    captured = capture(functools.partial(module.everything, Thing("w"), [module.plain]), policy=OFF)
    copies = captured.renamed(lambda handle: (handle.handle_kind, "copy"))
    assert [handle.handle_key for handle in copies.handles] == ["w"]
    for shipped, key in ((copies, "copy"), (captured, "w")):
        (form,) = shipped.forms()
        assert resolve(form, form.arrays, things)()[0][0] == f"the receiver's thing {key}"
    assert copies.digest != captured.digest


def made_by_exec() -> Any:
    """A function that is in no file."""
    namespace: dict[str, Any] = {}
    exec("def step(): pass", namespace)
    return namespace["step"]


def test_what_can_not_go_says_why(module: Any) -> None:
    """The error names the function and the part of it, and says how to correct it."""
    partial, offset = functools.partial, 1
    cases: list[tuple[Any, str]] = [
        (
            module.outer(1),
            r"^inner can't be sent without a pickle: it is defined inside outer\(\): move it to the top level of "
            r"users_steps.py and pass what it captures \(big, y\) as arguments, say with functools.partial",
        ),
        (lambda: offset, r"a lambda: write it as a function at the top level of test_by_reference.py .* \(offset\)"),
        (
            partial(module.plain, lambda: 1),
            r"its argument args\[0\] can't be sent: it is a lambda: write it as a function at",
        ),
        (module.local_class(), r"it is defined inside local_class\(\): move it to the top level"),
        (module.Windows().read, r"it is a method of an? users_steps.Windows: write a function that takes the object"),
        (made_by_exec(), r"it is a function, not a function defined in a file: pass one that creates it"),
        (partial(module.plain, module.LOCK), r"its argument args\[0\] is a _thread.lock, which can't be sent"),
        (
            partial(module.plain, x=[module.Windows()]),
            r"its argument kwargs\['x'\]\[0\] is .* make its class a dataclass",
        ),
        (partial(module.plain, np.random.default_rng(0)), r"args\[0\] is a numpy.random\S+, which can't be sent"),
        (partial(module.plain, module.Color.RED), r"args\[0\] is an? users_steps.Color, an enum, which can't be sent"),
        (partial(module.plain, module.Batch(1, module.LOCK)), r"its argument args\[0\].of is a _thread.lock"),
    ]
    for function, said in cases:
        with pytest.raises(TypeError, match=said) as caught:
            sent(function)
        assert str(caught.value).endswith("And pickles are off here")
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("x * RATE", "x * RATE * 2"))
    with pytest.raises(TypeError, match=r"the code of plain is not in .*users_steps.py: the file was changed since"):
        sent(module.plain)


def test_globals_are_what_the_file_makes_of_them(module: Any) -> None:
    """Handles, names that the file lacks, changed literals, and other functions are refused."""
    helpers: Any = sys.modules["users_helpers"]
    module.HANDLE, helpers.SECRET = [Thing("w")], Thing("s")
    for function in (module.uses_handle, module.uses_by_another, module.uses_by_class, module.decorated):
        said = (
            r"it uses the global 'HANDLE' of users_steps.py, a list, which is or holds a handle, .*: pass it as an arg"
        )
        for candidate in (function, functools.partial(function)):
            with pytest.raises(TypeError, match=said):
                sent(candidate)
    with pytest.raises(
        TypeError, match=r"global 'SECRET' of users_helpers.py, an? \S+Thing, which is or holds a handle"
    ):
        sent(module.uses_helpers)
    module.LATE, module.RATE, module.scaled = 1, 0.25, module.plain
    module.uses_handle.__defaults__ = (1,)
    with pytest.raises(TypeError, match=r"users_steps.py has another uses_handle at its top level, or none: define"):
        sent(module.uses_handle)
    module.HANDLE = None
    for function, name in (
        (module.uses_by_another, "uses_handle"),
        (module.uses_late, "LATE"),
        (module.plain, "RATE"),
        (module.uses_what_the_file_makes, "scaled"),
    ):
        with pytest.raises(TypeError, match=rf"it uses the global '{name}' of users_steps.py, which was set under the"):
            sent(function)


def test_what_was_sent_decides_the_digest(module: Any) -> None:
    """The same function with the same arguments has the same digest; with other arguments it has another."""
    values = (1, 1, 2, np.arange(9999), np.ones(9999))
    digests = [capture(functools.partial(module.plain, value), policy=OFF).digest for value in values]
    assert digests[0] == digests[1]
    assert len({*digests, capture(module.plain, policy=OFF).digest}) == 5


def test_another_version_is_refused(module: Any) -> None:
    """This holds for the module that has it, and for that of a function among its arguments."""
    message = sent(functools.partial(module.everything, sys.modules["users_helpers"].scaled))
    for name in ("users_helpers", "users_steps"):
        path = Path(str(sys.modules[name].__file__))
        path.write_text(path.read_text() + "\n# another version")
        with pytest.raises(UnresolvedReference, match=f"module {name} is another version here"):
            received(*message)


# What a peer may name


def named(module: str, name: str, file: Path | None = None) -> tuple[bytes, bytes]:
    """A handmade reference to a function."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else ""
    return definition_pb2.Definition(
        digest="d", module=module, qualname=name, source_path=str(file or ""), source_digest=digest
    ).SerializeToString(), b""


def argument_of(module: str, name: str) -> tuple[bytes, bytes]:
    """The same reference among the arguments of another one."""
    form = definition_pb2.Definition(digest="d", module="users_steps", qualname="everything")
    form.inner.add(module=module, qualname=name)
    encode_call((), {}, into=form.arguments)
    handle = form.arguments.tuple.items[0].tuple.items.add().handle
    handle.kind, handle.key = "definition", "0"
    return form.SerializeToString(), b""


@pytest.mark.parametrize("form", [named, argument_of])
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
        ("pscluster.worker.steps.training", "np.load"),
        ("pscluster.worker.main", "click.launch"),
        ("pscluster.worker.data.sources", "map_leaves"),
        ("pscluster.worker.data.sources", "MappedArray.open"),
        ("pscluster.worker.data.per_worker", "WorkerIterator"),
        ("pscluster.ps.handles.indexing", "put"),
        ("pscluster.ps.initializers", "from_spec"),
        ("pscluster.ps.handles.metric", "Metric.__init_subclass__"),
    ],
)
@pytest.mark.usefixtures("closed")
def test_what_peers_may_not_name(
    module: Any, form: Callable[[str, str], tuple[bytes, bytes]], module_name: str, name: str
) -> None:
    """Installed functions, and ones that a user's module has only imported, are refused."""
    with pytest.raises((MisuseError, UnresolvedReference)):
        received(*form(module_name, name))


def test_what_peers_may_name(module: Any, closed: Path) -> None:
    """The user's own functions, the library's for workers, and those of packages that the role was given are
    accepted."""
    assert received(*named("users_steps", "plain", Path(module.__file__)))(3) == 1.5
    assert received(*named("users_steps", "Windows.named"))(3) == ("Windows", 3)
    for form in (named, argument_of):
        resolved = received(*form("pscluster.ps.initializers", "Zeros"))
        assert initializers.Zeros in (resolved, *getattr(resolved, "args", ()))
        with pytest.raises(MisuseError, match=r"peers may not name (what is in )?pscluster\.worker\.data\.per_worker"):
            received(*form("pscluster.worker.data.per_worker", "given"))  # only workers accept datasets
        with pytest.raises(MisuseError, match=r"peers may not name .*pscluster\.worker\.data\.sources"):
            received(*form("pscluster.worker.data.sources", "MappedArray"))
    policy.choose(SerializationPolicy(False, "", (closed,), ("numpy",), is_worker=True))
    assert received(*named("pscluster.worker.data.per_worker", "given"))([1]) == [1]
    assert received(*named("numpy", "sum")) is np.sum
    with pytest.raises(MisuseError, match=r"peers may not name what is in os, .* in a function of your own$"):
        received(*named("os", "system"))


NOT_FOR_PEERS = {
    *("Checkpoint", "CheckpointManager", "ClusterCoordinator", "ClusterResolver", "ClusterSpec", "Dashboard"),
    *("DataPart", "DistributedDataset", "EmbeddingTable", "FixedShardsPartitioner", "HashPartitioner", "History"),
    *("KubernetesClusterResolver", "LocalCluster", "MaxSizePartitioner", "MinSizePartitioner", "ModuloPartitioner"),
    *("ParameterServerStrategy", "Partitioner", "PerReplica", "PerWorker", "PerWorkerDataset", "PerWorkerIterator"),
    "PerWorkerVariable",
    *("Plan", "ProgressLine", "RemoteValue", "RemoteValueStatus", "ReplicaContext", "RestoredFrom", "SavedVariables"),
    *("Server", "ServingTable", "SidecarEvaluator", "SimpleClusterResolver", "SlurmClusterResolver"),
    *("SynchronousStrategy", "TFConfigClusterResolver", "UnionClusterResolver", "UnionResolver", "callbacks"),
    *("export_delta", "optimizers"),
}
"""Of the public names those that make sense on the coordinator alone, or that only the library makes."""


def test_the_list_has_all_that_is_public() -> None:
    """Each public function and class is listed or known to be the coordinator's, and every listed name exists."""
    modules = ("callbacks", "errors", "initializers", "metrics", "optimizers")
    public = {name: getattr(api, name) for name in (*api.__all__, *modules)}
    for library in (api.errors, api.initializers, api.metrics, schedules, optim):
        classes = {name: value for name, value in vars(library).items() if isinstance(value, type)}
        public |= {
            name: value
            for name, value in classes.items()
            if not name.startswith("_") and value.__module__.startswith(library.__name__)
        }
    for name, value in public.items():
        listed = getattr(value, "__qualname__", "") in EVERYWHERE.get(getattr(value, "__module__", ""), ())
        assert listed or name in NOT_FOR_PEERS or isinstance(value, types.ModuleType), name
    for module_name, listed_names in [*EVERYWHERE.items(), *ON_WORKERS.items()]:
        if module_name.split(".")[1] in ("torch", "jax", "keras") and not importlib.util.find_spec(
            module_name.split(".")[1]
        ):
            continue  # tests/frameworks uses these
        for name in listed_names:
            assert operator.attrgetter(name)(importlib.import_module(module_name)) is not None


@pytest.mark.usefixtures("closed")
def test_records_of_ours_are_those_of_the_list() -> None:
    """A record is made without its class's code: of pscluster's, only those that may be named."""
    resolve_record = record_resolver(dict[str, type]().__getitem__)
    assert resolve_record("", "pscluster.worker.data.per_worker", "InputContext") is api.InputContext
    for module_name, name in (
        ("pscluster.worker.data.sources", "MappedArray"),
        ("pscluster.core.functions.policy", "SerializationPolicy"),
    ):
        with pytest.raises(MisuseError, match="peers may not name"):
            resolve_record("", module_name, name)


def test_files_elsewhere_are_not_looked_at(tmp_path: Path, closed: Path) -> None:
    """No module or script outside the role's folders is imported or run, whatever its path."""
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
        with pytest.raises(UnresolvedReference, match="is missing here, or of another version"):
            resolve(form, b"", things)
    sys.path.append(str(elsewhere))
    try:
        with pytest.raises(MisuseError, match=r"lies at .*, outside the folders whose functions peers may name"):
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
def test_a_pickle_is_not_looked_at(module: Any, tmp_path: Path) -> None:
    """It is not unpickled, wherever it is in the message, and whatever else is there."""
    mark = tmp_path / "mark"
    data = f"{sys.implementation.cache_tag}\n".encode() + cloudpickle.dumps(Bomb(mark))
    for form, bulk in (
        (definition_pb2.Definition(digest="d", pickle=data), b""),
        (definition_pb2.Definition(digest="d"), data),
        (definition_pb2.Definition(digest="d", module="users_steps", source_digest="0"), data),
    ):
        with pytest.raises(MisuseError, match=r"came by value, as a pickle, and pickles are off here"):
            resolve(form, bulk, things)
    message, bulk = argument_of("pscluster.ps.initializers", "Zeros")
    form = definition_pb2.Definition.FromString(message)
    form.pickle = form.inner[0].pickle = data
    assert resolve(form, bulk, things).func is module.everything  # type: ignore[attr-defined]
    with pytest.raises(ProtocolError, match="bytes of arrays"):
        resolve(form, data, things)
    assert not mark.exists()
    policy.choose(SerializationPolicy())
    with pytest.raises(UnresolvedReference, match="can't be called"):
        resolve(definition_pb2.Definition(digest="d", pickle=data), b"", things)
    assert mark.exists(), "the bomb is one"


def mutated(message: bytes, changes: list[tuple[int, int]]) -> bytes:
    """The message with some bytes changed."""
    data = bytearray(message)
    for position, byte in changes:
        data[position % len(data)] = byte
    return bytes(data)


@pytest.mark.timeout(300)
def test_rubbish_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bytes of a message are changed, the outcome is a function or one of our errors."""
    (tmp_path / "users_steps.py").write_text(MODULE)
    (tmp_path / "users_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("users_steps")
    batch = module.Batch(1, [module.plain, np.arange(3)])
    messages = [
        sent(functools.partial(module.everything, batch, np.arange(30_000), Thing("w"))),
        sent(module.Windows.named),
        sent(functools.partial(module.everything, functools.partial(module.plain, batch), x=module.Windows)),
    ]
    before = policy.chosen_policy()
    policy.choose(SerializationPolicy(False, "pickles are off here", (tmp_path.resolve(),)))

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
        policy.choose(before)
        for name in ("users_steps", "users_helpers"):
            sys.modules.pop(name, None)


# The policy of a role


def test_who_may_send_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option overrides the environment; a role open to any caller accepts no pickles unless told to."""
    monkeypatch.chdir(tmp_path)
    exposed = "this role listens on 0.0.0.0:1"
    assert not policy.policy_of(None, environ={"PSCLUSTER_ALLOW_PICKLE": " No "}).pickles
    assert policy.policy_of(None, exposed, environ={"PSCLUSTER_ALLOW_PICKLE": "1"}).pickles
    assert policy.policy_of(True, environ={"PSCLUSTER_ALLOW_PICKLE": "0"}).pickles
    with pytest.raises(ConfigurationError, match=r"PSCLUSTER_ALLOW_PICKLE is 'maybe'; it must be 1 or 0"):
        policy.policy_of(None, environ={"PSCLUSTER_ALLOW_PICKLE": "maybe"})
    assert policy.policy_of(None, environ={}).pickles
    assert policy.policy_of(True, exposed, environ={}).pickles
    chosen = policy.policy_of(None, exposed, environ={})
    assert not chosen.pickles
    assert "since this role listens on 0.0.0.0:1: give all roles a token" in chosen.why
    assert "--no-pickle, or PSCLUSTER_ALLOW_PICKLE=0" in policy.policy_of(False, exposed, environ={}).why


def test_where_functions_are_taken_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folders and packages that are named; by default the current folder and those of PYTHONPATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "on_path").mkdir()
    chosen = policy.policy_of(False, environ={"PYTHONPATH": f"{tmp_path / 'on_path'}{os.pathsep}/not/there"})
    assert chosen.folders == (tmp_path.resolve(), (tmp_path / "on_path").resolve())
    environ = {"PSCLUSTER_FUNCTIONS_FROM": f"{tmp_path}{os.pathsep}my.package", "PYTHONPATH": "/"}
    chosen = policy.policy_of(False, environ=environ)
    assert (chosen.folders, chosen.packages) == ((tmp_path.resolve(),), ("my.package",))
    assert policy.policy_of(False, "", ["on_path"], environ).folders == ((tmp_path / "on_path").resolve(),)
    with pytest.raises(ConfigurationError, match=r"names '/not/there', which is neither a folder here nor a package"):
        policy.policy_of(False, "", ["/not/there"])
    library = Path(pickle.__file__)
    assert not SerializationPolicy(False, "", (Path("/"),)).owns(library)


def test_a_class_goes_by_its_name(module: Any) -> None:
    """A record among the arguments has its class sent by name, like those of the script without pickles."""
    definition = capture(module.Batch, policy=OFF)
    (form,) = definition.forms()
    assert not form.pickle
    assert resolve(form, b"", things) is module.Batch
    assert isinstance(module, types.ModuleType)
    assert textwrap.dedent(repr(definition)).startswith("<CapturedFunction Batch by reference")
