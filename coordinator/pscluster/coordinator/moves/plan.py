"""What is to change so that the servers have equal loads: shards that move, and variables to reshard. Pure.

Moves are what `balance` finds. They can't divide a shard: where a server still has more than `TOLERANCE` times the
mean, the variable of its heaviest shard is to be resharded (`reshard`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pscluster.coordinator.moves.balance import PlacedShard, PlannedMove, balanced
from pscluster.ps.tables import BY_ID
from pscluster.v1 import node_pb2

TOLERANCE = 1.3
"""A server that has more than this many times the mean load is worth a cut."""

SHARDS_PER_SERVER = 8
"""The number of shards that is proposed for a variable: enough to spread unequal loads well."""

Measure = Literal["bytes", "load"]

_UNITS = {"bytes": "bytes held", "load": "bytes read and updated lately"}


@dataclass(frozen=True, slots=True)
class VariableUse:
    """What is known of a variable: its shape, empty if it is not known, and whether single rows of it are used."""

    shape: tuple[int, ...] = ()
    by_rows: bool = False
    row_order: str = ""  # "modulo" or "hash", if its rows are not cut into ranges; "id": it is a table by id


@dataclass(frozen=True, slots=True)
class ProposedCut:
    """A variable that is to be resharded, since one of its shards is more than a server's part of the load."""

    variable: str
    shard: int  # the one with most of the load
    share: float  # of the load of all servers, that this shard has
    num_shards: int  # into which the variable is cut now
    proposed: int  # into how many it is to be cut; as many as now, if it can't be into more
    by_rows: bool  # whether single rows are used, so that it is to be cut by hash or modulo
    row_order: str = ""  # how its rows are cut already, if not into ranges

    def __str__(self) -> str:
        which = f"shard {self.shard} of {self.num_shards}" if self.num_shards > 1 else "its only shard"
        text = f"{self.variable}: {which} has {self.share:.0%} of the load of all servers; "
        if self.proposed <= self.num_shards:
            return text + "it has no more rows to be cut into more shards"
        if self.row_order == BY_ID:
            return text + f"cut it into more shards: num_shards={self.proposed}; if a single row has it all, none helps"
        if self.row_order:
            partitioner = f"{self.row_order.capitalize()}Partitioner({self.proposed})"
            return text + f"cut it into more shards: partitioner={partitioner}; if a single row has it all, none helps"
        if self.by_rows:
            return text + f"cut its rows by hash, into more shards: partitioner=HashPartitioner({self.proposed})"
        return text + f"cut it into more shards: partitioner=FixedShardsPartitioner({self.proposed})"


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves of shards that give the servers of a job about the same load; see `ParameterServerStrategy.plan`.

    Plans are equal if they propose the same for the same loads. `str` gives a text for people.
    """

    by: Measure
    moves: tuple[PlannedMove, ...]
    cuts: tuple[ProposedCut, ...]
    before: tuple[float, ...]  # the load of each server now, in bytes
    after: tuple[float, ...]  # and once all moves are made

    @property
    def peak(self) -> float:
        """How many times the mean load the server with the highest load has after the moves; 1.0: all are equal."""
        return _peak(self.after)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON can represent it: also what `str` says of each cut, as its `text`."""
        cuts = [{**asdict(cut), "text": str(cut)} for cut in self.cuts]
        return {**asdict(self), "cuts": cuts, "peak_before": _peak(self.before), "peak": self.peak}

    def __str__(self) -> str:
        lines = [f"load by server ({_UNITS[self.by]}), now and after the moves:"]
        lines += [
            f"  ps {server}: {before:,.0f} -> {after:,.0f}"
            for server, (before, after) in enumerate(zip(self.before, self.after, strict=True))
        ]
        lines.append(f"the highest is {_peak(self.before):.2f} times the mean now, {self.peak:.2f} after the moves")
        lines.append(f"moves: {len(self.moves) or 'none'}")
        lines += [
            f"  {move.variable}, shard {move.shard}: ps {move.source} -> ps {move.target}, {move.load:,.0f}"
            for move in self.moves
        ]
        if self.cuts:
            lines.append("cuts:")
            lines += [f"  {cut}" for cut in self.cuts]
        return "\n".join(lines)


