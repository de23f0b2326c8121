"""Which updates a server has applied: the memory behind "applied once". Pure; its owner serializes the calls.

A key is (function, variable, shard, n-th update of it) inside a scheduled function, and (client, sequence,
variable, shard, n-th) outside of one. A function to which the user has given a key is identified by that key instead of
its number, since numbers begin anew with every coordinator. What arrives, and what may then be forgotten:

    record(key)         called after the effect, under the same shard lock: a repetition finds it and changes nothing
    finish(functions)   these have ended: forget their keys, refuse their later updates
    forget_answered(client, n)
                        the client has answers to all requests before n: forget their keys
    forget(keys)        functions with these keys will not run again
    close(incarnation)  the worker (or client) is lost: refuse its updates from now on
    open_term(term)     a checkpoint replaces the state: refuse updates of earlier terms, however late they arrive. For
                        each restored shard, `replace` what is remembered by what functions with keys had done to it
                        when it was saved

So memory holds the keys of functions in flight, a few intervals, and one number for each incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pscluster.core.errors import ProtocolError, StaleError
from pscluster.core.numbers.intervals import IntervalSet
from pscluster.v1 import ps_pb2


class Origin(NamedTuple):
    """The origin of an update: its function (0: none), or the sequence number of the client's request."""

    incarnation: int
    function: int
    sequence: int
    key: int = 0
    term: int = 0


Update = tuple[int, int, int]
"""Of an update: its variable, its shard, and its number among those of its origin, the n-th."""


_Keys = dict[tuple[int, int], set[int]]
"""By variable and shard: the n-th updates that were applied."""


@dataclass(slots=True)
class _Client:
    settled: int = 0  # all requests below it are answered
    keys: dict[int, _Keys] = field(default_factory=dict)


