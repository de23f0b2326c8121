"""Threads that are kept for a while after their work."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator

import pytest
from tests.waiting import TIMEOUT, until

from pscluster.worker.collectives import cached_thread_pool
from pscluster.worker.collectives.cached_thread_pool import CachedThreadPool

NAME = "kept-thread-of-a-test"


@pytest.fixture
def threads() -> Iterator[CachedThreadPool]:
    threads = CachedThreadPool(NAME)
    yield threads
    threads.close()
    until(lambda: not alive(), "its threads have ended")


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(NAME)]


def ran_by(threads: CachedThreadPool) -> int:
    """Run something, and return the thread that has done it."""
    done, by = threading.Event(), list[int]()

    def work() -> None:
        by.append(threading.get_ident())
        done.set()

    threads.run(work)
    assert done.wait(TIMEOUT)
    return by[0]


def test_an_idle_thread_does_the_next_work(threads: CachedThreadPool) -> None:
    """Also after work that has failed."""
    first = ran_by(threads)
    until(lambda: threads._idle, "it is idle")
    assert ran_by(threads) == first
    until(lambda: threads._idle, "it is idle")
    threads.run(lambda: 1 // 0)
    until(lambda: threads._idle, "it is idle")
    assert ran_by(threads) == first


def test_an_idle_thread_holds_nothing_of_its_work(threads: CachedThreadPool) -> None:
    class Held:
        """What work may hold."""

    for _ in range(2):
        held = Held()
        known = weakref.ref(held)
        threads.run(functools.partial(repr, held))
        until(lambda: threads._idle, "it is idle")
        del held
        assert known() is None


def test_work_does_not_wait_for_other_work(threads: CachedThreadPool) -> None:
    meet = threading.Barrier(5)
    for _ in range(4):
        threads.run(lambda: meet.wait(TIMEOUT))
    meet.wait(TIMEOUT)
    until(lambda: len(threads._idle) == 4, "all are idle")


def test_few_are_kept_and_not_for_long(threads: CachedThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_thread_pool, "MAX_IDLE", 1)
    monkeypatch.setattr(cached_thread_pool, "IDLE_SECONDS", 0.01)
    meet = threading.Barrier(3)
    for _ in range(2):
        threads.run(lambda: meet.wait(TIMEOUT))
    meet.wait(TIMEOUT)
    until(lambda: not alive(), "one was not kept, and the other has waited long enough")
    assert ran_by(threads)


def test_work_that_comes_as_a_thread_gives_up_is_done(
    threads: CachedThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may have been chosen just before it stops waiting."""
    monkeypatch.setattr(cached_thread_pool, "IDLE_SECONDS", 0.0005)
    for _ in range(200):
        ran_by(threads)


def test_after_the_end_work_is_done_and_no_thread_is_kept(threads: CachedThreadPool) -> None:
    ran_by(threads)
    threads.close()
    until(lambda: not alive(), "none is kept")
    assert ran_by(threads)
    until(lambda: not alive(), "none is kept")
