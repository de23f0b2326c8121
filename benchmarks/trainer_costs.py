"""What a trainer costs: a run of a trivial function, a worker that dies, and members that come and go.

Each question is asked in a new process.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from driver import Handlers, serve, timed

from pscluster.coordinator import IndexedSlices, Variable
from pscluster.launch import RunConfig, ScalingConfig, Trainer, get_context, get_dataset_shard, report

_ROWS, _BATCH = 4000, 4
_WAIT = 0.02  # in each step, as for an accelerator: so that workers, not cores, are what it takes
_EACH = 25  # steps between two reports
_WINDOW = 1.0


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


def _steps(folder: str) -> list[int]:
    """Count rows on the servers, and note when each step was done, until the file "end" is there."""
    shard, seen = get_dataset_shard(), get_context().variables
    with Path(folder, f"steps-{os.getpid()}").open("a", buffering=1) as done:
        while not Path(folder, "end").exists():
            for nth, rows in enumerate(shard.iter_batches(_BATCH), 1):
                time.sleep(_WAIT)
                seen.scatter_add(IndexedSlices(np.ones(len(rows), np.int64), rows))
                done.write(f"{time.monotonic()}\n")
                if nth % _EACH == 0:
                    report({"epoch": shard.epoch})
                    if Path(folder, "end").exists():
                        break
    totals: list[int] = seen.numpy().tolist()
    return totals


def elastic(seconds: float, n: int) -> dict[str, float]:
    """Rates, in steps a second, with 2, 4 and then 1 worker, and the seconds from `scale` to the new rate: medians.

    `lost` and `twice` are rows that were not counted, and that were counted more than once: the most.
    """
    trials = [_elastic(seconds) for _ in range(n)]
    return {
        name: (max if name in ("lost", "twice") else statistics.median)(t[name] for t in trials) for name in trials[0]
    }


def _elastic(seconds: float) -> dict[str, float]:
    called: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            _steps,
            folder,
            ScalingConfig(workers=(1, 4)),
            RunConfig("run", folder),
            datasets={"train": np.arange(_ROWS)},
            variables=lambda _: Variable(np.zeros(_ROWS, np.int64), name="seen"),
        )

        def change() -> None:
            while not list(Path(folder).glob("run/reports/000001.json")):
                time.sleep(0.01)
            for workers in (2, 4, 1):
                called.append(time.monotonic())
                trainer.scale(workers)
                time.sleep(seconds)
            called.append(time.monotonic())
            Path(folder, "end").touch()

        thread = threading.Thread(target=change)
        thread.start()
        result = trainer.fit()
        thread.join()
        steps = sorted(float(line) for path in Path(folder).glob("steps-*") for line in path.read_text().splitlines())
        assert result.return_values is not None
        seen: np.ndarray[Any, Any] = np.max(result.return_values, axis=0)
    rates = [_rate(steps, end - seconds / 2, end) for end in called[1:]]
    whole = len(steps) * _BATCH // _ROWS  # epochs, in which each row was counted
    return {
        **{f"with {workers}": rate for workers, rate in zip((2, 4, 1), rates, strict=True)},
        "to 4": _until(steps, called[1], lambda rate: rate >= 0.9 * rates[1]),
        "to 1": _until(steps, called[2], lambda rate: rate <= 1.1 * rates[2]),
        "lost": float(np.maximum(whole - seen, 0).sum()),
        "twice": float(result.rows_again),
    }


def _rate(steps: Sequence[float], begin: float, end: float) -> float:
    return (bisect_left(steps, end) - bisect_left(steps, begin)) / (end - begin)


def _until(steps: Sequence[float], begin: float, is_new: Callable[[float], bool]) -> float:
    """Return the seconds from `begin` to the first window with the new rate."""
    at = begin
    while not is_new(_rate(steps, at, at + _WINDOW)):
        at += 0.05
    return at - begin


def main() -> None:
    handlers: Handlers = {"fit": fit, "restart": restart, "elastic": elastic}
    serve(lambda _: (handlers, {}))


if __name__ == "__main__":
    main()
