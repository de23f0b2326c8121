"""Hours of work, during which the memory, descriptors, threads and sockets of every process are sampled: `make soak`.

    python benchmarks/soak.py [--hours H] [--every S] [--durability KIND] [--no-faults] [--csv FILE] [--png FILE]
                              [--worker-every S] [--ps-every S] [--shortest MINUTES] [--turns N]
    python benchmarks/soak.py --judge FILE [--png FILE] [--shortest MINUTES]     samples that were taken before

A job (`soak_job.py`) does whatever could leave something behind, on 2 parameter servers and 3 workers; each of them and
the coordinator is a separate process. This process holds the `LocalCluster`, kills roles, and takes the samples, which
it writes to the file immediately: it keeps none, and loads the drawing library only at the end. So no role contains
anything of the measurement, and this process can be judged like the others ("cluster").

Worker 0 and server 0 are never killed: they and the coordinator outlive all reconnections, and live as long as the run.
The others are killed in turn, and restarted.

Exit code 0: nothing grows, by the rule of `growth.py`, and the job had no error. Ctrl-C ends the run early, and the
samples taken so far are judged. Linux only: the samples are read from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from driver import THREADS
from growth import ALLOWED, COLUMNS, Sample, Series, Trend, judge, lives_of, read_samples, row_of
from harness import commit, machine

from pscluster.coordinator import LocalCluster
from pscluster.coordinator.local.environment import child_environ

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
NUM_PS, NUM_WORKERS = 2, 3
MOST_SAMPLES = 2000  # of a process, by default
TIMEOUT = 300.0  # for the job to end
COORDINATOR, CLUSTER = "coordinator", "cluster"
COLOURS = {  # Okabe and Ito's, which most people can distinguish
    COORDINATOR: "#000000",
    "ps 0": "#0072B2",
    "ps 1": "#56B4E9",
    "worker 0": "#D55E00",
    "worker 1": "#E69F00",
    "worker 2": "#CC79A7",
    CLUSTER: "#999999",
}
STARTING, POINTS = 10.0, 400  # seconds of a life that the picture omits; points of a line in it
PANELS = {"resident": "resident memory, MiB", "descriptors": "descriptors", "threads": "threads", "sockets": "sockets"}


def established() -> set[str]:
    """Return the inodes of all connected sockets, TCP and Unix, as the links in /proc/*/fd name them."""
    sockets = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[5] == "03":  # SS_CONNECTED
                sockets.add(f"socket:[{fields[6]}]")
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "01":
                    sockets.add(f"socket:[{fields[9]}]")
    return sockets


def disk_use(folders: Sequence[Path]) -> int:
    """The total size of the files in there."""
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # it has just been removed
                total += path.stat().st_size if path.is_file() else 0
    return total


def sample(seconds: float, role: str, pid: int, connected: set[str], folders: Sequence[Path]) -> Sample:
    """Sample a process now. OSError if it does not exist."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    rollup = re.findall(r"^Private_\w+:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
    sockets, descriptors = 0, list((process / "fd").iterdir())
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            sockets += os.readlink(descriptor) in connected
    return Sample(
        seconds,
        role,
        pid,
        int(status["VmRSS"].split()[0]) / 1024,
        sum(map(int, rollup)) / 1024,
        len(descriptors),
        int(status["Threads"]),
        sockets,
        disk_use(folders) / MIB,
    )


class Run:
    """The cluster, its job, and the faults."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.done: dict[str, Any] = {}
        self.strikes = 0
        self._over = threading.Event()
        self._striking = threading.Lock()
        self._struck_at = 0  # the turn of the last fault
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pscluster-soak-")))
        self._state, self._checkpoints = folder / "state", folder / "checkpoints"
        for directory in (self._state, self._checkpoints):
            directory.mkdir()
        path = os.pathsep.join([str(HERE.parent / "examples"), *filter(None, sys.path)])
        env = {**THREADS, "PYTHONPATH": path}
        self.cluster = stack.enter_context(
            LocalCluster(
                NUM_PS,
                NUM_WORKERS,
                env=env,
                log_level="ERROR",
                durability=options.durability,
                state_dir=self._state,
                max_restarts=1_000_000,
            )
        )
        limit = ["--turns", str(options.turns)] if options.turns else ["--seconds", str(3600 * options.hours)]
        role = [sys.executable, "-m", "pscluster.coordinator", "--exit-with-parent", "--log-level", "ERROR"]
        script = [str(HERE / "soak_job.py"), "--checkpoints", str(self._checkpoints), *limit]
        self.job = subprocess.Popen(
            [*role, *self.cluster.hand_over_port("chief", 0), *script],
            stdin=subprocess.PIPE,  # closing it stops the job
            stdout=subprocess.PIPE,
            text=True,
            env=child_environ(env, self.cluster.tf_config("chief", 0), self.cluster.token, self.cluster.tls_folder),
            start_new_session=True,  # Ctrl-C reaches this process alone
        )
        threads = [threading.Thread(target=self._listen)]
        if options.faults:
            workers, servers = (itertools.cycle(range(1, count)) for count in (NUM_WORKERS, NUM_PS))
            threads += [
                threading.Thread(target=self._strike, args=("worker", workers, options.worker_every)),
                threading.Thread(target=self._strike, args=("ps", servers, options.ps_every)),
            ]
        for thread in threads:
            stack.callback(thread.join)
            thread.start()
        stack.callback(self._stop)  # first: it ends what the threads wait for

    def _stop(self) -> None:
        self._over.set()
        if self.job.stdin is not None:
            self.job.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.job.wait(30)
        self.job.kill()
        self.job.wait()

    def _listen(self) -> None:
        assert self.job.stdout is not None
        for line in self.job.stdout:
            self.done = json.loads(line)

    def _strike(self, role: str, indices: Iterator[int], every: float) -> None:
        while not self._over.wait(every):
            with self._striking:
                # On a busy machine a killed role may not be back in time: the job must progress between two faults.
                while self._turns <= self._struck_at and not self._over.wait(0.1):
                    pass
                index = next(indices)
                if self.cluster.is_alive(role, index) and not self._over.is_set():
                    self._struck_at = self._turns
                    self.cluster.kill(role, index)
                    self.strikes += 1

    @property
    def _turns(self) -> int:
        return int(self.done.get("turns", 0))

    @property
    def working(self) -> bool:
        """Whether the job is running."""
        return not self.done.get("over") and self.job.poll() is None

    def processes(self) -> Iterator[tuple[str, int, list[Path]]]:
        """The processes to sample, and where they keep files."""
        yield COORDINATOR, self.job.pid, [self._checkpoints]
        for (role, index), pid in self.cluster.pids.items():
            yield f"{role} {index}", pid, list(self._state.glob(f"{role}-{index}-*"))
        yield CLUSTER, os.getpid(), []

    def watch(self, path: Path, every: float, limit: float) -> str:
        """Sample until the job is over; return what was wrong."""
        begin = told = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", buffering=1) as file, contextlib.suppress(KeyboardInterrupt):
            print(",".join(COLUMNS), file=file)
            for nth in itertools.count(1):
                connected = established()
                for role, pid, folders in self.processes():
                    with contextlib.suppress(OSError, KeyError, ValueError):  # it has just died
                        print(row_of(sample(time.monotonic() - begin, role, pid, connected, folders)), file=file)
                while self.working and (left := begin + nth * every - time.monotonic()) > 0:
                    time.sleep(min(left, 0.2))
                now = time.monotonic()
                if now > told + 600:
                    told = now
                    print(f"  {(now - begin) / 60:.0f} min: {self.account()}", flush=True)
                if not self.working:
                    break
                if now > begin + limit:
                    return f"the job has not ended in {limit:.0f} s"
        if not self.done.get("over") and (code := self.job.poll()) is not None:
            return f"the job ended with code {code}"
        return ""

    def account(self) -> str:
        """What the job has done."""
        done = {kind: count for kind, count in self.done.items() if kind not in ("over", "lost")}
        said = ", ".join(f"{count:,} {kind}" for kind, count in sorted(done.items(), key=lambda item: -item[1]))
        return f"{said or 'nothing'}; {self.strikes} processes killed"


def show(samples: Sequence[Sample], trends: Sequence[Trend]) -> None:
    """Print the table, in Markdown."""
    lives = lives_of(samples)
    print("| process | lives | minutes | memory, MiB | MiB an hour | descriptors | threads | sockets | disk, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    by_process: dict[tuple[str, int, int], dict[str, Trend]] = {}
    for index, trend in enumerate(trends):
        by_process.setdefault((trend.role, trend.lives, index // len(ALLOWED)), {})[trend.measure] = trend
    for (role, together, _), of in by_process.items():
        cells = {m: f"{of[m].start:.0f} - {of[m].end:.0f}" for m in ALLOWED}
        memory = of["resident"]
        who = role if together == 1 else f"{role}, {together} lives"
        print(
            f"| {who} | {len(lives[role])} | {memory.seconds / 60:.0f} | {cells['resident']} | {memory.hourly:+.1f} | "
            f"{cells['descriptors']} | {cells['threads']} | {cells['sockets']} | {cells['disk']} |"
        )


def verdict(trends: Sequence[Trend]) -> list[str]:
    """What grows; empty if nothing does."""
    return [str(trend) for trend in trends if trend.grows]


def thinned(times: Series, values: Series, points: int) -> tuple[Series, Series]:
    """At most this many points plus one: each the median of a group of neighbours."""
    together = -(-len(times) // points)
    starts = range(0, len(times), together)
    return times[::together], np.array([np.median(values[start : start + together]) for start in starts])


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw four panels, with a line per process, and a triangle where one was restarted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image  # matplotlib's own

    last = max(sample.seconds for sample in samples)
    unit, seconds = ("hours", 3600.0) if last > 5400 else ("minutes", 60.0)
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.4), sharex=True, layout="constrained", facecolor="white")
    lives = lives_of(samples)
    for panel, (measure, title) in zip(axes.flat, PANELS.items(), strict=True):
        for role, colour in COLOURS.items():
            for index, life in enumerate(lives.get(role, [])):
                times, values = life.series(measure)
                label = role if index == 0 else None
                begun = times >= times[0] + min(STARTING, life.seconds)
                points = max(1, round(POINTS * life.seconds / last)) if last else POINTS
                shown, medians = thinned(times[begun], values[begun], points)
                panel.plot(shown / seconds, medians, color=colour, linewidth=1, label=label)
                if index:
                    panel.plot(times[0] / seconds, 0, color=colour, marker="^", markersize=3, clip_on=False)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_ylim(bottom=0)
        panel.set_xlim(0, last / seconds)
        panel.grid(color="#dddddd", linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[1]:
        panel.set_xlabel(f"{unit}; a triangle: started anew")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    pyplot.close(figure)


def report(csv: Path, png: Path | None, shortest: float) -> bool:
    """Write the table, picture and verdict for the samples in the file; True if nothing grows."""
    samples = read_samples(csv)
    trends = judge(samples, shortest)
    show(samples, trends)
    if png is not None and samples:
        if importlib.util.find_spec("matplotlib") is None:
            print("no picture: matplotlib is not installed")
        else:
            draw(samples, png)
    growing = verdict(trends)
    if not trends:
        print(f"verdict: none, since no process was looked at for {shortest / 60:.0f} minutes")
    else:
        print("verdict: " + ("; ".join(growing) if growing else "nothing grows"))
    return not growing


def run(options: argparse.Namespace) -> bool:
    """Do the whole run; True if nothing grows and nothing was wrong."""
    every = options.every or max(0.5, 3600 * options.hours / MOST_SAMPLES)
    how = f"faults: a worker every {options.worker_every:.0f} s, a server every {options.ps_every:.0f} s"
    print(f"{machine()}; commit {commit()}")
    print(f"durability {options.durability}; {how if options.faults else 'no faults'}; a sample every {every:.1f} s")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        running = Run(options, stack)
        wrong = running.watch(options.csv, every, 3600 * options.hours + TIMEOUT)
        print(f"{running.account()}; updates known to be lost: {running.done.get('lost') or 'none'}", flush=True)
    calm = report(options.csv, options.png, 60 * options.shortest)
    if wrong:
        print(f"wrong: {wrong}")
    return calm and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Does anything grow over hours?")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, help=f"seconds between samples; default: {MOST_SAMPLES} samples in all")
    parser.add_argument("--durability", choices=("snapshot", "log"), default="snapshot")
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--worker-every", type=float, default=120.0, help="seconds from one killed worker to the next")
    parser.add_argument("--ps-every", type=float, default=300.0, help="seconds from one killed server to the next")
    parser.add_argument("--shortest", type=float, default=10.0, help="minutes of a life that is judged by itself")
    parser.add_argument("--turns", type=int, default=0, help="end after this many turns of the job")
    parser.add_argument("--csv", type=Path, default=HERE.parent / "build" / "soak.csv", help="where samples go")
    parser.add_argument("--png", type=Path, help="where the picture goes; default: nowhere")
    parser.add_argument("--judge", type=Path, metavar="CSV", help="run nothing: judge and draw these samples")
    options = parser.parse_args()
    if options.judge is not None:
        return 0 if report(options.judge, options.png, 60 * options.shortest) else 1
    logging.getLogger("pscluster.local_cluster").setLevel(logging.ERROR)  # these deaths are deliberate
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    return 0 if run(options) else 1


if __name__ == "__main__":
    sys.exit(main())
