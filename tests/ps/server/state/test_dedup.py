"""The memory behind "applied once": its keys, and when they are forgotten."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pscluster.core.errors import ProtocolError, StaleError
from pscluster.ps.server.state.dedup import Ledger, Origin

CLIENTS = (101, 102)
FUNCTIONS = range(1, 8)
SEQUENCES = range(1, 8)

clients = st.sampled_from(CLIENTS)
origins = st.one_of(
    st.builds(Origin, clients, st.sampled_from(FUNCTIONS), st.just(0)),
    st.builds(Origin, clients, st.sampled_from(FUNCTIONS), st.just(0), st.sampled_from([1001, 1002])),
    st.builds(Origin, clients, st.just(0), st.sampled_from(SEQUENCES)),
)
keys = st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 2))
Key = tuple[int, int, int]


class LedgerMachine(RuleBasedStateMachine):
    """A server's use of its ledger, against a model that forgets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.applied: dict[tuple[object, Key], int] = {}
        self.closed: set[int] = set()
        self.finished: set[int] = set()
        self.settled = dict.fromkeys(CLIENTS, 0)
        self.term = 0
        self.saved: set[tuple[int, Key]] = set()

    @staticmethod
    def owner(origin: Origin) -> object:
        """Return the owner of the key: a function, whichever worker runs it, or a client's request."""
        if origin.key:
            return "named", origin.key
        return origin.function or (origin.incarnation, origin.sequence)

    def refused(self, origin: Origin) -> bool:
        """Return whether updates of this origin may no longer be applied."""
        if origin.incarnation in self.closed or origin.function in self.finished:
            return True
        return not origin.function and origin.sequence < self.settled[origin.incarnation]

    @rule()
    def save(self) -> None:
        """A checkpoint is written."""
        self.saved = {
            (owner[1], key) for owner, key in self.applied if isinstance(owner, tuple) and owner[0] == "named"
        }

    @rule(places=st.sets(st.tuples(st.integers(1, 2), st.integers(0, 1)), min_size=1))
    def restore(self, places: set[tuple[int, int]]) -> None:
        """It is restored for some shards: what is remembered of these is replaced."""
        self.term += 1
        self.ledger.open_term(self.term)
        for shard in places:
            named: dict[int, set[int]] = {}
            for key_number, key in self.saved:
                if key[:2] == shard:
                    named.setdefault(key_number, set()).add(key[2])
            self.ledger.replace(*shard, named)
        self.applied = {name: 1 for name in self.applied if name[1][:2] not in places}
        self.applied |= {(("named", key_number), key): 1 for key_number, key in self.saved if key[:2] in places}

    @rule(origin=origins, key=keys, late=st.sampled_from([0, 0, 0, 1]))
    def update(self, origin: Origin, key: Key, late: int) -> None:
        """An update arrives, for the first time or not, or from before the last restore."""
        origin = origin._replace(term=self.term)
        if self.term and late:
            with pytest.raises(StaleError, match="a checkpoint was restored"):
                self.ledger.admit(origin._replace(term=self.term - late))
            return
        if self.refused(origin):
            with pytest.raises(StaleError):
                self.ledger.admit(origin)
            return
        self.ledger.admit(origin)
        name = self.owner(origin), key
        assert self.ledger.seen(origin, [key]) == [name in self.applied]
        if name not in self.applied:
            self.ledger.record(origin, [key])
            self.applied[name] = 1
        assert self.ledger.seen(origin, [key]) == [True]

    @rule(intervals=st.lists(st.tuples(st.sampled_from(FUNCTIONS), st.sampled_from(FUNCTIONS)), max_size=3))
    def finish(self, intervals: list[tuple[int, int]]) -> None:
        """Functions end."""
        self.ledger.finish(intervals)
        for start, stop in intervals:
            self.finished.update(range(start, stop))

    @rule(client=clients, before=st.sampled_from(SEQUENCES))
    def forget_answered(self, client: int, before: int) -> None:
        """A client has its answers; the messages that say so may arrive in any order, late ones included."""
        self.ledger.forget_answered(client, before)
        self.settled[client] = max(self.settled[client], before)

    @rule(client=clients)
    def close(self, client: int) -> None:
        """A worker is given up."""
        self.ledger.close(client)
        self.closed.add(client)

    @invariant()
    def memory_is_what_may_still_be_asked_for(self) -> None:
        """No key is held that no admitted update could repeat."""
        live = 0
        for owner, _ in self.applied:
            if isinstance(owner, tuple) and owner[0] == "named":
                live += 1
            elif isinstance(owner, tuple):
                client, sequence = owner
                live += client not in self.closed and sequence >= self.settled[client]
            else:
                live += owner not in self.finished
        assert self.ledger.remembered == live


TestLedger = LedgerMachine.TestCase
TestLedger.__doc__ = "A repetition is found, what has ended is refused, and all that can't be asked for is forgotten."
TestLedger.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_a_function_that_moved_to_another_worker_keeps_its_keys() -> None:
    """Updates of the first attempt, on a worker that died, are not applied again by the second on another."""
    ledger = Ledger()
    first, second = Origin(101, 5, 0), Origin(102, 5, 0)
    ledger.record(first, [(1, 0, 1)])
    ledger.close(101)
    ledger.admit(second)
    assert ledger.seen(second, [(1, 0, 1), (1, 0, 2)]) == [True, False]
    with pytest.raises(StaleError, match="given up"):
        ledger.admit(first)


def test_an_update_outside_of_functions_needs_a_number() -> None:
    """Without a function or a sequence number there is no key, and the update is refused."""
    with pytest.raises(ProtocolError, match="sequence"):
        Ledger().admit(Origin(101, 0, 0))


def test_twenty_thousand_functions_leave_one_interval() -> None:
    """Memory is bounded by the functions in flight, not by all there were."""
    ledger, most = Ledger(), 0
    for function in range(1, 20_001):
        for shard in range(3):
            ledger.record(Origin(101, function, 0), [(1, shard, 1)])
        most = max(most, ledger.remembered)
        if function % 50 == 0:
            ledger.finish([(function - 49, function + 1)])
    assert most <= 150
    assert ledger.remembered == 0
    with pytest.raises(StaleError, match="function 12345 has ended"):
        ledger.admit(Origin(101, 12_345, 0))


def test_a_closed_client_leaves_one_number() -> None:
    """A closed client's keys are forgotten, and an update in progress at that moment adds none."""
    ledger = Ledger()
    ledger.record(Origin(101, 0, 1), [(1, 0, 1)])
    ledger.close(101)
    assert ledger.remembered == 0
    ledger.record(Origin(101, 0, 2), [(1, 0, 1)])
    ledger.forget_answered(101, 2)
    assert ledger.remembered == 0
    with pytest.raises(StaleError):
        ledger.admit(Origin(101, 0, 9))
