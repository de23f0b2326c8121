"""Where the time goes: a server, a worker and the coordinator under the load of one row of the benchmark.

    pip install py-spy
    python benchmarks/profile.py ROW [--seconds 5] [--native]

ROW is one of the names below. Only running threads are sampled; waiting does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pscluster_side
from driver import THREADS

LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "empty": ("empty", {"n": 20_000, "result": False}),
    "result": ("empty", {"n": 20_000, "result": True}),
    "latency": ("latency", {"n": 500}),
    "pull-1": ("pull", {"n": 200, "mib": 1}),
    "push-1": ("push", {"n": 200, "mib": 1}),
    "pull-40": ("pull", {"n": 12, "mib": 40}),
    "push-40": ("push", {"n": 12, "mib": 40}),
    "many": ("many", {"n": 40, "variables": 500}),
    "gather": ("gather", {"n": 100, "ids": 10_000}),
    "update": ("gather_update", {"n": 50, "ids": 10_000, "optimizer": "Adagrad"}),
    "embedding": ("embedding", {"n": 40, "batch": 512, "optimizer": "Adagrad"}),
}


def room(frame: str) -> str:
    """The component that this line belongs to."""
    for fragment, name in (("grpc", "gRPC"), ("numpy", "NumPy"), ("asyncio", "asyncio"), ("model.py", "the model")):
        if fragment in frame:
            return name
    if any(fragment in frame for fragment in ("ps/", "core/", "worker/", "coordinator/")):
        return "pscluster"
    return "other"


def show(who: str, samples: Path) -> None:
    """Print the shares of one process."""
    own, rooms = Counter[str](), Counter[str]()
    for line in samples.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        rooms[next((name for name in map(room, reversed(frames)) if name != "other"), "other")] += int(count)
    total = sum(own.values()) or 1
    print(f"\n{who}: {total} samples: " + ", ".join(f"{name} {n / total:.0%}" for name, n in rooms.most_common()))
    for frame, count in own.most_common(12):
        print(f"  {count / total:6.1%}  {frame}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile pscluster under one row of the benchmark.")
    parser.add_argument("row", choices=LOADS)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--native", action="store_true", help="frames of C code, too")
    options = parser.parse_args()
    os.environ.update(THREADS)
    with contextlib.ExitStack() as stack:
        bench = pscluster_side.Bench(stack, 2, 2)
        name, arguments = LOADS[options.row]
        load = getattr(bench, name)
        load(**arguments)
        over = threading.Event()

        def keep_on() -> None:
            while not over.is_set():
                load(**arguments)

        loader = threading.Thread(target=keep_on)
        loader.start()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pids = bench.strategy.cluster_resolver.pids
        roles = {"ps 0": pids["ps", 0], "worker 0": pids["worker", 0], "coordinator": os.getpid()}
        try:
            for who, pid in roles.items():
                command = ["py-spy", "record", "--nonblocking", "-f", "raw", "-r", "400", "-p", str(pid)]
                command += ["-d", str(options.seconds), "-o", str(folder / who), *(["--native"] * options.native)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            sys.exit("py-spy is not installed: pip install py-spy")
        finally:
            over.set()
            loader.join()
        for who in roles:
            show(who, folder / who)


if __name__ == "__main__":
    main()
