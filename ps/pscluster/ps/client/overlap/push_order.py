"""Decide when and by whom pushes that return at once are sent, when a step may begin, and a function has ended. Pure.

A worker runs functions one after another, each of one step or several. Where steps overlap, an update is queued by the
step that makes it (`add`), and they are sent one after the other, in the order in which they were made. A push:

    QUEUED --add, by its step------> SENDING --acknowledged---------> (acknowledged)
           --next, by the pool-----> SENDING --acknowledged(error)--> (failed)     the error is its function's
    QUEUED --next, and an earlier push of its function
             has failed-----------> (dropped)   the function would not have come so far
           --next, and its function was told to stop--> SENDING, where the sender raises that as its error

There is at most one sender. A step's own thread sends a push, but does not wait for the acknowledgement. A step that
needs it later claims it; if more pushes follow, a thread of the pool does, and sends them:

    NONE   --add----------------------------------> STEP, or POOL
    STEP   --sent, and no other push is queued----> UNCLAIMED    the acknowledgement will lie in the kernel
           --sent, and others are queued----------> POOL
    UNCLAIMED --a step needs the acknowledgement--> STEP
              --a step adds a push, or waits for anything
                else, or the function has returned--> POOL
    STEP   --acknowledged, none is queued---------> NONE
           --acknowledged, others are queued------> POOL
    POOL   --next, none is queued-----------------> NONE

A function with pushes:

    RUNNING  --returned, none is outstanding--> ENDED
             --returned, some are-------------> RETURNED --the last one is sent, or dropped--> ENDED

Only then is its outcome reported, so to everyone else it has run until then. `acknowledged`, `next` and `returned` say
which functions have ended. A push is outstanding from `add` until it is acknowledged, failed or dropped. With `overlap`
n a step begins (`may_begin`) only when at most n earlier steps have outstanding pushes: as all are sent in order, these
are the last n.

What may be lost: if the worker dies, the pushes that are not acknowledged, all of functions that have not ended. They
run again, and make the same updates under the same keys. Nothing is lost otherwise: pushes are dropped only where the
function fails or is stopped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(eq=False, slots=True)
class Owner:
    """A function, as far as its pushes are concerned. Others only read it."""

    step: int = 0  # which of its steps runs, from 0
    outstanding: int = 0
    of_step: int = 0  # of these, how many the present step has made
    returned: bool = False
    error: BaseException | None = None  # of the first push that failed


@dataclass(frozen=True, slots=True)
class Push(Generic[P]):
    owner: Owner
    step: int
    payload: P
    nbytes: int


class Sender(Enum):
    """Who sends pushes, and waits for their acknowledgements."""

    NONE = auto()
    STEP = auto()
    """A thread of a step, the first push only."""
    UNCLAIMED = auto()
    """The first push was sent, and no thread waits for its acknowledgement."""
    POOL = auto()
    """A thread of the pool, all pushes."""


@dataclass(eq=False)
class PushOrder(Generic[P]):
    """The outstanding pushes of one worker. Its owner serializes the calls."""

    most_bytes: int
    """Beyond this a push is added only if there is no other."""
    _queue: deque[Push[P]] = field(default_factory=deque)
    sender: Sender = Sender.NONE
    _bytes: int = 0

    # Questions

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def may_begin(self, overlap: int) -> bool:
        """Return whether a step may begin while at most `overlap` earlier ones have outstanding pushes."""
        return len(self._queue) <= overlap or len({(id(push.owner), push.step) for push in self._queue}) <= overlap

    def may_add(self, owner: Owner, nbytes: int) -> bool:
        """Return whether there is room for another push. If its function has failed, none is needed."""
        return not self._queue or owner.error is not None or self._bytes + nbytes <= self.most_bytes

    def steps_acknowledged(self, owner: Owner) -> int:
        """Return how many steps of a function, from its first one, have no outstanding pushes; not the present one."""
        return next((push.step for push in self._queue if push.owner is owner), owner.step)

    # Events

    def begin_step(self, owner: Owner) -> None:
        """Begin the next step of a function, other than its first."""
        owner.step += 1
        owner.of_step = 0

    def add(self, owner: Owner, payload: P, nbytes: int, *, here: bool = False) -> bool:
        """Queue a push of the step that runs. Return whether that has a new sender: STEP if `here`, otherwise POOL."""
        assert not owner.returned, "a function that has returned pushes nothing"
        owner.outstanding += 1
        owner.of_step += 1
        self._bytes += nbytes
        self._queue.append(Push(owner, owner.step, payload, nbytes))
        if self.sender is not Sender.NONE:
            return False
        self.sender = Sender.STEP if here else Sender.POOL
        return True

    def sent(self) -> bool:
        """Note that a step has sent the first push. Return whether the sender is now POOL."""
        assert self.sender is Sender.STEP, self.sender
        self.sender = Sender.UNCLAIMED if len(self._queue) == 1 else Sender.POOL
        return self.sender is Sender.POOL

    def claim(self, sender: Sender) -> bool:
        """Have STEP or POOL wait for the acknowledgement that is unclaimed. Return False if none is."""
        if self.sender is not Sender.UNCLAIMED:
            return False
        self.sender = sender
        return True

    def acknowledged(self, error: BaseException | None = None) -> list[Owner]:
        """Note that the first push was acknowledged, or has failed. Return the functions that have ended."""
        assert self.sender in (Sender.STEP, Sender.POOL), self.sender
        self._queue[0].owner.error = error
        return self._remove()

    def go_on(self) -> bool:
        """Note that a step waits for acknowledgements no more. Return whether the sender is now POOL."""
        assert self.sender is Sender.STEP, self.sender
        self.sender = Sender.POOL if self._queue else Sender.NONE
        return self.sender is Sender.POOL

    def next(self) -> tuple[Push[P] | None, list[Owner]]:
        """Return the push that POOL sends now, if any, and functions that have ended since their pushes are dropped."""
        assert self.sender is Sender.POOL, self.sender
        ended: list[Owner] = []
        while self._queue and self._queue[0].owner.error is not None:
            ended += self._remove()
        if not self._queue:
            self.sender = Sender.NONE
            return None, ended
        return self._queue[0], ended

    def returned(self, owner: Owner) -> bool:
        """Note that a function's code is over, however it ended. Return whether the function has ended."""
        owner.returned = True
        return not owner.outstanding

    def _remove(self) -> list[Owner]:
        push = self._queue.popleft()
        self._bytes -= push.nbytes
        owner = push.owner
        owner.outstanding -= 1
        owner.of_step -= push.step == owner.step
        return [owner] if owner.returned and not owner.outstanding else []
