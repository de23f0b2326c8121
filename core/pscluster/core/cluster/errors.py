"""The form of the errors in a cluster's description: the key, what was found, the limit, and a right value."""

from __future__ import annotations

import json

from pscluster.core.errors import ConfigurationError

_MAX_QUOTED = 80


def wrong(key: str, actual: str, limit: str, right: str) -> ConfigurationError:
    """Return the error of a key, on one line."""
    return ConfigurationError(f"{key} {actual}, but {limit}; write, for example, {right}")


def quoted(value: object) -> str:
    """Return the value as JSON: in ASCII, thus without line breaks of any kind, and cut to `_MAX_QUOTED`."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."
