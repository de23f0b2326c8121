"""Reads that are repeated, prepared by the client; see `pscluster.ps.server.prepared_reads` for the server's side.

A training step reads the same variables again and again. To write and to check such a request item by item takes
longer than to move its bytes (500 variables of 4 KiB: ten times as long), so what the first time brought is kept: the
requests, and where the replies' bytes go. Only whole variables, and only what fits into one message, are read so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import UnavailableError
from pscluster.core.geometry import Block
from pscluster.core.transport.frames import Buffer, pack, padding
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]

MAX_PLANS = 64
"""As many are kept; of more, the oldest go."""


@dataclass(frozen=True, slots=True)
class WholeVariable:
    """A variable to be read, and for each of its shards the server, the item that asks for it, and its block."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: Sequence[tuple[int, ps_pb2.ReadItem, Block]]


class _Landing(NamedTuple):
    """Where in a server's reply the bytes of a shard begin, and where they go."""

    result: int
    server: int
    offset: int
    shape: tuple[int, ...]
    place: Any  # index in the result; None: they are all of it


class ReadPlan:
    """How a client reads several whole variables together, one request a server.

    Attributes:
        requests: by server, ready to be sent on a session.
        sizes: by server, the payload bytes of the reply.
        moved: bytes of the values.
    """

    def __init__(self, job: int, variables: Sequence[WholeVariable]) -> None:
        items: dict[int, list[ps_pb2.ReadItem]] = {}
        self.sizes: dict[int, int] = {}
        self.moved = 0
        self._variables = [(each.shape, each.dtype) for each in variables]
        self._landings: list[_Landing] = []
        for result, variable in enumerate(variables):
            for server, item, block in variable.shards:
                offset, size = self.sizes.get(server, 0), block.size * variable.dtype.itemsize
                place = (*block.slices, ...) if len(variable.shards) > 1 else None
                self._landings.append(_Landing(result, server, offset, block.shape, place))
                items.setdefault(server, []).append(item)
                self.sizes[server] = offset + size + padding(size)
                self.moved += size
        self._uncut = {landing.server for landing in self._landings if landing.place is None}
        self.requests: dict[int, Sequence[Buffer]] = {
            server: [pack(ps_pb2.Request(read=ps_pb2.ReadRequest(job=job, items=mine), last=True))]
            for server, mine in items.items()
        }

    def results(self, payloads: Mapping[int, memoryview]) -> list[Array]:
        """The variables' values, from the servers' replies.

        Those of uncut variables lie side by side in one piece of memory a server, copied at once: for 500 variables
        of 4 KiB a third of the time that as many arrays take. Whoever keeps one of them keeps that piece, which is
        no larger than a message.
        """
        copies = {server: np.frombuffer(payloads[server], np.uint8).copy() for server in self._uncut}
        results: list[Any] = [None] * len(self._variables)
        for result, server, offset, shape, place in self._landings:
            whole, dtype = self._variables[result]
            if place is None:
                results[result] = np.ndarray(shape, dtype, copies[server], offset)
                continue
            piece: Array = np.ndarray(shape, dtype, payloads[server], offset)
            if results[result] is None:
                results[result] = np.empty(whole, dtype)
            results[result][place] = piece
        return results

    def check(self, server: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
        """UnavailableError if the reply is not whole."""
        if len(payload) != self.sizes[server] or not reply.last:
            raise UnavailableError(f"the reply has {len(payload)} bytes, not {self.sizes[server]}")
