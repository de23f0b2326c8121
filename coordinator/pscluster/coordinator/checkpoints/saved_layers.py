"""Preprocessing layers in checkpoints: their states, in a safetensors file beside those of the servers.

A layer is saved as it is when the checkpoint is marked, with the variables that were trained with its indices. A layer
that was not adapted by then is left out. The index has its class, its configuration, and where its arrays are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pscluster.coordinator.checkpoints.folder import where
from pscluster.coordinator.checkpoints.index import Index, SavedFile, SavedLayer, SavedTensor, read_index
from pscluster.core.checks import type_of
from pscluster.core.errors import CheckpointError, CheckpointMismatchError, ConfigurationError, PsClusterError
from pscluster.core.transport.frames import view
from pscluster.ps.storage.files.tensor_files import CHUNK_BYTES, Array, join, read, tensor_to_write, write
from pscluster.worker.features.layer import Layer, layer_of

FILE = "features.safetensors"


class LayerState(NamedTuple):
    """A layer as it was at one moment."""

    kind: str
    config: str  # JSON
    arrays: dict[str, Array]


def checked_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return layers to save. ConfigurationError if something is no layer, or two have the same name."""
    for layer in layers if isinstance(layers, Iterable) else (layers,):
        if not isinstance(layer, Layer):
            raise ConfigurationError(f"features has {type_of(layer)}: give layers, such as StringLookup(name='words')")
    names = [layer.name for layer in layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"features has several layers named {', '.join(map(repr, twice))}: give them names")
    return tuple(layers)


def states_of(layers: Iterable[Layer]) -> dict[str, LayerState]:
    """Return the states of the layers that have one, by name."""
    return {
        layer.name: LayerState(
            type(layer).__name__,
            json.dumps(layer.get_config(), sort_keys=True),
            {name: np.ascontiguousarray(array) for name, array in layer.get_state().items()},
        )
        for layer in layers
        if layer.is_adapted
    }


def write_layers(path: str, index: Index, states: Mapping[str, LayerState]) -> None:
    """Write the states to a checkpoint's directory, and enter them in its index. CheckpointError if that fails."""
    if not states:
        return
    entries, arrays = {}, list[Array]()
    for layer, state in states.items():
        for name, array in state.arrays.items():
            entries[layer, name] = tensor_to_write(f"{layer}/{name}", array.dtype, array.shape)
            arrays.append(array.reshape(array.shape))
    chunks = (
        (bytes(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)) for data in map(view, arrays)
    )
    file = write(join(path, FILE), list(entries.values()), chunks)
    index.files[FILE] = SavedFile(file.bytes, file.header_bytes, file.header_checksum)
    for layer, state in states.items():
        saved = {}
        for name in state.arrays:
            entry = entries[layer, name]
            place = entry.offset, entry.bytes, entry.checksum
            saved[name] = SavedTensor(0, FILE, entry.tensor, entry.dtype, tuple(entry.shape), *place)
        index.layers[layer] = SavedLayer(state.kind, state.config, saved)


def read_layers(path: str, index: Index, wanted: Iterable[Layer], *, partial: bool) -> dict[str, Mapping[str, Array]]:
    """Read the states of layers, by name.

    Raises:
        CheckpointMismatchError: the checkpoint has no layer of such a name (unless `partial`), or another one.
        CheckpointError: it is damaged.
    """
    states: dict[str, Mapping[str, Array]] = {}
    for layer in wanted:
        if (saved := index.layers.get(layer.name)) is None:
            if partial:
                continue
            raise CheckpointMismatchError(
                f"{path} has no layer {layer.name!r}: give partial=True to leave it as it is, or adapt it without"
            )
        own = type(layer).__name__, json.dumps(layer.get_config(), sort_keys=True)
        if own != (saved.kind, saved.config):
            raise CheckpointMismatchError(
                f"{path} has a layer {layer.name!r} that is a different one: {saved.kind} with {saved.config}; this "
                f"job's is {own[0]} with {own[1]}"
            )
        states[layer.name] = _made(path, layer.name, saved).get_state()
    return states


def _made(path: str, name: str, saved: SavedLayer) -> Layer:
    """Return a saved layer. CheckpointError if it is damaged, or makes no sense."""
    try:
        arrays = {key: read(join(path, tensor.file), tensor) for key, tensor in saved.arrays.items()}
        config: Any = json.loads(saved.config)
        layer: Layer = layer_of(saved.kind, config, arrays)
    except CheckpointError:
        raise
    except (PsClusterError, ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{path}: layer {name!r} can't be restored: {error}") from error
    return layer


def load(path: str) -> dict[str, Layer]:
    """Return the layers of a checkpoint, by name, without a cluster, for instance to serve a model.

    Args:
        path: a checkpoint, or a directory of them: then the newest one.

    Raises:
        CheckpointError: it is not a checkpoint, or damaged.
    """
    chosen = where(path)
    return layers_of(chosen, read_index(chosen))


def layers_of(path: str, index: Index) -> dict[str, Layer]:
    """Return the layers of a checkpoint, by name. CheckpointError if one is damaged."""
    return {name: _made(path, name, saved) for name, saved in index.layers.items()}
