"""TensorFlow's side: ParameterServerStrategy and ClusterCoordinator on a cluster of the same shape as ours.

Two servers, two workers and one coordinator, each a process. All functions are tf.functions, traced before anything is
timed. Reads are forced to arrive: the worker touches the first and the last element of what it read.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ["GRPC_FAIL_FAST"] = "use_caller"  # without it a task that starts late fails the job

import numpy as np
import tensorflow as tf
from driver import Handlers, serve, timed
from model import IDS, LOOP_SIDE, ROWS, WIDTH, batches, dense_shapes

INTER_OP = 8  # threads for kernels that wait: with fewer, tasks can deadlock
INTRA_OP = 1
LEARNING_RATE = 0.01
LOOP_PACKING = 16  # steps per function, by default: ours come to about as many


def serve_task(job: str, index: int, cluster: str) -> None:
    """Run a server or worker until its standard input ends."""
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=INTER_OP, intra_op_parallelism_threads=INTRA_OP)
    spec = tf.train.ClusterSpec(json.loads(cluster))
    server = tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=config, start=True)
    print("up", flush=True)
    sys.stdin.read()
    del server
    os._exit(0)


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def start_cluster(stack: contextlib.ExitStack, ps: int = 2, workers: int = 2) -> dict[str, list[str]]:
    """Start servers and workers, and wait until they listen."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(ps + workers)]
    spec = {"ps": addresses[:ps], "worker": addresses[ps:]}
    tasks = []
    for job, index in [(job, index) for job, of_job in spec.items() for index in range(len(of_job))]:
        task = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), job, str(index), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.callback(task.wait, 10)
        stack.callback(task.kill)
        tasks.append(task)
    for task in tasks:
        assert task.stdout is not None
        if task.stdout.readline() != b"up\n":
            raise RuntimeError("a TensorFlow task did not come up")
    return spec


