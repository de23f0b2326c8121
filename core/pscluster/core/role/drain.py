"""A gate for work, which can be closed and drained."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from pscluster.core.errors import PsClusterError


class Drain:
    """Counts running work. Once closed, it refuses new work and waits for the rest to end."""

    def __init__(self, refusal: Callable[[], PsClusterError]) -> None:
        self._refusal = refusal
        self._condition = threading.Condition()
        self._under_way = 0
        self._closed = False

    def __enter__(self) -> Self:
        """Count the block as running work. Raise the refusal once closed."""
        with self._condition:
            if self._closed:
                raise self._refusal()
            self._under_way += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._under_way -= 1
            if self._closed:
                self._condition.notify_all()

    def close(self, timeout: float) -> bool:
        """Refuse new work and wait for the rest. Return False if some still runs after `timeout` seconds."""
        with self._condition:
            self._closed = True
            return self._condition.wait_for(lambda: self._under_way == 0, timeout)
