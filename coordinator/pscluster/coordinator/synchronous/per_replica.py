"""Values that differ from replica to replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pscluster.core.values import map_structure


class PerReplica(Sequence[Any]):
    """One value for each replica, by rank: as an argument, each replica gets its own.

        strategy.run(step, args=(PerReplica([first, second]),))          # of two replicas

    Args:
        values: as many as there are replicas, by rank.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the values, by rank."""
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rank: Any) -> Any:
        return self._values[rank]

    def __repr__(self) -> str:
        shown = ", ".join(f"{rank}: {value!r}" for rank, value in enumerate(self._values))
        return f"PerReplica({{{shown}}})"


def own_values(structure: Any, rank: int, size: int) -> Any:
    """Return a structure with the rank's own value in place of each `PerReplica`. ValueError if its size differs."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        if len(leaf) != size:
            raise ValueError(f"a PerReplica argument has {len(leaf)} values, but there are {size} replicas")
        return leaf[rank]

    return map_structure(own, structure)
