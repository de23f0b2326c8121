"""What callers share who ask again and again, so that making it takes no more than a share of a core.

none --asked for--> made --asked for--> the same, until SHARE of the time since is what making it took --> made anew
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

SHARE = 0.1
"""Of a core, the most that is spent on each result."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedResults(Generic[K, T]):
    """What `make` returns for each of a few keys: just made, or a little older if callers ask often. Thread-safe."""

    def __init__(self, make: Callable[[K], T]) -> None:
        self._make = make
        self._made: dict[K, tuple[float, T]] = {}  # with the time from which it is made anew
        self._making = threading.Lock()

    def get(self, key: K) -> T:
        """Return the result for a key. One is made at a time."""
        with self._making:
            begin = time.monotonic()
            if (known := self._made.get(key)) is not None and begin < known[0]:
                return known[1]
            result, end = self._make(key), time.monotonic()
            self._made[key] = end + (end - begin) / SHARE, result
            return result
