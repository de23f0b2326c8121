"""A shard that is copied page by page while it changes, and what a server refuses of moves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tests.ps.server.state.test_shard import JOB, OPTIMIZER, VARIABLE, Client, new_store

from pscluster.core.errors import ProtocolError, PsClusterError, ShardMovedError, StaleError, UnavailableError
from pscluster.ps.server import pages as pages_module
from pscluster.ps.server.moves import Moves
from pscluster.ps.server.state import shard as shard_module
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import DurabilityOptions
from pscluster.v1 import ps_pb2

Request = ps_pb2.MoveRequest
PAGE = 4


class Asked(Protocol):
    """A server that the coordinator of a move can ask."""

    def ask(self, action: Request.Action, payload: bytes = b"", **fields: Any) -> tuple[ps_pb2.MoveReply, bytes]: ...


class Side:
    """A server, as the coordinator of a move asks it."""

    def __init__(self, index: int) -> None:
        self.store = new_store()
        self.store.index = self.store.directory._server = index
        self.moves = Moves(StateManager(DurabilityOptions()))
        if index:
            held = self.store.directory.variables[VARIABLE]
            self.store.directory.variables[VARIABLE] = HeldVariable(held.spec, held.dtype, held.partition, {})

    def ask(self, action: Request.Action, payload: bytes = b"", **fields: Any) -> tuple[ps_pb2.MoveReply, bytes]:
        request = Request(job=JOB, id=5, action=action, variable=VARIABLE, shard=0, **fields)
        reply, buffers = self.moves.handle(self.store, request, memoryview(payload))
        return reply, b"".join(buffers)


def spec_of(store: Store, placement: int, *owners: int, variable: int = VARIABLE) -> ps_pb2.VariableSpec:
    spec = ps_pb2.VariableSpec()
    spec.CopyFrom(store.directory.variables[variable].spec)
    spec.placement, spec.owners[:] = placement, owners
    return spec


def copy(source: Asked, target: Asked, reply: ps_pb2.MoveReply, round_number: int) -> None:
    """Copy the pages that a reply names."""
    pages = np.flatnonzero(np.unpackbits(np.frombuffer(reply.changed, np.uint8))).tolist()
    target.ask(Request.STAGE, state=ps_pb2.ShardState(arrays=reply.state.arrays))
    for array in reply.state.arrays:
        of: Any = {"arrays": [array], "pages": pages}
        target.ask(Request.WRITE, source.ask(Request.READ, **of)[1], round=round_number, **of)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> tuple[Side, Side]:
    """Two servers, the first of which has the variable."""
    for module in (pages_module, shard_module):
        monkeypatch.setattr(module, "PAGE_ELEMENTS", PAGE)
    return Side(0), Side(1)


updates = st.sampled_from(["dense", "rows", "gradient", "row gradient", "replace"])


@settings(deadline=None, max_examples=60)
@given(rounds=st.lists(st.lists(st.tuples(updates, st.integers(0, 5), st.integers(1, 9)), max_size=3), max_size=4))
def test_what_has_arrived_is_what_was_there(rounds: list[list[tuple[str, int, int]]]) -> None:
    """Values, slots, counts and remembered updates, whatever changed between two rounds."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pages_module, shard_module):
            patch.setattr(module, "PAGE_ELEMENTS", PAGE)
        source, target = Side(0), Side(1)
        client = Client(source.store)
        copy(source, target, source.ask(Request.TRACK)[0], 0)
        for number, changes in enumerate(rounds, 1):
            for kind, row, amount in changes:
                change(client, kind, row, amount)
            copy(source, target, source.ask(Request.CHANGED, round=number)[0], number)
        change(client, "rows", 1, 3)
        last = len(rounds) + 1
        reply = source.ask(Request.FREEZE, round=last)[0]
        copy(source, target, reply, last)
        spec = spec_of(source.store, 1, 1, 0)
        assert target.ask(Request.COMMIT, state=reply.state, spec=spec)[0].committed
        before, after = (side.store.directory.variables[VARIABLE].shards[0] for side in (source, target))
        assert before.arrays().keys() == after.arrays().keys()
        for name, array in before.arrays().items():
            np.testing.assert_array_equal(array, after.arrays()[name])
        assert (after.updates, after.steps) == (before.updates, before.steps)
        with source.store.ledger() as theirs, target.store.ledger() as ours:
            assert list(theirs.keys_of(VARIABLE, 0)) == list(ours.keys_of(VARIABLE, 0)) != []


