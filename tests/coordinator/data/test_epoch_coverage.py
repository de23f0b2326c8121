"""Which items are assigned and which visited, under every order of events that Hypothesis finds."""

from __future__ import annotations

import json
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.conftest import search

from pscluster.coordinator.data.dataset_progress import Position
from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.core.errors import CheckpointMismatchError, MisuseError

LENGTH, USED = 11, 10
EPOCHS = 3


class EpochCoverageMachine(RuleBasedStateMachine):
    """Against a model that knows of each example of each epoch where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.coverage = EpochCoverage(LENGTH, USED)
        self.states: dict[tuple[int, int], str] = {}  # by epoch and place: "assigned" or "visited"
        self.pending: list[tuple[int, int, int]] = []
        self.saved = json.dumps(self.coverage.state())
        self.saved_visited: set[tuple[int, int]] = set()

    @rule(most=st.integers(1, 12), epoch=st.integers(0, EPOCHS - 1))
    def take(self, most: int, epoch: int) -> None:
        """The next range is the first consecutive items that are free."""
        taken = self.coverage.take(epoch, lambda start: start + most)
        free = [index for index in range(USED) if (epoch, index) not in self.states]
        if not free:
            assert taken is None
            return
        expected = [free[0]]
        while len(expected) < most and expected[-1] + 1 in free:
            expected.append(expected[-1] + 1)
        assert taken is not None
        assert list(range(*taken)) == expected
        self.states |= dict.fromkeys([(epoch, index) for index in expected], "assigned")
        self.pending.append((epoch, *taken))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A function has ended; a second copy of the news changes nothing."""
        epoch, start, stop = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        for _ in range(2):
            self.coverage.commit(epoch, start, stop)
        self.states |= dict.fromkeys([(epoch, index) for index in range(start, stop)], "visited")

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A function has failed: its places are free again."""
        epoch, start, stop = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        self.coverage.release(epoch, start, stop)
        for index in range(start, stop):
            del self.states[epoch, index]

    @rule(epoch=st.integers(0, EPOCHS - 1), start=st.integers(0, USED - 1), count=st.integers(1, 4))
    def commit_what_was_released(self, epoch: int, start: int, count: int) -> None:
        """Another function had it, too, and has ended well."""
        places = [(epoch, index) for index in range(start, min(start + count, USED))]
        if not any(self.states.get(example) == "assigned" for example in places):
            self.coverage.commit(epoch, start, places[-1][1] + 1)
            self.states |= dict.fromkeys(places, "visited")

    @rule()
    def save(self) -> None:
        """A checkpoint is made."""
        self.saved = json.dumps(self.coverage.state())
        self.saved_visited = {example for example, state in self.states.items() if state == "visited"}

    @precondition(lambda self: not self.pending)
    @rule()
    def restore(self) -> None:
        """What was visited then, and nothing else, is visited."""
        self.coverage = EpochCoverage(LENGTH, USED)
        self.coverage.load(json.loads(self.saved))
        self.states = dict.fromkeys(self.saved_visited, "visited")

    @invariant()
    def it_agrees(self) -> None:
        """With the model, in all that is asked."""
        states = [[self.states.get((epoch, index)) for index in range(USED)] for epoch in range(EPOCHS)]
        whole = [set(state) == {"visited"} for state in states] + [False]
        given = [all(state) for state in states] + [False]
        assert self.coverage.epoch == whole.index(False)
        assert self.coverage.unassigned_epoch == given.index(False)
        for epoch, state in enumerate(states):
            assert self.coverage.visited(epoch) == state.count("visited")


TestEpochCoverage = EpochCoverageMachine.TestCase
TestEpochCoverage.settings = search(100, 30)


def test_another_length() -> None:
    """A position of another dataset is refused, and nothing has changed."""
    coverage = EpochCoverage(10, 10)
    coverage.commit(0, 0, 3)
    with pytest.raises(CheckpointMismatchError, match="with 20 examples, and this one has 10: give it another name"):
        coverage.load(EpochCoverage(20, 20).state())
    assert coverage.visited(0) == 3


def test_another_batch_size() -> None:
    """What was kept with smaller batches may be all with larger ones."""
    coverage = EpochCoverage(10, 10)
    coverage.commit(0, 0, 9)
    later = EpochCoverage(10, 8)
    later.load(coverage.state())
    assert later.epoch == 1


def up_to(most: int) -> Callable[[int, int], int]:
    """Ranges of at most that many examples, of the first epoch."""
    return lambda epoch, start: start + most if not epoch else start


class Owner:
    """Stands for a dataset."""


def test_a_caller_that_was_interrupted() -> None:
    """It gave the range back, though its function was scheduled: that ends, and nothing is counted twice."""
    position, owner = Position(), Owner()
    position.begin(EpochCoverage(10, 10), owner)
    term, _ = position.begin_pass()
    given = position.take(term, up_to(4))
    assert given is not None
    position.enter(given)
    position.release(given)
    position.commit(given, key=1)
    assert position.functions == 0
    again = position.take(term, up_to(4))
    assert again is not None
    assert (again.start, again.stop) == (4, 8), "what was visited is not given out again"
    position.abandon(again)
    assert position.take(term, up_to(9)) is not None
    position.begin_pass()
    freed = position.take(term, up_to(9))
    assert freed is not None
    assert (freed.start, freed.stop) == (4, 8)
    position.restore(position.at(None))
    with pytest.raises(MisuseError, match="was restored meanwhile"):
        position.enter(freed)
    position.abandon(freed)
    assert position.begin_pass() == (term + 1, 0)
