"""The variable TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest


@pytest.fixture
def set_config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets TF_CONFIG to the JSON of its keyword arguments."""

    def set_to(**fields: object) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps(fields))

    return set_to
