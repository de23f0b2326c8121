"""The questions of members: a report read from one, and one that is asked in this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from pscluster.core.errors import MisuseError
from pscluster.launch.answers.session import Report


def report_of(asked: Mapping[str, Any]) -> Report:
    """Return the report that a member has sent."""
    updates = {int(variable): int(count) for variable, count in asked["updates"]}
    with_variables = bool(asked["with_variables"])
    return Report(asked["metrics"], asked["files"], asked["name"], asked["positions"], with_variables, updates)


class Asked:
    """A question of a function that runs in this process: see `Question`."""

    rank, worker, attempt = 0, 0, 1

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value
        self._answer: Any = None
        self._error: Exception | None = None
        self._answered = threading.Event()

    def reply(self, value: Any) -> None:
        """Answer it."""
        self._answer = value
        self._answered.set()

    def fail(self, error: Exception) -> None:
        """Answer it with an error."""
        self._error = error
        self._answered.set()

    def result(self) -> Any:
        """Return the answer, or raise its error. MisuseError if there is none: no other member could give one."""
        if not self._answered.is_set():
            raise MisuseError("there is no other member to wait for")
        if self._error is not None:
            raise self._error
        return self._answer
