"""TensorFlow's side of the recommender rows: the same tables and layers on its servers, without Keras.

tensorflow_recommender_side.py [--ps N] [--workers N]

As on our side variables are not cut, a function is of several steps, and rows of equal ids are summed by the worker.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from typing import Any

import numpy as np
import tensorflow as tf
from driver import Handlers, serve, timed
from recommender_data import AT_ONCE, BATCH, DENSE, WIDTH, batches
from tensorflow_side import INTER_OP, INTRA_OP, apply, start_cluster


def dense_shapes(tables: int) -> list[tuple[int, ...]]:
    """The weights and biases of the layers in `recommender.Dense`, in turn."""
    vectors = tables + 1
    below, above = (DENSE, 64, WIDTH), (WIDTH + vectors * (vectors - 1) // 2, 128, 64, 1)
    cuts = [*itertools.pairwise(below), *itertools.pairwise(above)]
    return [shape for a, b in cuts for shape in ((a, b), (b,))]


class Bench:
    """The handler, and the models by their numbers of tables and rows."""

    def __init__(self, stack: contextlib.ExitStack, ps: int, workers: int) -> None:
        tf.config.threading.set_inter_op_parallelism_threads(INTER_OP)
        tf.config.threading.set_intra_op_parallelism_threads(INTRA_OP)
        spec = start_cluster(stack, ps, workers)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec), rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._made: dict[tuple[int, int], Any] = {}

    def _variable(self, value: Any) -> tuple[Any, Any]:
        """A variable, and Adagrad's accumulator beside it."""
        with self.strategy.scope():
            variable = tf.Variable(value)
            with self.strategy.extended.colocate_vars_with(variable):
                return variable, tf.Variable(tf.fill(variable.shape, 0.1))

    def _model(self, tables: int, rows: int) -> tuple[Any, Any]:
        """A function of several training steps, and the data of each worker."""
        if (tables, rows) in self._made:
            return self._made[tables, rows]  # type: ignore[no-any-return]
        embeddings = [self._variable(tf.random.normal((rows, WIDTH), stddev=0.05)) for _ in range(tables)]
        layers = [self._variable(tf.random.normal(shape, stddev=0.05)) for shape in dense_shapes(tables)]
        places = [*embeddings, *layers]
        variables = [variable for variable, _ in places]
        first, second = np.triu_indices(tables + 1, 1)
        pairs = first * (tables + 1) + second

        @tf.function
        def steps(iterator: Any) -> None:
            for _ in tf.range(AT_ONCE):
                ids, features, labels = next(iterator)
                with tf.GradientTape() as tape:
                    looked_up = [tf.nn.embedding_lookup(table, ids[i]) for i, (table, _) in enumerate(embeddings)]
                    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = [tf.convert_to_tensor(layer) for layer, _ in layers]
                    below = tf.nn.relu(tf.nn.relu(features @ w1 + b1) @ w2 + b2)
                    vectors = tf.stack([below, *looked_up], 1)
                    products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [BATCH, -1])
                    x = tf.concat([below, tf.gather(products, pairs, axis=1)], 1)
                    logits = (tf.nn.relu(tf.nn.relu(x @ w3 + b3) @ w4 + b4) @ w5 + b5)[:, 0]
                    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
                for (variable, slot), gradient in zip(places, tape.gradient(loss, variables), strict=True):
                    apply("Adagrad", variable, slot, gradient)

        def dataset(context: Any = None) -> Any:
            columns = zip(*batches(1, tables, rows), strict=True)
            return tf.data.Dataset.from_tensor_slices(tuple(np.stack(column) for column in columns)).repeat()

        iterator = iter(self.coordinator.create_per_worker_dataset(dataset))
        self._made[tables, rows] = steps, iterator
        for _ in range(4):  # traced, and seen by all workers
            self.coordinator.schedule(steps, args=(iterator,))
        self.coordinator.join()
        return steps, iterator

    def recommend(self, n: int, tables: int, rows: int, overlap: int) -> float:
        """Seconds for this many training steps, on all workers together; rounded up to whole functions."""
        del overlap
        steps, iterator = self._model(tables, rows)

        def work() -> None:
            for _ in range(-(-n // AT_ONCE)):
                self.coordinator.schedule(steps, args=(iterator,))
            self.coordinator.join()

        return timed(work) * n / (-(-n // AT_ONCE) * AT_ONCE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
        # Remaining threads of the coordinator must not keep the process alive.
        stack.callback(lambda: (time.sleep(0.1), os._exit(0)))
        bench = Bench(stack.enter_context(contextlib.ExitStack()), options.ps, options.workers)
        return {"recommend": bench.recommend}, {"tensorflow": tf.__version__}

    serve(start)


if __name__ == "__main__":
    main()
