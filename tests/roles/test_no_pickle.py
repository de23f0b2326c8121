"""Jobs without pickles: making or reading one is fatal in every process, and the jobs complete.

pytestmark = pytest.mark.plain_starts

The hook is `sitecustomize`, which Python imports before everything else. A job with pickles shows that it works.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.examples.test_word2vec import SMALL, topics
from tests.roles.processes import Roles, make_cluster, run, run_all, tf_config

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
SENTENCE = r"pickles are off here \(--no-pickle, or PSCLUSTER_ALLOW_PICKLE=0\)"

HOOK = """
import _pickle, marshal, os, pathlib, pickle, sys

def fatal(name):
    def strike(*args, **kwargs):
        pathlib.Path(os.environ["STRUCK"], f"{os.getpid()}-{name}").touch()
        sys.stderr.write(f"a pickle: {name}\\n")
        os._exit(86)
    return strike

for module in (pickle, _pickle):
    for name in ("dump", "dumps", "load", "loads"):
        setattr(module, name, fatal(name))
    for name in ("Pickler", "Unpickler"):
        setattr(module, name, type(name, (), {"__init__": fatal(name)}))
pickle._Pickler, pickle._Unpickler = pickle.Pickler, pickle.Unpickler
"""


class Hooked:
    """The environment of processes that die if they use a pickle, and the marks that they leave."""

    def __init__(self, folder: Path) -> None:
        self.struck = folder / "struck"
        self.struck.mkdir()
        hook = folder / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {"PYTHONPATH": path, "STRUCK": str(self.struck)}

    def strikes(self) -> list[str]:
        """What was tried."""
        return sorted(path.name for path in self.struck.iterdir())


@pytest.fixture
def hooked(tmp_path: Path) -> Hooked:
    """The hooked environment for this test."""
    return Hooked(tmp_path)


def test_digits(hooked: Hooked) -> None:
    """The example reaches its accuracy; with pickles, the hook ends it."""
    job = ("run", "--ps", "2", "--workers", "2", "--max-restarts", "0")
    script = str(EXAMPLES / "digits.py")
    code, output = run(*job, "--no-pickle", script, "--steps", "400", **hooked.env)
    assert code == 0, output
    assert float(re.findall(r"test accuracy ([\d.]+)", output)[0]) > 0.96
    assert hooked.strikes() == []
    code, output = run(*job, "--pickle", script, "--steps", "400", **hooked.env)
    assert code == 86, output
    assert hooked.strikes() != []


@pytest.mark.timeout(300)
def test_word2vec(hooked: Hooked, tmp_path: Path) -> None:
    """The example works with a dataset of a dataclass in the script, `fit`, evaluation and checkpoints, and resumes
    from one."""
    command = ("run", "--ps", "2", "--workers", "2", "--max-restarts", "0", "--no-pickle")
    options = (str(EXAMPLES / "word2vec.py"), "--files", topics(tmp_path), *SMALL, "--batch-size", "500")
    kept = ("--checkpoints", str(tmp_path / "kept"), "--picture", str(tmp_path / "picture.png"))
    for epochs in ("1", "2"):
        code, output = run(*command, *options, *kept, "--epochs", epochs, **hooked.env)
        assert "held-out AUC" in output, output
        assert "more epochs" in output or code == 0
    assert list((tmp_path / "kept").rglob("*.safetensors"))
    assert hooked.strikes() == []


EVERYTHING = '''
import dataclasses, functools, math, sys
from pathlib import Path
from typing import ClassVar
import numpy as np
from pscluster.ps.optim import rules, schedules
from pscluster.coordinator import (
    CheckpointManager, ClusterCoordinator, FixedShardsPartitioner, LocalCluster, ParameterServerStrategy, Variable,
    IndexedSlices, metrics, optimizers,
)

SCALE = np.float32(2) * 3                       # made anew where the file is imported

@dataclasses.dataclass(frozen=True)
class Halving(rules.UpdateRule):
    """A rule of the user's own."""
    name: ClassVar[str] = "halving"
    slots: ClassVar[dict] = {}
    def apply(self, param, grad, slots, scalars, scratch):
        param -= param.dtype.type(scalars[0]) * grad / 2

@dataclasses.dataclass
class Answer:
    number: int
    array: np.ndarray

class Refusal(ValueError):
    """An error of the user's own."""

