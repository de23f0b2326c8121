"""How far a job is, as JSON in its metadata: as durable as the variables, and in every checkpoint.

Positions of datasets that take too much are compressed: a job that trains for weeks on new data may have thousands.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.fault_points import reach
from pscluster.core.limits import MAX_TEXT_BYTES
from pscluster.ps.client.client import PsClient

PROGRESS, POSITIONS, TRAINING = "progress", "positions", "training"
"""Names: of what `strategy.save_progress` was given, the positions of datasets, and the state of `fit`."""

_COMPRESSED = "zlib:"
"""What a compressed text begins with, before its bytes in base 85."""

_MOST_BYTES = 64 * MAX_TEXT_BYTES
"""Of JSON that was compressed."""


def load(client: PsClient, name: str) -> dict[str, Any]:
    """Return what was saved last under this name; {} if nothing was."""
    return decoded(name, client.metadata())


def save(client: PsClient, name: str, values: Mapping[str, Any]) -> None:
    """Save this in place of what was saved before."""
    try:
        text = json.dumps(values, default=_plain)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"progress must be representable as JSON: {error}") from None
    size = len(text)  # in ASCII
    if size > MAX_TEXT_BYTES and name == POSITIONS:
        text = _COMPRESSED + base64.b85encode(zlib.compress(text.encode())).decode()
        if size > _MOST_BYTES or len(text) > MAX_TEXT_BYTES:
            raise MisuseError(
                f"the positions of {len(values):,} datasets take {size:,} bytes, compressed {len(text):,}; at most "
                f"{_MOST_BYTES:,}, compressed {MAX_TEXT_BYTES:,}, fit: iterate over fewer datasets in one job"
            )
    if len(text) > MAX_TEXT_BYTES:
        raise MisuseError(
            f"the progress takes {len(text):,} bytes; at most {MAX_TEXT_BYTES:,} fit: save less, or use a variable"
        )
    reach("coordinator.progress.before")
    client.put_metadata(name, text)
    reach("coordinator.progress.after")


def decoded(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what a job's metadata has under this name; {} if nothing. CheckpointError if it is not a JSON object."""
    try:
        saved: Any = json.loads(_expanded(texts.get(name, "{}")))
    except (ValueError, RecursionError, zlib.error) as error:
        raise CheckpointError(f"the metadata {name!r} is not progress: {error}") from None
    if not isinstance(saved, dict):
        raise CheckpointError(f"the metadata {name!r} is not progress, but {saved!r:.80}")
    return saved


def _expanded(text: str) -> str | bytes:
    """Return a text as it was before it was compressed. ValueError or zlib.error if it was not, or is too large."""
    if not text.startswith(_COMPRESSED):
        return text
    expanding = zlib.decompressobj()
    expanded = expanding.decompress(base64.b85decode(text.removeprefix(_COMPRESSED)), _MOST_BYTES)
    if not expanding.eof:
        raise ValueError(f"it is cut off, or larger than {_MOST_BYTES:,} bytes")
    return expanded


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON type")
