"""Records the last functions and requests of a role, for `pscluster.coordinator.observability.timeline`.

Always on: a ring of tuples. Of functions shorter than `SHORT_SECONDS`, only reruns and every `EACH`-th are recorded, by
number, so that all roles record the same ones; to record all of them would take a percent of their time. All requests
are recorded, since a function that made one may turn out long. So the ring of requests may wrap before that of
functions, and the earliest functions then lack their requests.

Times are those of the process' `time.monotonic()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from pscluster.v1 import node_pb2

SHORT_SECONDS = 0.001
EACH = 16  # a power of two, so that the hot paths compute the remainder with `&`, without a call
MAX_FUNCTIONS = 2048
MAX_REQUESTS = 8192

SESSION_HEADER = "pscluster-session"
"""Identifies a stream of requests, or a single large one, to the server: both sides count a session's requests, so that
the messages need no number."""


BACKGROUND = " in the background"
"""Ends the kind of a request that was made for a function beside its code: rows fetched ahead, pushes sent after."""


class Run(NamedTuple):
    """A function on a worker."""

    function: int
    attempt: int
    received: float  # when its message came
    begin: float  # when its turn came
    ready: float  # when its arguments were decoded
    end: float
    waited: float  # seconds of this that it waited for data
    how: str  # "done", "failed" or "cancelled"
    thread: str


class Asked(NamedTuple):
    """A request to a server, with the function that made it."""

    function: int
    what: str  # "pull" or "push", perhaps with BACKGROUND
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
        """Drop the functions of an earlier job: those of the next one have the same numbers."""
        self.runs.clear()
        self.asked.clear()

    def messages(self) -> Iterator[node_pb2.Recorded]:
        for run in self.runs.copy():  # an atomic copy: other threads add
            yield node_pb2.Recorded(run=node_pb2.Recorded.Run(**run._asdict()))
        for asked in self.asked.copy():
            yield node_pb2.Recorded(asked=node_pb2.Recorded.Asked(**asked._asdict()))
        for served in self.served.copy():
            yield node_pb2.Recorded(served=node_pb2.Recorded.Served(**served._asdict()))
