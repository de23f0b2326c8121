"""The table between gRPC's status and our errors."""

from __future__ import annotations

import grpc
import pytest

from pscluster.core.errors import PsClusterError, RefusedError, UnavailableError, from_rpc


@pytest.mark.parametrize(
    ("details", "expected"),
    [("Internal error from Core", UnavailableError), ("an assertion failed", RefusedError)],
)
def test_a_call_that_ended_while_it_was_written(details: str, expected: type[PsClusterError]) -> None:
    """What grpc.aio says of it is not the peer's answer, so the call may be repeated. Other internal errors are
    answers."""
    empty = grpc.aio.Metadata()
    error = from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, empty, empty, details=details), "worker 1")
    assert type(error) is expected
    assert str(error).startswith("worker 1 ")
