"""What callers share who ask in a loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pscluster.core.metrics import sharing
from pscluster.core.metrics.sharing import SHARE, SharedResults


def test_what_takes_long_is_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a share of the time is spent on it, for each key; an error is not kept."""
    now, made = [0.0], list[str]()
    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def make(key: str) -> int:
        now[0] += 2.0
        made.append(key)
        if len(made) == 1:
            raise ValueError(key)
        return len(made)

    results = SharedResults(make)
    with pytest.raises(ValueError, match="a"):
        results.get("a")
    assert [results.get(key) for key in "aabab"] == [2, 2, 3, 2, 3]
    now[0] += 2.0 / SHARE - 2.0
    assert [results.get(key) for key in "abab"] == [4, 5, 4, 5]
    now[0] += 2.0 / SHARE
    assert [results.get(key) for key in "bb"] == [6, 6]
