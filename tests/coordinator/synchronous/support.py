"""What steps in these tests ask, and the data that they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pscluster.coordinator import SynchronousStrategy, replica_context
from pscluster.core.context import current_function


def rank() -> int:
    return replica_context().replica_id


def joint() -> bool:
    """Whether the step that calls this is taken together with others."""
    function = current_function()
    assert function is not None
    return function.steps.joint is not None


def numbers_of(strategy: SynchronousStrategy, count: int) -> Iterator[Any]:
    """An iterator of numbers from 0 on, the same for each replica."""
    return iter(strategy.distribute_datasets_from_function(lambda: range(count)))
