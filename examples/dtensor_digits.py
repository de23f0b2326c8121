"""Train a two-layer network on 60,000 images with global arrays: data-parallel, then with its weights sharded, too.

    python examples/dtensor_digits.py                                         # eight virtual devices of this process
    pscluster run --ps 2 --workers 2 examples/dtensor_digits.py --cluster     # eight devices of two workers

The model is plain NumPy. How its weights lie is said beside it, by the rules of a LayoutMap: that is all that differs
between the two runs.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the devices share the cores of this machine

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver
from pscluster.spmd import DVariable, Layout, LayoutMap, Mesh

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
SIDE, MARGIN = 28, 1
Array = np.ndarray[Any, np.dtype[Any]]

DATA_PARALLEL: dict[str, tuple[str | None, ...]] = {}
"""No rules: all weights are on all devices."""

SHARDED: dict[str, tuple[str | None, ...]] = {
    ".*hidden.*": (None, "batch"),
    ".*output.*kernel": ("batch", None),
}
"""The wide layer is cut by its outputs, and the next one by its inputs: no device has all of the weights."""


# The data: handwritten digits, turned, scaled and shifted


def originals(test: bool) -> tuple[Array, Array]:
    """Return the 1,437 digits for training, or the 360 others, in images of 28 x 28, and their labels."""
    with np.load(DATA) as file:
        digits, labels = file["images"].reshape(-1, 8, 8) / np.float32(16), file["labels"]
    order = np.random.default_rng(1998).permutation(len(labels))
    chosen = order[1437:] if test else order[:1437]
    at = np.clip((np.arange(20, dtype=np.float32) + 0.5) * 8 / 20 - 0.5, 0, 7)
    low = np.minimum(at.astype(np.int64), 6)
    weights = np.zeros((20, 8), np.float32)  # of each pixel among those of an 8 x 8 image, along one axis
    weights[np.arange(20), low], weights[np.arange(20), low + 1] = 1 - (at - low), at - low
    enlarged = weights @ digits[chosen] @ weights.T
    return np.pad(enlarged, ((0, 0), (4, 4), (4, 4))), labels[chosen].astype(np.int64)


def images(count: int, *, test: bool = False, first: int = 0) -> tuple[Array, Array]:
    """Return images, of shape (count, 784), and their labels. Each is made from a random stream of its own."""
    sources, labels = originals(test)
    width = SIDE + 2 * MARGIN
    flat = np.pad(sources, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN))).ravel()
    grid = np.stack(np.meshgrid(*2 * [np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2], indexing="ij")).reshape(
        2, -1
    )
    made, chosen = np.empty((count, SIDE * SIDE), np.float32), np.empty(count, np.int64)
    for start in range(0, count, 512):
        stop = min(start + 512, count)
        drawn, noise = np.empty((stop - start, 4), np.float32), np.empty((stop - start, SIDE * SIDE), np.float32)
        for row in range(start, stop):
            stream = np.random.Generator(np.random.Philox(key=[int(test), first + row]))
            chosen[row] = stream.integers(len(labels))
            drawn[row - start] = stream.uniform([-0.15, 0.95, -1.5, -1.5], [0.15, 1.1, 1.5, 1.5])
            stream.standard_normal(out=noise[row - start], dtype=np.float32)
        angle, scale, shift = drawn[:, :1], drawn[:, 1:2], drawn[:, 2:]
        y, x = (grid[axis] - shift[:, axis : axis + 1] for axis in (0, 1))
        cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
        ys, xs = (np.clip(at + (width - 1) / 2, 0, width - 1.001) for at in (cos * y - sin * x, sin * y + cos * x))
        rows, columns = ys.astype(np.int64), xs.astype(np.int64)
        corner = chosen[start:stop, None] * width**2 + rows * width + columns
        below, right = ys - rows, xs - columns
        upper = flat[corner] * (1 - right) + flat[corner + 1] * right
        lower = flat[corner + width] * (1 - right) + flat[corner + width + 1] * right
        made[start:stop] = np.clip(upper * (1 - below) + lower * below + np.float32(0.03) * noise, 0, 1)
    return made, labels[chosen]


# The model, which knows nothing of meshes and layouts


class Dense:
    """A layer."""

    def __init__(self, inputs: int, units: int, rng: np.random.Generator, dtype: str) -> None:
        limit = (6 / (inputs + units)) ** 0.5
        self.kernel: Any = rng.uniform(-limit, limit, (inputs, units)).astype(dtype)
        self.bias: Any = np.zeros((1, units), dtype)

    def __call__(self, x: Any) -> Any:
        return np.matmul(x, self.kernel) + self.bias


class Model:
    """Two layers: 784 inputs, 128 hidden units, 10 classes."""

    def __init__(self, seed: int, dtype: str) -> None:
        rng = np.random.default_rng(seed)
        self.hidden, self.output = Dense(SIDE * SIDE, 128, rng, dtype), Dense(128, 10, rng, dtype)

    def __call__(self, x: Any) -> Any:
        return self.output(np.maximum(self.hidden(x), 0))

    @property
    def weights(self) -> list[Any]:
        """Kernels and biases."""
        return [self.hidden.kernel, self.hidden.bias, self.output.kernel, self.output.bias]


def losses(logits: Any, labels: Any) -> Any:
    """Return the cross-entropy of each example."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -np.where(labels[:, None] == np.arange(10), log_p, 0).sum(axis=1)


# Training


