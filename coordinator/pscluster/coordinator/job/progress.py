"""How far a job is, as JSON in its metadata: as durable as the variables, and in every checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.fault_points import reach
from pscluster.core.limits import MAX_TEXT_BYTES
from pscluster.ps.client.client import PsClient

PROGRESS, POSITIONS, TRAINING = "progress", "positions", "training"
"""Names: of what `strategy.save_progress` was given, the positions of datasets, and the state of `fit`."""


def load(client: PsClient, name: str) -> dict[str, Any]:
    """Return what was saved last under this name; {} if nothing was."""
    return decoded(name, client.metadata())


def save(client: PsClient, name: str, values: Mapping[str, Any]) -> None:
    """Save this in place of what was saved before."""
    try:
        text = json.dumps(values, default=_plain)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"progress must be representable as JSON: {error}") from None
    if len(text) > MAX_TEXT_BYTES:  # it is ASCII
        raise MisuseError(
            f"the progress takes {len(text):,} bytes; at most {MAX_TEXT_BYTES:,} fit: save less, or use a variable"
        )
    reach("coordinator.progress.before")
    client.put_metadata(name, text)
    reach("coordinator.progress.after")


def decoded(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what a job's metadata has under this name; {} if nothing. CheckpointError if it is not a JSON object."""
    try:
        saved: Any = json.loads(texts.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the metadata {name!r} is not progress: {error}") from None
    if not isinstance(saved, dict):
        raise CheckpointError(f"the metadata {name!r} is not progress, but {saved!r:.80}")
    return saved


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON type")
