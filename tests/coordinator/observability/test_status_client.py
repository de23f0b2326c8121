"""What `pscluster status` and `top` ask with."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import closing
from typing import Any

import grpc
import pytest
from tests.roles.processes import listener
from tests.waiting import TIMEOUT

from pscluster.coordinator.observability.status_client import StatusClient
from pscluster.core.transport.channels import PeerAddress


def test_an_interrupt_ends_the_query() -> None:
    """Ctrl-C cancels the calls, however long a task may take to answer."""
    over, calls = threading.Event(), list[Any]()

    def hold(_: socket.socket) -> None:
        over.wait(TIMEOUT)

    with listener(hold) as address:
        peer = PeerAddress("ps", 0, address, None, None)
        with closing(StatusClient([peer])) as client:
            stub: Any = client._stubs[peer]
            ask = stub.status

            def interrupted(*args: Any, timeout: float) -> Any:
                calls.append(ask.future(*args, timeout=timeout))
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return calls[0].result()

            stub.status = interrupted
            with pytest.raises(KeyboardInterrupt):
                client.ask(timeout=TIMEOUT)
        over.set()
    assert calls[0].code() is grpc.StatusCode.CANCELLED
