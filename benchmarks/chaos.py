"""Training while a fault strikes every few seconds, and what it cost: `make chaos`.

    python benchmarks/chaos.py [--job digits|embedding]... [--faults workers|all] [--durability KIND] [--seconds S]
                               [--every S] [--seed N] [--tls] [--short]

A real training job runs on 2 parameter servers and 3 workers, on two clusters in turn: one is left alone, the other
gets a fault, drawn by a seeded generator, every 10 s of its time. Slices of both alternate, so that disturbances of the
machine affect both. At the end a checker compares what the servers hold with what was acknowledged.

Every function also counts itself on every shard of a variable of integers, and adds 1 to all of a large array. So the
exact number of updates of each shard is known, and a torn read shows. Exit code 0: the checker found nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from driver import THREADS
from model import batches, forward_and_backward

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

from digits import load, loss_and_gradients  # noqa: E402 (of the path above)
from tests.faults.proxied import Link, ProxiedCluster  # noqa: E402
from tests.faults.proxy import Proxy  # noqa: E402
from tests.faults.steps import starve_once  # noqa: E402

from pscluster.coordinator import (  # noqa: E402
    ClusterCoordinator,
    ClusterSpec,
    FixedShardsPartitioner,
    IndexedSlices,
    ParameterServerStrategy,
    RemoteValueStatus,
    SimpleClusterResolver,
    Variable,
    optimizers,
)
from pscluster.core.security.tls import TLS_VARIABLE  # noqa: E402

NUM_PS, NUM_WORKERS, BATCH = 2, 3, 64
AHEAD = 30  # functions that are scheduled and not done
LEASE = 2.0
TIMEOUT = 120.0
WORKER_FAULTS = (
    "worker killed",
    "worker frozen",
    "worker cut off",
    "two workers killed",
    "worker out of memory",
    "nothing from a worker",
    "nothing to a worker",
    "slow link to a worker",
    "bad link to a worker",
)
PS_FAULTS = (
    "ps killed",
    "all ps killed",
    "ps frozen",
    "ps and worker killed",
    "coordinator cut off from a ps",
    "nothing from a ps to the coordinator",
    "nothing to a ps from the coordinator",
    "slow link of a ps and the coordinator",
    "bad link of a ps and the coordinator",
    "workers cut off from a ps",
    "nothing from a ps to the workers",
    "nothing to a ps from the workers",
    "slow link of a ps and the workers",
    "bad link of a ps and the workers",
    "disk full",
    "coordinator frozen",
)
SLOW = 100_000.0  # bytes/s
LATE = 0.3  # seconds, at most, for which a bad link delays a piece


class Job:
    """A cluster that trains, and counts what it does."""

    def __init__(self, name: str, durability: str, tls: bool, stack: contextlib.ExitStack, folder: Path) -> None:
        self.name = name
        self.disk = folder
        self.marks = stack.enter_context(tempfile.TemporaryDirectory(prefix="pscluster-marks-"))
        cluster = ProxiedCluster(
            NUM_PS,
            NUM_WORKERS,
            env={**THREADS, "PYTHONPATH": os.pathsep.join(sys.path)},
            log_level="ERROR",
            durability=durability,
            state_dir=folder,
            max_restarts=10_000,
            tls=tls,
        )
        self.cluster = stack.enter_context(cluster)
        # The coordinator has separate links to the servers: over gRPC, as for any role at another address.
        self.to_ps = [
            stack.enter_context(Proxy(cluster.cluster_spec().task_address("ps", index))) for index in range(NUM_PS)
        ]
        spec = ClusterSpec({"ps": [proxy.address for proxy in self.to_ps], "worker": cluster.addresses("worker")})
        if tls:
            os.environ[TLS_VARIABLE] = cluster.tls_folder
        self.strategy = ParameterServerStrategy(
            SimpleClusterResolver(spec), FixedShardsPartitioner(NUM_PS), token=cluster.token
        )
        stack.callback(self.strategy.close)
        with self.strategy.scope():
            self.count = Variable(np.zeros((NUM_PS, 4), np.int64), name="count")
            self.large = Variable(np.zeros((NUM_PS, 1 << 16), np.float32), name="large")
        self.coordinator = ClusterCoordinator(self.strategy, worker_lease=LEASE)
        self._step, self.accuracy = getattr(self, f"_{name}")()
        self.done = 0
        self.finished: list[float] = []  # when each function finished
        self._pending: list[Any] = []

    def _digits(self) -> tuple[Callable[[], Any], Callable[[], float]]:
        rng = np.random.default_rng(0)
        shapes = ((64, 128), (128,), (128, 10), (10,))
        with self.strategy.scope():
            parameters = [Variable(rng.normal(0, 0.1, shape).astype(np.float32)) for shape in shapes]
            adam = optimizers.Adam(1e-3)
        strategy, count, large = self.strategy, self.count, self.large

        def examples(context: Any) -> Iterator[Any]:
            x, y, _, _ = load()
            random_rows = np.random.default_rng([1, context.worker_index])
            while True:
                rows = random_rows.integers(len(y), size=BATCH)
                yield x[rows], y[rows]

        def step(data: Any) -> None:
            x, y = next(data)
            _, gradients = loss_and_gradients(x, y, *strategy.read(parameters))
            adam.apply_gradients(zip(gradients, parameters, strict=True))
            count.assign_add(np.ones((NUM_PS, 4), np.int64))
            large.assign_add(1.0)

        data = iter(self.coordinator.create_per_worker_dataset(examples))

        def accuracy() -> float:
            _, _, x, y = load()
            w1, b1, w2, b2 = strategy.read(parameters)
            return float(((np.maximum(x @ w1 + b1, 0) @ w2 + b2).argmax(axis=1) == y).mean())

        return lambda: self.coordinator.schedule(step, args=(data,)), accuracy

    def _embedding(self) -> tuple[Callable[[], Any], Callable[[], float]]:
        from model import ROWS, WIDTH, dense_shapes

        rng = np.random.default_rng(0)
        with self.strategy.scope():
            table = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(ROWS // 4, WIDTH), name="table")
            dense = [Variable(rng.normal(0, 0.05, shape).astype(np.float32)) for shape in dense_shapes()]
            adagrad = optimizers.Adagrad(0.01)
        strategy, count, large = self.strategy, self.count, self.large

        def step(data: Any) -> None:
            ids, features, labels = next(data)
            ids = ids // 4
            rows = table.gather(ids)
            _, gradients, d_rows = forward_and_backward(rows, features, labels, strategy.read(dense))
            sparse = IndexedSlices(d_rows.reshape(-1, WIDTH), ids.reshape(-1))
            adagrad.apply_gradients([(sparse, table), *zip(gradients, dense, strict=True)])
            count.assign_add(np.ones((NUM_PS, 4), np.int64))
            large.assign_add(1.0)

        data = iter(
            self.coordinator.create_per_worker_dataset(
                lambda context: itertools.cycle(batches(context.worker_index, BATCH))
            )
        )
        return lambda: self.coordinator.schedule(step, args=(data,)), lambda: math.nan

    def link(self, kind: str, worker: int, server: int) -> Link | Proxy:
        """The link that a fault of this kind cuts when it strikes this worker or this server."""
        if "workers" in kind:
            return self.cluster.links["ps", server]
        return self.to_ps[server] if "coordinator" in kind else self.cluster.links["worker", worker]

    def run(self, seconds: float) -> None:
        """Train for this long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while len(self._pending) < AHEAD:
                self._pending.append(self._step())
            self._collect()
            time.sleep(0.005)
        deadline = time.monotonic() + TIMEOUT
        while self._pending and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.005)
        self.coordinator.join(timeout=TIMEOUT)
        self._collect()

    def _collect(self) -> None:
        now = time.monotonic()
        left = []
        for value in self._pending:
            if value.status is RemoteValueStatus.NOT_READY:
                left.append(value)
            else:
                value.fetch(timeout=TIMEOUT)  # raises the error that made it fail
                self.finished.append(now)
                self.done += 1
        self._pending = left


