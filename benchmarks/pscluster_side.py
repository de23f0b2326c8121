"""Our own side: a cluster of pscluster, and what is measured on it.

    pscluster_side.py [--ps N] [--workers N]

Every measured function uses the public API, as a user would write it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from driver import THREADS, Handlers, serve, timed
from model import LOOP_SIDE, ROWS, batches, dense_shapes, forward_and_backward

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    MinSizePartitioner,
    ParameterServerStrategy,
    Variable,
    __version__,
    optimizers,
    replica_context,
)


class Bench:
    """The handlers, and the variables they share."""

    def __init__(self, stack: contextlib.ExitStack, num_ps: int, num_workers: int) -> None:
        env = {**THREADS, "PSCLUSTER_READ_CACHE_MIB": "0"}  # unchanged values are sent again: the transfer is measured
        # Over TCP, like everything it is compared with.
        cluster = stack.enter_context(
            LocalCluster(num_ps, num_workers, transport="tcp", env=env, log_level="ERROR"),
        )
        self.strategy = ParameterServerStrategy(
            cluster, variable_partitioner=MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=num_ps)
        )
        stack.callback(self.strategy.close)
        self.coordinator = ClusterCoordinator(self.strategy)
        self.workers = num_workers
        self._made: dict[str, Any] = {}

    def _variable(self, name: str, shape: tuple[int, ...]) -> Variable:
        if name not in self._made:
            with self.strategy.scope():
                self._made[name] = Variable(np.zeros(shape, np.float32), name=name)
        return self._made[name]

    def _optimizer(self, name: str) -> Any:
        if name not in self._made:
            with self.strategy.scope():
                self._made[name] = getattr(optimizers, name)(learning_rate=0.01, name=f"{name}-{len(self._made)}")
        return self._made[name]

    def _run(self, n: int, function: Any, args: tuple[Any, ...] = ()) -> float:
        """Seconds for this many functions, on all workers."""

        def work() -> None:
            for _ in range(n):
                self.coordinator.schedule(function, args=args)
            self.coordinator.join()

        return timed(work)

    def _once(self, key: str, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _constant(self, shape: tuple[int, ...]) -> Any:
        """An iterator that repeatedly gives each worker the same array of ones."""
        return iter(self.coordinator.create_per_worker_dataset(lambda: itertools.repeat(np.ones(shape, np.float32))))

    def optimizer_names(self) -> list[str]:
        """The optimizers that can be compared."""
        return [name for name in ("Adagrad", "SGD") if hasattr(optimizers, name)]

    # Dispatch

    def empty(self, n: int, result: bool) -> float:
        """Run empty functions: scheduled, joined and, if they have a result, fetched."""
        function = self._once(f"empty{result}", lambda: _one if result else _nothing)
        if not result:
            return self._run(n, function)

        def work() -> None:
            values = [self.coordinator.schedule(function) for _ in range(n)]
            self.coordinator.join()
            assert sum(self.coordinator.fetch(values)) == n

        return timed(work)

    def latency(self, n: int) -> list[float]:
        """Seconds from schedule to the result, one function at a time."""
        return [timed(lambda: self.coordinator.schedule(_one).fetch()) for _ in range(n)]

    # Collectives

    def all_reduce(self, n: int, size: int) -> float:
        """Seconds for this many all-reduces, on the slowest worker."""
        values = self.coordinator.schedule_together(_all_reduces, args=(n, size))
        return float(max(self.coordinator.fetch(values)))

    # Dense

    def pull(self, mib: int, n: int) -> float:
        """Run this many functions, each of which reads the whole variable."""
        strategy, variable = self.strategy, self._variable(f"dense{mib}", (mib << 10, 256))

        def pull() -> None:
            (value,) = strategy.read([variable])
            assert value[0, 0] == value[-1, -1]

        return self._run(n, self._once(f"pull{mib}", lambda: pull))

    def push(self, mib: int, n: int) -> float:
        """Run this many functions, each of which adds to the whole variable."""
        variable, shape = self._variable(f"dense{mib}", (mib << 10, 256)), (mib << 10, 256)

        def make() -> tuple[Any, Any]:
            def push(iterator: Any) -> None:
                variable.assign_add(next(iterator))

            return push, self._constant(shape)

        push, iterator = self._once(f"push{mib}", make)
        return self._run(n, push, (iterator,))

    def many(self, n: int, variables: int) -> float:
        """Run this many functions, each of which reads many variables of 4 KiB."""
        strategy, small = self.strategy, [self._variable(f"small{i}", (1024,)) for i in range(variables)]

        def read_all() -> None:
            values = strategy.read(small)
            assert len(values) == variables

        return self._run(n, self._once("many", lambda: read_all))

    # Sparse

    def gather(self, n: int, ids: int) -> float:
        """Run this many functions, each of which reads random rows of 64 of a million."""
        table = self._variable("table64", (ROWS, 64))

        def gather() -> None:
            rows = table.gather(np.random.randint(0, ROWS, ids))
            assert rows.shape == (ids, 64)

        return self._run(n, self._once(f"gather{ids}", lambda: gather))

    def gather_update(self, n: int, ids: int, optimizer: str) -> float:
        """Do the same, with a gradient for these rows that an optimizer applies."""
        table, rule = self._variable("table64", (ROWS, 64)), self._optimizer(optimizer)

        def step() -> None:
            wanted = np.random.randint(0, ROWS, ids)
            rows = table.gather(wanted)
            rule.apply_gradients([(IndexedSlices(rows * 2 + 1, wanted), table)])

        return self._run(n, self._once(f"update{optimizer}", lambda: step))

    # End to end

    def embedding(self, n: int, batch: int, optimizer: str) -> float:
        """Run this many training steps of the model in model.py."""
        strategy, rule = self.strategy, self._optimizer(optimizer)
        table = self._variable("embeddings", (ROWS, 32))

        def make() -> tuple[Any, Any]:
            rng = np.random.default_rng(0)
            with strategy.scope():
                dense = [Variable(rng.normal(0, 0.05, shape).astype(np.float32)) for shape in dense_shapes()]
            data = self.coordinator.create_per_worker_dataset(
                lambda context: itertools.cycle(batches(context.seed % (1 << 31), batch))
            )

            def step(iterator: Any) -> float:
                ids, features, labels = next(iterator)
                rows = table.gather(ids)
                weights = strategy.read(dense)
                loss, gradients, d_rows = forward_and_backward(rows, features, labels, weights)
                sparse = IndexedSlices(d_rows.reshape(-1, 32), ids.reshape(-1))
                rule.apply_gradients([(sparse, table), *zip(gradients, dense, strict=True)])
                return loss

            return step, iter(data)

        step, iterator = self._once(f"embedding{optimizer}", make)
        return self._run(n, step, (iterator,))

    def loop(self, n: int, packing: int) -> float:
        """Run an epoch of this many steps of a multiplication, by `fit`; 0 steps per function: its own choice."""

        def make() -> tuple[Any, Any]:
            return multiplication(), self.coordinator.create_per_worker_dataset(multiplied)

        step, data = self._once("loop", make)
        return timed(
            lambda: self.coordinator.fit(
                step, data, steps_per_epoch=n, steps_per_execution=packing or "auto", verbose=0
            )
        )

    # One client, one server

    def single(self, mib: int, n: int, push: bool) -> list[float]:
        """Seconds of each read or `assign` of one tensor, timed inside the client."""
        strategy, variable = self.strategy, self._variable(f"single{mib}", (mib << 10, 256))

        def make() -> tuple[Any, Any]:
            def client(times: int, values: Any) -> list[float]:
                took = []
                value = next(values)
                for _ in range(times):
                    begin = time.perf_counter()
                    if push:
                        variable.assign(value)
                    else:
                        strategy.read([variable])
                    took.append(time.perf_counter() - begin)
                return took

            return client, self._constant((mib << 10, 256))

        client, values = self._once(f"single{mib}{push}", make)
        return self.coordinator.schedule(client, args=(n, values)).fetch(timeout=300)


def multiplied() -> Iterator[Any]:
    """The input of the training loop's steps."""
    return itertools.repeat(np.full((LOOP_SIDE, LOOP_SIDE), 1 / LOOP_SIDE, np.float32))


def multiplication() -> Callable[[Any], float]:
    """A step of the training loop."""
    matrix = next(multiplied())
    return lambda element: float((element @ matrix).mean())


def _nothing() -> None:
    pass


def _one() -> int:
    return 1


def _all_reduces(n: int, size: int) -> float:
    """Return the seconds for this many all-reduces of float32, from when all workers are ready."""
    replica, array = replica_context(), np.ones(size // 4, np.float32)
    replica.barrier()

    def work() -> None:
        for _ in range(n):
            replica.all_reduce("sum", array)

    return timed(work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
        import google.protobuf
        import grpc

        bench = Bench(stack, options.ps, options.workers)
        names = ("empty", "latency", "pull", "push", "many", "gather", "gather_update", "embedding", "loop", "single")
        names += ("all_reduce", "optimizer_names")
        handlers: dict[str, Any] = {name: getattr(bench, name) for name in names}
        versions = {
            "pscluster": __version__,
            "grpcio": grpc.__version__,
            "protobuf": google.protobuf.__version__,
            "numpy": np.__version__,
        }
        return handlers, versions

    serve(start)


if __name__ == "__main__":
    main()