class Bench:
    """The handlers, and the variables they share."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        tf.config.threading.set_inter_op_parallelism_threads(INTER_OP)
        tf.config.threading.set_intra_op_parallelism_threads(INTRA_OP)
        spec = start_cluster(stack)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec), rpc_layer="grpc")
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(256 << 10, max_shards=2)
        self.strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._made: dict[str, Any] = {}

    def _variable(self, name: str, shape: tuple[int, ...]) -> Any:
        if name not in self._made:
            with self.strategy.scope():
                self._made[name] = tf.Variable(tf.zeros(shape), name=name)
        return self._made[name]

    def _slots(self, optimizer: str, parts: list[Any]) -> list[Any]:
        """Adagrad's accumulators, each beside its shard."""
        slots = []
        for shard in parts:
            with self.strategy.scope(), self.strategy.extended.colocate_vars_with(shard):
                slots.append(tf.Variable(tf.fill(shard.shape, 0.1)) if optimizer == "Adagrad" else None)
        return slots

    def _once(self, key: str, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
            args = self._made[key][1:] if isinstance(self._made[key], tuple) else ()
            function = self._made[key][0] if isinstance(self._made[key], tuple) else self._made[key]
            for _ in range(4):  # traced, and seen by both workers
                self.coordinator.schedule(function, args=args)
            self.coordinator.join()
        return self._made[key]

    def _run(self, n: int, function: Any, args: tuple[Any, ...] = ()) -> float:
        def work() -> None:
            for _ in range(n):
                self.coordinator.schedule(function, args=args)
            self.coordinator.join()

        return timed(work)

    def optimizer_names(self) -> list[str]:
        """The optimizers that can be compared."""
        return ["Adagrad", "SGD"]

    # Dispatch

    def empty(self, n: int, result: bool) -> float:
        """Run empty functions: scheduled, joined and, if they have a result, fetched."""

        def make() -> Any:
            @tf.function
            def nothing() -> None:
                pass

            @tf.function
            def one() -> Any:
                return tf.constant(1)

            return one if result else nothing

        function = self._once(f"empty{result}", make)
        if not result:
            return self._run(n, function)

        def work() -> None:
            values = [self.coordinator.schedule(function) for _ in range(n)]
            self.coordinator.join()
            assert sum(self.coordinator.fetch(values)) == n

        return timed(work)

    def latency(self, n: int) -> list[float]:
        """Seconds from schedule to the result, one function at a time."""
        self.empty(4, True)
        one = self._made["emptyTrue"]
        return [timed(lambda: self.coordinator.schedule(one).fetch()) for _ in range(n)]

    # Dense

    def pull(self, mib: int, n: int) -> float:
        """Run this many functions, each of which reads the whole variable."""
        variable = self._variable(f"dense{mib}", (mib << 10, 256))

        def make() -> Any:
            @tf.function
            def pull() -> Any:
                value = tf.convert_to_tensor(variable)
                return value[0, 0] + value[-1, -1]

            return pull

        return self._run(n, self._once(f"pull{mib}", make))

    def push(self, mib: int, n: int) -> float:
        """Run this many functions, each of which adds to the whole variable."""
        variable, shape = self._variable(f"dense{mib}", (mib << 10, 256)), (mib << 10, 256)

        def make() -> tuple[Any, Any]:
            @tf.function
            def push(iterator: Any) -> None:
                variable.assign_add(next(iterator))

            deltas = self.coordinator.create_per_worker_dataset(
                lambda: tf.data.Dataset.from_tensors(tf.ones(shape)).repeat()
            )
            return push, iter(deltas)

        push, iterator = self._once(f"push{mib}", make)
        return self._run(n, push, (iterator,))

    def many(self, n: int, variables: int) -> float:
        """Run this many functions, each of which reads many variables of 4 KiB."""
        small = [self._variable(f"small{i}", (1024,)) for i in range(variables)]

        def make() -> Any:
            @tf.function
            def read_all() -> Any:
                return tf.add_n([variable.read_value() for variable in small])[0]

            return read_all

        return self._run(n, self._once("many", make))

    # Sparse

    def gather(self, n: int, ids: int) -> float:
        """Run this many functions, each of which reads random rows of 64 of a million."""
        table = self._variable("table64", (ROWS, 64))

        def make() -> Any:
            @tf.function
            def gather() -> Any:
                rows = tf.nn.embedding_lookup(table, tf.random.uniform([ids], maxval=ROWS, dtype=tf.int64))
                return rows[0, 0] + rows[-1, -1]

            return gather

        return self._run(n, self._once(f"gather{ids}", make))

    def gather_update(self, n: int, ids: int, optimizer: str) -> float:
        """Do the same, with a gradient for these rows that an optimizer applies."""
        table = self._variable("table64", (ROWS, 64))

        def make() -> Any:
            slots = self._slots(optimizer, parts_of(table))

            @tf.function
            def step() -> None:
                wanted = tf.random.uniform([ids], maxval=ROWS, dtype=tf.int64)
                with tf.GradientTape() as tape:
                    rows = tf.nn.embedding_lookup(table, wanted)
                    loss = tf.reduce_sum(rows * rows + rows)
                gradients = tape.gradient(loss, parts_of(table))
                for variable, slot, gradient in zip(parts_of(table), slots, gradients, strict=True):
                    apply(optimizer, variable, slot, gradient)

            return step

        return self._run(n, self._once(f"update{optimizer}", make))

    # End to end

    def embedding(self, n: int, batch: int, optimizer: str) -> float:
        """Run this many training steps of the model in model.py."""
        table = self._variable("embeddings", (ROWS, WIDTH))

        def make() -> tuple[Any, Any]:
            weights = [self._variable(f"w{i}", shape) for i, shape in enumerate(dense_shapes())]
            rng = np.random.default_rng(0)
            for weight, shape in zip(weights, dense_shapes(), strict=True):
                weight.assign(rng.normal(0, 0.05, shape).astype(np.float32))
            places = [shard for variable in (table, *weights) for shard in parts_of(variable)]
            slots = self._slots(optimizer, places)

            @tf.function
            def step(iterator: Any) -> Any:
                ids, features, labels = next(iterator)
                with tf.GradientTape() as tape:
                    rows = tf.nn.embedding_lookup(table, ids)
                    w1, b1, w2, b2, w3, b3 = [tf.convert_to_tensor(weight) for weight in weights]
                    x = tf.concat([tf.reshape(rows, [batch, IDS * WIDTH]), features], axis=1)
                    hidden = tf.nn.relu(tf.nn.relu(x @ w1 + b1) @ w2 + b2)
                    logits = (hidden @ w3 + b3)[:, 0]
                    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
                for variable, slot, gradient in zip(places, slots, tape.gradient(loss, places), strict=True):
                    apply(optimizer, variable, slot, gradient)
                return loss

            def dataset(context: Any = None) -> Any:
                stacked = [np.stack(column) for column in zip(*batches(1, batch), strict=True)]
                return tf.data.Dataset.from_tensor_slices(tuple(stacked)).repeat()

            return step, iter(self.coordinator.create_per_worker_dataset(dataset))

        step, iterator = self._once(f"embedding{optimizer}", make)
        return self._run(n, step, (iterator,))

    def loop(self, n: int, packing: int) -> float:
        """Run this many steps of a multiplication, several per function."""
        packing = packing or LOOP_PACKING

        def make() -> tuple[Any, Any]:
            matrix = np.full((LOOP_SIDE, LOOP_SIDE), 1 / LOOP_SIDE, np.float32)

            @tf.function
            def steps(iterator: Any) -> Any:
                loss = tf.constant(0.0)
                for _ in tf.range(packing):
                    loss += tf.reduce_mean(next(iterator) @ matrix)
                return loss

            def dataset(context: Any = None) -> Any:
                return tf.data.Dataset.from_tensors(matrix).repeat()

            return steps, iter(self.coordinator.create_per_worker_dataset(dataset))

        steps, iterator = self._once(f"loop{packing}", make)

        def work() -> None:
            values = [self.coordinator.schedule(steps, args=(iterator,)) for _ in range(n // packing)]
            self.coordinator.join()
            assert len(self.coordinator.fetch(values)) == n // packing

        return timed(work)


def parts_of(variable: Any) -> list[Any]:
    """A variable's shards; the variable itself if it is whole."""
    return list(getattr(variable, "variables", [variable]))


def apply(optimizer: str, variable: Any, slot: Any, gradient: Any) -> None:
    """Apply TensorFlow's own kernels on the variable's server, as its optimizers do (duplicate rows summed first)."""
    if isinstance(gradient, tf.IndexedSlices):
        ids, positions = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(ids))
        with tf.device(variable.device):
            if optimizer == "Adagrad":
                tf.raw_ops.ResourceSparseApplyAdagradV2(
                    var=variable.handle,
                    accum=slot.handle,
                    lr=LEARNING_RATE,
                    epsilon=1e-7,
                    grad=values,
                    indices=ids,
                )
            else:
                variable.scatter_sub(tf.IndexedSlices(values * LEARNING_RATE, ids))
        return
    with tf.device(variable.device):
        if optimizer == "Adagrad":
            tf.raw_ops.ResourceApplyAdagradV2(
                var=variable.handle, accum=slot.handle, lr=LEARNING_RATE, epsilon=1e-7, grad=gradient
            )
        else:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=LEARNING_RATE, delta=gradient)


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the cluster and connect to it."""
    # Remaining threads of the coordinator must not keep the process alive.
    stack.callback(lambda: (time.sleep(0.1), os._exit(0)))
    children = stack.enter_context(contextlib.ExitStack())
    bench = Bench(children)
    names = (
        "empty",
        "latency",
        "pull",
        "push",
        "many",
        "gather",
        "gather_update",
        "embedding",
        "loop",
        "optimizer_names",
    )
    return {name: getattr(bench, name) for name in names}, {"tensorflow": tf.__version__, "numpy": np.__version__}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        serve_task(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        serve(start)
