"""When a wait for a parameter server is given up: pure, by looks."""

from __future__ import annotations

import threading
import time

import pytest
from tests.waiting import until

from pscluster.core.errors import UnavailableError
from pscluster.ps.client.watchdog import LOOK_SECONDS, Exchange, Liveness, SilentError, Verdict

PATIENCE = 8.0


class Asked:
    """A server that is asked, and answers as the test says."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.liveness = Liveness(lambda _seconds: True, patience)
        self.cancelled = 0
        self.exchange = Exchange(self.liveness, self._cancel)

    def _cancel(self) -> None:
        self.cancelled += 1

    def looks(self, seconds: float) -> list[Verdict]:
        """One after the other, over so many seconds, none of them late."""
        return [self.exchange.look(LOOK_SECONDS, time.monotonic()) for _ in range(round(seconds / LOOK_SECONDS))]


def test_nobody_waits() -> None:
    """An idle session is left alone for ever."""
    asked = Asked()
    assert set(asked.looks(100)) == {Verdict.GO_ON}
    asked.exchange.begin(60)
    asked.exchange.end()
    assert set(asked.looks(100)) == {Verdict.GO_ON}


def test_a_server_that_never_answers() -> None:
    """It is asked after a while, and given up when its time is over and it was asked in vain."""
    asked = Asked()
    asked.exchange.begin(60)
    assert set(asked.looks(0.5)) == {Verdict.GO_ON}
    assert set(asked.looks(20)) == {Verdict.ASK}, "nobody knows yet that it does not answer"
    asked.liveness.unheard += 1
    assert asked.looks(0.5) == [Verdict.GIVE_UP]
    asked.exchange.give_up()
    assert asked.cancelled == 1
    with pytest.raises(SilentError, match="has not answered for 21 s"):
        asked.exchange.check()


@pytest.mark.parametrize("sign", ["answers", "progress"])
def test_a_server_that_answers_or_a_transfer_that_goes_on(sign: str) -> None:
    """Is waited for as long as the attempt may take, however little time the server may be gone."""
    asked = Asked()
    asked.exchange.begin(60)
    for _ in range(10):
        asked.liveness.unheard += 1
        assert Verdict.GIVE_UP not in asked.looks(PATIENCE - 1)
        if sign == "answers":
            asked.liveness.heard += 1
        else:
            asked.exchange.progress()
    assert asked.exchange.look(0.0, time.monotonic() + 61) is Verdict.GIVE_UP
    asked.exchange.give_up()
    with pytest.raises(UnavailableError):
        asked.exchange.check()


def test_what_was_found_out_for_another_exchange() -> None:
    """A server that did not answer before this began may do so now."""
    asked = Asked()
    asked.liveness.unheard = 5
    asked.exchange.begin(60)
    assert Verdict.GIVE_UP not in asked.looks(30)


@pytest.mark.parametrize(("patience", "after"), [(0.1, 1.0), (8.0, 1.0), (600.0, 75.0)])
def test_how_soon_it_is_asked(patience: float, after: float) -> None:
    """Seldom, where there is much time: to ask takes a connection."""
    assert Liveness(lambda _seconds: True, patience).ask_after == after


def test_it_is_asked_once_at_a_time() -> None:
    """Whoever waits."""
    begun, go = threading.Semaphore(0), threading.Event()

    def answers(_seconds: float) -> bool:
        begun.release()
        return go.wait(30)

    liveness = Liveness(answers, PATIENCE)
    liveness.ask()
    assert begun.acquire(timeout=30)
    liveness.ask()
    assert (liveness.heard, liveness.unheard) == (0, 0)
    go.set()
    until(lambda: liveness.heard == 1, "it has answered")
    assert not begun.acquire(blocking=False)
