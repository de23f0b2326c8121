"""A client's copies of large shards that do not change, so that they are not sent again.

Every shard has a version, which rises with each update. Before a large read the client may query it, which takes a
reply of eight bytes, and if the cached copy has that version, it reads the copy. This module decides whether to query
and what to store; the client sends the queries. Only a shard that was read twice at one version is stored, and only if
it had that version before and after the read that made the copy. A shard that changes all the time is queried less and
less often, and ends up costing nothing.

For each shard, by the reply to the last query:

    UNKNOWN --version v--------------> SEEN(v)
    SEEN(v) --version v--------------> the read is stored as COPY(v) if the shard still has version v after it
            --another version, w-----> SEEN(w); the next query comes after 1, 3, 7 and then every 15 reads
    COPY(v) --version v--------------> the copy is read
            --another version, w-----> SEEN(w); the copy is dropped
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass

from pscluster.core import checks

Key = tuple[int, int]
"""A variable's id, and the shard's index."""

SIZE_VARIABLE = "PSCLUSTER_READ_CACHE_MIB"
DEFAULT_MIB = 256

_MOST_SKIPPED = 15

MAX_SHARDS = 4096
"""Shards of which something is known, with a copy or without; beyond that the least recently used are forgotten."""


def cache_bytes() -> int:
    """Return the size of a process's cache, from the environment; 0 turns it off. ConfigurationError if invalid."""
    return checks.mib_of_environ(SIZE_VARIABLE, DEFAULT_MIB, 0) << 20


class CacheDecision(enum.Enum):
    """How to serve a large read of a shard."""

    READ = "read it"
    STORE = "read it, and store it if it has not changed meanwhile"
    COPY = "use the copy"


@dataclass(slots=True)
class _Shard:
    version: int | None = None
    copy: bytes | None = None
    backoff: int = 0  # reads without a query after the last change
    skip: int = 0  # those still to come


class ReadCache:
    """The copies of one process. Thread-safe; holds no lock over a network call."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes of all copies
        self.used = 0
        self._lock = threading.Lock()
        self._shards: dict[Key, _Shard] = {}  # the most recently used last

    def asks(self, key: Key, size: int) -> bool:
        """Return whether to query the version of this shard, of `size` bytes, before reading it."""
        if size > self.limit:
            return False
        with self._lock:
            shard = self._known(key)
            if shard.skip:
                shard.skip -= 1
                return False
            return True

    def decide(self, key: Key, version: int) -> tuple[CacheDecision, bytes]:
        """Decide how to read a shard that now has this version; also return the copy, if it is to be used."""
        with self._lock:
            shard = self._known(key)
            if shard.version == version:
                shard.backoff = 0
                return (CacheDecision.STORE, b"") if shard.copy is None else (CacheDecision.COPY, shard.copy)
            if shard.version is not None:
                shard.backoff = shard.skip = min(2 * shard.backoff + 1, _MOST_SKIPPED)
            shard.version = version
            self._drop(shard)
            return CacheDecision.READ, b""

    def store(self, key: Key, version: int, values: memoryview) -> None:
        """Copy values that were read while the shard had this version, before and after."""
        copy = bytes(values)
        with self._lock:
            shard = self._shards.get(key)
            if shard is None or shard.version != version or shard.copy is not None:
                return
            for other in list(self._shards.values()):
                if self.used + len(copy) <= self.limit:
                    break
                self._drop(other)
            if self.used + len(copy) <= self.limit:
                shard.copy = copy
                self.used += len(copy)

    def _known(self, key: Key) -> _Shard:
        """Return what is known of a shard, which is now the last used one."""
        shard = self._shards.pop(key, None) or _Shard()
        while len(self._shards) >= MAX_SHARDS:  # such as those of variables that were deleted
            self._drop(self._shards.pop(next(iter(self._shards))))
        self._shards[key] = shard
        return shard

    def _drop(self, shard: _Shard) -> None:
        if shard.copy is not None:
            self.used -= len(shard.copy)
            shard.copy = None
