"""A variable is resharded while all that can fail does: every pair of failures, each at every request.

The servers' part is the library's own; what they save is kept in memory. The coordinator is its `Reshard`, around which
requests and answers get lost, servers die and return with what they have saved, and a coordinator dies and is replaced.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from tests.conftest import SEARCH

from pscluster.coordinator.moves.reshard import ENDS, Reshard, Step, merged, owners_of, remembered, unfinished
from pscluster.core.errors import ProtocolError, PsClusterError, StaleError, UnavailableError
from pscluster.core.geometry.row_orders import RANGE
from pscluster.ps.client.placement.move_steps import pages_of
from pscluster.ps.server.moves import Moves
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import partition_of
from pscluster.ps.storage.manager import StateManager
from pscluster.v1 import ps_pb2

JOB, SERVERS, ROWS, LATER = 7, 2, 4, 5
MOVE = ps_pb2.MoveRequest
OLD = ps_pb2.VariableSpec(
    id=1, name="v", dtype="int64", shape=[ROWS], splits=[ps_pb2.AxisSplit(ends=[2, ROWS])], owners=[0, 1]
)
FINAL = ps_pb2.VariableSpec(
    id=5,
    name="v",
    dtype="int64",
    shape=[ROWS],
    splits=[ps_pb2.AxisSplit(ends=[1, 2, 3, ROWS])],
    owners=[1, 0, 1, 0],
    row_order=ps_pb2.RowOrder(kind="modulo"),
    origin=1,
)
MADE = ps_pb2.VariableSpec()
MADE.CopyFrom(FINAL)
MADE.name, MADE.evaluation = "pscluster/cut/5/v", 6


@dataclass
class Server:
    """A parameter server, which saves when it is told to, and before it acknowledges what updates it has had."""

    index: int
    saved: list[tuple[ps_pb2.VariableSpec, dict[int, np.ndarray[Any, Any]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.store = Store(self.index, JOB)
        held = [
            HeldVariable(spec, np.dtype(np.int64), partition_of(spec), {n: Shard(a.copy()) for n, a in shards.items()})
            for spec, shards in self.saved
        ]
        self.store.directory.restore(held, {})
        self.moves = Moves(cast(StateManager, self))

    def save(self) -> None:
        self.saved = [
            (held.spec, {n: np.array(shard.array, np.int64) for n, shard in held.shards.items()})
            for held in self.store.held()[0]
        ]

    def may_extend(self, *_: object) -> bool:
        """Return False: all is saved, without files."""
        return False

    def save_shards(self, *_: object) -> None:
        self.save()

    def take_over(self) -> None:
        """Begin anew with another coordinator."""
        self.moves.persist()
        self.moves.forget(self.store)

    @property
    def specs(self) -> list[ps_pb2.VariableSpec]:
        return [held.spec for held in self.store.held()[0]]


class CoordinatorDiedError(Exception):
    """There is none any more."""


class World:
    """The servers, and what happens at each request, by its number."""

    def __init__(self, events: dict[int, str]) -> None:
        whole = self.expected = np.arange(ROWS)
        spec = ps_pb2.VariableSpec()
        spec.CopyFrom(OLD)
        self.servers = [Server(n, [(spec, {n: whole[2 * n : 2 * n + 2]})]) for n in range(SERVERS)]
        self.events, self.requests = events, 0
        self.late: dict[int, Callable[[], object]] = {}  # copies of requests, by the request before which they come

    def ask(self, server: int, payload: bytes = b"", **about: Any) -> ps_pb2.MoveReply:
        """Send a request, to which something may happen."""
        event, number = self.events.get(self.requests, ""), self.requests
        self.requests += 1
        request = MOVE(job=JOB, id=9, variable=1, **about)
        there = self.servers[server]
        self.deliver(number)
        if event == "coordinator dies":
            raise CoordinatorDiedError
        if event.startswith("dies before"):
            self.servers[int(event[-1])].start()
        if event == "request lost":
            raise UnavailableError(f"request {number}")
        reply, _ = there.moves.handle(there.store, request, memoryview(payload))
        if event.startswith("dies after"):
            self.servers[int(event[-1])].start()
        if event == "answer lost":
            raise UnavailableError(f"request {number}")
        if event == "coordinator dies after":
            raise CoordinatorDiedError
        if event == "twice":
            there.moves.handle(there.store, request, memoryview(payload))
        if event == "late copy":
            self.late[number + LATER] = lambda: there.moves.handle(there.store, request, memoryview(payload))
        return reply

    def deliver(self, number: int) -> None:
        """Let the late copy come that comes by now, if there is one."""
        for due in [due for due in self.late if due <= number]:
            with contextlib.suppress(PsClusterError):
                self.late.pop(due)()

    def until_answered(self, server: int, **about: Any) -> None:
        while True:
            try:
                self.ask(server, **about)
                return
            except UnavailableError:
                continue

    def update(self, row: int) -> None:
        """Add 10 to a row of the old variable, as an update does, which is saved before it is acknowledged."""
        server = self.servers[row // 2]
        shard = server.store.directory.variables[1].shards[row // 2]
        with shard.lock:
            assert shard.frozen is None
            shard.before_rows_change(np.array([row % 2]))
            shard.array[row % 2] += 10
        server.save()
        self.expected = self.expected + 10 * (np.arange(ROWS) == row)

    def value(self, variable: int) -> np.ndarray[Any, Any]:
        """The value of a variable, from whichever server has each shard."""
        spec = next(spec for server in self.servers for spec in server.specs if spec.id == variable)
        partition, out = partition_of(spec), np.full(ROWS, -1)
        for index, owner in enumerate(spec.owners):
            held = self.servers[owner].store.directory.variables[variable]
            out[partition.row_ids(index)] = held.shards[index].array
        return out


def packed(*rows: int) -> bytes:
    """Numbers of rows, as FILL has them."""
    return np.array(rows, np.int64).tobytes()


def copy(world: World, left: set[int], number: int) -> None:
    """Copy the rows that are left."""
    new = partition_of(FINAL)
    for shard, owner in enumerate(FINAL.owners):
        for at, row in enumerate(new.row_ids(shard).tolist()):
            if row in left:
                value = world.servers[row // 2].store.directory.variables[1].shards[row // 2].array[row % 2]
                fill = {"action": MOVE.FILL, "shard": shard, "arrays": ["value"], "round": number}
                where = {"start": at} if number else {"rows": packed(at)}
                world.ask(owner, value.tobytes(), **fill, **where)


def changed_rows(shard: int, reply: ps_pb2.MoveReply) -> set[int]:
    """Return the rows on the pages that a server says have changed, of which there is one."""
    return {2 * shard, 2 * shard + 1} if pages_of(reply.changed).tolist() == [0] else set()


def run(world: World) -> Step:
    """Do what `Resharder` does, while functions update the variable; return how it ended."""
    reshard, every, left = Reshard(), range(SERVERS), set(range(ROWS))
    while reshard.step not in ENDS:
        try:
            match reshard.step:
                case Step.MAKE:
                    for server in every:
                        world.ask(server, action=MOVE.MAKE, spec=MADE)
                case Step.TRACK:
                    for shard, owner in enumerate(OLD.owners):
                        world.ask(owner, action=MOVE.TRACK, shard=shard)
                case Step.AHEAD:
                    copy(world, left, 0)
                    world.update(1)
                    left.clear()
                    for shard, owner in enumerate(OLD.owners):
                        reply = world.ask(owner, action=MOVE.CHANGED, shard=shard, round=1)
                        left |= changed_rows(shard, reply)
                    copy(world, left, 1)
                    world.update(0)
                    world.update(3)
                    left.clear()
                case Step.CAPTURE:
                    for shard, owner in enumerate(OLD.owners):
                        reply = world.ask(owner, action=MOVE.CAPTURE, shard=shard, round=2)
                        left |= changed_rows(shard, reply)
                case Step.COPY:
                    copy(world, left, 2)
                    for shard, owner in enumerate(FINAL.owners):
                        world.ask(
                            owner, action=MOVE.SETTLE, shard=shard, state=ps_pb2.ShardState(updates=3, arrays=["value"])
                        )
                case Step.SEAL:
                    for server in every:
                        world.ask(server, action=MOVE.SEAL)
                case Step.DECIDE:
                    world.until_answered(0, action=MOVE.ADOPT, spec=FINAL)
                case Step.ADOPT:
                    world.until_answered(1, action=MOVE.ADOPT, spec=FINAL)
                case Step.ABANDON:
                    for server in every:
                        world.until_answered(server, action=MOVE.ABANDON, spec=MADE)
        except PsClusterError as error:
            if not reshard.failed(refused=not isinstance(error, UnavailableError)):
                raise
        else:
            reshard.succeeded()
    return reshard.step


def take_over(world: World) -> None:
    """Do what the next coordinator does: see `attach`."""
    for server in world.servers:
        server.take_over()
    for index, spec in unfinished([server.specs for server in world.servers]):
        world.until_answered(index, action=MOVE.ADOPT, spec=spec)
    for server in world.servers:
        for spec in server.specs:
            if spec.evaluation:
                server.store.delete("", evaluation=spec.evaluation)


def check(events: dict[int, str]) -> int:
    """Run with these events; all servers have the same variable, whole, and serve it. Return how many requests came."""
    world = World(events)
    try:
        ended = run(world)
    except CoordinatorDiedError:
        try:
            take_over(world)
        except CoordinatorDiedError:  # the one after that
            take_over(world)
        ended = Step.CUT if any(spec.id == FINAL.id for spec in world.servers[0].specs) else Step.UNDONE
    world.deliver(world.requests + LATER)
    for lasting in (False, True):
        for server in world.servers:
            if lasting:  # what is there after all have restarted; remains of what was undone may be there again
                server.start()
            assert [spec.id for spec in server.specs if not spec.evaluation] == [5 if ended is Step.CUT else 1], events
            shards = [shard for held in server.store.held()[0] for shard in held.shards.values()]
            assert not any(shard.frozen or shard.pages for shard in shards), events
        np.testing.assert_array_equal(world.value(5 if ended is Step.CUT else 1), world.expected, str(events))
    return world.requests


EVENTS = [
    *("request lost", "answer lost", "twice", "late copy", "coordinator dies", "coordinator dies after"),
    *(f"dies {when} {server}" for when in ("before", "after") for server in range(SERVERS)),
]
REQUESTS = check({})


@pytest.mark.parametrize("first", EVENTS)
def test_every_pair_of_failures(first: str) -> None:
    """It is done on all servers or on none, and the values are those there were, whatever happens when."""
    for at in range(REQUESTS):
        check({at: first})
        pairs = list(itertools.product(range(at + 1, REQUESTS + 2), EVENTS))
        for later, second in pairs if SEARCH > 1 else pairs[(at + 3 * EVENTS.index(first)) % 31 :: 31]:
            check({at: first, later: second})


def test_it_is_done_without_failures_and_undone_before_it_is_decided() -> None:
    assert run(World({})) is Step.CUT
    for at in range(REQUESTS):
        ended = run(World({at: "request lost"}))
        assert ended is (Step.CUT if at >= REQUESTS - 2 else Step.UNDONE), at
        for server in range(SERVERS) if 2 <= at < REQUESTS - 4 else ():
            assert run(World({at: f"dies before {server}"})) is Step.UNDONE


def test_a_server_that_has_lost_the_new_shards_is_refused() -> None:
    """It has fallen back on what it held before, of which the job has a later cut."""
    with pytest.raises(StaleError, match="ps 1 lacks the shards of 'v' as it is cut now"):
        unfinished([[FINAL], [OLD]])
    assert unfinished([[FINAL], [MADE, OLD]]) == [(1, FINAL)]
    assert unfinished([[MADE, OLD], [MADE, OLD]]) == []
    assert unfinished([[FINAL], []]) == [], "a deletion was under way"
    again = ps_pb2.VariableSpec()
    again.CopyFrom(FINAL)
    again.id = 8
    made = ps_pb2.VariableSpec()
    made.CopyFrom(again)
    made.evaluation = 9
    assert unfinished([[again], [made, FINAL]]) == [(1, again)]


def changed(**fields: Any) -> ps_pb2.VariableSpec:
    """The spec of the new shards with other fields."""
    spec = ps_pb2.VariableSpec()
    spec.CopyFrom(MADE)
    for name, value in fields.items():
        setattr(spec, name, value)
    return spec


@pytest.mark.parametrize(
    ("about", "error", "sentence"),
    [
        ({"action": MOVE.MAKE, "variable": 3, "spec": MADE}, StaleError, "no variable 3 that could be resharded"),
        ({"action": MOVE.MAKE, "spec": changed(name="other")}, ProtocolError, "without a number or a reserved name"),
        ({"action": MOVE.MAKE, "spec": changed(evaluation=0)}, ProtocolError, "without a number or a reserved name"),
        ({"action": MOVE.MAKE, "spec": changed(id=1)}, ProtocolError, "without a number or a reserved name"),
        ({"action": MOVE.MAKE, "spec": changed(dtype="int32")}, ProtocolError, "makes another variable of it"),
        ({"action": MOVE.FILL, "arrays": ["value"], "start": ROWS}, ProtocolError, "8 bytes from element 4 of a shard"),
        ({"action": MOVE.FILL, "arrays": ["slot/3/m"]}, ProtocolError, "with an array 'slot/3/m'"),
        ({"action": MOVE.FILL, "arrays": []}, ProtocolError, "with an array ''"),
        (
            {"action": MOVE.FILL, "arrays": ["value"], "rows": packed(1)},
            ProtocolError,
            r"rows that a shard of shape \(1,",
        ),
        ({"action": MOVE.FILL, "arrays": ["value"], "rows": packed(-1)}, ProtocolError, "rows that a shard of shape"),
        ({"action": MOVE.FILL, "arrays": ["value"], "rows": b"0"}, ProtocolError, "rows that a shard of shape"),
        (
            {"action": MOVE.FILL, "arrays": ["value"], "rows": packed(0, 0)},
            ProtocolError,
            "rows that are not ascending",
        ),
        ({"action": MOVE.TRACK, "shard": 0, "id": 0, "job": 1}, StaleError, "ps 0 serves another job"),
        ({"action": MOVE.CHANGED, "shard": 0}, StaleError, "does not know the move"),
        ({"action": MOVE.SETTLE, "state": ps_pb2.ShardState(traffic=-1.0)}, ProtocolError, "a traffic of -1.0 bytes"),
        ({"action": MOVE.SETTLE, "state": ps_pb2.ShardState(term=3)}, StaleError, "not in one term"),
        ({"action": MOVE.SEAL, "id": 8}, StaleError, "ps 0 has nothing of this resharding"),
        ({"action": MOVE.ADOPT, "spec": changed(id=7)}, StaleError, "ps 0 lacks the shards of"),
        ({"action": MOVE.ADOPT, "spec": OLD}, None, ""),
        ({"action": MOVE.ADOPT, "spec": changed(dtype="int32")}, ProtocolError, "is another one"),
        ({"action": MOVE.RESIZE}, ProtocolError, "action 12 of a move"),
        ({"action": MOVE.SEAL, "job": 1}, StaleError, "ps 0 serves another job"),
    ],
)
def test_what_a_server_refuses(about: dict[str, Any], error: type[Exception] | None, sentence: str) -> None:
    """Requests that make no sense change nothing."""
    world = World({})
    server = world.servers[0]
    world.ask(0, action=MOVE.MAKE, spec=MADE)
    fields = {"job": JOB, "id": 9, "variable": 1, "shard": 1, **about}
    payload = memoryview(b"8 bytes!" if about["action"] == MOVE.FILL else b"")
    with pytest.raises(error, match=sentence) if error is not None else contextlib.nullcontext():
        server.moves.handle(server.store, MOVE(**fields), payload)
    np.testing.assert_array_equal(server.store.directory.variables[1].shards[0].array, [0, 1])
    assert not server.store.directory.variables[5].shards[1].array.any()


def test_new_shards_go_where_the_load_is_least() -> None:
    assert owners_of([1] * 6, 6.0, [0.0, 0.0]) == [0, 1, 0, 1, 0, 1]
    assert owners_of([1] * 4, 4.0, [2.0, 0.0]) == [1, 1, 0, 1]
    assert owners_of([0, 0, 0], 0.0, [0.0, 0.0]) == [0, 1, 0]


def test_what_the_new_shards_are_given() -> None:
    """Of counts the highest, and of each key all updates that any shard has had."""
    states = [
        ps_pb2.ShardState(arrays=["value"], updates=3, steps={1: 4}, traffic=2.0, term=2),
        ps_pb2.ShardState(arrays=["value", "slot/1/m"], updates=5, steps={1: 2, 2: 1}, traffic=1.0, term=2),
    ]
    state = merged(states)
    assert (state.updates, dict(state.steps), state.traffic, state.term) == (5, {1: 4, 2: 1}, 3.0, 2)
    assert list(state.arrays) == ["value", "slot/1/m"]
    assert remembered([{7: frozenset({1})}, {7: frozenset({2}), 8: frozenset({1})}]) == {7: {1, 2}, 8: {1}}
    assert partition_of(OLD).order == RANGE
