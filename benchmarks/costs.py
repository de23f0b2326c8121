"""What must not grow: our own costs by number of workers, of queued functions, of clients, by size of table.

Each question starts a separate cluster of suitable shape, and ends it. It is asked in a new process every time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from driver import THREADS, Handlers, serve, timed
from pscluster_side import multiplication, multiplied

from pscluster.coordinator import (
    ClusterCoordinator,
    Dashboard,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    SimpleClusterResolver,
    Variable,
    optimizers,
    sources,
)
from pscluster.coordinator.observability.status_client import StatusClient, replies_by_task
from pscluster.core.transport.unix_sockets import connect, path_of
from pscluster.ps.storage.files.spill import LIMIT_BYTES

MIB = 1 << 20
QUEUE_SECONDS = 240.0  # limits the functions that hold the workers while the queue fills


def memory(pid: int | str, field: str) -> int:
    """Bytes of resident memory now (VmRSS), or the highest so far (VmHWM)."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) << 10 if match else 0


def processor_seconds(pid: int) -> float:
    """The processor time of all its threads so far, including those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def cluster_of(
    num_ps: int, num_workers: int, env: dict[str, str] | None = None, **options: Any
) -> Iterator[tuple[LocalCluster, ParameterServerStrategy, ClusterCoordinator]]:
    """A cluster and its coordinator. Its clients cache nothing, unless told to."""
    settings = {**THREADS, "PSCLUSTER_READ_CACHE_MIB": "0", **(env or {})}
    with (
        LocalCluster(num_ps, num_workers, env=settings, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(num_ps)) as strategy,
    ):
        yield cluster, strategy, ClusterCoordinator(strategy, **options)


def _nothing() -> None:
    pass


def dispatch(workers: int, n: int) -> dict[str, float]:
    """CPU of the coordinator's process per empty function, and functions per second: the medians of the rounds."""
    with cluster_of(1, workers) as (_, _, coordinator):

        def work() -> None:
            for _ in range(n):
                coordinator.schedule(_nothing)
            coordinator.join()

        for _ in range(2):
            work()
        cpu, seconds = [], []
        for _ in range(7):
            begin = time.process_time()
            seconds.append(timed(work))
            cpu.append(time.process_time() - begin)
        return {"cpu": statistics.median(cpu) / n, "rate": n / statistics.median(seconds)}


