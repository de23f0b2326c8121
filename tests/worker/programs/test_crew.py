"""Threads that share pieces of work."""

from __future__ import annotations

import threading

import pytest

from pscluster.worker.programs.crew import Crew


def test_pieces_are_done_at_once_and_each_once() -> None:
    """As many as there are threads meet, which they could not one after the other."""
    crew, meeting = Crew(2), threading.Barrier(3, timeout=30)
    done: list[int] = []

    def piece(nth: int) -> None:
        if nth < 3:
            meeting.wait()
        done.append(nth)

    crew.share(7, piece)
    assert sorted(done) == list(range(7))


def test_who_asks_does_not_wait_for_threads_that_are_busy() -> None:
    """It does all pieces itself, also inside a piece of other work."""
    crew, busy, over = Crew(1), threading.Event(), threading.Event()

    def other(nth: int) -> None:
        if threading.current_thread() is asking:
            busy.wait(30)
        else:
            busy.set()
            over.wait(30)

    asking = threading.Thread(target=crew.share, args=(2, other), daemon=True)
    asking.start()
    assert busy.wait(30)
    done: list[int] = []
    crew.share(3, lambda nth: crew.share(2, lambda _: done.append(nth)))
    assert done == [0, 0, 1, 1, 2, 2]
    over.set()
    asking.join(30)


def test_the_first_error_is_raised_when_all_have_ended() -> None:
    """The one of the lowest number, whichever came first."""
    crew, done = Crew(1), list[int]()

    def piece(nth: int) -> None:
        done.append(nth)
        if nth in (1, 3):
            raise ValueError(f"piece {nth}")

    with pytest.raises(ValueError, match="piece 1"):
        crew.share(5, piece)
    assert sorted(done) == list(range(5))
