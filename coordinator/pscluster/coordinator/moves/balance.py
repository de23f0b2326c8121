"""Which shards to move, so that servers have equal loads. Pure.

A load is any measure that adds up: bytes, or bytes read and updated. The heaviest server gives a shard to the lightest,
the one whose move brings the two closest to each other, as long as that makes the heavier of them lighter by more than
a little. So few shards move, and an assignment that was balanced stays. It is not the best one there is: that is a hard
problem, and each shard that moves has its price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_GAIN = 0.02
"""The least part of the mean load by which a move must relieve the heavier of two servers."""


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """A shard, the server that has it, and its load there."""

    variable: str
    shard: int
    server: int
    load: float


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A shard that is to move, from one server to another."""

    variable: str
    shard: int
    source: int
    target: int
    load: float


def balanced(shards: Iterable[PlacedShard], servers: Sequence[int]) -> list[PlannedMove]:
    """Return the moves that balance these servers; shards of others move to them, the heaviest first."""
    loads = dict.fromkeys(servers, 0.0)
    at: dict[int, list[PlacedShard]] = {server: [] for server in servers}
    homeless: list[PlacedShard] = []
    for shard in shards:
        if shard.server in loads:
            loads[shard.server] += shard.load
            at[shard.server].append(shard)
        else:
            homeless.append(shard)
    for shard in sorted(homeless, key=lambda shard: -shard.load):
        target = min(servers, key=lambda server: (loads[server], server))
        loads[target] += shard.load
        at[target].append(shard)
    least = LEAST_GAIN * sum(loads.values()) / len(loads)
    while True:
        heavy = max(servers, key=lambda server: (loads[server], -server))
        light = min(servers, key=lambda server: (loads[server], server))
        gap = loads[heavy] - loads[light]
        # Afterwards the heavier of the two has this much less than the heavier one before.
        best = max(at[heavy], key=lambda shard: min(shard.load, gap - shard.load), default=None)
        if best is None or min(best.load, gap - best.load) <= least:
            return [
                PlannedMove(shard.variable, shard.shard, shard.server, server, shard.load)
                for server in servers
                for shard in at[server]
                if shard.server != server
            ]
        at[heavy].remove(best)
        at[light].append(best)
        loads[heavy] -= best.load
        loads[light] += best.load