def change(client: Client, kind: str, row: int, amount: int) -> None:
    """Make one update of the shard, of 6 rows of 5."""
    values = np.full((6, 5), amount, np.float32)
    if kind == "dense":
        client.dense(0, ps_pb2.ADD, values)
    elif kind == "gradient":
        client.dense(0, ps_pb2.APPLY_GRADIENT, values, OPTIMIZER)
    elif kind == "replace":
        client.replace(0, values)
    else:
        gradient = kind == "row gradient"
        update = ps_pb2.APPLY_GRADIENT if gradient else ps_pb2.ADD
        client.rows(0, update, [row], values[:1], OPTIMIZER if gradient else 0)


def test_who_serves_a_shard_that_moves(sides: tuple[Side, Side]) -> None:
    """Frozen, the source answers reads; the target nothing before it is told to; then the source says where it is."""
    source, target = sides
    client = Client(source.store)
    copy(source, target, source.ask(Request.TRACK)[0], 0)
    state = source.ask(Request.FREEZE, round=1)[0].state
    with pytest.raises(UnavailableError, match="'v' is about to move"):
        change(client, "dense", 0, 1)
    source.store.find(VARIABLE, 0)
    spec = spec_of(source.store, 1, 1, 0)
    target.ask(Request.COMMIT, state=state, spec=spec)
    with pytest.raises(UnavailableError, match="shard 0 of 'v' is still arriving on ps 1"):
        target.store.directory.find(VARIABLE, 0)
    source.ask(Request.PLACE, spec=spec)
    with pytest.raises(ShardMovedError, match="shard 0 of 'v' does not live on ps 0"):
        source.store.find(VARIABLE, 0)
    assert source.store.describe((), (), moved=True).variables == [spec]
    target.ask(Request.SERVE, spec=spec_of(source.store, 2, 1, 0))  # of another move
    assert target.store.directory.variables[VARIABLE].shards[0].arriving is not None
    target.ask(Request.SERVE, spec=spec)
    change(Client(target.store), "dense", 0, 1)


def test_late_copies_of_requests(sides: tuple[Side, Side]) -> None:
    """None brings back older values, thaws another move's shard, or begins again what is over."""
    source, target = sides
    client = Client(source.store)
    first = source.ask(Request.TRACK)[0]
    copy(source, target, first, 0)
    change(client, "rows", 0, 1)
    again = [source.ask(Request.CHANGED, round=1)[0].changed for _ in range(2)]
    assert again[0] == again[1] != b"\0", "an answer may get lost"
    reply = source.ask(Request.FREEZE, round=2)[0]
    copy(source, target, reply, 2)
    late = source.ask(Request.READ, arrays=["value"], pages=[0])[1]
    with pytest.raises(StaleError, match="late copy: later ones have come"):
        target.ask(Request.WRITE, late, arrays=["value"], pages=[0], round=1)
    with pytest.raises(StaleError, match="late copy: the shard has been copied further"):
        source.ask(Request.CHANGED, round=1)
    assert not target.ask(Request.WITHDRAW, spec=spec_of(source.store, 1, 1, 0))[0].committed
    for action in (Request.STAGE, Request.COMMIT):
        with pytest.raises(StaleError, match="this move is over"):
            target.ask(action, spec=spec_of(source.store, 1, 1, 0))
    source.ask(Request.RELEASE)
    change(client, "rows", 0, 1)
    with pytest.raises(StaleError, match="this move is over"):
        source.ask(Request.TRACK)
    with pytest.raises(StaleError, match="does not know the move"):
        source.ask(Request.FREEZE, round=3)


