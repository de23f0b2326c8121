"""Outcomes and questions of a stream's functions, on their way to the coordinator.

The stream's own thread sends what is ready (`messages`). On the data plane a thread whose function has just ended sends
its outcome itself, if it is the only one (`add_ended`, then `send_one`). Only one of the two sends at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from pscluster.core.fault_points import reach
from pscluster.v1 import worker_pb2

SEND_SECONDS = 0.0001  # the outcome of a longer function, or of one after which no other waits, gets its own message
_SEND_BYTES = 4096  # at most, by the running thread: it must not block, and there is room for this much
_REPLY_BYTES = 4 << 20  # approximate limit of the outcomes in one message

Send = Callable[[bytes], bool]
"""Sends a message; returns False if it could not. See `ServerCall.sender`."""


class Outbox:
    """What one stream has yet to send. It shares its runner's lock; `changed`: for those who wait for it to be sent."""

    def __init__(self, lock: threading.RLock, changed: threading.Condition) -> None:
        self._lock, self._changed = lock, changed
        self._to_send = threading.Condition(lock)
        self.send: Send | None = None
        self.questions: deque[worker_pb2.Question] = deque()
        """They go out before any outcome."""
        self._outcomes: deque[worker_pb2.Outcome] = deque()
        self._sending = True  # a thread sends; at first the stream's own, to say that the stream is up
        self._ended = False

    # Under the lock

    @property
    def is_empty(self) -> bool:
        """Whether all outcomes are sent, or the stream has ended."""
        return self._ended or not (self._outcomes or self._sending)

    def wake(self) -> None:
        """Have the stream's thread see that there is something to send."""
        self._to_send.notify_all()

    def add(self, outcome: worker_pb2.Outcome) -> None:
        """Have the stream's thread send an outcome."""
        self._outcomes.append(outcome)
        self._to_send.notify_all()

    def add_ended(self, outcome: worker_pb2.Outcome, *, others_wait: bool) -> bool:
        """Add the outcome of a function that has just ended, after which others may wait to run.

        Return whether the calling thread is to send it, by `send_one`. After the end it is dropped: the function may
        have failed because its attachment was being closed, and runs again.
        """
        if self._ended:
            self._changed.notify_all()
            return False
        send_here = (
            self.send is not None
            and not (self._sending or self._outcomes or self.questions)
            and (outcome.seconds > SEND_SECONDS or not others_wait)
            and outcome.ByteSize() <= _SEND_BYTES
        )
        if send_here:
            self._sending = True
            return True
        self.add(outcome)
        return False

    def end(self) -> None:
        """Send nothing more than what is there."""
        self._ended = True
        self._to_send.notify_all()

    # Without it

    def send_one(self, outcome: worker_pb2.Outcome) -> None:
        """Send an outcome on the calling thread, after `add_ended` has said so."""
        assert self.send is not None  # see add_ended
        sent = True
        try:
            reach("worker.result.before")
            sent = self.send(worker_pb2.StepsReply(outcomes=[outcome]).SerializeToString())
            reach("worker.result.after")
        finally:
            with self._lock:
                self._sending = False
                if not sent:
                    self._outcomes.appendleft(outcome)
                if self._outcomes or self.questions or self._ended:
                    self._to_send.notify_all()
                self._changed.notify_all()

    def messages(self) -> Iterator[worker_pb2.StepsReply]:
        """Yield messages of all outcomes and questions that are ready, until the stream ends."""
        unsent = self.questions
        while True:
            with self._lock:
                self._sending = False
                self._changed.notify_all()
                self._to_send.wait_for(lambda: not self._sending and (self._outcomes or unsent or self._ended))
                batch, questions, size = [], [], 0
                while unsent and size < _REPLY_BYTES:
                    size += unsent[0].ByteSize()
                    questions.append(unsent.popleft())
                while self._outcomes and not unsent and size < _REPLY_BYTES:
                    size += self._outcomes[0].ByteSize()
                    batch.append(self._outcomes.popleft())
                self._sending = bool(batch or questions)
            if not (batch or questions):
                return
            reach("worker.result.before")
            yield worker_pb2.StepsReply(outcomes=batch, questions=questions)
            reach("worker.result.after")
