"""A question that a running function asks its coordinator; see `answers` for how it comes, and how its answer goes.

    OPEN --`reply` or `fail`--> ANSWERED   the answer is on its way to the worker

If its function has ended by then, or the connection to its worker has, the answer is dropped: the function that asked
is over, and if another attempt runs it asks by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pscluster.core.errors import MisuseError
from pscluster.v1 import worker_pb2
from pscluster.worker.execution.questions import encoded
from pscluster.worker.failures import failure_of

Answer = worker_pb2.AnswerRequest


class Question:
    """What a function on a worker has asked, and waits to be told. It is answered once, by any thread."""

    def __init__(
        self,
        value: Any,
        *,
        function: int,
        attempt: int,
        number: int,
        rank: int,
        worker: int,
        send: Callable[[Answer], object],
    ) -> None:
        self.value = value
        self.function = function  # its id; each generation of a gang has others
        self.attempt = attempt  # from 1, and higher each time that the function is started again
        self.number = number  # among the questions of this attempt, from 1
        self.rank = rank  # of a member of a gang; 0 of a function that runs alone
        self.worker = worker
        self._send = send
        self._lock = threading.Lock()
        self._answered = False

    def reply(self, value: Any) -> None:
        """Answer with plain data. Returns at once; does nothing if the attempt that asked is over.

        Raises:
            TypeError: the value can't be sent, or is too large. The question is still open.
            MisuseError: the question has been answered.
        """
        self._answer(Answer(value=encoded(value, "the answer")))

    def fail(self, error: BaseException) -> None:
        """Answer with an error, which is raised in the function. Otherwise as `reply`."""
        self._answer(Answer(failure=failure_of(error)))

    @property
    def answered(self) -> bool:
        return self._answered

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            if self._answered:
                raise MisuseError(f"{self!r} has been answered: it takes one answer")
            self._answered = True
        self._send(answer)

    def __repr__(self) -> str:
        return f"<question {self.number} of function {self.function} on worker {self.worker}, attempt {self.attempt}>"
