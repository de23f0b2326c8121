"""Where a training is cut into functions: whole epochs, the same cuts after a resume, sizes by measured times."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.coordinator.training.plan import (
    DISPATCH_SHARE,
    FUNCTION_SECONDS,
    FUNCTIONS_A_WORKER,
    MOST_QUEUED,
    Overhead,
    Plan,
    best_size,
    most_ahead,
)

Part = tuple[int, int, int, int]
"""Of a training's epoch, of the data's epoch: from this place to that one."""


@dataclass
class Data:
    """Epochs of `length` items, `items_per_element` of which make an element."""

    length: int
    items_per_element: int
    first: int = 0
    begun: int = 0
    coverage: EpochCoverage = field(init=False)
    sizes: list[int] = field(default_factory=list)
    """That were wanted for the parts, as they were taken."""
    begins: set[int] = field(default_factory=set)
    """Elements from which on a size was wanted."""
    kept: list[dict[str, Any]] = field(default_factory=list)
    """The plan at the end of each epoch."""

    def __post_init__(self) -> None:
        self.coverage = EpochCoverage(self.length, self.length)
        self.coverage.load({"length": self.length, "epoch": self.first, "visited": {}})

    @property
    def elements(self) -> int:
        """Of an epoch."""
        return -(-self.length // self.items_per_element)

    def plan(self, per_epoch: int) -> Plan:
        """Of a training that begins here."""
        plan = Plan("data", self.elements, self.items_per_element, self.length, per_epoch)
        plan.begin((self.first, self.begun), 0)
        return plan

    def element(self, epoch: int, item: int) -> int:
        """Its number, from the one at which the training began."""
        return (epoch - self.first) * self.elements + item // self.items_per_element - self.begun

    def take(self, plan: Plan, training_epoch: int) -> Part | None:
        """What the next function gets."""
        epoch = self.coverage.unassigned_epoch
        self.begins |= {start for start, _ in plan.cuts}

        def stop_of(start: int) -> int:
            size = plan.size_at(self.element(epoch, start))
            stop = plan.stop_of(training_epoch, epoch, start)
            if stop > start:
                self.sizes.append(size)
            return stop

        interval = self.coverage.take(epoch, stop_of)
        return None if interval is None else (training_epoch, epoch, *interval)


@st.composite
def datas(draw: st.DrawFn) -> Data:
    """Of a few elements, the last one perhaps smaller than the others; begun with already, in mid-epoch perhaps."""
    data = Data(draw(st.integers(1, 30)), draw(st.integers(1, 4)), draw(st.integers(0, 2)))
    data.begun = draw(st.integers(0, data.elements - 1))
    data.coverage.commit(data.first, 0, data.begun * data.items_per_element)
    return data


CHANGES = st.dictionaries(st.integers(0, 40), st.integers(1, 9), max_size=4)
"""Before which function the size of functions changes, and to what."""


def all_parts(data: Data, plan: Plan, epochs: int, changes: dict[int, int]) -> list[Part]:
    """What is handed out, in order."""
    parts: list[Part] = []
    for training_epoch in range(epochs):
        plan.begin_epoch(training_epoch)
        while True:
            if len(parts) in changes:
                plan.change(changes[len(parts)])
            part = data.take(plan, training_epoch)
            if part is None:
                break
            parts.append(part)
        data.kept.append(json.loads(json.dumps(plan.to_json())))
    return parts


@given(datas(), st.integers(1, 40), st.integers(1, 3), CHANGES)
def test_parts_tile_each_epoch(data: Data, per_epoch: int, epochs: int, changes: dict[int, int]) -> None:
    """Functions follow one another, and none crosses the end of an epoch of the data or the training."""
    plan = data.plan(per_epoch)
    parts = all_parts(data, plan, epochs, changes)
    elements = [data.element(epoch, index) for _, epoch, start, stop in parts for index in range(start, stop)]
    assert elements == sorted(elements)
    assert sorted(set(elements)) == list(range(epochs * per_epoch)), "no element is left out, none is too many"
    places = [(epoch, index) for _, epoch, start, stop in parts for index in range(start, stop)]
    assert len(places) == len(set(places))
    for training_epoch, epoch, start, stop in parts:
        first, last = data.element(epoch, start), data.element(epoch, stop - 1)
        assert first // per_epoch == last // per_epoch == training_epoch
        assert start % data.items_per_element == 0
        assert stop % data.items_per_element == 0 or stop == data.length, "elements stay whole"


@given(datas(), st.integers(1, 40), st.integers(1, 3), CHANGES)
def test_sizes(data: Data, per_epoch: int, epochs: int, changes: dict[int, int]) -> None:
    """As of a part's first element; smaller only before an epoch's end, or where another size begins."""
    plan = data.plan(per_epoch)
    parts = all_parts(data, plan, epochs, changes)
    for (training_epoch, epoch, start, stop), size in zip(parts, data.sizes, strict=True):
        first, after = data.element(epoch, start), data.element(epoch, stop - 1) + 1
        assert after - first <= size
        ends = after == (training_epoch + 1) * per_epoch or stop == data.length or after in data.begins
        assert after - first == size or ends


@given(datas(), st.integers(1, 40), st.integers(1, 3), CHANGES, st.data())
def test_a_resumed_training_cuts_alike(
    data: Data, per_epoch: int, epochs: int, changes: dict[int, int], choice: st.DataObject
) -> None:
    """Some parts were done, in any order, others were only handed out: those are given out again, with the same cuts.

    A function's name is made of them: other cuts would be other pieces of work, and count beside these.
    """
    state = data.coverage.state()
    plan = data.plan(per_epoch)
    parts = all_parts(data, plan, epochs, changes)
    training_epoch = choice.draw(st.integers(0, epochs - 1))
    mine = [part for part in parts if part[0] == training_epoch]
    done = choice.draw(st.sets(st.sampled_from(mine))) if mine else set()
    again = Data(data.length, data.items_per_element, data.first, data.begun)
    again.coverage.load(json.loads(json.dumps(state)))
    for part in parts:
        if part[0] < training_epoch or part in done:
            again.coverage.commit(*part[1:])
    resumed = again.plan(per_epoch)
    resumed.origin = 99, 99
    assert resumed.fits(data.kept[training_epoch])
    resumed.load(data.kept[training_epoch])
    resumed.begin_epoch(training_epoch)
    left = list(iter(lambda: again.take(resumed, training_epoch), None))
    assert left == [part for part in mine if part not in done]
    visited = sum(-(-(stop - start) // data.items_per_element) for _, _, start, stop in done)
    epoch, places = again.coverage.epoch, again.coverage.visited(again.coverage.epoch)
    earlier = {epoch for _, epoch, _, _ in mine} == {epoch}  # of one epoch of the data, it is exact
    assert not earlier or resumed.done(epoch, places) == training_epoch * per_epoch + visited


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=6))
def test_a_change_moves_nothing_that_was_handed_out(changes: list[tuple[int, int]]) -> None:
    """Sizes of elements before the frontier stay, whatever comes; and it is said whether something has changed."""
    data = Data(50, 1)
    plan = data.plan(50)
    for size, takes in changes:
        before = [plan.size_at(element) for element in range(plan.frontier)]
        known, cuts = plan.size_at(plan.frontier), list(plan.cuts)
        assert plan.change(size) == (size != known)
        assert size != known or plan.cuts == cuts
        assert [plan.size_at(element) for element in range(plan.frontier)] == before
        assert plan.size_at(plan.frontier) == plan.size_at(10**9) == size
        for _ in range(takes):
            data.take(plan, 0)
    starts = [start for start, _ in plan.cuts]
    assert starts == sorted(set(starts))


def test_elements_of_a_later_epoch_are_not_given_out() -> None:
    """It is not given out: the place itself says so."""
    plan = Plan("data", elements=4, items_per_element=2, items=7, per_epoch=4)
    plan.begin((3, 0), 0)
    assert plan.stop_of(0, 3, 6) == 7
    assert plan.stop_of(0, 4, 0) == 0
    assert plan.stop_of(1, 4, 0) == 2
    assert plan.done(3, 0) == 0
    assert plan.done(3, 7) == plan.done(4, 0) == 4
    assert plan.done(2, 5) == 0, "a checkpoint of before"


def test_it_begins_in_the_middle() -> None:
    """Of an element, too: data cut differently than before begins after what was done."""
    plan = Plan("data", elements=10, items_per_element=3, items=30, per_epoch=6)
    plan.begin((2, 5), 14)
    assert [plan.done(2, 15), plan.done(2, 30), plan.done(3, 3)] == [14, 19, 20]
    plan.change(9)
    assert plan.stop_of(2, 2, 15) == 27, "up to the end of the third epoch, the element 18"
    assert plan.stop_of(2, 2, 3) == 27, "what was left of the data before is cut as large"


def test_it_goes_on_cut_otherwise() -> None:
    """What was visited is done, told of or not: of an epoch that is over nothing is left, of a part the rest."""
    before = Plan("data", elements=10, items_per_element=3, items=30, per_epoch=20)
    before.begin((1, 0), 0)  # two epochs of the data, from its second on
    kept = before.to_json()
    for now, done in (((3, 0), 0), ((3, 6), 3), ((4, 0), 15), ((5, 0), 30)):
        plan = Plan("data", elements=15, items_per_element=2, items=30, per_epoch=30)
        plan.begin_with_another_cut(kept, 1, now, whole=True)
        assert plan.done(*now) - 30 == done
        assert plan.stop_of(1, *now) == (now[1] if done == 30 else now[1] + 2)
    in_steps = Plan("data", elements=10, items_per_element=3, items=30, per_epoch=4)
    in_steps.begin((1, 0), 0)
    for now, done in (((1, 12), 0), ((1, 15), 1), ((1, 24), 4), ((1, 30), 4)):
        plan = Plan("data", elements=15, items_per_element=2, items=30, per_epoch=4)
        plan.begin_with_another_cut(in_steps.to_json(), 1, now, whole=False)
        assert plan.done(*now) - 4 == done
    plan = Plan("data", elements=15, items_per_element=2, items=30, per_epoch=15)
    plan.begin_with_another_cut(in_steps.to_json(), 1, (1, 12), whole=True)
    assert plan.done(1, 12) - 15 == 6, "epochs end with those of the data from now on, this one too"


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"elements": 5}, {"items_per_element": 3}, {"items": 8}, {"per_epoch": 3}]
)
def test_other_pieces(change: dict[str, Any]) -> None:
    """They are told from these."""
    plan = Plan("data", elements=4, items_per_element=2, items=7, per_epoch=4)
    assert plan.fits(plan.to_json())
    assert not plan.fits(plan.to_json() | change)


# How many steps


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=64),
    st.floats(0, 0.1),
    st.none() | st.integers(1, 10**6),
    st.integers(1, 64),
)
def test_the_best_size(seconds: list[float], dispatch: float, per_epoch: int | None, workers: int) -> None:
    """The smallest with which handing out takes its share at most; but each worker has several functions an epoch."""
    size = best_size(seconds, dispatch, per_epoch, workers)
    typical = max(sorted(seconds)[len(seconds) // 2], 1e-7)
    assert size >= 1
    most = max(1, per_epoch // (workers * FUNCTIONS_A_WORKER)) if per_epoch is not None else None
    assert most is None or size <= most
    wanted = min(dispatch, DISPATCH_SHARE * FUNCTION_SECONDS)
    if size != most:
        assert wanted <= DISPATCH_SHARE * typical * size * (1 + 1e-9)
    if size > 1:
        assert wanted >= DISPATCH_SHARE * typical * (size - 1) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("step", "dispatch", "per_epoch", "workers", "size"),
    [
        (0.001, 0.0001, None, 2, 10),
        (0.001, 0.0001, 16, 2, 2),
        (0.001, 0.0001, 5, 2, 1),
        (0.1, 0.0001, 1000, 2, 1),
        (0.0, 0.0, None, 1, 1),
    ],
)
def test_sizes_by_example(step: float, dispatch: float, per_epoch: int | None, workers: int, size: int) -> None:
    """Handing out takes a tenth of a millisecond."""
    assert best_size([step] * 9, dispatch, per_epoch, workers) == size


def test_one_slow_step_does_not_matter() -> None:
    """Nor do a few: the first ones, in which a framework compiles."""
    assert best_size([9.0] * 3 + [0.001] * 6, 0.0001, None, 1) == best_size([0.001], 0.0001, None, 1)


@given(st.none() | st.floats(0, 100), st.integers(1, 64))
def test_how_many_are_scheduled(seconds: float | None, workers: int) -> None:
    """Two a worker at least, as long as that is not too many; the shorter they are, the more."""
    count = most_ahead(seconds, workers)
    assert 2 * workers <= count <= MOST_QUEUED
    if seconds is not None:
        assert count >= most_ahead(2 * seconds, workers)
        assert seconds * (count / workers - 2) <= 0.2 * (1 + 1e-9)


def test_sizes_hold_from_their_elements_on() -> None:
    """Before the first one it is one step."""
    plan = Plan("data", 100, 1, 100, 100, cuts=[(10, 3), (40, 7)])
    sizes = [(size, len(list(run))) for size, run in itertools.groupby(plan.size_at(element) for element in range(100))]
    assert sizes == [(1, 10), (3, 30), (7, 60)]


def test_what_functions_cost_beside_their_steps() -> None:
    """The overhead is a worker's wait between two functions plus the coordinator's time, once enough have ended."""
    overhead, now, cpu = Overhead(2), 100.0, 7.0
    overhead.begin(now, cpu)
    measured = []
    for index in range(40):
        now, cpu = now + 0.02, cpu + 0.002
        begin = index // 2 * 0.04 + index % 2 * 1000.0  # each worker has a clock of its own
        measured.append(overhead.add(index % 2, begin, begin + 0.039, now, cpu))
    assert measured[:15] == [None] * 15, "sixteen functions at least"
    assert measured[15] == pytest.approx(0.001 + 0.002)
    assert measured[31] == pytest.approx(0.001 + 0.002), "and anew"
    assert len([value for value in measured if value is not None]) == 2
    overhead.begin(now, cpu)
    assert all(overhead.add(0, second, second, now + second / 1000, cpu) is None for second in range(100)), "in 0.1 s"


def test_a_worker_that_was_started_again_has_another_clock() -> None:
    """What lies between the two says nothing."""
    overhead = Overhead(1)
    overhead.begin(0.0, 0.0)
    times = [*(100.0 + second for second in range(10)), *(1.0 + second for second in range(10))]
    measured = [overhead.add(0, begin, begin + 0.75, index, 0.0) for index, begin in enumerate(times)]
    assert next(value for value in measured if value is not None) == pytest.approx(0.25)
