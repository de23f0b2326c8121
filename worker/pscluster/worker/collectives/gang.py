"""What the members of a gang know of it, and how they prove that to each other."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pscluster.core.errors import NotPermittedError, ProtocolError
from pscluster.core.limits import MAX_COUNT, check_count
from pscluster.v1 import worker_pb2

DEFAULT_SECONDS = 60.0
"""For which a member is awaited before its worker is asked whether it is there, unless the gang says otherwise."""

_SHORTEST_SECRET = 16
_PROVED = struct.Struct("<QIIIQ")
_LABEL = b"pscluster exchange, request\0"  # this way only: nothing that a receiver sends can pass for an opening


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a gang."""

    rank: int
    worker: int
    address: str
    incarnation: int
    tls_name: str = ""

    def __str__(self) -> str:
        return f"replica {self.rank} (worker {self.worker} at {self.address})"


class _Members(Sequence[Member]):
    """Those of a message, read at first use: most gangs run one small program, and exchange nothing."""

    __slots__ = ("_known", "_messages")

    def __init__(self, messages: Sequence[worker_pb2.GangMember]) -> None:
        self._messages, self._known = messages, tuple[Member, ...]()

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, rank: Any) -> Any:
        if not self._known:
            self._known = tuple(
                Member(rank, member.worker, member.address, member.incarnation, member.tls_name)
                for rank, member in enumerate(self._messages)
            )
        return self._known[rank]


class _Names(Sequence[str]):
    """What errors call members, made at first use."""

    __slots__ = ("_members",)

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, rank: Any) -> Any:
        return str(self._members[rank])


@dataclass(frozen=True, slots=True)
class Gang:
    """One placement of a gang, as one of its members sees it."""

    id: int
    generation: int
    rank: int
    members: Sequence[Member]
    secret: bytes = field(repr=False)
    seconds: float = DEFAULT_SECONDS  # for which others may be silent

    @property
    def size(self) -> int:
        return len(self.members)

    @classmethod
    def of(cls, message: worker_pb2.Gang) -> Gang:
        """Return the gang of a step. Raise ProtocolError if the message makes no sense."""
        check_count(len(message.members), MAX_COUNT, "members of a gang")
        if message.rank >= len(message.members):
            raise ProtocolError(f"a gang of {len(message.members)} members has no replica {message.rank}")
        if len(message.secret) < _SHORTEST_SECRET:
            raise ProtocolError(f"a gang's secret has {len(message.secret)} bytes; the least is {_SHORTEST_SECRET}")
        if not 0 <= message.timeout < float("inf"):
            raise ProtocolError(f"a gang's timeout is {message.timeout} s; give one above 0, or 0 for the default")
        seconds = message.timeout or DEFAULT_SECONDS
        members = _Members(message.members)
        return cls(message.id, message.generation, message.rank, members, message.secret, seconds)

    @property
    def names(self) -> Sequence[str]:
        """What errors call its members, by rank."""
        return _Names(self.members)

    def runs_beside(self, rank: int) -> bool:
        """Return whether there is a member with this rank, and it is placed on this worker, too."""
        return rank < self.size and self.members[rank].worker == self.members[self.rank].worker

    def opening(self, target: int) -> worker_pb2.Opening:
        """Return the first message of this member's exchange with another one."""
        opening = worker_pb2.Opening(
            gang=self.id,
            generation=self.generation,
            source=self.rank,
            target=target,
            incarnation=self.members[target].incarnation,
        )
        opening.proof = _proof(self.secret, opening)
        return opening

    def check(self, opening: worker_pb2.Opening) -> None:
        """Raise NotPermittedError if the sender of an opening to this member has not proved that it is the source."""
        if not hmac.compare_digest(opening.proof, _proof(self.secret, opening)):
            raise NotPermittedError("the caller does not know the secret of this gang: only its members may call this")
        if opening.target != self.rank or opening.source == self.rank or opening.source >= self.size:
            raise NotPermittedError(
                f"replica {opening.source} of {self.size} has opened an exchange with replica {opening.target}, but "
                f"this is replica {self.rank}"
            )


def _proof(secret: bytes, opening: worker_pb2.Opening) -> bytes:
    fields = opening.gang, opening.generation, opening.source, opening.target, opening.incarnation
    return hmac.digest(secret, _LABEL + _PROVED.pack(*fields), "sha256")
