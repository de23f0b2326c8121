"""Values that differ from replica to replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pscluster.core.checks import type_of
from pscluster.core.values import map_structure


class PerReplica(Sequence[Any]):
    """One value for each replica, by rank: as an argument, each replica gets its own.

        strategy.run(step, args=(PerReplica([first, second]),))          # of two replicas

    Args:
        values: as many as there are replicas, by rank.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[Any]) -> None:
        if not isinstance(values, Iterable):
            raise TypeError(f"PerReplica takes the values of all replicas, not {type_of(values)}")
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


def own_values(structure: Any, size: int) -> list[Any]:
    """Return a structure for each rank, with its own value in place of each `PerReplica`: without any, itself for all.

    ValueError if one has not as many values as there are replicas.
    """
    found = list[PerReplica]()

    def find(leaf: Any) -> None:
        if isinstance(leaf, PerReplica):
            found.append(leaf)

    map_structure(find, structure)
    for values in found:
        if len(values) != size:
            raise ValueError(f"a PerReplica argument has {len(values)} values, but there are {size} replicas")
    if not found:
        return [structure] * size

    def own(rank: int) -> Any:
        return map_structure(lambda leaf: leaf[rank] if isinstance(leaf, PerReplica) else leaf, structure)

    return [own(rank) for rank in range(size)]