def queue(n: int) -> dict[str, float]:
    """CPU and memory per function of this many that wait at the same time: the median of up to 7 rounds."""
    with cluster_of(1, 2, max_queued=n + 10) as (_, _, coordinator), tempfile.TemporaryDirectory() as directory:
        for _ in range(2000):
            coordinator.schedule(_nothing)
        coordinator.join()

        def hold(path: str, seconds: float) -> None:
            until = time.monotonic() + seconds
            while not os.path.exists(path) and time.monotonic() < until:
                time.sleep(0.02)

        cpu, bytes_each = [], 0.0
        for trial in range(min(7, max(1, 100_000 // n))):
            gate = os.path.join(directory, f"open-{trial}")
            for _ in range(4):
                coordinator.schedule(hold, args=(gate, QUEUE_SECONDS))
            time.sleep(0.3)
            gc.collect()
            before, begin = memory("self", "VmRSS"), time.process_time()
            for _ in range(n):
                coordinator.schedule(_nothing)
            if not trial:  # later ones use the memory of the first
                bytes_each = (memory("self", "VmRSS") - before) / n
            Path(gate).touch()
            coordinator.join()
            cpu.append(time.process_time() - begin)
        return {"cpu": statistics.median(cpu) / n, "bytes": bytes_each}


def server_memory(update: str, mib: int, seconds: float, budget: int) -> dict[str, float]:
    """Resident memory of a server whose variable two workers read and update all the time.

    Its state is written every few seconds, as by default.
    """
    with cluster_of(1, 2, env={"PSCLUSTER_IN_FLIGHT_MIB": str(budget)}) as (cluster, strategy, coordinator):
        pid = cluster.pids["ps", 0]
        empty = memory(pid, "VmRSS")
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(mib << 10, 256))
            adam = optimizers.Adam(1e-3)
        updates = {
            "assign": variable.assign,
            "assign_add": variable.assign_add,
            "Adam": lambda values: adam.apply_gradients([(values, variable)]),
        }
        apply, copies = updates[update], 3 if update == "Adam" else 1
        delta = coordinator.create_per_worker_dataset(lambda: iter_ones((mib << 10, 256)))

        def load(iterator: Any, until: float) -> None:
            ones = next(iterator)
            while time.monotonic() < until:
                strategy.read([variable])
                apply(ones)

        highest, stop = [empty], threading.Event()

        def watch() -> None:
            while not stop.wait(0.005):
                highest[0] = max(highest[0], memory(pid, "VmRSS"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            iterator, until = iter(delta), time.monotonic() + seconds
            for _ in range(2):
                coordinator.schedule(load, args=(iterator, until))
            coordinator.join()
        finally:
            stop.set()
            watcher.join()
        size = mib * MIB
        return {
            "constant": empty,
            "copies": copies,
            "kept": LIMIT_BYTES,
            "load": (highest[0] - empty) / size,
        }


def unchanged(mib: int, keep: int, n: int) -> float:
    """Return the seconds that a client that may cache `mib` MiB takes to read a tensor that does not change."""
    with cluster_of(1, 1, env={"PSCLUSTER_READ_CACHE_MIB": str(keep)}) as (_, strategy, coordinator):
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(mib << 10, 256))

        def read() -> list[float]:
            return [timed(lambda: strategy.read([variable])) for _ in range(n + 3)][3:]

        return statistics.median(coordinator.schedule(read).fetch(timeout=120))


def pushes(durability: str, seconds: float) -> float:
    """Updates of 8 MiB per second, by one worker, on one server with this durability."""
    with (
        LocalCluster(1, 1, env=THREADS, log_level="ERROR", durability=durability) as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(8 << 10, 256))

        def push(until: float) -> tuple[int, float]:
            ones, count, begin = np.ones((8 << 10, 256), np.float32), 0, time.monotonic()
            while (now := time.monotonic()) < until:
                variable.assign_add(ones)
                count += 1
            return count, now - begin

        coordinator.schedule(push, args=(time.monotonic() + 1,)).fetch(timeout=120)
        count, took = coordinator.schedule(push, args=(time.monotonic() + seconds,)).fetch(timeout=120)
        return count / took


def healing(mib: int, durability: str) -> dict[str, float]:
    """Seconds from the start of a new process to the first update, and from when it serves; with this much state."""
    with (
        LocalCluster(1, 1, env=THREADS, log_level="ERROR", durability=durability) as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.ones(shape, dtype), shape=(mib << 10, 256))
            small = Variable(np.zeros(4, np.float32))
        del variable
        address = cluster.cluster_spec().task_address("ps", 0)
        whole, serving = [], []
        for _ in range(3):
            killed = cluster.kill("ps", 0)
            started = time.monotonic()
            cluster.wait_restarted("ps", 0, killed)
            up: list[float] = []

            def watch(up: list[float] = up) -> None:
                while not up:
                    with contextlib.suppress(OSError), connect(str(path_of(address)), 1.0):
                        up.append(time.monotonic())
                    time.sleep(0.002)

            watcher = threading.Thread(target=watch)
            watcher.start()
            small.assign_add(1.0)
            done = time.monotonic()
            watcher.join()
            whole.append(done - started)
            serving.append(done - up[0])
        return {"whole": statistics.median(whole), "serving": statistics.median(serving)}


def starts(role: str, n: int, busy: int) -> dict[str, float]:
    """Seconds from the start of a worker's or server's process to the end of the first function, beside busy loops.

    The launcher's own delay between restarts, which grows with their number, is left out: every other start is a
    requested one, which resets the task's restarts.
    """
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with (
            LocalCluster(1, 1, env=THREADS, log_level="ERROR") as cluster,
            ParameterServerStrategy(cluster) as strategy,
        ):
            with strategy.scope():
                count = Variable(np.zeros(1, np.int64))
            coordinator = ClusterCoordinator(strategy)

            def step() -> None:
                count.assign_add(np.ones(1, np.int64))

            coordinator.schedule(step).fetch()
            seconds = []
            for trial in range(n):
                if trial % 2:
                    cluster.restart(role, 0)
                else:
                    cluster.wait_restarted(role, 0, cluster.kill(role, 0))
                begin = time.monotonic()
                coordinator.schedule(step).fetch()
                seconds.append(time.monotonic() - begin)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    seconds.sort()
    return {"median": statistics.median(seconds), "p95": seconds[math.ceil(0.95 * n) - 1], "most": seconds[-1]}


def iter_ones(shape: tuple[int, ...]) -> Iterator[Any]:
    """The same array repeatedly."""
    ones = np.ones(shape, np.float32)
    while True:
        yield ones


def client_memory(mib: int, push: bool) -> float:
    """The increase to the peak of a new worker's memory, in tensors, while it reads or assigns one."""
    with cluster_of(1, 1) as (_, strategy, coordinator):
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(mib << 10, 256))
            small = Variable(np.zeros((1 << 10, 256), np.float32))

        def client() -> float:
            def resident(field: str) -> int:
                lines = Path("/proc/self/status").read_text().splitlines()
                return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

            value = np.ones((mib << 10, 256), np.float32) if push else None
            strategy.read([small])  # connects and imports
            small.assign_add(1)
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            if push:
                variable.assign(value)
                return (resident("VmHWM") - before) / (mib * MIB)
            kept = strategy.read([variable])  # the tensor itself is not a copy
            return (resident("VmHWM") - before - kept[0].nbytes) / (mib * MIB)

        return float(coordinator.schedule(client).fetch(timeout=120))


def bandwidth(clients: int, mib: int, n: int) -> float:
    """Bytes per second that one server sends to this many workers that read one variable at the same time."""
    with cluster_of(1, clients) as (_, strategy, coordinator):
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(mib << 10, 256))

        def read(times: int) -> None:
            for _ in range(times):
                strategy.read([variable])

        def work(times: int) -> None:
            for _ in range(clients):
                coordinator.schedule(read, args=(times,))
            coordinator.join()

        work(1)
        reads_each = max(1, n // clients)
        return reads_each * clients * mib * MIB / timed(lambda: work(reads_each))


def lookup(rows: int, ids: int, n: int) -> float:
    """Seconds for a gather of this many random rows of 16 from a table of this many rows."""
    with cluster_of(2, 1) as (_, strategy, coordinator):
        with strategy.scope():
            table = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(rows, 16))

        def gather() -> float:
            wanted = [np.random.randint(0, rows, ids) for _ in range(n)]
            table.gather(wanted[0])
            begin = time.perf_counter()
            for row_ids in wanted:
                table.gather(row_ids)
            return (time.perf_counter() - begin) / n

        return float(coordinator.schedule(gather).fetch(timeout=120))


def compared(ours: list[float], base: list[float]) -> dict[str, float]:
    """Medians of what was measured in turn, of the rounds' ratios, and half the width of its 95 % interval."""
    ratios = sorted(one / other for one, other in zip(ours, base, strict=True))
    # From order statistics, which do not depend on how the ratios are distributed.
    aside = max(math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2), 0)
    return {
        "ours": statistics.median(ours),
        "base": statistics.median(base),
        "ratio": statistics.median(ratios),
        "error": (ratios[-1 - aside] - ratios[aside]) / 2,
    }


