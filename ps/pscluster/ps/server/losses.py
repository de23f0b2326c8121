"""What was lost with a parameter server's process: a lower bound, from what its clients were told.

Every acknowledgement says how many updates the shard has had, and under which life of the server, a number that each
process draws. A client sends the most it has heard of back with its next update, or before it asks what was lost. If
that was under a life before, what it exceeds the restored count by is lost. Clients that are gone may know of more.
What a log has lost is found without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pscluster.core.ids import fresh_id

ShardKey = tuple[int, int]
"""Variable and shard."""

UNKNOWN: ShardKey = (0, 0)
"""In place of a shard: updates of which it can't be told what they updated."""

UNKNOWN_NAME = "(unknown)"


@dataclass(slots=True)
class Losses:
    """Of one server. Pure; guarded by its owner's lock.

    Attributes:
        life: of this process.
        before: the lives of those that held the state before, in turn.
        restored: did this process restore anything?
        news: how often something was found to be lost.
        total: by shard, acknowledged updates that are lost, at least, of all lives.
        since: of these, those that were lost since the last of the lives before had saved.
    """

    life: int = field(default_factory=fresh_id)
    before: Sequence[int] = ()
    restored: bool = False
    news: int = 0
    total: dict[ShardKey, int] = field(default_factory=dict)
    since: dict[ShardKey, int] = field(default_factory=dict)
    _restored: Mapping[ShardKey, int] = field(default_factory=dict)

    def restore(
        self,
        lives: Sequence[int],
        counts: Mapping[ShardKey, int],
        lost: Mapping[ShardKey, int],
        found: Mapping[ShardKey, int] | None = None,
        since: Mapping[ShardKey, int] | None = None,
    ) -> None:
        """The state was restored: it was held by these lives, and has these counts of updates.

        Args:
            lost: what was known before.
            found: what was found to be lost as the state was restored.
            since: of `lost`, what processes have found that had restored the same and have saved nothing.
        """
        self.before, self.total, self._restored = tuple(lives), dict(lost), counts
        self.restored = bool(counts)
        self.since = dict(since or {})
        for shard, count in (found or {}).items():
            self._count(shard, count)

    def note(self, shard: ShardKey, life: int, seen: int) -> int:
        """A client was told of so many updates under this life: how many are lost, if that is news, else 0."""
        # What a life before the last one had acknowledged was compared when that one was restored.
        if life in (0, self.life, *self.before[:-1]):
            return 0
        lost = seen - self._restored.get(shard, seen)
        return lost if self._count(shard, lost) else 0

    def _count(self, shard: ShardKey, lost: int) -> bool:
        """Is it news that so many are lost?"""
        more = lost - self.since.get(shard, 0)
        if more <= 0:
            return False
        self.since[shard] = lost
        self.news += 1
        self.total[shard] = self.total.get(shard, 0) + more
        return True