@dataclasses.dataclass
class Largest:
    """A metric of the user's own."""
    name: str = "largest"
    def initial(self):
        return {"largest": np.full((), -1e9)}
    def update(self, state, values):
        return {"largest": np.maximum(state["largest"], np.max(values))}
    def merge(self, state, other):
        return {"largest": np.maximum(state["largest"], other["largest"])}
    def result(self, state):
        return float(state["largest"])

def sevens(shape, dtype):
    return np.full(shape, 7, dtype)

def filled(value, shape, dtype):
    return np.full(shape, value, dtype)

def add(w):
    w.assign_add(np.full(4, SCALE, np.float32))

def first_of(iterator):
    return next(iterator)

def uses_a_global():
    w.assign_add(np.ones(4, np.float32))        # which only the part below makes

def shifted(shift, x):
    return x + shift

def fit_step(w, sgd, batch):
    x = w.numpy()
    sgd.apply_gradients([(np.zeros(4, np.float32), w)])
    return float(batch.mean())

def score(w, batch):
    return batch - w.numpy()[0]

def rows_and_all(table, w, ids):
    return [(table, ids), w]

def count_rows(table, w, ids):
    w.numpy()
    table.scatter_add(IndexedSlices(0 * table.sparse_read(ids) + 1, ids))

def one_more(count):
    count.assign_add(1)
    return int(count)

def a_list():
    return [1, 2]

def length_of(made):
    return len(made.get())

def total_of(part):
    return sum(map(np.sum, part))

def answer(given):
    return Answer(given.number + 1, given.array * 2)

def refuse():
    raise Refusal("no", 3)

def numbers_of(path):
    return np.loadtxt(path, ndmin=1)

def counted(context):
    def forever():
        while True:
            yield context.worker_index
    return forever()

if __name__ == "__main__":
    with (
        LocalCluster(2, 2, allow_pickle=False, durability="log", state_dir=sys.argv[1]) as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy,
    ):
        with strategy.scope():
            w = Variable(np.zeros(4, np.float32), name="w")
            made = Variable(sevens, shape=(5,), name="made")
            closed = Variable(functools.partial(filled, np.float64(8)), shape=(3,), name="closed")
            SGD = optimizers.SGD(schedules.ExponentialDecay(0.5, 10, 0.5))
            total = metrics.Mean("total")
            halving = optimizers.Optimizer(Halving(learning_rate=0.5))
            halved = Variable(np.ones(4, np.float32), name="halved")
        coordinator = ClusterCoordinator(strategy)

        for _ in range(20):
            coordinator.schedule(add, args=(w,))
        coordinator.join()
        print("w", w.numpy().tolist(), "made", made.numpy().tolist(), "closed", closed.numpy().tolist())

        got = coordinator.schedule(answer, args=(Answer(1, np.arange(100_000)),)).fetch()
        print("answer", type(got).__name__, got.number, got.array.sum())

        iterator = iter(coordinator.create_per_worker_dataset(counted))
        given = iter(coordinator.create_per_worker_dataset([5, 6]))
        values = [coordinator.schedule(first_of, args=(iterator,)) for _ in range(4)]
        first = coordinator.schedule(first_of, args=(given,)).fetch()
        print("workers", set(coordinator.fetch(values)) <= {0, 1}, "given", first)

        halving.apply_gradients([(np.ones(4, np.float32), halved)])
        print("halved", halved.numpy().tolist())

        shift = functools.partial(shifted, 10)
        data = coordinator.distribute_dataset(np.arange(100.0)).map(shift, workers=1).batch(10)
        history = coordinator.fit(functools.partial(fit_step, w, SGD), data, epochs=1, verbose=0)
        print("loss", history.history["loss"])

        with strategy.scope():
            table = Variable(np.zeros((100, 2), np.float32), name="table")
        ids = coordinator.distribute_dataset(np.arange(100)).batch(10)
        counts, lookups = functools.partial(count_rows, table, w), functools.partial(rows_and_all, table, w)
        coordinator.fit(counts, ids, epochs=2, verbose=0, lookups=lookups, overlap=1)
        coordinator.schedule(counts, args=(np.arange(10),), lookups=lookups).fetch()
        print("rows", table.numpy()[:, 0].sum())

        count, made = coordinator.per_worker_variable(3), coordinator.per_worker(a_list)
        print("own", coordinator.schedule(one_more, args=(count,)).fetch(), sorted(count.read_all()))
        print("length", coordinator.schedule(length_of, args=(made,)).fetch())
        print("predicted", coordinator.predict(functools.partial(shifted, 1), data)[:2].tolist())

        named = {"largest": Largest(), "mean": metrics.Mean()}
        for concurrent in (False, True):
            print("scores", coordinator.evaluate(functools.partial(score, w), data, named, concurrent=concurrent))

        numbers = Path(sys.argv[0]).parent / "numbers.txt"
        numbers.write_text("1 2 3")
        files = coordinator.distribute_dataset([str(numbers)], reader=numbers_of).batch(3)
        for part in files:
            print("file", coordinator.schedule(total_of, args=(part,)).fetch())

        with CheckpointManager(sys.argv[1] + "-checkpoints", strategy=strategy) as manager:
            manager.save()
        w.assign(np.zeros(4, np.float32))
        strategy.restore_or_initialize(sys.argv[1] + "-checkpoints")
        print("restored", w.numpy().tolist())
        cluster.kill("ps", 0)
        coordinator.schedule(add, args=(w,))
        coordinator.join()
        print("after a death", w.numpy().tolist())
        for refused in (uses_a_global, lambda: 1):
            try:
                coordinator.schedule(refused)
            except TypeError as error:
                print(error)
        try:
            coordinator.schedule(refuse).fetch()
        except Refusal as error:
            print("refused", error.args)
        try:
            coordinator.join()
        except Exception as error:
            print("joined", type(error).__name__)
