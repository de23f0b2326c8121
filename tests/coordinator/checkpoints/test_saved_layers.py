"""Layers in checkpoints: with the variables of one moment, restored or read without a cluster; damage is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.coordinator import (
    Checkpoint,
    CheckpointManager,
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    RestoredFrom,
    Variable,
    errors,
    features,
)
from pscluster.coordinator.checkpoints import tools
from pscluster.coordinator.checkpoints.saved_layers import FILE
from pscluster.coordinator.job.context import JobContext

WORDS = ["b", "a", "c", "b", "ü"]


def new_layers() -> list[Any]:
    """Layers as a script makes them when it starts."""
    return [
        features.StringLookup(name="words", output_mode="tf_idf"),
        features.IntegerLookup(name="ids", vocabulary=[7, 9]),
        features.Normalization(name="x"),
        features.Discretization(name="bins", num_bins=3),
        features.Hashing(5, name="hash"),
    ]


def adapt(layers: list[Any]) -> None:
    """Adapt those that learn."""
    layers[0].adapt(WORDS)
    layers[2].adapt([[1.0, 2.0], [3.0, 5.0]])
    layers[3].adapt(np.arange(30.0))


def states(layers: list[Any]) -> list[Any]:
    """What the layers have learned."""
    return [{name: array.tolist() for name, array in layer.get_state().items()} for layer in layers]


def test_saved_and_restored(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """With the variables; as they were then; read again without a cluster; every byte is verified."""
    with strategy.scope():
        Variable(np.zeros(3, np.float32), name="w")
    layers = new_layers()
    adapt(layers)
    saved = states(layers)
    with CheckpointManager(str(tmp_path), features=layers) as manager:
        path = manager.save().result()
        layers[0].adapt(["others"])
        manager.restore()
        assert states(layers) == saved
        fresh = new_layers()
        Checkpoint(strategy, features=fresh).read(path)
        assert states(fresh) == saved
    assert set(tools.verify(path).layers) == {"words", "ids", "x", "bins", "hash"}
    assert "layers: bins, hash, ids, words, x" in tools.inspect(path)
    loaded = features.load(str(tmp_path))
    assert states([loaded[layer.name] for layer in layers]) == saved
    assert loaded["words"](["b"]).tolist() == layers[0](["b"]).tolist()
    other = [features.StringLookup(name="words")]
    with pytest.raises(errors.CheckpointMismatchError, match="a layer 'words' that is a different one: StringLookup"):
        Checkpoint(strategy, features=other).read(path)
    missing = [features.StringLookup(name="more")]
    with pytest.raises(errors.CheckpointMismatchError, match="has no layer 'more': give partial=True to leave it"):
        Checkpoint(strategy, features=missing).read(path)
    Checkpoint(strategy, features=missing).read(path, partial=True)
    file = Path(path) / FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for read in (tools.verify, features.load, Checkpoint(strategy, features=new_layers()).read):
        with pytest.raises(errors.CheckpointError, match=r"features\.safetensors is damaged"):
            read(path)


def test_a_script_that_starts_again(tmp_path: Path) -> None:
    """Its layers are adapted once: then they come from the checkpoint, with live variables and without."""
    with LocalCluster(num_ps=1, num_workers=1, log_level="ERROR") as cluster:

        def start(adapted: RestoredFrom) -> list[Any]:
            with ParameterServerStrategy(cluster) as strategy:
                with strategy.scope():
                    Variable(1.0, name="w")
                layers = new_layers()
                manager = CheckpointManager(str(tmp_path), strategy=strategy, features=layers)
                assert manager.restore_or_initialize() is adapted
                if adapted is RestoredFrom.NOTHING:
                    assert not layers[0].is_adapted
                    adapt(layers)
                    manager.save()
                coordinator = ClusterCoordinator(strategy)
                words = layers[0]
                assert coordinator.schedule(lambda: words.vocabulary_size()).fetch(60) == 5
                return states(layers)

        first = start(RestoredFrom.NOTHING)
        assert start(RestoredFrom.CHECKPOINT) == first


def test_beside_live_variables(
    strategy: ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers have no layers: those that the script has not adapted come from the newest checkpoint."""
    layers = new_layers()
    adapt(layers)
    with CheckpointManager(str(tmp_path), features=layers) as manager:
        manager.save()
        expected = states(layers)
        layers[0].adapt(["newer"])
        newer = layers[0].get_vocabulary()
        monkeypatch.setattr(JobContext, "resumed", True)
        assert manager.restore_or_initialize() is RestoredFrom.LIVE
        assert layers[0].get_vocabulary() == newer
    fresh = new_layers()
    with CheckpointManager(str(tmp_path), strategy=strategy, features=fresh) as manager:
        assert manager.restore_or_initialize() is RestoredFrom.LIVE
        assert states(fresh) == expected


def test_bad_features(strategy: ParameterServerStrategy) -> None:
    """They are layers with different names."""
    wrong: Any = ["words"]
    with pytest.raises(errors.ConfigurationError, match="features has a str: give layers, such as"):
        Checkpoint(strategy, features=wrong)
    with pytest.raises(errors.ConfigurationError, match="features has several layers named 'string_lookup': give them"):
        Checkpoint(strategy, features=[features.StringLookup(), features.StringLookup()])