def make_plan(shards: Sequence[PlacedShard], uses: Mapping[str, VariableUse], num_servers: int, by: Measure) -> Plan:
    """Return the plan that balances this many servers, all of which are among those that have the shards."""
    moves = tuple(balanced(shards, range(num_servers)))
    targets = {(move.variable, move.shard): move.target for move in moves}
    before, after, heaviest = [0.0] * num_servers, [0.0] * num_servers, dict[int, PlacedShard]()
    for shard in shards:
        if shard.server < num_servers:
            before[shard.server] += shard.load
        server = targets.get((shard.variable, shard.shard), shard.server)
        after[server] += shard.load
        if server not in heaviest or heaviest[server].load < shard.load:
            heaviest[server] = shard
    counts = Counter(shard.variable for shard in shards)
    cuts, total = dict[str, ProposedCut](), sum(after)
    for server in sorted(heaviest, key=lambda server: -after[server]):
        shard = heaviest[server]
        if after[server] > TOLERANCE * total / num_servers and shard.variable not in cuts:
            use = uses.get(shard.variable, VariableUse())
            by_rows = use.by_rows and by == "load"
            cuts[shard.variable] = _cut(shard, counts[shard.variable], use, by_rows, total, num_servers)
    return Plan(by, moves, tuple(cuts.values()), tuple(before), tuple(after))


def measured(replies: Iterable[node_pb2.StatusReply], by: Measure) -> tuple[list[PlacedShard], dict[str, VariableUse]]:
    """Return the shards that servers have reported, with their loads, and how their variables are used."""
    shards = dict[tuple[str, int], PlacedShard]()  # one that moves may be reported by two servers
    shapes, rows, orders = dict[str, tuple[int, ...]](), Counter[str](), dict[str, str]()
    for reply in replies:
        for variable in reply.busiest:
            shapes[variable.name] = tuple(variable.shape) or shapes.get(variable.name, ())
            rows[variable.name] += variable.rows
            orders[variable.name] = variable.row_order or orders.get(variable.name, "")
            for load in variable.shards:
                amount = load.traffic if by == "load" else float(load.bytes)
                placed = PlacedShard(variable.name, load.shard, reply.identity.index, amount)
                shards.setdefault((variable.name, load.shard), placed)
    uses = {name: VariableUse(shape, rows[name] > 0, orders[name]) for name, shape in shapes.items()}
    return list(shards.values()), uses


def why_outdated(plan: Plan, places: Mapping[tuple[str, int], int], num_servers: int) -> str | None:
    """Return why a plan does not fit these shards, by variable and index, and this many servers; None if it does."""
    variables = {variable for variable, _ in places}
    for move in plan.moves:
        server = places.get((move.variable, move.shard))
        if move.variable not in variables:
            return f"variable {move.variable!r} was deleted"
        if server is None:
            return f"variable {move.variable!r} has no shard {move.shard} any more"
        if server != move.source:
            return f"shard {move.shard} of {move.variable!r} is now on ps {server}, not on ps {move.source}"
        if not 0 <= move.target < num_servers:
            return f"ps {move.target} was removed, where shard {move.shard} of {move.variable!r} was to go"
    for cut in plan.cuts:
        shards = sum(variable == cut.variable for variable, _ in places)
        if not shards:
            return f"variable {cut.variable!r} was deleted"
        if shards != cut.num_shards:
            return f"variable {cut.variable!r} now has {shards} shards, not {cut.num_shards}"
    return None


def _cut(shard: PlacedShard, shards: int, use: VariableUse, by_rows: bool, total: float, servers: int) -> ProposedCut:
    """Return into how many shards to cut the variable of this one: not more than it has rows."""
    wanted = max(SHARDS_PER_SERVER * servers if by_rows else servers, 2 * shards)
    most = max(use.shape[0] if use.shape else 1, shards)
    share = shard.load / total
    return ProposedCut(shard.variable, shard.shard, share, shards, min(wanted, most), by_rows, use.row_order)


def _peak(loads: Sequence[float]) -> float:
    mean = sum(loads) / len(loads) if loads else 0.0
    return max(loads) / mean if mean else 1.0
