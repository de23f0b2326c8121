"""What a trainer costs: a run of a trivial function, and a worker that dies.

Each question is asked in a new process.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from driver import Handlers, serve, timed

from pscluster.launch import RunConfig, ScalingConfig, Trainer, get_context, report


def _nothing() -> None:
    report({"done": 1})


def fit(workers: int, backend: str, n: int) -> dict[str, float]:
    """Seconds from the call of fit() to its return, of a function that reports once: median, and the most."""
    with tempfile.TemporaryDirectory() as folder:

        def run(trial: int) -> float:
            trainer = Trainer(
                _nothing, None, ScalingConfig(workers=workers), RunConfig(f"run-{trial}", folder), backend=backend
            )
            return timed(trainer.fit)

        seconds = [run(trial) for trial in range(n)]
    return {"median": statistics.median(seconds), "most": max(seconds)}


def _dies(folder: str) -> None:
    """Report, and die as rank 1 after the second report; note when, and when the function begins again."""
    begun = time.time()
    rank = get_context().world_rank
    if rank == 1 and (died := Path(folder, "died")).exists():
        Path(folder, "again").write_text(str(begun - float(died.read_text())))
    for step in range(4):
        report({"step": step})
        if rank == 1 and step == 1 and not Path(folder, "died").exists():
            Path(folder, "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def restart(backend: str, n: int) -> dict[str, float]:
    """Seconds from a worker's death to the beginning of its function in the next attempt: median, and the most."""
    seconds = []
    for _ in range(n):
        with tempfile.TemporaryDirectory() as folder:
            Trainer(_dies, folder, run=RunConfig("run", folder), backend=backend).fit()
            seconds.append(float(Path(folder, "again").read_text()))
    return {"median": statistics.median(seconds), "most": max(seconds)}


def main() -> None:
    handlers: Handlers = {"fit": fit, "restart": restart}
    serve(lambda _: (handlers, {}))


if __name__ == "__main__":
    main()
