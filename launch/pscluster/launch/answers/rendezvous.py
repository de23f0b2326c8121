"""Where the processes of a framework's group find each other, and how long those run that only serve. Pure.

Each member reserves a port of its own machine, and says which. The trainer knows at which host others reach that
machine. All members of an attempt get all addresses together:

    a member asks------------------------> waits until all members of its attempt have asked: then all are answered
    one of a later attempt asks----------> those that wait are dropped: all begin again, and these are being killed
    one of an earlier attempt asks-------> StaleError
    a wait that takes too long-----------> fails, for all who wait; the error names who is missing

Processes of a group that are no members of the run, such as TensorFlow's parameter servers, serve as long as a member
of their attempt runs:

    one that serves asks-----------------> waits until all members of its attempt have returned; then it is ended
    a later attempt begins---------------> those that wait are dropped: they are being killed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pscluster.core.errors import MemberTimeoutError, ProtocolError, StaleError
from pscluster.launch.answers.session import Answer


class Rendezvous:
    """The addresses of one group, in its newest attempt."""

    def __init__(self, size: int, seconds: float) -> None:
        """Expect `size` members, each of which may wait `seconds` for the others."""
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


class Serving:
    """The processes of one group that serve until its members have returned, in its newest attempt."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._attempt = 0
        self._returned: set[int] = set()  # ranks
        self._waiting: list[Any] = []  # questions

    def serve(self, attempt: int, question: Any) -> list[Answer]:
        """Take a process that serves. Answered once it is needed no more."""
        self._begin(attempt)
        self._waiting.append(question)
        return self._settle()

    def returned(self, rank: int, attempt: int) -> list[Answer]:
        """Take note that the function of a member has returned."""
        self._begin(attempt)
        self._returned.add(rank)
        return self._settle()

    def _begin(self, attempt: int) -> None:
        if attempt < self._attempt:
            raise StaleError("a later attempt of this group has begun")
        if attempt > self._attempt:
            self._attempt, self._returned, self._waiting = attempt, set(), []

    def _settle(self) -> list[Answer]:
        if len(self._returned) < self._members:
            return []
        waiting, self._waiting = self._waiting, []
        return [Answer(question) for question in waiting]


def place_among(rank: int, hosts: Sequence[str]) -> dict[str, int]:
    """Return where a member is, beside those on the same host; nothing if the hosts are not known."""
    if rank >= len(hosts):
        return {}
    there = [index for index, host in enumerate(hosts) if host == hosts[rank]]
    return {
        "local_rank": there.index(rank),
        "local_world_size": len(there),
        "node_rank": list(dict.fromkeys(hosts)).index(hosts[rank]),
    }
