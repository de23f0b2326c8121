"""What the coordinator asks of servers when a variable is resharded: see `pscluster.ps.server.resharding`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from pscluster.core.errors import from_rpc
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.placement.move_steps import pages_of, pull_shard
from pscluster.ps.spec import MOVE_BYTES
from pscluster.v1 import ps_pb2

Ids = npt.NDArray[np.int64]

_CALL_SECONDS = 60.0

_SAVE_SECONDS = 600.0
"""The same, if the server writes what it holds to the disk."""

_KEYS = 1 << 18
"""Keys of functions in one message."""

MAX_ROWS = 1 << 16
"""Numbers of rows in one message: they are in its header."""


class ReshardSteps:
    """The steps of cutting one variable otherwise, by action. They raise PsClusterError.

    All may be repeated. `adopt` and `abandon` wait for a server that is down; of the others, a server that restarts
    refuses what follows.
    """

    def __init__(self, client: PsClient, number: int, variable: int) -> None:
        self._client = client
        self._round = 0  # of asking all old shards what has changed
        self._about = functools.partial(ps_pb2.MoveRequest, job=client.job, id=number, variable=variable)

    def make(self, spec: ps_pb2.VariableSpec) -> None:
        """Have all servers make the new shards that are theirs, with zeros."""
        self._on_all(self._about(action=ps_pb2.MoveRequest.MAKE, spec=spec))

    def track(self, server: int, shard: int, page_elements: int) -> ps_pb2.ShardState:
        """Have an old shard note changes from now on, by pages; return its arrays, and what traffic it has."""
        about = self._about(action=ps_pb2.MoveRequest.TRACK, shard=shard, page_elements=page_elements)
        return self._once(server, about).state

    def next_round(self) -> None:
        """Ask from now on for what changes after what was asked for before."""
        self._round += 1

    def changed(self, server: int, shard: int) -> tuple[list[str], Ids]:
        """Return an old shard's arrays, and the pages that have changed since the round before."""
        reply = self._once(server, self._about(action=ps_pb2.MoveRequest.CHANGED, shard=shard, round=self._round))
        return list(reply.state.arrays), pages_of(reply.changed)

    def capture(self, server: int, shard: int) -> tuple[ps_pb2.ShardState, Mapping[int, frozenset[int]], Ids]:
        """Freeze an old shard; return its state, and by key of a function which of its updates were applied.

        And, if it was tracked, the pages that have changed since the round before.
        """
        reply = self._once(server, self._about(action=ps_pb2.MoveRequest.CAPTURE, shard=shard, round=self._round))
        named = {key: frozenset(same.nth) for same in reply.named for key in same.keys}
        return reply.state, named, pages_of(reply.changed)

    def count(self, server: int, shard: int, num_shards: int) -> tuple[list[int], list[str]]:
        """Return how many rows of an old shard of a table each new one will have, and its arrays."""
        request = self._about(action=ps_pb2.MoveRequest.COUNT, shard=shard, num_shards=num_shards)
        reply = self._once(server, request)
        return list(reply.rows), list(reply.state.arrays)

    def take(self, server: int, shard: int, array: str, first: int, rows: int, nbytes: int, updates: int) -> memoryview:
        """Return rows of an array of an old shard of a table, as if the shard had had this number of updates."""
        state = ps_pb2.ShardState(rows=rows, updates=updates)
        action = ps_pb2.MoveRequest.TAKE
        move = self._about(action=action, shard=shard, arrays=[array], start=first, state=state)
        return pull_shard(self._client, server, ps_pb2.Request(move=move, last=True), nbytes)

    def fill(
        self, server: int, shard: int, array: str, start: int, data: memoryview, itemsize: int, *, seen: int = 0
    ) -> None:
        """Set the elements of a new shard's array from `start` on. `seen`: of a table's counts, after how many."""
        most, state = MOVE_BYTES // itemsize * itemsize, ps_pb2.ShardState(seen=seen)
        for at in range(0, len(data), most):
            first = start + at // itemsize
            move = self._fill(shard, array, start=first, state=state)
            self._client.exchanges.push(server, ps_pb2.Request(move=move), [data[at : at + most]])

    def fill_rows(self, server: int, shard: int, array: str, rows: Ids, data: memoryview) -> None:
        """Set these rows, ascending, of a new shard's array: at most `MAX_ROWS`, and `MOVE_BYTES`."""
        move = self._fill(shard, array, rows=rows.astype(np.int64, copy=False).tobytes())
        self._client.exchanges.push(server, ps_pb2.Request(move=move), [data])

    def _fill(self, shard: int, array: str, **about: Any) -> ps_pb2.MoveRequest:
        return self._about(action=ps_pb2.MoveRequest.FILL, shard=shard, arrays=[array], round=self._round, **about)

    def settle(self, server: int, shard: int, state: ps_pb2.ShardState, named: Mapping[int, Iterable[int]]) -> None:
        """Give a new shard its counts, and what it remembers."""
        by_updates: dict[tuple[int, ...], list[int]] = {}
        for key, nths in named.items():
            by_updates.setdefault(tuple(sorted(nths)), []).append(key)
        about = functools.partial(self._about, action=ps_pb2.MoveRequest.SETTLE, shard=shard, state=state)
        self._once(server, about())
        for nths, keys in by_updates.items():
            for at in range(0, len(keys), _KEYS):
                self._once(server, about(named=[ps_pb2.NamedUpdates(nth=nths, keys=keys[at : at + _KEYS])]))

    def seal(self) -> None:
        """Have all servers save what has come, if they have forgotten nothing."""
        self._on_all(self._about(action=ps_pb2.MoveRequest.SEAL), save=True)

    def adopt(self, servers: Iterable[int], spec: ps_pb2.VariableSpec) -> None:
        """Have servers put the new variable in the old one's place, and save that. Waits for them."""
        request = self._about(action=ps_pb2.MoveRequest.ADOPT, spec=spec)
        self._client.exchanges.on_each(functools.partial(self._waiting, server, request) for server in servers)

    def abandon(self, spec: ps_pb2.VariableSpec) -> None:
        """Have all servers drop the new shards, and go on with the old ones. Waits for them."""
        request = self._about(action=ps_pb2.MoveRequest.ABANDON, spec=spec)
        every = range(self._client.num_servers)
        self._client.exchanges.on_each(functools.partial(self._waiting, server, request) for server in every)

    def _on_all(self, request: ps_pb2.MoveRequest, *, save: bool = False) -> None:
        every = range(self._client.num_servers)
        self._client.exchanges.on_each(functools.partial(self._once, server, request, save=save) for server in every)

    def _once(self, server: int, request: ps_pb2.MoveRequest, *, save: bool = False) -> ps_pb2.MoveReply:
        self._client.exchanges.check_open()
        there = self._client.exchanges.server(server)
        there.check()
        try:
            reply: ps_pb2.MoveReply = there.ask("bulk", "move", request, _SAVE_SECONDS if save else _CALL_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc(error, str(there.peer)) from None
        return reply

    def _waiting(self, server: int, request: ps_pb2.MoveRequest) -> None:
        self._client.exchanges.check_open()
        there = self._client.exchanges.server(server)
        self._client.exchanges.retrying(there, functools.partial(there.ask, "bulk", "move", request, _SAVE_SECONDS))
