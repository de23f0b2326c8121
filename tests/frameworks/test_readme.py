"""The README's lines for each framework: they train a small model, as they are shown."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, optimizers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own

README = Path(__file__).resolve().parents[2] / "README.md"
# Beside the script, in a module of its own, as a user's models are: workers import it.
MODELS = {
    "torch": """
import torch

torch.set_num_threads(1)

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(10, 4)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.embedding(ids).mean(1))[:, 0]

def loss_of(module, batch):
    ids, labels = map(torch.from_numpy, batch)
    return torch.nn.functional.binary_cross_entropy_with_logits(module(ids), labels)
""",
    "jax": """
import jax
import jax.numpy as jnp
import numpy as np

params = {"table": np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32), "out": np.ones(4, np.float32)}

@jax.jit
@jax.value_and_grad
def loss_and_gradients(params, batch):
    ids, labels = batch
    logits = params["table"][ids].mean(1) @ params["out"]
    return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)
""",
    "keras": """
import os

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras

def model_fn():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
    model.compile(keras.optimizers.Adam(0.05), keras.losses.BinaryCrossentropy(from_logits=True))
    return model
""",
}


def lines_for(framework: str) -> str:
    """The block of the README that serves a model of this framework."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if f"pscluster.{framework}.serve" in block]
    return str(block)


@pytest.mark.parametrize("framework", MODELS)
def test_lines(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they define trains with `fit`: the loss becomes half of what it was, or less."""
    if framework == "keras":
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip(framework)
    (tmp_path / f"readme_{framework}.py").write_text(MODELS[framework])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.import_module(f"pscluster.{framework}")
    names: dict[str, Any] = {
        "__name__": "__main__",
        "pscluster": sys.modules["pscluster"],
        "optimizers": optimizers,
        **vars(importlib.import_module(f"readme_{framework}")),
    }
    names["__name__"] = "__main__"
    ids = np.random.default_rng(0).integers(10, size=(512, 3))
    labels = (ids.mean(1) > 4.5).astype(np.float32)
    with (
        LocalCluster(num_ps=1, num_workers=2, log_level="ERROR", env={"OMP_NUM_THREADS": "1"}) as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        names["strategy"] = strategy
        coordinator = ClusterCoordinator(strategy)
        exec(compile(lines_for(framework).replace("1e-3", "0.05"), README, "exec"), names)
        data = coordinator.distribute_dataset((ids, labels)).shuffle(seed=0).batch(16)
        history = coordinator.fit(names["step"], data, epochs=20, verbose=0)
    losses = history.history["loss"]  # of separable data, so that it goes towards 0; the order of two workers is open
    assert losses[-1] < losses[0] / 2, losses
