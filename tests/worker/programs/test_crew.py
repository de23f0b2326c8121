"""Threads that take over pieces of work."""

from __future__ import annotations

import threading

import pytest

from pscluster.worker.programs.crew import Crew


def test_pieces_are_done_at_once() -> None:
    """As many as there are threads meet, which they could not one after the other."""
    crew, meeting = Crew(2), threading.Barrier(3, timeout=30)

    def meet() -> None:
        meeting.wait()

    pieces = [crew.hand_over(meet) for _ in range(2)]
    meet()
    for piece in pieces:
        piece.finish()


def test_who_waits_does_what_no_thread_has_begun() -> None:
    """Each piece once, also inside of another one, and also if there are no threads."""
    busy, over = threading.Event(), threading.Event()
    for crew in (Crew(1), Crew(0)):

        def other() -> None:
            busy.set()
            over.wait(30)

        running = crew.hand_over(other)
        assert not crew.helpers or busy.wait(30)
        done: list[int] = []

        def piece(nth: int, crew: Crew = crew, done: list[int] = done) -> None:
            crew.hand_over(lambda: done.append(nth)).finish()
            done.append(nth)

        for handed in [crew.hand_over(lambda nth=nth: piece(nth)) for nth in range(3)]:  # type: ignore[misc]
            handed.finish()
        assert done == [0, 0, 1, 1, 2, 2]
        over.set()
        running.finish()


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    """Not before, and nowhere else."""
    crew = Crew(1)
    failing, fine = crew.hand_over(lambda: [][0]), crew.hand_over(lambda: None)
    fine.finish()
    with pytest.raises(IndexError):
        failing.finish()


def test_what_is_abandoned_never_begins_or_has_ended() -> None:
    """So that nothing goes on with what a program has left behind."""
    crew, begun, over, done = Crew(1), threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        begun.set()
        over.wait(30)
        done.append(0)

    running, waiting = crew.hand_over(slow), crew.hand_over(lambda: done.append(1))
    assert begun.wait(30)
    waiting.abandon()
    threading.Timer(0.01, over.set).start()
    running.abandon()
    crew.hand_over(lambda: None).finish()
    assert done == [0]
