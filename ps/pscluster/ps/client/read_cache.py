"""What a client keeps of large shards that nobody changes, so that they are not sent again.

Every shard has a version, which rises with each update. Before a large read the client may ask for it, eight bytes
of answer, and where it is that of the copy it keeps, it reads the copy. Whether to ask, and what to keep, is decided
here; the client does the asking. Nothing is kept on suspicion: only what was read twice under one version, and was
of that version before and after the read that the copy is made of. A shard that changes all the time is asked about
more and more seldom, and costs nothing in the end.

For each shard, by the last time that was asked:

    UNKNOWN --asked: v----------------> SEEN(v)
    SEEN(v) --asked: v----------------> the read is kept as COPY(v) if the shard has version v behind it, too
            --asked: another, w-------> SEEN(w); asked again after 1, 3, 7 and then every 15 reads
    COPY(v) --asked: v----------------> read from the copy
            --asked: another, w-------> SEEN(w); the copy is dropped
"""

from __future__ import annotations

import enum
import os
import threading
from dataclasses import dataclass

Key = tuple[int, int]
"""A variable's id, and the number of the shard."""

KEEP_VARIABLE = "PSCLUSTER_KEEP_MIB"
DEFAULT_MIB = 256

_SELDOM = 15


def cache_bytes() -> int:
    """How much a process keeps, by the environment; 0: nothing."""
    given = os.environ.get(KEEP_VARIABLE, "")
    return (int(given) if given.isdecimal() else DEFAULT_MIB) << 20


class CacheDecision(enum.Enum):
    """What to do about a large read of a shard."""

    READ = "read it"
    KEEP = "read it, and keep it if nobody has changed it meanwhile"
    COPY = "it is here"


@dataclass(slots=True)
class _Shard:
    version: int | None = None
    copy: bytes | None = None
    patience: int = 0  # reads to let pass after the next change
    skip: int = 0  # of them, still to come


class ReadCache:
    """The copies of one process, up to so many bytes. Thread-safe; holds no lock over a network call.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()
        self._shards: dict[Key, _Shard] = {}  # those last used at the end

    def asks(self, key: Key, size: int) -> bool:
        """Is the version of this shard, of so many bytes, to be asked for before it is read?"""
        if size > self.limit:
            return False
        with self._lock:
            shard = self._shards.setdefault(key, _Shard())
            if shard.skip:
                shard.skip -= 1
                return False
            return True

    def decide(self, key: Key, version: int) -> tuple[CacheDecision, bytes]:
        """What to do, the shard having this version now; and its copy, where there is one."""
        with self._lock:
            shard = self._shards.setdefault(key, _Shard())
            if shard.version == version:
                shard.patience = 0
                self._shards[key] = self._shards.pop(key)
                return (CacheDecision.KEEP, b"") if shard.copy is None else (CacheDecision.COPY, shard.copy)
            if shard.version is not None:
                shard.patience = min(2 * shard.patience + 1, _SELDOM)
                shard.skip = shard.patience
            shard.version = version
            self._drop(shard)
            return CacheDecision.READ, b""

    def keep(self, key: Key, version: int, values: memoryview) -> None:
        """The shard had this version before and after these values, which are copied, were read."""
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

    def _drop(self, shard: _Shard) -> None:
        if shard.copy is not None:
            self.used -= len(shard.copy)
            shard.copy = None
