"""Where shards are: a client's view of it, and what it does when that is no longer true.

A handle knows which server had each shard when it was described. A server that is asked for a shard that it no longer
has refuses (`ShardMovedError`), and knows a later spec of the variable. The client asks it for that, and makes the same
request again, of the servers that the spec names. So what is repeated has the same keys, which have moved with the
shard; items for other servers that were applied the first time are recognized there.

    ask --answered--------------> done
        --refused: it has moved-> learn --a later placement is known--> ask
                                        --none------------------------> wait a moment, and ask, for `seconds`

Of two specs of a variable the later placement counts, from whichever server it comes. A variable may also be
resharded, and then has other shards: see `cuts`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

from pscluster.core.errors import ShardMovedError
from pscluster.core.phases import Begun, Phases, run
from pscluster.ps.client.placement.cuts import Cut, SharedCut, origin_of
from pscluster.v1 import ps_pb2

T = TypeVar("T")

_PAUSE_SECONDS = 0.01


class Placements:
    """What one client knows of variables whose shards have moved. Thread-safe.

    `describe` asks a server, by its index, for their specs. `check` raises if the caller must not continue.
    """

    def __init__(
        self, describe: Callable[[int], Iterable[ps_pb2.VariableSpec]], check: Callable[[], object], seconds: float
    ) -> None:
        self._describe = describe
        self._check = check
        self._seconds = seconds
        self._lock = threading.Lock()
        self._known: dict[int, tuple[int, tuple[int, ...]]] = {}  # by variable: placement, owners
        self._cuts: weakref.WeakValueDictionary[int, SharedCut] = weakref.WeakValueDictionary()  # by origin
        self.on_reshard: Callable[[Cut, Cut], None] = lambda _old, _new: None
        """Called before handles of a variable go on with a new cut."""
        self.changes = 0
        """How often something was learned. What was planned before may ask the wrong servers."""

    def cut_of(self, spec: ps_pb2.VariableSpec) -> SharedCut:
        """Return the cut that all handles of a variable share; see `cuts`."""
        with self._lock:
            return self._cuts.setdefault(origin_of(spec), SharedCut(Cut.of(spec)))

    def owners(self, variable: int, made: tuple[int, ...]) -> tuple[int, ...]:
        """Return the servers of a variable's shards; `made` are those of a handle."""
        known = self._known.get(variable)
        return made if known is None else known[1]

    def owner(self, variable: int, shard: int, planned: int) -> int:
        """Return the server of a shard, which was planned to be asked of another one."""
        known = self._known.get(variable)
        return planned if known is None else known[1][shard]

    def learn(self, specs: Iterable[ps_pb2.VariableSpec]) -> bool:
        """Take specs into account; return whether one of them is news."""
        news = False
        with self._lock:
            for spec in specs:
                if spec.placement > self._known.get(spec.id, (0, ()))[0]:
                    self._known[spec.id] = spec.placement, tuple(spec.owners)
                    news = True
                cut = self._cuts.get(origin_of(spec))
                if cut is not None and spec.id > cut.now.id:
                    old, new = cut.now, Cut.of(spec)
                    self.on_reshard(old, new)
                    cut.change(new)
                    news = True
            self.changes += news
        return news

    def _ask(self, server: int) -> bool:
        """Learn what a server knows, or the first one, if that one was removed; return whether it is news."""
        try:
            return self.learn(self._describe(server))
        except ShardMovedError:
            return self.learn(self._describe(0))

    def following_begun(self, attempt: Callable[[], Phases[T]]) -> Phases[T]:
        """Do what `following` does. The first attempt is begun, once this is; the others are made at once."""
        first: Begun[T] | None = None
        begun: list[Begun[T]] = []  # until it is finished
        try:
            try:
                first = Begun(attempt())
                begun.append(first)
            except ShardMovedError:  # it is raised again below
                pass
            yield first is not None and first.is_under_way
            return self.following(lambda: begun.pop().finish() if begun else run(attempt()))
        finally:
            if first is not None:
                first.close()

    def following(self, attempt: Callable[[], T]) -> T:
        """Return what the attempt returns, which is repeated when a shard turns out to have moved."""
        deadline = 0.0
        while True:
            before = self.changes
            try:
                return attempt()
            except ShardMovedError as error:
                if error.server is None:
                    raise
                if self._ask(error.server) or self.changes != before:
                    continue
                deadline = deadline or time.monotonic() + self._seconds
                if time.monotonic() >= deadline:
                    raise
            self._check()
            time.sleep(_PAUSE_SECONDS)
