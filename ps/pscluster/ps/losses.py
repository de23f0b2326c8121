"""What was lost with a parameter server's process: a lower bound, from what its clients were told.

Every acknowledgement says how many updates the shard has had, and under which life of the server, a number that each
process draws. A client sends the most it has heard of back with its next update. If that was under a life before, what
it exceeds the restored count by is lost. Clients that are gone, or never update the shard again, know of more, perhaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pscluster.core.identity import fresh_id

ShardKey = tuple[int, int]
"""Variable and shard."""


@dataclass(slots=True)
class Losses:
    """Of one server. Pure; guarded by its owner's lock.

    Attributes:
        life: of this process.
        before: the lives of those that held the state before, in turn.
        restored: did this process restore anything?
        news: how often something was found to be lost.
        total: by shard, acknowledged updates that are lost, at least, of all lives.
    """

    life: int = field(default_factory=fresh_id)
    before: Sequence[int] = ()
    restored: bool = False
    news: int = 0
    total: dict[ShardKey, int] = field(default_factory=dict)
    _restored: Mapping[ShardKey, int] = field(default_factory=dict)
    _lost: dict[ShardKey, int] = field(default_factory=dict)  # in this life's restoring

    def restore(self, lives: Sequence[int], counts: Mapping[ShardKey, int], lost: Mapping[ShardKey, int]) -> None:
        """The state was restored: it was held by these lives, and has these counts of updates."""
        self.before, self.total, self._restored = tuple(lives), dict(lost), counts
        self.restored = bool(counts)

    def note(self, shard: ShardKey, life: int, seen: int) -> int:
        """A client was told of so many updates under this life: how many are lost, if that is news, else 0."""
        # What a life before the last one had acknowledged was compared when that one was restored.
        if life in (0, self.life, *self.before[:-1]):
            return 0
        lost = seen - self._restored.get(shard, seen)
        more = lost - self._lost.get(shard, 0)
        if more <= 0:
            return 0
        self._lost[shard] = lost
        self.news += 1
        self.total[shard] = self.total.get(shard, 0) + more
        return lost