def data_path(batches: int, rounds: int) -> dict[str, dict[str, float]]:
    """Examples per second of a small training step: with every example visited once, and by a loop on each worker.

    The comparisons are for `fit`, and for one batch per function. One job, asked in turn; batches of 64 shuffled rows
    of 64, from 64,000.
    """
    rows, size = 64_000, 64
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    y = x.sum(1)
    with cluster_of(2, 2) as (_, strategy, coordinator):
        with strategy.scope():
            w = Variable(np.zeros(64, np.float32))

        def train(inputs: Any, labels: Any) -> float:
            error = inputs @ w.numpy() - labels
            w.assign_sub(inputs.T @ error * (0.01 / size))
            return float((error**2).mean())

        def with_part(part: Any) -> float:
            (loss,) = [train(*batch) for batch in part]  # it has one batch
            return loss

        def with_iterator(iterator: Any) -> float:
            return train(*next(iterator))

        def loop() -> Iterator[tuple[Any, Any]]:
            rng = np.random.default_rng()
            while True:
                order = rng.permutation(rows)
                for start in range(0, rows, size):
                    places = order[start : start + size]
                    yield x[places], y[places]

        own = coordinator.create_per_worker_dataset(loop)
        once = coordinator.distribute_dataset((x, y)).shuffle(seed=0).batch(size).repeat()
        again = coordinator.distribute_dataset((x, y)).shuffle(seed=1).batch(size).repeat()
        iterator, parts = iter(own), iter(once)

        def one_by_one(step: Callable[..., Any], argument: Callable[[], Any]) -> Callable[[], Any]:
            def all_of_them() -> None:
                for _ in range(batches):
                    coordinator.schedule(step, args=(argument(),))
                coordinator.join()

            return all_of_them

        def fitted(data: Any) -> Callable[[], Any]:
            return lambda: coordinator.fit(lambda batch: train(*batch), data, steps_per_epoch=batches, verbose=0)

        ways = {
            "fit": (fitted(again), fitted(own)),
            "one batch per function": (
                one_by_one(with_part, lambda: next(parts)),
                one_by_one(with_iterator, lambda: iterator),
            ),
        }
        measured: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
        for trial in range(rounds + 1):
            for name, pair in ways.items():
                for which in (0, 1) if trial % 2 else (1, 0):
                    seconds = timed(pair[which])
                    if trial:
                        measured[name][which].append(batches * size / seconds)
        return {name: compared(*rates) for name, rates in measured.items()}


