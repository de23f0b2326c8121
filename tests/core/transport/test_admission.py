"""Memory for arriving messages: who is cut off, and that a new call waits until that memory is free."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fakes import FakeCall
from tests.waiting import TIMEOUT, until

from pscluster.core.transport import admission
from pscluster.core.transport.admission import Admission


def test_the_longest_wait_is_cut_off_first() -> None:
    """As many as it takes to fit, and never the new call, even if it does not fit alone."""
    calls = [FakeCall() for _ in range(4)]
    room = Admission(lambda: 10)
    waiting = [room.enter(call, 5) for call in calls[:2]]
    room.leave(waiting.pop())
    waiting.append(room.enter(calls[2], 5))
    assert [call.is_active() for call in calls] == [True, True, True, True]
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(room.enter, calls[3], 11)
        until(lambda: not (calls[0].is_active() or calls[2].is_active()), "both others are cut off")
        for admitted in waiting:
            room.leave(admitted)
        room.leave(entered.result(TIMEOUT))
    assert [call.is_active() for call in calls] == [False, True, False, True]
    assert (room.used, room.cut_off) == (0, 2)


def test_a_new_call_waits_for_the_memory_of_those_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold what has arrived until they end: many calls would otherwise hold more than there is room for."""
    monkeypatch.setattr(admission, "END_SECONDS", TIMEOUT)
    room = Admission(lambda: 10)
    first, second = room.enter(FakeCall(), 5), room.enter(FakeCall(), 5)
    with ThreadPoolExecutor(2) as pool:
        third, fourth = FakeCall(), FakeCall()
        entered = [pool.submit(room.enter, call, 5) for call in (third, fourth)]
        until(lambda: room.cut_off == 2, "both are cut off")
        assert not any(future.done() for future in entered)
        assert room.used == 20
        room.leave(first)
        room.leave(second)
        for future in entered:
            room.leave(future.result(TIMEOUT))
    assert (third.is_active(), fourth.is_active(), room.used) == (True, True, 0)


def test_a_new_call_that_is_cut_off_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one needs its room, and its own end must not take as long as that of the first."""
    monkeypatch.setattr(admission, "END_SECONDS", TIMEOUT)
    room = Admission(lambda: 10)
    first = room.enter(FakeCall(), 10)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(room.enter, FakeCall(), 10)
        until(lambda: room.cut_off == 1, "the first is cut off")
        third = pool.submit(room.enter, FakeCall(), 10)
        room.leave(second.result(TIMEOUT))
        assert not third.done()
        room.leave(first)
        room.leave(third.result(TIMEOUT))
    assert (room.used, room.cut_off) == (0, 2)


def test_a_call_that_does_not_end_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may be busy: a new call waits for a moment only."""
    monkeypatch.setattr(admission, "END_SECONDS", 0.01)
    room = Admission(lambda: 10)
    busy = room.enter(FakeCall(), 10)
    second = room.enter(FakeCall(), 10)
    room.leave(busy)
    room.leave(second)
    assert room.used == 0
