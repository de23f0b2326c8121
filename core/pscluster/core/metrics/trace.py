"""Remember the last functions and requests of a role, for `pscluster.coordinator.observability.timeline`.

Always on: a ring of tuples. Of functions shorter than `SHORT_SECONDS` every `EACH`-th is remembered, by its number, so
that all roles remember the same ones, and those that run again; to remember all of them would cost a percent of what
they cost themselves. Requests are all remembered: a function that has made one may still be a long one. So the ring of
requests may be over before that of functions is, whose earlier ones then have none.

Times are those of the process' `time.monotonic()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from pscluster.v1 import node_pb2

SHORT_SECONDS = 0.001
EACH = 16
"""A power of two: whoever runs functions, or hands them out, asks for the rest by `&`, without a call."""

MAX_FUNCTIONS = 2048
MAX_REQUESTS = 8192

SESSION_HEADER = "pscluster-session"
"""Names a stream of requests, or a single large one, to the server: the n-th request of a session is the same one on
both sides, without a word of it in the message."""


class Run(NamedTuple):
    """A function on a worker."""

    function: int
    attempt: int
    received: float  # its message came
    begin: float  # it had its turn
    ready: float  # its arguments were there
    end: float
    waited: float  # seconds of these, for data
    how: str  # "done", "failed" or "cancelled"
    thread: str


class Asked(NamedTuple):
    """A request to a server, by the function that made it."""

    function: int
    what: str  # "pull" or "push"
    server: int
    session: str
    nth: int
    begin: float
    end: float
    sent: int  # bytes
    received: int


class Served(NamedTuple):
    """A request that a server has answered."""

    session: str
    nth: int
    what: str
    begin: float
    end: float


class Recording:
    """The last functions and requests of one process. Any thread adds, any thread reads."""

    def __init__(self) -> None:
        self.runs: deque[Run] = deque(maxlen=MAX_FUNCTIONS)
        self.asked: deque[Asked] = deque(maxlen=MAX_REQUESTS)
        self.served: deque[Served] = deque(maxlen=MAX_REQUESTS)

    def forget_functions(self) -> None:
        """Drop what functions of an earlier job did: those of the next one have the same numbers."""
        self.runs.clear()
        self.asked.clear()

    def messages(self) -> Iterator[node_pb2.Recorded]:
        """All of it."""
        for run in self.runs.copy():  # at once: others add
            yield node_pb2.Recorded(run=node_pb2.Recorded.Run(**run._asdict()))
        for asked in self.asked.copy():
            yield node_pb2.Recorded(asked=node_pb2.Recorded.Asked(**asked._asdict()))
        for served in self.served.copy():
            yield node_pb2.Recorded(served=node_pb2.Recorded.Served(**served._asdict()))
