"""What a handler may do with its call beside gRPC's own interface, whichever transport carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pscluster.core.transport.frames import Buffer
from pscluster.core.transport.tcp.packets import Place


class ServerCall:
    """Over gRPC, which takes and gives whole messages; the data plane's calls do more, without copies."""

    takes_parts = False
    """May a handler yield a list of buffers, each sent as it is by the time the next one is asked for?"""

    def reply(self, parts: Sequence[Buffer]) -> Any:
        """Return a message of these parts as a handler yields it."""
        return b"".join(parts)

    def sender(self) -> Callable[[bytes], bool] | None:
        """Return what sends a message past the handler's answers, by any thread, while the handler is at work on none.

        It returns False if that can't be: then the message is to be among the answers, and is what finds out why. None:
        all are to be.
        """
        return None

    def receive_into(self, place: Place) -> None:
        """Put the messages that follow in their place, if that can be: the handler reads b"" instead of each."""

    def has_taken_memory(self) -> None:
        """Count no message that follows: the handler has taken memory for all of them."""


_GRPC = ServerCall()


def server_call(context: grpc.ServicerContext) -> ServerCall:
    """Return what can be done with this call."""
    return context if isinstance(context, ServerCall) else _GRPC
