"""Decides what becomes of refused calls, so that unauthenticated callers cost a role little.

No I/O; `ConnectionReaper` does what is due.

A refused call is answered as long as its address, and all addresses together, have not had many: a bucket each that
fills again with time. Beyond that, and always where its head is large, it is held: it gets no answer, and its
connection is closed a second later, or at the next look if it holds many. So whoever calls in a loop has to wait.
Nobody who may call is ever held for what others at the same address do, but for one thing: a call of a session that a
restarted role does not know has to be answered, or its client would never begin another. The first few of each
connection always are.

    connection:  quiet --refused, bucket empty--> held since t --t + 1 s, or many held--> due (closed)
                   ^------------a call of it is accepted--------|

Counts may be read at any time. What is remembered is bounded: connections until they are due, and so many addresses.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from ipaddress import ip_address

BURST, PER_SECOND = 512, 16.0
"""So many refusals of one address are answered at once, and as many a second later on."""

ALL_BURST, ALL_PER_SECOND = 2048, 128.0
"""Of all addresses together."""

HOLD_SECONDS = 1.0
MAX_HELD = 32
"""Of one connection; then it is closed at the next look."""

UNKNOWN_SESSIONS = 4
"""Answers on one connection that tell that its session is unknown, even while nothing else is answered."""

REPORT_SECONDS = 60.0
_MAX_ADDRESSES = 1024
_MAX_CONNECTIONS = 16_384
_NAMED = 5  # addresses in one line of the log


OTHER_USER = "unix:another user"
"""The name of a connection over a Unix socket by somebody else's process; it is not answered in any case."""


def address_of(peer: str) -> str:
    """Return whose a connection is, of the name that gRPC or the data plane gives it; an IPv6 network counts as one."""
    _, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    try:
        address = ip_address(host)
    except ValueError:
        if peer == OTHER_USER:
            return "another user of this machine"
        return "this machine" if peer.startswith("unix:") else "an unknown address"
    if address.is_loopback:
        return "127.0.0.1"
    if address.version == 6:
        if (plain := address.ipv4_mapped) is not None:
            return str(plain)
        return f"{ip_address(int(address) >> 64 << 64)}/64"
    return host


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
    """Of one role. Thread-safe.

    Args:
        can_close: connections can be found and closed here; else every refused call is answered.
        now: a monotonic clock's time.
    """

    def __init__(self, can_close: bool, now: float) -> None:
        self._can_close = can_close
        self._lock = threading.Lock()
        self._all = _Bucket(ALL_BURST, ALL_PER_SECOND, now)
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()  # the address that was refused last is last
        self._held: dict[str, tuple[float, int]] = {}  # by connection: since when, and how many calls
        self._unknown: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._next_report = now
        self.total = 0

    @property
    def pending(self) -> bool:
        """Is something remembered of a connection? Read without the lock, by every call that is accepted."""
        return bool(self._held or self._unknown)

    def refused(self, peer: str, now: float, *, unknown_session: bool = False, is_large: bool = False) -> bool:
        """Note a refused call; is it to be answered? Else it is held until its connection is closed.

        One whose head is larger than any of ours never is: it costs as much as hundreds.
        """
        address = address_of(peer)
        with self._lock:
            self.total += 1
            named = address if address in self._unreported or len(self._unreported) < _MAX_ADDRESSES else "others"
            self._unreported[named] += 1
            answers = self._answers(address, now) and not is_large
            if answers or not self._can_close or peer.startswith("unix:"):
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
        """A call of this connection was accepted: it is not closed for what was refused before."""
        with self._lock:
            self._held.pop(peer, None)
            self._unknown.pop(peer, None)

    def due(self, now: float) -> set[str]:
        """Return the connections that are to be closed now, and forget them."""
        with self._lock:
            found = {
                peer for peer, (since, count) in self._held.items() if count > MAX_HELD or now >= since + HOLD_SECONDS
            }
            for peer in found:
                del self._held[peer]
                self._unknown.pop(peer, None)
            return found

    def forget_absent(self, present: set[str]) -> None:
        """Forget connections that have gone; those of `present` are still there."""
        with self._lock:
            for peer in self._unknown.keys() - present:
                del self._unknown[peer]

    def close(self) -> set[str]:
        """Hold no more calls; return the connections that hold some."""
        with self._lock:
            self._can_close = False
            held = set(self._held)
            self._held.clear()
            return held

    def report(self, now: float) -> str:
        """Return what to log of what was refused since the last report; "" if nothing, or if that was just now."""
        with self._lock:
            if not self._unreported or now < self._next_report:
                return ""
            self._next_report = now + REPORT_SECONDS
            found, self._unreported = self._unreported, Counter()
        named = found.most_common(_NAMED)
        places = ", ".join(f"{count:,} from {address}" for address, count in named)
        if rest := sum(found.values()) - sum(count for _, count in named):
            places += f", {rest:,} from {len(found) - len(named):,} other addresses"
        return f"refused {sum(found.values()):,} calls without a valid proof of the cluster token: {places}"