'''


def everything(hooked: Hooked, folder: Path) -> tuple[int, str]:
    """Run the job with all kinds of functions, which keeps its files in a folder."""
    script = folder / "everything.py"
    script.write_text(EVERYTHING)
    return run(str(script), str(folder / "state"), command=(sys.executable,), **hooked.env)


@pytest.mark.timeout(300)
def test_whatever_runs_on_workers_and_servers(hooked: Hooked, tmp_path: Path) -> None:
    """It uses steps, initializers, datasets, readers, metrics, errors, records, logs and checkpoints; a server dies."""
    code, output = everything(hooked, tmp_path)
    assert code == 0, output
    assert hooked.strikes() == []
    for line in (
        "w [120.0, 120.0, 120.0, 120.0] made [7.0, 7.0, 7.0, 7.0, 7.0] closed [8.0, 8.0, 8.0]",
        "answer Answer 2 9999900000",
        "workers True given 5",
        "halved [0.75, 0.75, 0.75, 0.75]",
        "loss [59.5]",
        "rows 210.0",
        "own 4 [array(3), array(4)]",
        "length 2",
        "predicted [11.0, 12.0]",
        "file 6.0",
        "restored [120.0, 120.0, 120.0, 120.0]",
        "after a death [126.0, 126.0, 126.0, 126.0]",
        "uses_a_global can't be sent without a pickle: it uses the global 'w' of everything.py, a pscluster.",
        "<lambda> can't be sent without a pickle: it is a lambda: write it as a function at the top level of",
        "refused ('no', 3)",
    ):
        assert line in output, output
    assert output.count("scores {'largest': -11.0, 'mean': -60.5}") == 2, output
    kept = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert kept


PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def test_only_one_module_knows_pickles() -> None:
    """No other module of the library imports a pickling module, or lets NumPy use one."""
    files = set()
    for folder in ("core", "ps", "worker", "coordinator"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            names = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
            if names & PICKLERS:
                files.add(path.name)
            assert "allow_pickle=True" not in text, path
            assert "multiprocessing" not in names, path
    assert files == {"by_value.py"}


# Refusals

BY_VALUE = """
import sys
import numpy as np
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable

strategy = ParameterServerStrategy(TFConfigClusterResolver())
w = None
with strategy.scope():
    try:
        w = Variable(lambda shape, dtype: np.ones(shape, dtype), shape=(2,), name="w")
    except Exception as error:
        print("initializer", type(error).__name__, error)
coordinator = ClusterCoordinator(strategy)
def named(): return 1
try:
    coordinator.schedule(named)
except Exception as error:
    print("named", type(error).__name__, error)
try:
    coordinator.schedule(lambda: 1)
    print("scheduled")
    coordinator.join()
    print("ran")
except Exception as error:
    print("step", type(error).__name__, error)
"""


def refusals(
    folder: Path, roles_env: Mapping[str, str], chief_env: Mapping[str, str], bind: str = ""
) -> tuple[str, str]:
    """What a job with functions by value says, and what the roles do."""
    cluster = make_cluster()
    with Roles(cluster, folder) as roles:
        for process in ("ps", "worker"):
            options = ("--bind", bind + cluster[process][0].rpartition(":")[2], "--insecure") if bind else ()
            roles.env = dict(roles_env)
            getattr(roles, process)(0, *options)
        roles.env = dict(chief_env)
        script = roles.script(BY_VALUE)
        chief = roles.start(script, role="chief", command=(sys.executable,))
        assert chief.wait() == 0, chief.output
        return chief.output, "".join(process.output for process in roles.started[:2])


def test_the_sender_refuses(tmp_path: Path) -> None:
    """`schedule` and `Variable` say that it can't be sent, why, and how to correct it."""
    output, _ = refusals(tmp_path, {}, {"PSCLUSTER_ALLOW_PICKLE": "0"})
    why = r"it is a lambda: write it as a function at the top level of script.py"
    assert re.search(rf"step TypeError <lambda> can't be sent without a pickle: {why}.*{SENTENCE}", output), output
    assert re.search(rf"initializer TypeError <lambda> can't be sent without a pickle: {why}", output), output
    why = r"script.py has no `if __name__ == \"__main__\":`, and a worker must import it to take a function from it"
    assert re.search(rf"named TypeError named can't be sent without a pickle: {why}.*{SENTENCE}", output), output
    assert "scheduled" not in output


def test_the_receiver_refuses(tmp_path: Path) -> None:
    """A worker and a server without pickles accept none, even if the coordinator sends them."""
    output, _ = refusals(tmp_path, {"PSCLUSTER_ALLOW_PICKLE": "0"}, {})
    assert re.search(rf"step \S+ .*came by value, as a pickle, and {SENTENCE}", output, re.DOTALL), output
    assert re.search(rf"initializer \w+ .*came by value, as a pickle, and {SENTENCE}", output), output
    assert "ran" not in output


@pytest.mark.parametrize("allowed", [False, True])
def test_whoever_listens_to_anybody_takes_no_pickles(tmp_path: Path, allowed: bool) -> None:
    """Without a token and off loopback pickles are refused, unless they are explicitly allowed."""
    env = {"PSCLUSTER_ALLOW_PICKLE": "1"} if allowed else {}
    output, said = refusals(tmp_path, env, {"PSCLUSTER_INSECURE": "1"}, bind="0.0.0.0:")
    assert ("ran" in output) is allowed, output
    why = "this role listens on 0.0.0.0:"
    assert (why in output) is not allowed, output
    assert "without a token" in said


def test_nonsense_is_refused() -> None:
    """A value that is neither yes nor no, and a folder that does not exist, end the role with a message."""
    config = tf_config(make_cluster(), "ps")
    code, output = run("ps", config=config, PSCLUSTER_ALLOW_PICKLE="maybe")
    assert (code, "PSCLUSTER_ALLOW_PICKLE is 'maybe'; it must be 1 or 0" in output) == (2, True), output
    code, output = run("ps", "--no-pickle", "--functions-from", "/not/there", config=config)
    assert (code, "neither a folder here nor a package name" in output) == (2, True), output


def test_a_script_in_another_folder(tmp_path: Path) -> None:
    """A worker takes the script's functions from the folder that it was given, by the file's digest."""
    elsewhere, cluster = tmp_path / "elsewhere", make_cluster()
    elsewhere.mkdir()
    text = """
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver
def step(x):
    return x + 1, __file__
if __name__ == "__main__":
    coordinator = ClusterCoordinator(ParameterServerStrategy(TFConfigClusterResolver()))
    print("got", coordinator.schedule(step, args=(1,)).fetch())
"""
    (elsewhere / "script.py").write_text(text)
    (tmp_path / "roles").mkdir()
    with Roles(cluster, tmp_path / "roles") as roles:
        roles.ps(0, "--no-pickle")
        roles.worker(0, "--no-pickle", "--functions-from", str(elsewhere))
        roles.folder = tmp_path
        chief = roles.coordinator(text, options=["--no-pickle"])
        assert chief.wait() == 0, chief.output
        assert f"got (2, '{elsewhere / 'script.py'}')" in chief.output
        chief = roles.coordinator(text + "# another version\n", options=["--no-pickle"])
        assert chief.wait() == 1
        assert "is missing here, or of another version; looked at" in chief.output, chief.output


MAPPED = """
import sys
import numpy as np
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver
def total(batch):
    return float(batch.sum())
if __name__ == "__main__":
    with ParameterServerStrategy(TFConfigClusterResolver()) as strategy:
        coordinator = ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset(np.load(sys.argv[1], mmap_mode="r")).batch(4)
        try:
            print("losses", coordinator.fit(total, data, epochs=1, verbose=0).history["loss"])
        except Exception as error:
            print("failed", type(error).__name__, error)
        print("still there", coordinator.schedule(total, args=(np.ones(3),)).fetch())
"""


def test_data_files_are_read_below_what_workers_were_given(tmp_path: Path) -> None:
    """A mapped array in a file elsewhere is refused, and the worker survives; with --data-from it is read."""
    data, scripts = tmp_path / "data", tmp_path / "scripts"
    data.mkdir()
    scripts.mkdir()
    np.save(data / "numbers.npy", np.arange(8.0))
    (scripts / "script.py").write_text(MAPPED)
    job = ("run", "--no-pickle", "--max-restarts", "0")
    script = (str(scripts / "script.py"), str(data / "numbers.npy"))
    code, output = run(*job, *script)
    assert code == 0, output
    refusal = r"failed .*lies outside the folders .*: start the workers with --data-from"
    assert re.search(refusal, output, re.DOTALL), output
    assert "still there 3.0" in output
    code, output = run(*job, "--data-from", str(data), *script)
    assert code == 0, output
    assert "losses [14.0]" in output


SYNCHRONOUS = """
import numpy as np
from pscluster.coordinator import (
    SynchronousStrategy, TFConfigClusterResolver, compute_average_loss, replica_context, scale_regularization_loss,
)
def dataset_fn(context):
    return [np.arange(context.get_per_replica_batch_size(4)) + context.input_pipeline_id]
def batches():
    return [np.arange(4.0)]
def step(iterator):
    x = next(iterator)
    loss = compute_average_loss(x) + scale_regularization_loss(1.0)
    return replica_context().all_reduce("sum", loss), x
if __name__ == "__main__":
    with SynchronousStrategy(TFConfigClusterResolver()) as strategy:
        for data in (
            strategy.distribute_datasets_from_function(dataset_fn),
            strategy.distribute_dataset(batches),
            strategy.distribute_dataset([np.arange(10.0, 14.0)]),
        ):
            loss, x = strategy.run(step, args=(iter(data),))
            print("loss", *map(float, loss), "x", strategy.gather(x, axis=0).tolist())
"""


def test_synchronous_training(hooked: Hooked, tmp_path: Path) -> None:
    """Steps, datasets and losses of a SynchronousStrategy go by name."""
    (tmp_path / "script.py").write_text(SYNCHRONOUS)
    job = ("run", "--workers", "2", "--no-pickle", "--max-restarts", "0")
    code, output = run(*job, str(tmp_path / "script.py"), **hooked.env)
    assert code == 0, output
    assert re.findall(r"loss .*", output) == [
        "loss 2.0 2.0 x [0, 1, 1, 2]",
        "loss 2.5 2.5 x [0.0, 1.0, 2.0, 3.0]",
        "loss 12.5 12.5 x [10.0, 11.0, 12.0, 13.0]",
    ]
    assert hooked.strikes() == []


GLOBAL_ARRAYS = """
import numpy as np
from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver

with ParameterServerStrategy(TFConfigClusterResolver()) as strategy:
    mesh = spmd.create_mesh({"x": 2}, coordinator=ClusterCoordinator(strategy))
    a = spmd.distribute(np.arange(12.0).reshape(4, 3), spmd.Layout(["x", None], mesh))
    step = spmd.function(lambda v: (v.T @ v).relayout(["x", None]))  # stays here: what it does is sent
    for result in (a.T @ a, step(a), step(a)):
        assert result.full().tolist() == [[126.0, 144.0, 162.0], [144.0, 166.0, 188.0], [162.0, 188.0, 214.0]]
    assert spmd.random.normal(3, 1, layout=spmd.Layout([None], mesh)).full().shape == (3,)
    try:
        np.linalg.inv(spmd.zeros((2, 2), layout=spmd.Layout([None, None], mesh))).full()
    except np.linalg.LinAlgError as error:
        print("refused:", "Singular" in str(error))
"""


def test_global_arrays(hooked: Hooked, tmp_path: Path) -> None:
    """Programs over them are data, and so are those of traced functions."""
    script = tmp_path / "arrays.py"
    script.write_text(GLOBAL_ARRAYS)
    code, output = run("run", "--ps", "1", "--workers", "2", "--no-pickle", str(script), **hooked.env)
    assert code == 0, output
    assert "refused: True" in output
    assert hooked.strikes() == []


def test_the_help_says_it() -> None:
    """The help of every command that starts a role mentions it."""
    for code, output in run_all([((name, "--help"), {}) for name in ("ps", "worker", "coordinator", "run")]):
        assert code == 0
        assert "--no-pickle" in output
        assert "--functions-from" in output
        assert "--data-from" in output
