"""Which worker is which task, as workers come and go. Pure: no connections, no clock, no locks.

A task is an index, which one worker at a time has:

    FREE    --claim, for the lowest one, or for this one--> PENDING   the coordinator dials the worker
    PENDING --came_up: the coordinator is connected to it-> UP
            --PENDING_SECONDS pass without that-----------> AWAY
    UP      --its connection is down----------------------> AWAY      it is still expected, see `worker_link`
    AWAY    --claim, for this one-------------------------> PENDING   the same task, in another process
    PENDING, UP --claim, with its secret------------------> PENDING   the same process, perhaps at another address
    PENDING, UP --claim, without--------------------------> refused
    any     --left----------------------------------------> FREE

The tasks that TF_CONFIG names are like the others, but they are not AWAY before the coordinator has tried to connect to
them for a while.

A worker that gives a name has the same index for as long as the job lasts, as one that gives an index has: nobody gets
it who asks for none, unless no other index is left. A worker that gives neither has its index while it lives, and also
under the next coordinator, unless another worker was quicker there.

What is kept is bounded by the most workers that the cluster takes: one entry for each index, one name for each.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pscluster.core.display.sanitize import shown
from pscluster.core.errors import BusyError, ProtocolError, RefusedError

MAX_WORKERS = 1000
"""How many workers a cluster takes, unless it is told."""

PENDING_SECONDS = 10.0
"""The coordinator has this long to reach a worker that has claimed a task, before another one may claim it."""

SECRET_BYTES = 16
"""The shortest secret."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_INDEX = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker that registers says of itself."""

    secret: bytes = field(repr=False)
    task: str = ""  # its index or name; "": any
    last_index: int | None = None  # that it had, if `task` is empty

    def check(self) -> None:
        """Raise ProtocolError if it is malformed."""
        if not SECRET_BYTES <= len(self.secret) <= 1024:
            raise ProtocolError(f"a secret of {len(self.secret)} bytes; it has {SECRET_BYTES} to 1,024 bytes")
        if self.task and not _NAME.fullmatch(self.task):
            raise ProtocolError(
                f"the task is {shown(self.task[:80])!r}; give an index, or a name of letters, digits, '-', '_' and '.'"
            )


@dataclass(slots=True)
class _Member:
    secret: bytes  # its digest; b"": it has not registered
    since: float  # when it registered


class Members:
    """The tasks that have a worker. The owner serializes calls."""

    def __init__(self, listed: Iterable[int], limit: int = MAX_WORKERS) -> None:
        """Begin with the workers that TF_CONFIG names. `limit`: the most workers, and one more than the last index."""
        self._members = {index: _Member(b"", float("-inf")) for index in listed}
        self._limit = max(limit, *(index + 1 for index in self._members), 1)
        self._names: dict[str, int] = {}  # of tasks that were claimed by name or index, the last used one at the end

    @property
    def indices(self) -> list[int]:
        """Return the indices that have a worker, rising."""
        return sorted(self._members)

    def claim(self, claim: Claim, now: float, is_there: Callable[[int], bool]) -> int:
        """Give a worker an index. BusyError if the task has a worker, or the cluster is full, RefusedError if it has
        no such task; nothing has changed then.

        `is_there` says whether the coordinator is connected to the worker with an index, or about to be: it has not had
        the time to find out that there is none.
        """
        claim.check()
        secret = hashlib.sha256(claim.secret).digest()
        index = self._wanted(claim, secret)
        if index is None:
            index = self._lowest_free()
        elif self._is_taken(index, secret, now, is_there):
            raise BusyError(
                f"worker {index} is another process, which is in the cluster now: stop that one, or give this one "
                "another --task, or none"
            )
        if index >= self._limit:
            raise RefusedError(self._too_high(index))
        if index not in self._members and len(self._members) >= self._limit:
            raise BusyError(self._full())
        self._members[index] = _Member(secret, now)
        if claim.task:
            self._keep_name(claim.task, index)
        return index

    def _is_taken(self, index: int, secret: bytes, now: float, is_there: Callable[[int], bool]) -> bool:
        member = self._members.get(index)
        if member is None or member.secret == secret:
            return False
        return is_there(index) or now - member.since < PENDING_SECONDS

    def _wanted(self, claim: Claim, secret: bytes) -> int | None:
        """Return the index that this worker has, or asks for; None if any will do."""
        if claim.task:
            return int(claim.task) if _INDEX.fullmatch(claim.task) else self._names.get(claim.task)
        index = claim.last_index
        if index is None:
            return next((index for index, member in self._members.items() if member.secret == secret), None)
        if (member := self._members.get(index)) is None:
            return None if index in self._names.values() else index
        return index if member.secret == secret else None

    def _lowest_free(self) -> int:
        kept = {*self._members, *self._names.values()}
        index = next(index for index in itertools.count() if index not in kept)
        if index < self._limit:
            return index
        away = next((name for name, index in self._names.items() if index not in self._members), None)
        if away is None:
            raise BusyError(self._full())
        return self._names.pop(away)

    def _full(self) -> str:
        return (
            f"the cluster has {len(self._members):,} workers, and takes no more: stop one, or give its coordinator a "
            "higher --max-workers or PSCLUSTER_MAX_WORKERS"
        )

    def _too_high(self, index: int) -> str:
        return (
            f"the task is {index}, but the cluster takes workers up to {self._limit - 1}: give a lower --task, or the "
            "coordinator a higher --max-workers or PSCLUSTER_MAX_WORKERS"
        )

    def _keep_name(self, name: str, index: int) -> None:
        """Note that an index belongs to this name, and no longer to another one."""
        self._names = {other: at for other, at in self._names.items() if at != index and other != name}
        self._names[name] = index

    def came_up(self, index: int) -> None:
        """Note that the coordinator has connected to the worker with this index: once it is down it is AWAY."""
        if (member := self._members.get(index)) is not None:
            member.since = float("-inf")

    def left(self, index: int) -> None:
        """Note that the worker with this index has left the cluster."""
        self._members.pop(index, None)