class Ledger:
    """The memory of applied updates of one job on one server."""

    def __init__(self) -> None:
        self.term = 0
        self.closed: set[int] = set()  # incarnations
        self.finished = IntervalSet()  # functions
        self._functions: dict[int, _Keys] = {}
        self._keyed: dict[int, _Keys] = {}
        self.clients: dict[int, _Client] = {}

    def admit(self, origin: Origin) -> None:
        """Raise StaleError if updates of this origin may no longer be applied."""
        if origin.term < self.term:
            raise StaleError("a checkpoint was restored since this update was sent: it is not applied")
        if origin.incarnation in self.closed:
            raise StaleError("this worker was given up for dead, and its functions were given to others")
        if origin.function:
            if origin.function in self.finished:
                raise StaleError(f"function {origin.function} has ended: its late update is not applied")
        elif not origin.sequence:
            raise ProtocolError("an update outside of a function needs a sequence number")
        else:
            client = self.clients.get(origin.incarnation)
            if client is not None and origin.sequence < client.settled:
                raise StaleError(f"request {origin.sequence} was answered long ago: its late copy is not applied")

    def seen(self, origin: Origin, updates: Sequence[Update]) -> list[bool]:
        """Return of each of these updates whether it was applied."""
        if origin.key:
            keys = self._keyed.get(origin.key)
        elif origin.function:
            keys = self._functions.get(origin.function)
        else:
            client = self.clients.get(origin.incarnation)
            keys = client.keys.get(origin.sequence) if client else None
        if not keys:
            return [False] * len(updates)
        return [nth in keys.get((variable, shard), ()) for variable, shard, nth in updates]

    def record(self, origin: Origin, updates: Sequence[Update]) -> None:
        """Remember that these updates have been applied."""
        if not updates:
            return
        if origin.key:
            keys = self._keyed.setdefault(origin.key, {})
        elif origin.function:
            keys = self._functions.setdefault(origin.function, {})
        elif origin.incarnation in self.closed:  # closed while they were applied: they can't be repeated
            return
        else:
            client = self.clients.setdefault(origin.incarnation, _Client())
            keys = client.keys.setdefault(origin.sequence, {})
        for variable, shard, nth in updates:
            known = keys.get((variable, shard))
            if known is None:
                keys[variable, shard] = {nth}
            else:
                known.add(nth)

    def forget_answered(self, incarnation: int, before: int) -> None:
        """Forget a client's requests numbered below `before`, which it will not repeat."""
        if incarnation in self.closed:
            return
        client = self.clients.setdefault(incarnation, _Client())
        if before > client.settled:
            client.settled = before
            for sequence in [sequence for sequence in client.keys if sequence < before]:
                del client.keys[sequence]

    def last_sequence(self, incarnation: int) -> int:
        """Return the highest sequence number of a client of which something was applied; 0 if there is none."""
        client = self.clients.get(incarnation)
        return max((*client.keys, client.settled)) if client is not None else 0

    def finish(self, intervals: Iterable[tuple[int, int]]) -> None:
        """Forget functions that have ended, given as [start, stop) intervals, and refuse their late updates."""
        for start, stop in intervals:
            self.finished.add(start, stop)
        for function in [function for function in self._functions if function in self.finished]:
            del self._functions[function]

    def forget(self, keys: Iterable[int]) -> None:
        """Forget these keys, whose functions will not run again."""
        for key in keys:
            self._keyed.pop(key, None)

    def open_term(self, term: int) -> None:
        """Refuse updates of earlier terms from now on."""
        self.term = max(self.term, term)

    def replace(self, variable: int, shard: int, named: Mapping[int, Iterable[int]]) -> None:
        """Replace all that is remembered of a shard by what was when its checkpoint was made: updates by key."""
        target = variable, shard
        for _, keys in self._all():
            keys.pop(target, None)
        for key in [key for key, keys in self._keyed.items() if not keys]:
            del self._keyed[key]
        for key, nths in named.items():
            self._keyed.setdefault(key, {})[target] = set(nths)

    def named(self, variable: int, shard: int) -> dict[int, frozenset[int]]:
        """Return, by key of a function, which of its updates of a shard were applied."""
        target = variable, shard
        return {key: frozenset(keys[target]) for key, keys in self._keyed.items() if target in keys}

    def forget_functions(self) -> None:
        """Forget functions without a key: their numbers begin anew. Their late updates are of another job."""
        self.finished, self._functions = IntervalSet(), {}

    def close(self, incarnation: int) -> None:
        """Refuse this incarnation from now on."""
        self.closed.add(incarnation)
        self.clients.pop(incarnation, None)

    @property
    def remembered(self) -> int:
        """The number of keys that are held."""
        return sum(len(nths) for _, keys in self._all() for nths in keys.values())

    def _all(self) -> Iterator[tuple[Origin, _Keys]]:
        """Yield all that is remembered with its origin; origins of functions have no incarnation."""
        for function, keys in self._functions.items():
            yield Origin(0, function, 0), keys
        for key, keys in self._keyed.items():
            yield Origin(0, 0, 0, key), keys
        for incarnation, client in self.clients.items():
            for sequence, keys in client.keys.items():
                yield Origin(incarnation, 0, sequence), keys

    def keys_of(self, variable: int, shard: int) -> Iterator[tuple[Origin, list[int]]]:
        """Yield the remembered updates of a shard, by origin."""
        for origin, keys in self._all():
            if (variable, shard) in keys:
                yield origin, list(keys[variable, shard])

    def saved_keys(self, variable: int, shard: int) -> Iterator[ps_pb2.SavedKeys]:
        """Yield the same as messages, for `record_saved` on any server."""
        for origin, nths in self.keys_of(variable, shard):
            yield ps_pb2.SavedKeys(
                function=origin.function,
                incarnation=origin.incarnation,
                sequence=origin.sequence,
                key=origin.key,
                nth=nths,
            )

    def record_saved(self, variable: int, shard: int, remembered: Iterable[ps_pb2.SavedKeys]) -> None:
        for keys in remembered:
            origin = Origin(keys.incarnation, keys.function, keys.sequence, keys.key)
            self.record(origin, [(variable, shard, nth) for nth in keys.nth])