@pytest.mark.parametrize(
    ("action", "fields", "text"),
    [
        (Request.READ, {"arrays": ["slot/2/none"], "pages": [0]}, "the array 'slot/2/none', which is not there"),
        (Request.READ, {"arrays": ["value"], "pages": [8]}, "not ascending, or not among its 8"),
        (Request.READ, {"arrays": ["value"], "pages": [1, 1]}, "not ascending"),
        (Request.TRACK, {"shard": 7}, "shard 7 of 'v' does not live on ps 0"),
        (0, {}, "action 0 of a move"),
    ],
)
def test_what_the_source_refuses(sides: tuple[Side, Side], action: Any, fields: dict[str, Any], text: str) -> None:
    """Requests that make no sense are named, and change nothing."""
    source, _ = sides
    source.ask(Request.TRACK)
    request = Request(job=JOB, id=5, action=action, variable=VARIABLE, **fields)
    with pytest.raises(PsClusterError, match=text):
        source.moves.handle(source.store, request, memoryview(b""))


def test_what_the_target_refuses(sides: tuple[Side, Side]) -> None:
    """What has not come whole is not entered."""
    source, target = sides
    reply = source.ask(Request.TRACK)[0]
    spec = spec_of(source.store, 1, 1, 0)
    with pytest.raises(StaleError, match="ps 1 has nothing of this move"):
        target.ask(Request.COMMIT, state=reply.state, spec=spec)
    for array in ("valu", "slot/x/y", "slot/2/none", "average/"):
        with pytest.raises(PsClusterError):
            target.ask(Request.STAGE, state=ps_pb2.ShardState(arrays=[array]))
    target.ask(Request.STAGE)
    with pytest.raises(ProtocolError, match="but only nothing has arrived"):
        target.ask(Request.COMMIT, state=reply.state, spec=spec)
    copy(source, target, reply, 0)
    with pytest.raises(ProtocolError, match="3 bytes for pages that take 16"):
        target.ask(Request.WRITE, b"abc", arrays=["value"], pages=[0])
    with pytest.raises(ProtocolError, match="which is not to ps 1"):
        target.ask(Request.COMMIT, state=reply.state, spec=spec_of(source.store, 1, 0, 0))
    with pytest.raises(ProtocolError, match="on ps 0 already"):
        source.ask(Request.STAGE)
    other = ps_pb2.ShardState(arrays=reply.state.arrays, term=3)
    with pytest.raises(StaleError, match="not in one term"):
        target.ask(Request.COMMIT, state=other, spec=spec)
    for traffic in (-1.0, math.nan, math.inf):
        other = ps_pb2.ShardState(arrays=reply.state.arrays, traffic=traffic)
        with pytest.raises(ProtocolError, match="with a traffic of"):
            target.ask(Request.COMMIT, state=other, spec=spec)
    for wrong in (spec_of(source.store, 2, 0), spec_of(source.store, 2, 0, 0, 0)):
        with pytest.raises(ProtocolError, match="makes another variable of it"):
            target.store.place(wrong, JOB)
    with pytest.raises(StaleError, match="ps 1 lacks shard 0 of 'v', which has moved here"):
        target.store.place(spec, JOB)


def test_a_shard_that_can_not_be_saved_is_not_taken(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The target is then as it was, so that the move can be undone."""
    del tmp_path
    source, target = sides
    reply = source.ask(Request.TRACK)[0]
    copy(source, target, reply, 0)

    def full() -> None:
        raise PsClusterError("no room")

    monkeypatch.setattr(target.moves._manager, "save", full)
    with pytest.raises(PsClusterError, match="no room"):
        target.ask(Request.COMMIT, state=reply.state, spec=spec_of(source.store, 1, 1, 0))
    held = target.store.directory.variables[VARIABLE]
    assert (held.shards, held.spec.placement) == ({}, 0)
    with target.store.ledger() as ledger:
        assert not ledger.remembered


def test_a_read_that_was_answered_as_its_shard_left(sides: tuple[Side, Side]) -> None:
    """The answer counts. It is not prepared for the next request, and ends no session."""
    source, _ = sides
    read = ps_pb2.ReadRequest(job=JOB, items=[ps_pb2.ReadItem(variable=VARIABLE, rows=ps_pb2.Rows(all=True))])
    source.store.prepare(b"the request", read)
    assert source.store.prepared(b"the request") is not None
    owners = source.store.directory.variables[VARIABLE].spec.owners
    source.store.place(spec_of(source.store, 1, *(1 for _ in owners)), JOB)
    source.store.prepare(b"the request", read)
    assert source.store.prepared(b"the request") is None
