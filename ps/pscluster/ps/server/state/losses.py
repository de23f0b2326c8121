"""The updates that were lost with a parameter server's process: a lower bound, from what its clients have received.

Every acknowledgement carries the shard's count of updates and the server's boot id, which each process draws. A client
returns the highest count it has seen with its next update, or before it queries the losses. If it saw that count under
an earlier boot id, its excess over the restored count is lost. Clients that have ended may have seen more. Losses of
the log are found without clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pscluster.core.ids import fresh_id
from pscluster.ps.spec import METADATA

ShardKey = tuple[int, int]
"""Variable and shard."""

UNKNOWN: ShardKey = (0, 0)
"""In place of a shard, for updates that can't be attributed to one."""

NAMES = {UNKNOWN: "(unknown)", METADATA: "(metadata)"}
"""Of what is not a shard of a variable."""


@dataclass(slots=True)
class Losses:
    """The losses of one server. Pure; guarded by its owner's lock."""

    boot_id: int = field(default_factory=fresh_id)  # this process's
    before: Sequence[int] = ()  # boot ids of the processes that held the state earlier, oldest first
    restored: bool = False  # whether this process restored anything
    news: int = 0  # how often a loss was found
    total: dict[ShardKey, int] = field(default_factory=dict)  # lost acknowledged updates, at least, over all boots
    since: dict[ShardKey, int] = field(default_factory=dict)  # those lost since the last earlier process saved
    _restored: dict[ShardKey, int] = field(default_factory=dict)

    def restore(
        self,
        boot_ids: Sequence[int],
        counts: Mapping[ShardKey, int],
        lost: Mapping[ShardKey, int],
        newly_lost: Mapping[ShardKey, int],
        since: Mapping[ShardKey, int],
    ) -> None:
        """Begin from restored counts of updates, and the losses known before and `newly_lost`.

        Those of `lost` in `since` were found by processes that had restored the same state and saved nothing.
        """
        self.before, self.total, self._restored = tuple(boot_ids), dict(lost), dict(counts)
        self.restored = bool(counts)
        self.since = dict(since)
        for shard, count in newly_lost.items():
            self._count(shard, count)

    def leave(self, shard: ShardKey) -> None:
        """Compare no more counts of a shard, which has moved to another server with all that it had."""
        self._restored.pop(shard, None)

    def note(self, shard: ShardKey, boot_id: int, seen: int) -> int:
        """Return how many updates are lost, or 0 if that is known, given that a client saw `seen` under `boot_id`."""
        # Acknowledgements of processes before the latest one were compared when that one restored.
        if boot_id in (0, self.boot_id, *self.before[:-1]):
            return 0
        lost = seen - self._restored.get(shard, seen)
        return lost if self._count(shard, lost) else 0

    def _count(self, shard: ShardKey, lost: int) -> bool:
        """Record that `lost` updates of a shard are lost; return whether that is news."""
        more = lost - self.since.get(shard, 0)
        if more <= 0:
            return False
        self.since[shard] = lost
        self.news += 1
        self.total[shard] = self.total.get(shard, 0) + more
        return True