class Training:
    """A model whose weights lie on a mesh, by rules, with what trains and evaluates it."""

    def __init__(
        self, mesh: Mesh, name: str, rules: dict[str, tuple[str | None, ...]], *, seed: int = 1337, dtype: str
    ) -> None:
        self.mesh, self.dtype = mesh, dtype
        layouts = LayoutMap(mesh)
        layouts.update(rules)
        models = layouts.variables({name: Model(seed, dtype)})  # variables have different names in each run
        self.model, self.report = models[name], layouts.report(models)
        self.optimizer = spmd.optimizers.Adam(0.01, mesh=mesh)
        self.loss, self.accuracy = spmd.metrics.Mean(mesh=mesh), spmd.metrics.SparseCategoricalAccuracy(mesh=mesh)
        self.step, self.evaluate = spmd.function(self._step), spmd.function(self._evaluate)

    def _loss(self, weights: list[DVariable], x: Any, y: Any) -> tuple[Any, Any]:
        del weights  # those of the model
        logits = self.model(x)
        each = losses(logits, y)
        return each.sum(), (each, logits)

    def _step(self, weights: list[DVariable], x: Any, y: Any) -> Any:
        (loss, (each, logits)), gradients = spmd.value_and_grad(self._loss, has_aux=True)(weights, x, y)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss.update_state(each)
        self.accuracy.update_state(y, logits)
        return loss

    def _evaluate(self, weights: list[DVariable], x: Any, y: Any) -> None:
        _, (each, logits) = self._loss(weights, x, y)
        self.loss.update_state(each)
        self.accuracy.update_state(y, logits)

    def packed(self, x: Array, y: Array) -> tuple[Any, Any]:
        """Return a batch cut into a part for each device: of any number of examples, so parts may differ by one."""
        parts = [np.array_split(array, self.mesh.size) for array in (x.astype(self.dtype, copy=False), y)]
        layouts = [Layout.batch_sharded(self.mesh, "batch", rank=array.ndim) for array in (x, y)]
        packed_x, packed_y = map(spmd.pack, parts, layouts)
        return packed_x, packed_y

    def results(self) -> tuple[float, float]:
        """Return loss and accuracy since the last call, and reset them."""
        found = self.loss.result(), self.accuracy.result()
        self.loss.reset_state()
        self.accuracy.reset_state()
        return found

    def epoch(self, x: Array, y: Array, order: Array, batch_size: int, label: str) -> tuple[float, float]:
        """Train once on all examples, in this order; return the loss of an example, and the accuracy."""
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            starts = range(0, len(order), batch_size)
            task = progress.add_task(label, total=len(starts))
            for done, start in enumerate(starts, 1):
                rows = order[start : start + batch_size]
                self.step(self.model.weights, *self.packed(x[rows], y[rows]))
                if not done % 50:
                    shown = f"{label}  loss {self.loss.result():.4f}  accuracy {self.accuracy.result():.4f}"
                    progress.update(task, completed=done, description=shown)
            progress.update(task, completed=len(starts))
        return self.results()

    def test(self, x: Array, y: Array, batch_size: int) -> tuple[float, float]:
        """Return the loss of an example, and the accuracy, of examples that it was not trained on."""
        for start in range(0, len(y), batch_size):
            self.evaluate(
                self.model.weights, *self.packed(x[start : start + batch_size], y[start : start + batch_size])
            )
        return self.results()


def mesh_of(devices: int, coordinator: ClusterCoordinator | None) -> Mesh:
    """Make a mesh of this number of devices: of this process, or of a cluster's workers."""
    if coordinator is None:
        return spmd.create_mesh([("batch", devices)])
    each, left = divmod(devices, len(coordinator.context.workers))
    if left or not each:
        sys.exit(f"{devices} devices can't be shared equally by the workers: give another number of --devices")
    return spmd.create_mesh([("batch", devices)], coordinator=coordinator, devices_per_task=each)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier with global arrays, in two layouts.")
    parser.add_argument("--cluster", action="store_true", help="devices are those of workers (TF_CONFIG)")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--train", type=int, default=60_000, help="training images")
    parser.add_argument("--test", type=int, default=10_000, help="test images")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--target", type=float, default=0.97, help="accuracy on the training set in the last epoch")
    options = parser.parse_args()

    begin = time.monotonic()
    (x, y), (x_test, y_test) = images(options.train), images(options.test, test=True)
    print(f"made {len(y) + len(y_test):,} images in {time.monotonic() - begin:.1f} s")
    strategy = ParameterServerStrategy(TFConfigClusterResolver()) if options.cluster else None
    mesh = mesh_of(options.devices, None if strategy is None else ClusterCoordinator(strategy))
    missed = False
    for name, rules in (("data_parallel", DATA_PARALLEL), ("sharded", SHARDED)):
        training = Training(mesh, name, rules, dtype=options.dtype)
        print(f"\n{name} on {mesh!r}\n{training.report}")
        rng = np.random.default_rng(1337)
        for epoch in range(options.epochs):
            begin, order = time.monotonic(), rng.permutation(len(y))
            label = f"epoch {epoch + 1}/{options.epochs}"
            loss, accuracy = training.epoch(x, y, order, options.batch_size, label)
            each = (time.monotonic() - begin) / -(-len(y) // options.batch_size)
            eval_loss, eval_accuracy = training.test(x_test, y_test, options.batch_size)
            print(
                f"{label}: loss {loss:.4f}, accuracy {accuracy:.5f}, eval_loss {eval_loss:.4f}, "
                f"eval_accuracy {eval_accuracy:.4f}, {1000 * each:.0f} ms a step"
            )
        spmd.barrier(mesh)
        missed |= accuracy < options.target
    if missed:
        sys.exit(f"that is less than the {options.target:g} this network reaches in three epochs")


if __name__ == "__main__":
    main()
