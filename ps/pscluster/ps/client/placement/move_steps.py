"""What the coordinator asks of servers between which a shard moves: see `pscluster.ps.server.moves`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import numpy.typing as npt

from pscluster.core.errors import UnavailableError, from_rpc
from pscluster.core.metrics.trace import SESSION_HEADER
from pscluster.core.transport.base import Metadata
from pscluster.core.transport.frames import pack
from pscluster.core.transport.payload_sink import PayloadSink
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.connections import new_session
from pscluster.ps.spec import MOVE_BYTES, PAGE_ELEMENTS
from pscluster.v1 import ps_pb2

Pages = npt.NDArray[np.int64]

_CALL_SECONDS = 60.0

_SAVE_SECONDS = 600.0
"""The same, if the server writes what it holds to the disk."""

_KEYS = 4096
"""Origins of remembered updates in one message."""


class MoveSteps:
    """The steps of one move, by action. They raise PsClusterError.

    Steps that may change something twice, or must not wait, are tried once. Others wait for a server that is down, as
    all requests do.
    """

    def __init__(
        self,
        client: PsClient,
        move: int,
        variable: int,
        shard: int,
        source: int,
        target: int,
        elements: int = 0,
        *,
        row_elements: int = 0,
    ) -> None:
        """Take the numbers of the shard, of the servers, and of its `elements`, or the items of a row of a table's."""
        self._client = client
        self._source, self._target = source, target
        self._elements, self._row_elements, self._rows, self._round = elements, row_elements, 0, 0
        self._about = functools.partial(ps_pb2.MoveRequest, job=client.job, id=move, variable=variable, shard=shard)

    def track(self) -> tuple[list[str], Pages]:
        """Have the source note changes from now on; return the names of the arrays, and all pages."""
        return self._changes(self._once(self._source, self._about(action=ps_pb2.MoveRequest.TRACK)))

    def changed(self) -> tuple[list[str], Pages]:
        """Return the arrays, and the pages that have changed since they were last asked for."""
        return self._changes(self._next_round(ps_pb2.MoveRequest.CHANGED))

    def freeze(self) -> tuple[ps_pb2.ShardState, Pages]:
        """Have the source apply no more updates; return the state, and the last pages that have changed."""
        reply = self._next_round(ps_pb2.MoveRequest.FREEZE)
        return reply.state, self._changes(reply)[1]

    def _next_round(self, action: ps_pb2.MoveRequest.Action) -> ps_pb2.MoveReply:
        self._round += 1
        return self._once(self._source, self._about(action=action, round=self._round))

    def copy(self, itemsizes: Mapping[str, int], pages: Pages) -> Iterator[int]:
        """Copy these pages of arrays to the target, given how many bytes an element of each takes.

        Yield the bytes of each piece once it has arrived; the next is read from the source meanwhile.
        """
        arrays = list(itemsizes)
        state = ps_pb2.ShardState(arrays=arrays, rows=self._rows)
        pages = pages[pages * PAGE_ELEMENTS < self._elements]  # of a table, rows may have gone since
        self._once(self._target, self._about(action=ps_pb2.MoveRequest.STAGE, state=state))
        most = max(MOVE_BYTES // (PAGE_ELEMENTS * max(itemsizes.values())), 1)
        pieces = [(array, pages[at : at + most]) for at in range(0, len(pages), most) for array in arrays]
        metadata = ((SESSION_HEADER, new_session()),)
        with ThreadPoolExecutor(1, thread_name_prefix="shard-move") as ahead:
            reading = [ahead.submit(self._read, itemsizes, metadata, *piece) for piece in pieces[:1]]
            for index, piece in enumerate(pieces):
                data = reading.pop().result()
                reading += [ahead.submit(self._read, itemsizes, metadata, *each) for each in pieces[index + 1 :][:1]]
                request = self._of_pages(ps_pb2.MoveRequest.WRITE, *piece)
                self._client.exchanges.push(self._target, request, [data])
                yield len(data)

    def _read(self, itemsizes: Mapping[str, int], metadata: Metadata, array: str, pages: Pages) -> memoryview:
        elements = len(pages) * PAGE_ELEMENTS
        if len(pages) and pages[-1] == self._elements // PAGE_ELEMENTS:  # the last one is not full
            elements -= PAGE_ELEMENTS - self._elements % PAGE_ELEMENTS
        request = self._of_pages(ps_pb2.MoveRequest.READ, array, pages)
        return pull_shard(self._client, self._source, request, elements * itemsizes[array], metadata)

    def _of_pages(self, action: ps_pb2.MoveRequest.Action, array: str, pages: Pages) -> ps_pb2.Request:
        state = ps_pb2.ShardState(rows=self._rows) if self._rows else None
        move = self._about(action=action, arrays=[array], pages=pages.tolist(), round=self._round, state=state)
        return ps_pb2.Request(move=move, last=True)

    def stage(self, state: ps_pb2.ShardState) -> None:
        """Send the remembered updates to the target, as many as one message takes at a time, and clear them here."""
        for at in range(0, len(state.keys), _KEYS):
            some = ps_pb2.ShardState(keys=state.keys[at : at + _KEYS])
            self._once(self._target, self._about(action=ps_pb2.MoveRequest.STAGE, state=some))
        del state.keys[:]

    def commit(self, state: ps_pb2.ShardState, spec: ps_pb2.VariableSpec) -> None:
        """Have the target enter the shard and save it."""
        self._once(self._target, self._about(action=ps_pb2.MoveRequest.COMMIT, state=state, spec=spec), save=True)

    def withdraw(self, spec: ps_pb2.VariableSpec) -> bool:
        """Return whether the target had committed; it will not from now on. Waits for it."""
        request = self._about(action=ps_pb2.MoveRequest.WITHDRAW, spec=spec)
        return self._waiting(self._target, request).committed

    def discard(self, spec: ps_pb2.VariableSpec) -> None:
        """Have the target drop what is staged, if it answers."""
        self._once(self._target, self._about(action=ps_pb2.MoveRequest.WITHDRAW, spec=spec))

    def release(self) -> None:
        """Have the source apply updates again. Waits for it."""
        self._waiting(self._source, self._about(action=ps_pb2.MoveRequest.RELEASE))

    def place(self, server: int, spec: ps_pb2.VariableSpec, *, saved: bool = False) -> None:
        """Have any server take this spec, drop shards that are elsewhere, and save that if need be. Waits for it."""
        self._waiting(server, self._about(action=ps_pb2.MoveRequest.PLACE, spec=spec, saved=saved), save=saved)

    def resize(self, server: int, count: int) -> None:
        """Have any server note, and save, how many servers the job has. Waits for it."""
        self._waiting(server, self._about(action=ps_pb2.MoveRequest.RESIZE, num_servers=count), save=True)

    def serve(self, spec: ps_pb2.VariableSpec) -> None:
        """Have the target serve the shard that it has under this spec. Waits for it."""
        self._waiting(self._target, self._about(action=ps_pb2.MoveRequest.SERVE, spec=spec))

    def _once(self, server: int, request: ps_pb2.MoveRequest, *, save: bool = False) -> ps_pb2.MoveReply:
        self._client.exchanges.check_open()
        there, seconds = self._client.exchanges.server(server), _SAVE_SECONDS if save else _CALL_SECONDS
        there.check()
        try:
            reply: ps_pb2.MoveReply = there.ask("bulk", "move", request, seconds)
        except grpc.RpcError as error:
            raise from_rpc(error, str(there.peer)) from None
        return reply

    def _waiting(self, server: int, request: ps_pb2.MoveRequest, *, save: bool = False) -> ps_pb2.MoveReply:
        self._client.exchanges.check_open()
        there, seconds = self._client.exchanges.server(server), _SAVE_SECONDS if save else _CALL_SECONDS
        ask = functools.partial(there.ask, "bulk", "move", request, seconds)
        reply: ps_pb2.MoveReply = self._client.exchanges.retrying(there, ask)
        return reply

    def _changes(self, reply: ps_pb2.MoveReply) -> tuple[list[str], Pages]:
        if self._row_elements:
            self._rows = reply.state.rows
            self._elements = self._rows * self._row_elements
        return list(reply.state.arrays), pages_of(reply.changed)


def pages_of(changed: bytes) -> Pages:
    """Return the numbers of the pages that a server says have changed."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(changed, np.uint8)))


def pull_shard(
    client: PsClient, server: int, request: ps_pb2.Request, nbytes: int, metadata: Metadata = ()
) -> memoryview:
    """Return this many bytes of a shard that moves, or is resharded. Waits for the server."""
    data = memoryview(bytearray(nbytes))
    there, packed = client.exchanges.server(server), pack(request)

    def attempt() -> None:
        sink = PayloadSink(ps_pb2.Reply, [data])
        there.pull(packed, metadata, _CALL_SECONDS, sink.take)
        if not sink.complete:
            raise UnavailableError(f"{there.peer} has sent {sink.missing} bytes too few of a shard")

    client.exchanges.retrying(there, attempt)
    return data
