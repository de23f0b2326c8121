"""Which updates a server has applied: the memory behind "applied once". Pure; its owner serialises the calls.

A key is (function, variable, shard, n-th update of it) inside a scheduled function, and (client, sequence,
variable, shard, n-th) outside of one. A function that the user has given a key goes by that in place of its number,
which begins anew with every coordinator. Facts that arrive, and what each allows to forget:

    record(key)         after its effect, under the same shard lock: a repetition finds it and changes nothing
    finish(functions)   these have ended: their keys go, later updates of theirs are refused
    settled(client, n)  the client has an answer to all before n: those keys go
    forget(keys)        nobody will run functions with these keys again
    close(incarnation)  the worker (or client) is gone: its updates are refused from now on
    open_term(term)     a checkpoint takes the place of what there is: what was sent under an earlier term is refused,
                        however late it comes, and with each shard that is restored goes what is remembered of it: what
                        functions with a key had done to it when it was saved takes its place (`replace`)

So memory holds the keys of functions in flight, a few intervals, and one number an incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pscluster.core.errors import ProtocolError, StaleError
from pscluster.core.intervals import IntervalSet


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sent an update: the function it belongs to (0: none), or the client's number of the request."""

    incarnation: int
    function: int
    sequence: int
    key: int = 0
    term: int = 0


_Keys = dict[tuple[int, int], set[int]]
"""By variable and shard: the n-th updates that were applied."""


@dataclass(slots=True)
class _Client:
    settled: int = 0
    keys: dict[int, _Keys] = field(default_factory=dict)


class Ledger:
    """The memory of applied updates of one job on one server."""

    def __init__(self) -> None:
        self.term = 0
        self._closed: set[int] = set()
        self._finished = IntervalSet()
        self._functions: dict[int, _Keys] = {}
        self._keyed: dict[int, _Keys] = {}
        self._clients: dict[int, _Client] = {}

    def admit(self, origin: Origin) -> None:
        """StaleError if nothing more is to be applied for this origin."""
        if origin.term < self.term:
            raise StaleError("a checkpoint was restored since this update was sent: it is not applied")
        if origin.incarnation in self._closed:
            raise StaleError("this worker was given up for dead, and its functions were given to others")
        if origin.function:
            if origin.function in self._finished:
                raise StaleError(f"function {origin.function} has ended: its late update is not applied")
        elif not origin.sequence:
            raise ProtocolError("an update outside of a function needs a sequence number")
        else:
            client = self._clients.get(origin.incarnation)
            if client is not None and origin.sequence < client.settled:
                raise StaleError(f"request {origin.sequence} was answered long ago: its late copy is not applied")

    def seen(self, origin: Origin, variable: int, shard: int, nth: int) -> bool:
        """Was this update applied?"""
        if origin.key:
            keys = self._keyed.get(origin.key)
        elif origin.function:
            keys = self._functions.get(origin.function)
        else:
            client = self._clients.get(origin.incarnation)
            keys = client.keys.get(origin.sequence) if client else None
        return keys is not None and nth in keys.get((variable, shard), ())

    def record(self, origin: Origin, variable: int, shard: int, nth: int) -> None:
        """This update has been applied."""
        if origin.key:
            keys = self._keyed.setdefault(origin.key, {})
        elif origin.function:
            keys = self._functions.setdefault(origin.function, {})
        elif origin.incarnation in self._closed:  # while it was being applied: nobody can repeat it
            return
        else:
            client = self._clients.setdefault(origin.incarnation, _Client())
            keys = client.keys.setdefault(origin.sequence, {})
        keys.setdefault((variable, shard), set()).add(nth)

    def settle(self, incarnation: int, before: int) -> None:
        """The client will not repeat requests numbered below `before`."""
        if incarnation in self._closed:
            return
        client = self._clients.setdefault(incarnation, _Client())
        if before > client.settled:
            client.settled = before
            for sequence in [number for number in client.keys if number < before]:
                del client.keys[sequence]

    def finish(self, intervals: Iterable[tuple[int, int]]) -> None:
        """These functions, [start, stop) each, have ended."""
        for start, stop in intervals:
            self._finished.add(start, stop)
        for function in [number for number in self._functions if number in self._finished]:
            del self._functions[function]

    def forget(self, keys: Iterable[int]) -> None:
        """Nobody will run functions with these keys again."""
        for key in keys:
            self._keyed.pop(key, None)

    def open_term(self, term: int) -> None:
        """Refuse from now on what was sent under an earlier one."""
        self.term = max(self.term, term)

    def replace(self, variable: int, shard: int, named: Mapping[int, Iterable[int]]) -> None:
        """The shard has the values of a checkpoint: all that is remembered of it is what was when that was made.

        Args:
            variable: its number.
            shard: its number.
            named: by key of a function, which of its updates were applied.
        """
        place = variable, shard
        requests = (keys for client in self._clients.values() for keys in client.keys.values())
        for keys in (*self._functions.values(), *self._keyed.values(), *requests):
            keys.pop(place, None)
        for key in [key for key, keys in self._keyed.items() if not keys]:
            del self._keyed[key]
        for key, nths in named.items():
            self._keyed.setdefault(key, {})[place] = set(nths)

    def named(self, variable: int, shard: int) -> dict[int, frozenset[int]]:
        """By key of a function, which of its updates of a shard were applied."""
        place = variable, shard
        return {key: frozenset(keys[place]) for key, keys in self._keyed.items() if place in keys}

    def forget_functions(self) -> None:
        """Their numbers begin anew: whoever worked under the old ones is refused elsewhere. Those with a key stay."""
        self._finished, self._functions = IntervalSet(), {}

    def close(self, incarnation: int) -> None:
        """Refuse this incarnation from now on."""
        self._closed.add(incarnation)
        self._clients.pop(incarnation, None)

    @property
    def remembered(self) -> int:
        """How many keys are held."""
        requests = [keys for client in self._clients.values() for keys in client.keys.values()]
        held = (*self._functions.values(), *self._keyed.values(), *requests)
        return sum(len(nths) for keys in held for nths in keys.values())

    # What is kept on disk

    def keys_of(self, variable: int, shard: int) -> Iterator[tuple[Origin, list[int]]]:
        """The updates of a shard that are remembered; origins of functions name no incarnation."""
        place = variable, shard
        for function, keys in self._functions.items():
            if place in keys:
                yield Origin(0, function, 0), list(keys[place])
        for key, keys in self._keyed.items():
            if place in keys:
                yield Origin(0, 0, 0, key), list(keys[place])
        for incarnation, client in self._clients.items():
            for sequence, keys in client.keys.items():
                if place in keys:
                    yield Origin(incarnation, 0, sequence), list(keys[place])

    @property
    def closed(self) -> list[int]:
        """The incarnations that are refused."""
        return list(self._closed)

    @property
    def finished(self) -> list[tuple[int, int]]:
        """The functions that have ended, as intervals."""
        return list(self._finished)

    @property
    def settled(self) -> dict[int, int]:
        """By client: all its requests below this number are answered."""
        return {incarnation: client.settled for incarnation, client in self._clients.items()}
