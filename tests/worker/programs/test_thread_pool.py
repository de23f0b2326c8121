"""Threads that take over pieces of work."""

from __future__ import annotations

import threading

import pytest

from pscluster.worker.programs.thread_pool import ThreadPool


def test_pieces_are_done_at_once() -> None:
    """As many as there are threads meet, which they could not one after the other."""
    pool, meeting = ThreadPool(2), threading.Barrier(3, timeout=30)

    def meet() -> None:
        meeting.wait()

    pieces = [pool.submit(meet) for _ in range(2)]
    meet()
    for piece in pieces:
        piece.finish()


def test_who_waits_does_what_no_thread_has_begun() -> None:
    """Each piece once, also inside of another one, and also if there are no threads."""
    busy, over = threading.Event(), threading.Event()
    for pool in (ThreadPool(1), ThreadPool(0)):

        def other() -> None:
            busy.set()
            over.wait(30)

        running = pool.submit(other)
        assert not pool.num_threads or busy.wait(30)
        done: list[int] = []

        def piece(nth: int, pool: ThreadPool = pool, done: list[int] = done) -> None:
            pool.submit(lambda: done.append(nth)).finish()
            done.append(nth)

        for handed in [pool.submit(lambda nth=nth: piece(nth)) for nth in range(3)]:  # type: ignore[misc]
            handed.finish()
        assert done == [0, 0, 1, 1, 2, 2]
        over.set()
        running.finish()


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    """Not before, and nowhere else."""
    pool = ThreadPool(1)
    failing, fine = pool.submit(lambda: [][0]), pool.submit(lambda: None)
    fine.finish()
    with pytest.raises(IndexError):
        failing.finish()


def test_what_is_abandoned_never_begins_or_has_ended() -> None:
    """So that nothing goes on with what a program has left behind."""
    pool, begun, over, done = ThreadPool(1), threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        begun.set()
        over.wait(30)
        done.append(0)

    running, waiting = pool.submit(slow), pool.submit(lambda: done.append(1))
    assert begun.wait(30)
    waiting.abandon()
    threading.Timer(0.01, over.set).start()
    running.abandon()
    pool.submit(lambda: None).finish()
    assert done == [0]
