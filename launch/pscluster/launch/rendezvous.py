"""Where the processes of a framework's group find each other. Pure.

Each member reserves a port of its own machine, and says which. The trainer knows at which host others reach that
machine. All members of an attempt get all addresses together:

    a member asks------------------------> waits until all members of its attempt have asked: then all are answered
    one of a later attempt asks----------> those that wait are dropped: all begin again, and these are being killed
    one of an earlier attempt asks-------> StaleError
    a wait that takes too long-----------> fails, for all who wait; the error names who is missing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pscluster.core.errors import MemberTimeoutError, ProtocolError, StaleError
from pscluster.launch.session import Answer


class Rendezvous:
    """The addresses of one group, in its newest attempt."""

    def __init__(self, size: int, seconds: float) -> None:
        """`seconds`: how long a member may wait for the others."""
        self._size, self._seconds = size, seconds
        self._attempt = 0
        self._addresses: dict[int, tuple[str, int]] = {}  # host and port by rank
        self._waiting: dict[int, Any] = {}  # questions by rank
        self._since = 0.0

    def ask(self, rank: int, attempt: int, host: str, port: int, question: Any, now: float) -> list[Answer]:
        """Take the address of a member. Answered with the host and port of each rank.

        Raises:
            StaleError: a later attempt has begun.
            ProtocolError: there is no such rank, or port.
        """
        if not (0 <= rank < self._size and 0 < port < 1 << 16):
            raise ProtocolError(f"port {port} of rank {rank}, in a group of {self._size}")
        if attempt < self._attempt:
            raise StaleError("a later attempt of this group has begun")
        if attempt > self._attempt:
            self._attempt = attempt
            self._addresses, self._waiting = {}, {}
        if not self._waiting:
            self._since = now
        self._addresses[rank], self._waiting[rank] = (host, port), question
        if len(self._addresses) < self._size:
            return []
        waiting, self._waiting = self._waiting, {}
        addresses = [list(self._addresses[rank]) for rank in range(self._size)]
        return [Answer(waits, {"addresses": addresses}) for waits in waiting.values()]

    @property
    def hosts(self) -> Sequence[str]:
        """Return the hosts of all members, by rank; nothing before all have asked."""
        complete = len(self._addresses) == self._size
        return [self._addresses[rank][0] for rank in range(self._size)] if complete else []

    def expire(self, now: float) -> list[Answer]:
        """Give up what has waited for too long."""
        if not self._waiting or now - self._since <= self._seconds:
            return []
        waiting, self._waiting = self._waiting, {}
        missing = ", ".join(str(rank) for rank in range(self._size) if rank not in self._addresses)
        error = MemberTimeoutError(
            f"the group has waited {self._seconds:g} s for rank {missing} to say where it is. If it only takes longer, "
            "give RunConfig(report_timeout=) more seconds"
        )
        return [Answer(waits, error=error) for waits in waiting.values()]


def place_among(at: int, hosts: Sequence[str]) -> dict[str, int]:
    """Return where a member is, beside those on the same host; nothing if the hosts are not known."""
    if at >= len(hosts):
        return {}
    there = [index for index, host in enumerate(hosts) if host == hosts[at]]
    return {
        "local_rank": there.index(at),
        "local_world_size": len(there),
        "node_rank": list(dict.fromkeys(hosts)).index(hosts[at]),
    }