@dataclass
class Strike:
    """A fault, when it came, and for how long nothing finished around it."""

    kind: str
    at: float
    until: float = math.inf  # the end of the slice
    without_service: float = 0.0
    until_whole: float = 0.0


@dataclass
class Chaos:
    """Strikes a job."""

    job: Job
    kinds: tuple[str, ...]
    every: float
    rng: random.Random
    strikes: list[Strike] = field(default_factory=list)
    _deck: list[str] = field(default_factory=list)

    def during(self, seconds: float) -> None:
        """Strike every so often while the job runs for this long; later if the previous fault is not over."""
        over, begin = threading.Event(), time.monotonic()
        moments = itertools.count(self.every / 2, self.every)

        def strike() -> None:
            while not over.wait(max(begin + next(moments) - time.monotonic(), 0.0)):
                if not self._deck:  # each kind once, then all again
                    self._deck = self.rng.sample(self.kinds, len(self.kinds))
                self.strikes.append(self._one(self._deck.pop()))

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            self.job.run(seconds)
        finally:
            ended = time.monotonic()
            over.set()
            thread.join()
            for strike_of_slice in self.strikes:
                strike_of_slice.until = min(strike_of_slice.until, ended)

    def _one(self, kind: str) -> Strike:
        job, cluster = self.job, self.job.cluster
        worker, server = self.rng.randrange(NUM_WORKERS), self.rng.randrange(NUM_PS)
        done = Strike(kind, time.monotonic())

        def kill(role: str, index: int) -> None:
            if cluster.is_alive(role, index):
                cluster.kill(role, index)

        if kind in ("worker killed", "two workers killed", "ps and worker killed"):
            kill("worker", worker)
        if kind == "two workers killed":
            kill("worker", (worker + 1) % NUM_WORKERS)
        if kind in ("ps killed", "ps and worker killed", "all ps killed"):
            kill("ps", server)
        if kind == "all ps killed":
            kill("ps", 1 - server)
        if kind in ("worker frozen", "ps frozen"):
            role, index = ("worker", worker) if kind == "worker frozen" else ("ps", server)
            pid = cluster.pids.get((role, index))
            if pid is not None:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(LEASE + 1)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if kind == "coordinator frozen":
            freeze = f"kill -STOP {os.getpid()}; sleep {LEASE + 1}; kill -CONT {os.getpid()}"
            subprocess.run(["sh", "-c", freeze], check=True)
        if "cut off" in kind:
            link = job.link(kind, worker, server)
            link.part()
            time.sleep(1.0)
            link.join()
        if kind == "worker out of memory":
            # If the function runs again, it does nothing.
            job.coordinator.schedule(starve_once, args=(job.marks, str(len(self.strikes)))).fetch(timeout=TIMEOUT)
        if kind.startswith(("nothing ", "slow link ", "bad link ")):
            link = job.link(kind, worker, server)
            if kind.startswith("nothing "):
                link.stall(back="from a" in kind)
            elif kind.startswith("slow"):
                link.slow(SLOW)
            else:
                link.stutter(LATE, self.rng.randrange(1 << 30))
            time.sleep(LEASE + 1)
            link.flow()
        if kind == "disk full":
            with contextlib.suppress(OSError), (job.disk / "ballast").open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
            time.sleep(2.0)
            (job.disk / "ballast").unlink()
        limit = time.monotonic() + TIMEOUT
        while job.coordinator.workers_up < NUM_WORKERS and time.monotonic() < limit:
            time.sleep(0.01)
        done.until_whole = time.monotonic() - done.at
        return done

    def measure(self) -> None:
        """The longest time without a finished function, from each fault to the next."""
        for strike, following in itertools.zip_longest(self.strikes, self.strikes[1:]):
            end = min(strike.until, following.at if following is not None else math.inf)
            times = [strike.at, *(at for at in self.job.finished if strike.at <= at <= end)]
            strike.without_service = max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Checker:
    """Reads all the time, and compares at the end."""

    def __init__(self, job: Job, durability: str) -> None:
        self._job, self._durability = job, durability
        self.wrong: list[str] = []
        self.reads = 0
        self._over = threading.Event()
        self._last: dict[int, tuple[int, float]] = {}  # by shard: its server's process, value
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Checker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.3):
            lives = dict(self._job.cluster.pids)
            try:
                values = self._job.large.numpy()
            except Exception as error:
                self.wrong.append(f"a read failed: {error}")
                return
            self.reads += 1
            for shard, row in enumerate(values):
                if row.min() != row.max():
                    self.wrong.append(f"a torn read of shard {shard}: {row.min()} and {row.max()}")
                pid = lives.get(("ps", shard), 0)
                before = self._last.get(shard)
                same = before is not None and before[0] == pid == self._job.cluster.pids.get(("ps", shard))
                if before is not None and same and row[0] < before[1]:
                    self.wrong.append(f"shard {shard} went back from {before[1]} to {row[0]} in one process")
                self._last[shard] = pid, float(row[0])

    def verdict(self, deaths: int) -> str:
        """What is wrong; empty if nothing is."""
        job = self._job
        lost = job.strategy.lost_updates()
        for variable in (job.count, job.large):
            for index, shard in enumerate(variable.variables):
                values = np.unique(shard.numpy())
                missing = job.done - int(values[0])
                told = lost.get(variable.name, 0)
                # Of the updates in flight when a server died, the reported count may be a few too high.
                slack = deaths * NUM_WORKERS if self._durability == "snapshot" else 0
                if len(values) > 1 or missing < 0 or missing > told + slack:
                    self.wrong.append(
                        f"{variable.name}, shard {index}, holds {values} of {job.done} updates; {told} are known to "
                        "be lost"
                    )
        return "; ".join(self.wrong)


