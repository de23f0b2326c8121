"""The job of `soak.py`: the coordinator's script, which repeatedly does whatever could leave something behind.

A turn does all of it once: steps with a dataset, sparse rows, arrays as arguments and results, RemoteValues passed on
and dropped, functions and classes that are new every time, large reads and updates. Some turns also raise, make and
delete a variable, replace the dataset, check metrics and health, save a checkpoint, or restore one. At the end of a
turn everything has been joined, so no more functions wait than one turn has.

From time to time it prints a line of JSON with what it has done so far. The last line says that it is over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from digits import load, loss_and_gradients

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    ParameterServerStrategy,
    TFConfigClusterResolver,
    Variable,
    errors,
    metrics,
    optimizers,
)
from pscluster.coordinator.cli.health import is_healthy
from pscluster.core.security.tokens import load_token

ROWS, WIDTH = 50_000, 32
LARGE = 2_200_000  # elements: 4.2 MiB per shard, so that requests are streamed, and copies kept
BATCH, STEPS, NEW, TIMEOUT = 64, 30, 20, 300.0
PRINT_EVERY = 1.0


class ExpectedError(Exception):
    """An error that a step raises on purpose."""


class Load:
    """Everything that a turn does. `done` counts it, by kind."""

    def __init__(self, strategy: ParameterServerStrategy, folder: str) -> None:
        self.done: Counter[str] = Counter()
        self._strategy = strategy
        self._rng = np.random.default_rng(0)
        shapes = ((64, 128), (128,), (128, 10), (10,))
        with strategy.scope():
            self._dense = [Variable(self._rng.normal(0, 0.1, shape).astype(np.float32)) for shape in shapes]
            self._table = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(ROWS, WIDTH), name="table")
            self._large = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(LARGE,), name="large")
            self._still = Variable(lambda shape, dtype: np.ones(shape, dtype), shape=(LARGE,), name="still")
            self._adam, self._adagrad = optimizers.Adam(1e-3, name="adam"), optimizers.Adagrad(0.01, name="adagrad")
            self._sgd = optimizers.SGD(0.1, momentum=0.9, name="sgd")
            self._loss = metrics.Mean("loss")
        self._coordinator = ClusterCoordinator(strategy, worker_lease=5.0)
        self._manager = CheckpointManager(folder, strategy=strategy, max_to_keep=2)
        self._saving: Future[str] | None = None
        spec = TFConfigClusterResolver().cluster_spec()
        self._addresses = [spec.task_address(job, index) for job in spec.jobs for index in spec.task_indices(job)]
        self._token = load_token(None)
        self._make_steps()
        self._data = iter(self._coordinator.create_per_worker_dataset(self._examples))

    def _make_steps(self) -> None:
        strategy, dense, table, adam, adagrad = self._strategy, self._dense, self._table, self._adam, self._adagrad
        sgd, large, still, loss_metric = self._sgd, self._large, self._still, self._loss

        def examples(context: Any) -> Iterator[Any]:
            x, y, _, _ = load()
            random_rows = np.random.default_rng([1, context.worker_index])
            while True:
                rows = random_rows.integers(len(y), size=BATCH)
                yield x[rows], y[rows]

        def train(data: Any, number: int) -> dict[str, Any]:
            x, y = next(data)
            loss, gradients = loss_and_gradients(x, y, *strategy.read(dense))
            adam.apply_gradients(zip(gradients, dense, strict=True))
            loss_metric.update_state(loss)
            return {"number": number, "loss": loss, "gradient": gradients[0]}

        def sparse(ids: Any) -> Any:
            rows = table.gather(ids)
            adagrad.apply_gradients([(IndexedSlices(0.01 * rows + 0.1, ids), table)])
            table.scatter_add(IndexedSlices(np.ones((len(ids), WIDTH), np.float32), ids))
            table.scatter_max(IndexedSlices(-1.0, ids[:8]))
            return rows

        def big(amount: float) -> float:
            large.assign_add(np.full(LARGE, amount, np.float32))
            return float(large.numpy()[0] + still.numpy()[-1])

        def total(array: Any, scale: float = 1.0) -> Any:
            return array * scale

        def temporary(variable: Variable) -> Any:
            variable.assign_add(np.ones(variable.shape, variable.dtype))
            sgd.apply_gradients([(np.ones(variable.shape, np.float32), variable)])
            return variable.numpy()

        def fail(number: int) -> None:
            loss_metric.update_state(1.0)
            raise ExpectedError(f"number {number}, with a value of its own {np.arange(number % 10)}")

        self._examples, self._train, self._sparse, self._big = examples, train, sparse, big
        self._total, self._temporary, self._fail = total, temporary, fail

    def turn(self, turn: int) -> None:
        """Do everything once."""
        parts = [self._steps, self._rows, self._arrays, self._functions, self._streams]
        for at in self._rng.permutation(len(parts)):
            parts[at](turn)
        self._join()
        for every, work in (
            (4, self._error),
            (4, self._variables),
            (5, self._datasets),
            (6, self._look),
            (8, self._save),
            (30, self._restore),
        ):
            if turn % every == every - 1:
                work(turn)
        self.done["turns"] += 1

    def _join(self) -> None:
        self._coordinator.join(timeout=TIMEOUT)

    def _schedule(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.done["functions"] += 1
        return self._coordinator.schedule(function, args, kwargs)

    def _steps(self, turn: int) -> None:
        kept = [self._schedule(self._train, self._data, i) for i in range(STEPS)]
        del kept[::3]  # these are never fetched
        results = self._coordinator.fetch(kept[: STEPS // 3], TIMEOUT)
        assert all(np.isfinite(result["loss"]) for result in results)

    def _rows(self, turn: int) -> None:
        for _ in range(10):
            self._schedule(self._sparse, self._rng.integers(ROWS, size=int(self._rng.integers(8, 2000))))

    def _arrays(self, turn: int) -> None:
        value = self._schedule(self._total, np.ones(int(self._rng.integers(1, 1 << 18)), np.float32), scale=2.0)
        for _ in range(3):
            value = self._schedule(self._total, value, scale=0.5)
        if turn % 2:
            assert float(value.fetch(TIMEOUT)[0]) == 0.25

    def _functions(self, turn: int) -> None:
        """Use functions, classes and captured values that no worker has seen before.

        A worker keeps up to 256 of them: enough are used per turn that it reaches that number, and drops some, within
        minutes.
        """
        captured = self._rng.normal(size=NEW)

        def make(at: int) -> Callable[[], float]:
            class Weights:
                def __init__(self, scale: float) -> None:
                    self.scale = scale

                def total(self) -> float:
                    return float(captured.sum()) * self.scale

            return lambda: Weights(at).total()

        values = [self._schedule(make(at)) for at in range(NEW)]
        assert np.allclose(self._coordinator.fetch(values, TIMEOUT), captured.sum() * np.arange(NEW))
        self.done["new functions"] += NEW

    def _variables(self, turn: int) -> None:
        """Create a variable and delete it.

        A worker keeps the handle of each, some hundred bytes: so not at every turn.
        """
        with self._strategy.scope():
            variable = Variable(np.zeros((100, 50), np.float32), name=f"temporary-{turn}")
        assert self._schedule(self._temporary, variable).fetch(TIMEOUT).shape == (100, 50)
        self._strategy.delete_variable(variable)
        self.done["variables"] += 1

    def _streams(self, turn: int) -> None:
        self._schedule(self._big, 1.0)
        self._strategy.read([self._still, *self._dense])
        if turn % 4 == 0:
            self._large.assign(np.zeros(LARGE, np.float32))
        self.done["large updates"] += 1

    def _error(self, turn: int) -> None:
        """Check that the first error is raised once and cancels what waits; with `retries` the function first runs
        again."""
        waiting = [self._schedule(self._train, self._data, i) for i in range(5)]
        waiting.append(self._coordinator.schedule(self._fail, (turn,), retries=turn % 3))
        try:
            waiting += [self._schedule(self._train, self._data, i) for i in range(5)]
            self._join()
        except errors.FunctionError as error:
            self.done["errors" if f"number {turn}" in str(error) else "errors of others"] += 1
        for value in waiting:
            try:
                value.fetch(TIMEOUT)
            except (errors.FunctionError, errors.CancelledError):
                self.done["failed or cancelled"] += 1

    def _datasets(self, turn: int) -> None:
        """Make a new dataset; the previous one is dropped on all workers."""
        self._data = iter(self._coordinator.create_per_worker_dataset(self._examples))
        fixed = iter(self._coordinator.create_per_worker_dataset([np.ones(1000)] * 3))
        self._schedule(lambda data: next(data), fixed).fetch(TIMEOUT)
        self.done["datasets"] += 1

    def _look(self, turn: int) -> None:
        self._loss.result()
        self._loss.reset_states()
        self._strategy.save_progress(turn=turn)
        self._strategy.lost_updates()
        self._coordinator.explain()
        for address in self._addresses:  # one connection each; a role that is being restarted does not answer
            self.done["health checks"] += is_healthy(address, self._token)[0]

    def _save(self, turn: int) -> None:
        self._wait_saved()
        try:
            self._saving = self._manager.save(wait=False)
        except errors.PsClusterError as error:  # a server has just died
            self._failed("saving", error)

    def _wait_saved(self) -> None:
        if self._saving is not None:
            try:
                self._saving.result(TIMEOUT)
                self.done["checkpoints"] += 1
            except errors.PsClusterError as error:
                self._failed("writing", error)
            self._saving = None

    def _restore(self, turn: int) -> None:
        self._wait_saved()
        if self._manager.latest_checkpoint is not None:
            try:
                self._manager.restore(partial=True)
                self.done["restores"] += 1
            except errors.PsClusterError as error:
                self._failed("restoring", error)

    def _failed(self, action: str, error: Exception) -> None:
        """Record a failed checkpoint: the job continues."""
        self.done["checkpoints failed"] += 1
        print(f"{action} a checkpoint failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Wait until nothing is being written."""
        self._wait_saved()
        self._manager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="The job that soak.py looks at.")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--turns", type=int, default=0, help="default: no limit")
    parser.add_argument("--checkpoints", required=True)
    options = parser.parse_args()
    begin = printed = time.monotonic()
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    load_of_job = Load(strategy, options.checkpoints)

    def tell(**more: Any) -> None:
        print(json.dumps({**load_of_job.done, **more}), flush=True)

    for turn in range(options.turns) if options.turns else itertools.count():
        if time.monotonic() - begin > options.seconds:
            break
        load_of_job.turn(turn)
        if time.monotonic() - printed > PRINT_EVERY:
            printed = time.monotonic()
            tell()
    load_of_job.close()
    tell(lost=strategy.lost_updates(), over=True)


if __name__ == "__main__":
    main()
