"""Plans: what they say of moves and cuts, and when they no longer fit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pscluster.coordinator.moves.balance import PlacedShard
from pscluster.coordinator.moves.plan import TOLERANCE, Plan, VariableUse, make_plan, measured, why_outdated
from pscluster.v1 import node_pb2


def plan_of(loads: list[list[float]], use: VariableUse | None = None, by_load: bool = True) -> Plan:
    """The plan for a table "t" whose shards have these loads, by server."""
    shards = list[PlacedShard]()
    for server, here in enumerate(loads):
        shards += [PlacedShard("t", len(shards) + index, server, load) for index, load in enumerate(here)]
    return make_plan(shards, {"t": use or VariableUse()}, len(loads), "load" if by_load else "bytes")


def test_moves_and_the_loads_before_and_after() -> None:
    plan = plan_of([[3.0, 3.0, 3.0, 3.0], [0.0], [0.0]])
    assert plan.before == (12.0, 0.0, 0.0)
    assert sorted(plan.after) == [3.0, 3.0, 6.0]
    assert {(move.variable, move.source, move.load) for move in plan.moves} == {("t", 0, 3.0)}
    assert plan.cuts[0].num_shards == 6, "4 equal loads on 3 servers: one has 1.5 times the mean"
    assert plan == plan_of([[3.0, 3.0, 3.0, 3.0], [0.0], [0.0]])
    assert plan != plan_of([[3.0, 3.0, 3.0], [0.0], [0.0]])


@pytest.mark.parametrize("num_servers", [2, 3, 4])
def test_rows_cut_by_modulo_are_balanced(num_servers: int) -> None:
    """Ids by Zipf 1.1, batch by batch, each server asked once for an id: none has more than 1.3 times the mean.

    Of ranges of rows the first has so much that no move helps, and the plan says how to cut them.
    """
    rng = np.random.default_rng(5)
    rows, num_shards = 100_000, 8 * num_servers
    use = VariableUse((rows, 32), by_rows=True)
    chances = np.arange(1, rows + 1) ** -1.1
    batches = [np.unique(rng.choice(rows, 4096, p=chances / chances.sum())) for _ in range(10)]
    ids = np.concatenate(batches)

    def cut(shard_of: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Plan:
        counts = np.bincount(shard_of, minlength=num_shards).astype(float)
        return plan_of([list(here) for here in np.split(counts, num_servers)], use)

    by_modulo = cut(ids % num_shards)
    assert by_modulo.peak <= TOLERANCE
    assert by_modulo.cuts == ()
    by_ranges = cut(ids * num_shards // rows)
    assert by_ranges.peak < max(by_ranges.before) / np.mean(by_ranges.before)
    if num_servers > 2:
        assert by_ranges.peak > TOLERANCE
        (cut_,) = by_ranges.cuts
        assert (cut_.variable, cut_.shard, cut_.by_rows) == ("t", 0, True)
        assert str(cut_).endswith(
            f"cut its rows by hash, into more shards: partitioner=HashPartitioner({cut_.proposed})"
        )


def test_cuts_are_proposed_by_what_is_used() -> None:
    """Whole variables into as many shards as there are servers; tables into many; none into more than it has rows."""
    dense = VariableUse((1000, 10))
    assert str(plan_of([[9.0], []], dense).cuts[0]) == (
        "t: its only shard has 100% of the load of all servers; cut it into more shards: "
        "partitioner=FixedShardsPartitioner(2)"
    )
    assert plan_of([[9.0], []], VariableUse((1000, 10), by_rows=True)).cuts[0].proposed == 16
    assert plan_of([[9.0], []], VariableUse((5, 10), by_rows=True)).cuts[0].proposed == 5
    assert not plan_of([[9.0], []], VariableUse((1000,), by_rows=True), by_load=False).cuts[0].by_rows
    hashed = VariableUse((1000, 10), by_rows=True, row_order="hash")
    assert str(plan_of([[9.0], []], hashed).cuts[0]).endswith(
        "cut it into more shards: partitioner=HashPartitioner(16); if a single row has it all, none helps"
    )
    by_id = VariableUse((1000, 10), by_rows=True, row_order="id")
    assert "cut it into more shards: num_shards=16;" in str(plan_of([[9.0], []], by_id).cuts[0])
    assert "no more rows" in str(plan_of([[9.0], []], VariableUse(())).cuts[0])
    assert plan_of([[], []]).cuts == ()
    assert plan_of([[], []]).peak == 1.0


def test_a_plan_is_json_and_text() -> None:
    plan = plan_of([[3.0, 3.0], []], VariableUse((4,)))
    (move,) = plan.moves
    read = json.loads(json.dumps(plan.as_json()))
    assert read["moves"] == [{"variable": "t", "shard": move.shard, "source": 0, "target": 1, "load": 3.0}]
    assert (read["before"], read["after"], read["peak_before"], read["peak"]) == ([6.0, 0.0], [3.0, 3.0], 2.0, 1.0)
    assert f"t, shard {move.shard}: ps 0 -> ps 1, 3" in str(plan)
    hot = plan_of([[3.0], []]).as_json()
    assert hot["cuts"][0]["text"].startswith("t: its only shard has 100%")


def test_why_a_plan_does_not_fit() -> None:
    plan = plan_of([[3.0, 3.0], []])
    (move,) = plan.moves
    here = {("t", 0): 0, ("t", 1): 0}
    assert why_outdated(plan, here, 2) is None
    assert why_outdated(plan, {("u", 0): 0}, 2) == "variable 't' was deleted"
    assert why_outdated(plan, {("t", 7): 0}, 2) == f"variable 't' has no shard {move.shard} any more"
    assert (
        why_outdated(plan, {**here, ("t", move.shard): 1}, 2)
        == f"shard {move.shard} of 't' is now on ps 1, not on ps 0"
    )
    assert why_outdated(plan, here, 1) == f"ps 1 was removed, where shard {move.shard} of 't' was to go"


def test_loads_are_those_that_servers_report() -> None:
    """A shard that moves meanwhile counts once."""
    replies = [
        node_pb2.StatusReply(
            identity=node_pb2.Identity(role="ps", index=index),
            busiest=[
                node_pb2.VariableLoad(
                    name="t",
                    rows=rows,
                    shape=[8, 2],
                    shards=[node_pb2.ShardLoad(shard=0, bytes=64, traffic=100.0)],
                    row_order="modulo",
                )
            ],
        )
        for index, rows in ((1, 0), (2, 5))
    ]
    shards, uses = measured(replies, "load")
    assert shards == [PlacedShard("t", 0, 1, 100.0)]
    assert uses == {"t": VariableUse((8, 2), by_rows=True, row_order="modulo")}
    assert measured(replies, "bytes")[0] == [PlacedShard("t", 0, 1, 64.0)]
