"""Decides what happens to refused calls, so that unauthenticated callers cost a role little.

No I/O; `ConnectionReaper` acts on the decisions.

Refused calls are answered while the token bucket of their address, and that of all addresses, is not empty. Otherwise,
and always if its head is large, a call is held: it gets no answer, and its connection is closed a second later, or at
the next check if it holds many. So a caller in a loop has to wait. A legitimate caller is never held for what others at
the same address do, with one exception: a call of a session that a restarted role does not know must be answered, or
its client would never begin another. So the first few of each connection always are.

    connection:  quiet --refused, bucket empty--> held since t --t + 1 s, or many held--> due (closed)
                   ^------------a call of it is accepted--------|

Counts may be read at any time. Memory is bounded: connections are remembered until they are due, and addresses are
limited in number.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

from pscluster.core.transport.peer_names import address_of, is_on_unix_socket

BURST, PER_SECOND = 512, 16.0
"""Refusals of one address that are answered at once, and per second after that."""

ALL_BURST, ALL_PER_SECOND = 2048, 128.0
"""The same for all addresses together."""

HOLD_SECONDS = 1.0
MAX_HELD = 32
"""Held calls of one connection, above which it is closed at the next check."""

UNKNOWN_SESSIONS = 4
"""Answers on one connection that its session is unknown, even while no other call is answered."""

MAX_STALE = 256
"""Calls of unknown sessions per REPORT_SECONDS that are not worth a line in the log: after a restart, the first calls
of each client are of this kind."""

REPORT_SECONDS = 60.0
_MAX_ADDRESSES = 1024
_MAX_CONNECTIONS = 16_384
_NAMED = 5  # addresses in one line of the log


class _Bucket:
    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, most: float, rate: float, now: float) -> None:
        self._most, self._rate, self._left, self._at = most, rate, most, now

    def take(self, now: float) -> bool:
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Refusals:
    """The refused calls of one role; all are answered unless connections can be found and closed here. Thread-safe."""

    def __init__(self, can_close: bool, now: float) -> None:
        self._can_close = can_close
        self._lock = threading.Lock()
        self._all = _Bucket(ALL_BURST, ALL_PER_SECOND, now)
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()  # the address refused last is last
        self._held: dict[str, tuple[float, int]] = {}  # by connection: since when, and number of calls
        self._unknown: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._stale: Counter[str] = Counter()  # calls of unknown sessions, since the time below
        self._next_report = self._stale_since = now
        self.total = 0

    @property
    def pending(self) -> bool:
        """Return whether any connection is remembered. Called without the lock, for every accepted call."""
        return bool(self._held or self._unknown)

    def refused(self, peer: str, now: float, *, unknown_session: bool = False, is_large: bool = False) -> bool:
        """Count a refused call. Return whether to answer it; otherwise it is held until its connection is closed.

        A call whose head is larger than any of ours is never answered: it costs as much as hundreds.
        """
        address = address_of(peer)
        with self._lock:
            self.total += 1
            counter = self._stale if unknown_session else self._unreported
            named = address if address in counter or len(counter) < _MAX_ADDRESSES else "others"
            counter[named] += 1
            answers = self._answers(address, now) and not is_large
            if answers or not self._can_close or is_on_unix_socket(peer):
                return True
            if len(self._unknown) + len(self._held) >= _MAX_CONNECTIONS:
                return True
            if unknown_session and self._unknown[peer] < UNKNOWN_SESSIONS:
                self._unknown[peer] += 1
                return True
            since, count = self._held.get(peer, (now, 0))
            self._held[peer] = since, count + 1
            return False

    def _answers(self, address: str, now: float) -> bool:
        bucket = self._buckets.get(address)
        if bucket is None:
            if len(self._buckets) >= _MAX_ADDRESSES:
                self._buckets.popitem(last=False)
            bucket = self._buckets[address] = _Bucket(BURST, PER_SECOND, now)
        self._buckets.move_to_end(address)
        return bucket.take(now) and self._all.take(now)

    def accepted(self, peer: str) -> None:
        """Forget the refusals of a connection, since a call of it was accepted."""
        with self._lock:
            self._held.pop(peer, None)
            self._unknown.pop(peer, None)

    def due(self, now: float) -> set[str]:
        """Return the connections to close now, and forget them."""
        with self._lock:
            due = {
                peer for peer, (since, count) in self._held.items() if count > MAX_HELD or now >= since + HOLD_SECONDS
            }
            for peer in due:
                del self._held[peer]
                self._unknown.pop(peer, None)
            return due

    def forget_absent(self, present: set[str]) -> None:
        """Forget closed connections, all but those in `present`."""
        with self._lock:
            for peer in self._unknown.keys() - present:
                del self._unknown[peer]

    def close(self) -> set[str]:
        """Stop holding calls. Return the connections with held calls."""
        with self._lock:
            self._can_close = False
            held = set(self._held)
            self._held.clear()
            return held

    def report(self, now: float) -> str:
        """Return a log line about the refusals since the last report; "" if there are none, or it was just now."""
        with self._lock:
            if now < self._next_report:
                return ""
            refused = self._unreported
            if self._stale.total() > MAX_STALE:
                refused += self._stale
                self._stale.clear()
            elif now >= self._stale_since + REPORT_SECONDS:
                self._stale.clear()
                self._stale_since = now
            if not refused:
                return ""
            self._next_report, self._unreported = now + REPORT_SECONDS, Counter()
        named = refused.most_common(_NAMED)
        origins = ", ".join(f"{count:,} from {address}" for address, count in named)
        if rest := refused.total() - sum(count for _, count in named):
            origins += f", {rest:,} from {len(refused) - len(named):,} other addresses"
        calls = "1 call" if refused.total() == 1 else f"{refused.total():,} calls"
        return f"refused {calls} without a valid proof of the cluster token: {origins}"