def parquet(rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Examples per second of one worker that reads Parquet files in batches of 512, beside pyarrow alone in it.

    18 columns of numbers in row groups of 16,384 rows, on one thread. Alone, a function reads row group by row group
    and takes slices of each column's array.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, files = 512, 2
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory, cluster_of(1, 1) as (_, _, coordinator):
        for file in range(files):
            columns = {f"x{n}": rng.random(rows // files, dtype=np.float32) for n in range(13)}
            columns |= {f"id{n}": rng.integers(0, 100_000, rows // files) for n in range(5)}
            pq.write_table(pa.table(columns), f"{directory}/{file}.parquet", row_group_size=16_384)
        coordinator.schedule(pa.set_cpu_count, args=(1,)).fetch()

        def alone() -> int:
            seen = 0
            for file in range(files):
                with pq.ParquetFile(f"{directory}/{file}.parquet") as opened:
                    for group in range(opened.num_row_groups):
                        table = opened.read_row_group(group)
                        arrays = {name: table.column(name).to_numpy() for name in table.column_names}
                        for start in range(0, table.num_rows, size):
                            batch = {name: array[start : start + size] for name, array in arrays.items()}
                            seen += len(batch["x0"])
            return seen

        def read(part: Any) -> int:
            return sum(len(batch["x0"]) for batch in part)

        def ours(data: Any) -> Callable[[], Any]:
            def all_of_them() -> None:
                seen = [coordinator.schedule(read, args=(part,)) for part in data]
                assert sum(coordinator.fetch(seen)) == rows

            return all_of_them

        data = coordinator.distribute_dataset(sources.parquet(f"{directory}/*.parquet")).batch(size).parts(8)
        ways = {
            "alone": lambda: coordinator.schedule(alone).fetch(),
            "in order": ours(data),
            "shuffled": ours(data.shuffle(seed=1)),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for trial in range(rounds + 1):
            for name in ways if trial % 2 else reversed(ways):
                seconds = timed(ways[name])
                if trial:
                    rates[name].append(rows / seconds)
        return {name: compared(rates[name], rates["alone"]) for name in ("in order", "shuffled")}


def packing(steps: int, rounds: int) -> dict[str, float]:
    """Steps of 0.3 ms per second: by `fit` with one step per function, with its own choice, and without any dispatch.

    With one step per function, an eighth of the steps. Also the percentage of the workers' time outside functions, from
    the first to the last, with `fit`'s own choice.
    """
    with cluster_of(2, 2) as (_, _, coordinator):
        step, data = multiplication(), coordinator.create_per_worker_dataset(multiplied)
        iterator = iter(data)

        def alone(elements: Any) -> float:
            return sum(step(next(elements)) for _ in range(steps // 2))

        def without() -> None:
            for _ in range(2):
                coordinator.schedule(alone, args=(iterator,))
            coordinator.join()

        def fitted(count: int, size: Any) -> Callable[[], Any]:
            return lambda: coordinator.fit(step, data, steps_per_epoch=count, steps_per_execution=size, verbose=0)

        few = steps // 8
        ways = {
            "one step per function": (few, fitted(few, 1)),
            "chosen": (steps, fitted(steps, "auto")),
            "no dispatch": (steps, without),
        }
        measured: dict[str, list[float]] = {name: [] for name in (*ways, "beside")}
        last = 0
        for trial in range(rounds + 1):
            for name, (count, work) in ways.items():
                seconds = timed(work)
                ran, last = functions_since(last, coordinator)
                if trial:
                    measured[name].append(count / seconds)
                    if name == "chosen":
                        spans = [
                            (functions[0][0], functions[-1][1], sum(end - begin for begin, end in functions))
                            for functions in ran
                        ]
                        there = sum(end - begin for begin, end, _ in spans)
                        measured["beside"].append(100 * (1 - sum(within for *_, within in spans) / there))
        return {name: statistics.median(rates) for name, rates in measured.items()}


_WATCHER = """
import sys, threading, time, urllib.request

def look(page):
    with urllib.request.urlopen(page + "events", timeout=60) as events:
        events.read1(1)
        opened.set()
        while events.read1(65536):
            pass

opened = threading.Event()
threading.Thread(target=look, args=sys.argv[1:2], daemon=True).start()
opened.wait()
print("looking", flush=True)
while True:
    begin = time.monotonic()
    for address in sys.argv[2:]:
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read()
    time.sleep(max(5 - (time.monotonic() - begin), 0))
"""


@contextlib.contextmanager
def _watched(page: str, addresses: list[str]) -> Iterator[None]:
    """Within the block the live page is open, and all roles are asked for their metrics every five seconds.

    Prometheus asks every fifteen seconds, or every minute, by default.
    """
    command = [sys.executable, "-S", "-c", _WATCHER, page, *addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        try:
            assert watcher.stdout.readline(), "the watcher has ended"
            yield
            assert watcher.poll() is None, "the watcher has ended"
        finally:
            watcher.kill()


def telemetry(n: int, mib: int, reads: int, rounds: int, idle: float) -> dict[str, Any]:
    """Empty functions per second, and bytes read and pushed, with all telemetry on and watched, and with none.

    Two clusters are asked in turn. The counting itself is done in both: to measure it, compare with an older commit.

    Returns:
        the comparison, by what was done; and the additional processor time per second of all roles while they are
        only being watched.
    """

    def push(variable: Variable) -> None:
        ones = np.ones((mib << 10, 256), np.float32)
        for _ in range(reads):
            variable.assign_add(ones)

    def pull(strategy: Any, variable: Variable) -> None:
        for _ in range(reads):
            strategy.read([variable])

    def ways(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> dict[str, Callable[[], None]]:
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(mib << 10, 256))

        def many(function: Callable[..., None], count: int, *arguments: Any) -> Callable[[], None]:
            def work() -> None:
                for _ in range(count):
                    coordinator.schedule(function, args=arguments)
                coordinator.join()

            return work

        return {
            "functions": many(_nothing, n),
            "pull": many(pull, 2, strategy, variable),
            "push": many(push, 2, variable),
        }

    with contextlib.ExitStack() as stack:
        clusters: dict[str, dict[str, Callable[[], None]]] = {}
        for name, port in (("on", "0"), ("off", "off")):
            os.environ["PSCLUSTER_METRICS_PORT"] = port
            cluster, strategy, coordinator = stack.enter_context(cluster_of(2, 2))
            clusters[name] = ways(coordinator, strategy)
            if name == "on":
                page = stack.enter_context(Dashboard(coordinator, "127.0.0.1:0")).url
                with contextlib.closing(StatusClient(strategy.tasks)) as client:
                    replies = replies_by_task(client.ask())
                assert len(replies) == len(strategy.tasks), replies
                addresses = [strategy.metrics_address, *(reply.metrics_address for reply in replies.values())]
                pids = [os.getpid(), *cluster.pids.values()]

        def watched(name: str) -> contextlib.AbstractContextManager[None]:
            return _watched(page, addresses) if name == "on" else contextlib.nullcontext()

        measured: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in clusters} for kind in ("functions", "pull", "push")
        }
        for trial in range(rounds + 1):
            for name in sorted(clusters, reverse=bool(trial % 2)):
                with watched(name):  # takes long to start: so several tries for functions, the most precise rate
                    for kind in ("functions", "pull", "functions", "push", "functions"):
                        amount = n if kind == "functions" else 2 * reads * mib * MIB
                        rate = amount / timed(clusters[name][kind])
                        if trial:
                            measured[kind][name].append(rate)

        used: dict[str, list[float]] = {name: [] for name in clusters}
        for _ in range(3):
            for name, shares in used.items():
                with watched(name):
                    before, begin = sum(map(processor_seconds, pids)), time.monotonic()
                    time.sleep(idle)
                    shares.append((sum(map(processor_seconds, pids)) - before) / (time.monotonic() - begin))
        rates: dict[str, Any] = {kind: compared(times["on"], times["off"]) for kind, times in measured.items()}
        return {**rates, "idle": statistics.median(used["on"]) - statistics.median(used["off"])}


# LocalCluster always has a token: its processes are started without one here, and must not find the user's.
_WITHOUT_TOKEN = """
import json, os, runpy
del os.environ["PSCLUSTER_TOKEN"]
os.environ["PSCLUSTER_INSECURE"] = "1"
runpy.run_module("pscluster." + json.loads(os.environ["TF_CONFIG"])["task"]["type"], run_name="__main__")
"""


def security(functions: int, moves: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Functions per second, and GB/s of pulls and pushes by a worker, by authentication and encryption.

    Each of these ways is compared to none of it.
    """
    kinds: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "none": ({"transport": "tcp", "_command": (sys.executable, "-c", _WITHOUT_TOKEN)}, {}),
        "token": ({"transport": "tcp"}, {}),
        "token, TLS": ({"tls": True}, {"PSCLUSTER_TLS_SERVER_ONLY": "1"}),
        "token, mutual TLS": ({"tls": True}, {}),
    }
    return _in_turns(kinds, functions, moves, rounds)


def transports(functions: int, moves: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Compare Unix sockets, and mutual TLS, with TCP on loopback in the same way."""
    tcp, unix, tls = ({"transport": "tcp"}, {}), ({"transport": "unix"}, {}), ({"tls": True}, {})
    return _in_turns({"tcp": tcp, "unix": unix, "mutual TLS": tls}, functions, moves, rounds)


@contextlib.contextmanager
def _insecure() -> Iterator[None]:
    os.environ["PSCLUSTER_INSECURE"] = "1"
    try:
        yield
    finally:
        del os.environ["PSCLUSTER_INSECURE"]


def _in_turns(
    kinds: dict[str, tuple[dict[str, Any], dict[str, str]]], functions: int, moves: int, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Compare clusters with these options and environments with the first of them.

    All clusters are up at the same time and are asked in turn, so that other activity on the machine affects all of
    them.
    """
    base = next(iter(kinds))
    with contextlib.ExitStack() as stack:
        work: dict[tuple[str, str], Callable[[], float]] = {}
        for kind, (options, env) in kinds.items():
            settings = {**THREADS, "PSCLUSTER_READ_CACHE_MIB": "0", **env}
            cluster = stack.enter_context(LocalCluster(1, 2, env=settings, log_level="ERROR", **options))
            with _insecure() if kind == "none" else contextlib.nullcontext():
                # Like another's cluster: a LocalCluster passes its token to its strategies.
                resolver = SimpleClusterResolver(cluster.cluster_spec()) if kind == "none" else cluster
                strategy = stack.enter_context(ParameterServerStrategy(resolver, job_name=kind))
            coordinator = ClusterCoordinator(strategy)
            work.update({(kind, name): do for name, do in _moves(strategy, coordinator, functions, moves).items()})
        measured: dict[tuple[str, str], list[float]] = {key: [] for key in work}
        for trial in range(rounds + 1):
            order = sorted(work, key=lambda key: key[1])
            for key in order if trial % 2 else reversed(order):
                rate = work[key]()
                if trial:
                    measured[key].append(rate)
        return {
            kind: {name: compared(measured[kind, name], measured[base, name]) for at, name in work if at == kind}
            for kind in kinds
        }


def _moves(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator, functions: int, moves: int
) -> dict[str, Callable[[], float]]:
    def dispatched() -> float:
        def work() -> None:
            for _ in range(functions):
                coordinator.schedule(_nothing)
            coordinator.join()

        return functions / timed(work)

    measures: dict[str, Callable[[], float]] = {"functions/s": dispatched}
    for mib in (1, 40):
        with strategy.scope():
            variable = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(mib << 10, 256))
        count = max(moves // mib, 5)

        def pulled(variable: Variable, count: int) -> float:
            return timed(lambda: [strategy.read([variable]) for _ in range(count)])

        def pushed(variable: Variable, count: int) -> float:
            ones = np.ones(variable.shape, np.float32)
            return timed(lambda: [variable.assign_add(ones) for _ in range(count)])

        for name, move in (("pull", pulled), ("push", pushed)):

            def rate(move: Any = move, variable: Any = variable, count: int = count, mib: int = mib) -> float:
                return count * mib * MIB / 1e9 / coordinator.schedule(move, args=(variable, count)).fetch(timeout=120)

            measures[f"{name} {mib} MiB, GB/s"] = rate
    return measures


def functions_since(last: int, coordinator: Any) -> tuple[list[list[tuple[float, float]]], int]:
    """For each worker, the begin and end there of each function after that number; and the last one's number."""
    with tempfile.NamedTemporaryFile() as file:
        coordinator.timeline(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    ran: dict[int, list[tuple[float, float]]] = {}
    numbers = [last]
    for event in events:
        facts = event["args"]
        function = facts.get("function", 0)
        if "thread" in facts and function > last:  # in a worker's row
            ran.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
            numbers.append(function)
    return [sorted(spans) for spans in ran.values()], max(numbers)


def start(_: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Nothing to start: each question does it."""
    handlers: list[Callable[..., Any]] = [
        dispatch,
        queue,
        server_memory,
        client_memory,
        bandwidth,
        lookup,
        unchanged,
        pushes,
        healing,
        starts,
        data_path,
        parquet,
        packing,
        telemetry,
        security,
        transports,
    ]
    return {handler.__name__: handler for handler in handlers}, {}


if __name__ == "__main__":
    serve(start)
