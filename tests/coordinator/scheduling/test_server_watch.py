"""What the coordinator asks its workers of while connections to some of them are closed."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from pscluster.coordinator.scheduling import gang_runs
from pscluster.coordinator.scheduling.connections.loop import run
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.state import DispatchState


class ClosedMeanwhile:
    """A connection whose channel is closed while it waits for an answer: then gRPC raises a CancelledError."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def report_seen(self, _servers: object) -> None:
        """Call a method of a peer that never answers."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
            call = channel.unary_unary("/service/Method")(b"")
            closing = asyncio.create_task(channel.close())
            try:
                await call
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                await closing

    async def answers(self, _seconds: float) -> bool:
        """Do the same."""
        await self.report_seen(())
        return True


@pytest.fixture
def connection() -> ClosedMeanwhile:
    """The connection to a worker that dies."""
    return ClosedMeanwhile()


def test_updates_seen_by_a_worker_that_dies(connection: ClosedMeanwhile) -> None:
    """Less is known then of what a server has lost, but the others' reports count."""
    handle = SimpleNamespace(up=True, connection=connection)
    state = SimpleNamespace(servers=[], workers=[handle, handle], scheduler=None)
    run(ServerWatch(cast(DispatchState, state)).report_seen([0]))
    assert connection.cancelled == 2


def test_a_late_member_whose_worker_dies(connection: ClosedMeanwhile) -> None:
    """It does not answer; the others are watched on."""
    assert not run(gang_runs._answers(cast(WorkerConnection, connection)))
    assert connection.cancelled == 1


def test_a_job_that_ends_meanwhile(connection: ClosedMeanwhile) -> None:
    """What was cancelled ends."""

    async def cancel() -> bool:
        asking = asyncio.create_task(gang_runs._answers(cast(WorkerConnection, connection)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))
        return asking.cancelled()

    assert run(cancel())
