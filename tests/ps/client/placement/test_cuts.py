"""The cut that handles share, and the gate that keeps it the same while requests are made of it."""

from __future__ import annotations

import threading

import pytest
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import WaitTimeoutError
from pscluster.ps.client.placement.cuts import Cut, Gate
from pscluster.ps.client.placement.placements import Placements
from pscluster.v1 import ps_pb2


def spec(number: int, *ends: int, origin: int = 0, evaluation: int = 0) -> ps_pb2.VariableSpec:
    return ps_pb2.VariableSpec(
        id=number,
        name="v",
        dtype="int64",
        shape=[4],
        splits=[ps_pb2.AxisSplit(ends=ends)],
        owners=[0] * len(ends),
        origin=origin,
        evaluation=evaluation,
    )


def test_handles_share_the_latest_cut() -> None:
    """Of one origin the highest number counts; an evaluation's copy is another variable."""
    seen: list[tuple[int, int]] = []
    placements = Placements(lambda _: (), lambda: None, 0.0)
    placements.on_reshard = lambda old, new: seen.append((old.id, new.id))
    shared = placements.cut_of(spec(1, 4))
    assert placements.learn([spec(5, 2, 4, origin=1), spec(9, 4, origin=1, evaluation=2)])
    assert shared.now == Cut.of(spec(5, 2, 4, origin=1))
    assert not placements.learn([spec(1, 4)]), "an earlier one is no news"
    assert placements.cut_of(spec(1, 4)) is shared
    assert placements.cut_of(spec(9, 4, origin=1, evaluation=2)) is not shared
    assert seen == [(1, 5)]


def test_the_gate_is_closed_once_no_thread_is_inside() -> None:
    """Those who are inside may enter again; others wait until it is open; who has closed it passes."""
    gate, inside, passed = Gate(), threading.Event(), threading.Event()
    leave = threading.Event()

    def pass_twice() -> None:
        with gate:
            inside.set()
            assert leave.wait(TIMEOUT)
            with gate:
                pass

    def pass_later() -> None:
        with gate:
            passed.set()

    first = threading.Thread(target=pass_twice)
    first.start()
    assert inside.wait(TIMEOUT)
    busy = "another thread of the script still reads or updates variables"
    with pytest.raises(WaitTimeoutError, match=busy), gate.closed(0.0):
        raise AssertionError
    leave.set()
    with gate.closed(TIMEOUT):
        later = threading.Thread(target=pass_later)
        later.start()
        with gate:
            assert not passed.wait(0.01)
    until(passed.is_set, "it is open again")
    first.join()
    later.join()