@contextlib.contextmanager
def small_disk(stack: contextlib.ExitStack, wanted: bool) -> Iterator[tuple[Path, bool]]:
    """A folder; if possible, on a separate disk that can be filled."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pscluster-chaos-")))
    mounted = (
        wanted and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", folder], stderr=-3).returncode == 0
    )
    try:
        yield folder, mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=False)


def show(chaos: Chaos, slices: list[tuple[float, float]], accuracies: tuple[float, float], verdict: str) -> None:
    """Print the results."""
    share = statistics.median(b / a for a, b in slices)
    calm, struck = (statistics.median(column) * BATCH for column in zip(*slices, strict=True))
    print(f"examples/s: {calm:,.0f} undisturbed, {struck:,.0f} under {len(chaos.strikes)} faults: {share:.2f} of it")
    by_kind: dict[str, list[Strike]] = defaultdict(list)
    for strike in chaos.strikes:
        by_kind[strike.kind].append(strike)
    print("fault | times | without service, s: p50, p99 | until all workers are there, s: p50, p99")
    for kind, strikes in sorted(by_kind.items()):
        cells = []
        for times in ([s.without_service for s in strikes], [s.until_whole for s in strikes]):
            ordered = sorted(times)
            cells.append(f"{statistics.median(ordered):.2f}, {ordered[math.ceil(0.99 * len(ordered)) - 1]:.2f}")
        print(f"{kind} | {len(strikes)} | {cells[0]} | {cells[1]}")
    if not math.isnan(accuracies[0]):
        print(f"accuracy: {accuracies[0]:.4f} undisturbed, {accuracies[1]:.4f} with faults")
    print(f"updates known to be lost: {chaos.job.strategy.lost_updates() or 'none'}")
    print(f"checker: {verdict or 'nothing is wrong'}")


def run(name: str, options: argparse.Namespace) -> bool:
    """Run one job; True if the checker found nothing."""
    with contextlib.ExitStack() as stack:
        wants_disk = options.faults == "all" and hasattr(os, "geteuid") and os.geteuid() == 0
        folder, mounted = stack.enter_context(small_disk(stack, wants_disk))
        # The other job must not fill that disk: it can't hold two jobs' logs.
        quiet_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pscluster-chaos-")))
        calm = Job(name, options.durability, options.tls, stack, quiet_folder)
        struck = Job(name, options.durability, options.tls, stack, folder)
        kinds = WORKER_FAULTS + (() if options.faults == "workers" else PS_FAULTS)
        if not mounted:
            kinds = tuple(kind for kind in kinds if kind != "disk full")
        chaos = Chaos(struck, kinds, options.every, random.Random(options.seed))
        for job in (calm, struck):
            job.run(min(2.0, options.every))  # warm up
        slices: list[tuple[float, float]] = []
        length = min(options.seconds, max(30.0, 3 * options.every))
        with Checker(struck, options.durability) as checker:
            for _ in range(max(1, round(options.seconds / length))):
                rates = []
                for job, work, seconds in ((calm, calm.run, options.calm or length), (struck, chaos.during, length)):
                    before, begin = job.done, time.monotonic()
                    work(seconds)
                    rates.append((job.done - before) / (time.monotonic() - begin))
                slices.append((rates[0], rates[1]))
                print(f"  {name}: {rates[1] / rates[0]:.2f} of the undisturbed speed", flush=True)
        chaos.measure()
        deaths = sum("ps" in strike.kind and "killed" in strike.kind for strike in chaos.strikes)
        verdict = checker.verdict(2 * deaths)
        print(
            f"{name}, durability {options.durability}, faults: {options.faults}, {'TLS, ' if options.tls else ''}"
            f"seed {options.seed}; {checker.reads} reads"
        )
        show(chaos, slices, (calm.accuracy(), struck.accuracy()), verdict)
        return not verdict


def main() -> int:
    parser = argparse.ArgumentParser(description="Train while faults strike.")
    parser.add_argument("--job", action="append", choices=("digits", "embedding"), help="default: both")
    parser.add_argument("--faults", choices=("workers", "all"), default="all")
    parser.add_argument("--durability", choices=("none", "snapshot", "log"), default="snapshot")
    parser.add_argument("--seconds", type=float, default=300.0, help="under faults; as long again without")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tls", action="store_true", help="with certificates, as off loopback")
    parser.add_argument("--short", action="store_true", help="one job, 16 s with a fault every second, 1 s without any")
    options = parser.parse_args()
    options.calm = 0.0  # as long as with faults
    if options.short:
        options.seconds, options.every, options.calm = 16.0, 1.0, 1.0
    if options.durability == "none" and options.faults == "all":
        parser.error("without durability the death of a parameter server ends the job: say --faults workers")
    jobs = options.job or (["digits"] if options.short else ["digits", "embedding"])
    verdicts = [run(name, options) for name in jobs]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
