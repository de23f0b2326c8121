"""Which shards move to balance servers, against what any assignment could reach."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from pscluster.coordinator.moves.balance import LEAST_GAIN, PlacedShard, balanced


def after(shards: list[PlacedShard], servers: list[int]) -> Counter[int]:
    """The loads once the moves are made."""
    at = {(shard.variable, shard.shard): shard.server for shard in shards}
    for move in balanced(shards, servers):
        assert at[move.variable, move.shard] == move.source != move.target
        at[move.variable, move.shard] = move.target
    loads: Counter[int] = Counter(dict.fromkeys(servers, 0))
    for shard in shards:
        loads[at[shard.variable, shard.shard]] += round(shard.load)
    return loads


placed = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), max_size=40)


@given(placed, st.integers(1, 5))
def test_servers_end_close_to_each_other(places: list[tuple[int, int]], count: int) -> None:
    """As close as the largest shard and the least gain permit; servers that are not among them have nothing."""
    shards = [PlacedShard("v", index, server, load) for index, (server, load) in enumerate(places)]
    loads = after(shards, list(range(count)))
    assert loads.keys() == set(range(count))
    assert sum(loads.values()) == sum(load for _, load in places)
    heaviest = max((load for _, load in places), default=0)
    slack = LEAST_GAIN * sum(loads.values()) / count
    assert max(loads.values()) - min(loads.values()) <= heaviest + 2 * slack + 1


@given(placed)
def test_what_is_balanced_stays(places: list[tuple[int, int]]) -> None:
    """Nothing moves a second time."""
    shards = [PlacedShard("v", index, server, load) for index, (server, load) in enumerate(places)]
    at = {move.shard: move.target for move in balanced(shards, range(5))}
    again = [PlacedShard("v", shard.shard, at.get(shard.shard, shard.server), shard.load) for shard in shards]
    assert balanced(again, range(5)) == []


def test_a_new_server_gets_its_share_by_few_moves() -> None:
    """Twelve equal shards on three servers, and a fourth one: three of them move."""
    shards = [PlacedShard("v", index, index % 3, 10.0) for index in range(12)]
    moves = balanced(shards, range(4))
    assert [move.target for move in moves] == [3, 3, 3]
    assert sorted(after(shards, [0, 1, 2, 3]).values()) == [30, 30, 30, 30]


def test_a_server_that_leaves_gives_all_it_has() -> None:
    """The heaviest is placed first, where there is least."""
    shards = [PlacedShard("v", 0, 2, 5.0), PlacedShard("v", 1, 2, 9.0), PlacedShard("v", 2, 0, 4.0)]
    assert {(move.shard, move.target) for move in balanced(shards, [0, 1])} == {(1, 1), (0, 0)}
