"""When a call is cancelled: pure, by checks; and on the watchdog's thread."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import UnavailableError
from pscluster.core.transport.watchdog import (
    CHECK_SECONDS,
    Action,
    Liveness,
    SilentError,
    StallWatchdog,
    WatchedCall,
    watch,
)

MAX_SILENCE = 8.0


class CancelCounter:
    """A call that counts how often it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> bool:
        """Count the cancellation."""
        self.cancelled += 1
        return True


class FakeExchange:
    """An exchange with a server that answers probes as the test says."""

    def __init__(self) -> None:
        self.liveness = Liveness(lambda _seconds: True, MAX_SILENCE)
        self.call = CancelCounter()
        self.watched = WatchedCall(self.call.cancel, MAX_SILENCE, self.liveness)

    def checks(self, seconds: float) -> list[Action]:
        """Return what the checks of that many seconds decide, none of them late."""
        return checks(self.watched, seconds)


def checks(watched: WatchedCall, seconds: float) -> list[Action]:
    """Return what the checks of that many seconds decide, none of them late."""
    return [watched.check(CHECK_SECONDS, time.monotonic()) for _ in range(round(seconds / CHECK_SECONDS))]


def test_an_idle_session() -> None:
    """It is left alone forever."""
    exchange = FakeExchange()
    assert set(exchange.checks(100)) == {Action.WAIT}
    exchange.watched.begin(60)
    exchange.watched.end()
    assert set(exchange.checks(100)) == {Action.WAIT}


def test_a_server_that_never_answers() -> None:
    """It is probed after a while; the call is cancelled once its time is over and a probe was not answered."""
    exchange = FakeExchange()
    exchange.watched.begin(60)
    assert set(exchange.checks(0.5)) == {Action.WAIT}
    assert set(exchange.checks(20)) == {Action.PROBE}, "no probe has failed yet"
    exchange.liveness.unanswered += 1
    assert exchange.checks(0.5) == [Action.CANCEL]
    exchange.watched.act(Action.CANCEL)
    assert exchange.call.cancelled == 1
    with pytest.raises(SilentError, match="has not answered for 21 s"):
        exchange.watched.raise_if_cancelled()


@pytest.mark.parametrize("sign", ["answers", "progress"])
def test_a_server_that_answers_or_a_transfer_that_makes_progress(sign: str) -> None:
    """Its call is left alone until the deadline, however short a silence is allowed."""
    exchange = FakeExchange()
    exchange.watched.begin(60)
    for _ in range(10):
        exchange.liveness.unanswered += 1
        assert Action.CANCEL not in exchange.checks(MAX_SILENCE - 1)
        if sign == "answers":
            exchange.liveness.answered += 1
        else:
            exchange.watched.progress()
    assert exchange.watched.check(0.0, time.monotonic() + 61) is Action.CANCEL
    exchange.watched.act(Action.CANCEL)
    with pytest.raises(UnavailableError):
        exchange.watched.raise_if_cancelled()


def test_a_probe_of_another_exchange() -> None:
    """A server that did not answer before this one began may do so now."""
    exchange = FakeExchange()
    exchange.liveness.unanswered = 5
    exchange.watched.begin(60)
    assert Action.CANCEL not in exchange.checks(30)


@pytest.mark.parametrize(("max_silence", "after"), [(0.1, 1.0), (8.0, 1.0), (600.0, 75.0)])
def test_how_soon_a_server_is_probed(max_silence: float, after: float) -> None:
    """Probes are rare if there is much time, since each takes a connection."""
    assert Liveness(lambda _seconds: True, max_silence).probe_after == after


def test_one_probe_at_a_time() -> None:
    """There is one, however many exchanges wait for the server."""
    begun, go = threading.Semaphore(0), threading.Event()

    def answers(_seconds: float) -> bool:
        begun.release()
        return go.wait(30)

    liveness = Liveness(answers, MAX_SILENCE)
    liveness.probe()
    assert begun.acquire(timeout=30)
    liveness.probe()
    assert (liveness.answered, liveness.unanswered) == (0, 0)
    go.set()
    until(lambda: liveness.answered == 1, "it has answered")
    assert not begun.acquire(blocking=False)


def test_a_probe_for_which_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next check probes again: otherwise a server that is frozen later would never be found out."""

    def no_more(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    liveness = Liveness(lambda _seconds: True, MAX_SILENCE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError):
            liveness.probe()
    liveness.probe()
    until(lambda: liveness.answered == 1, "it has answered")


def test_a_call_with_nothing_to_probe() -> None:
    """It is cancelled for silence alone, and progress keeps it alive."""
    watched = WatchedCall(lambda: None, MAX_SILENCE)
    watched.begin()
    for _ in range(10):
        assert set(checks(watched, MAX_SILENCE - 1)) == {Action.WAIT}
        watched.progress()
    assert checks(watched, MAX_SILENCE)[-1] is Action.CANCEL


def test_the_thread_cancels_a_call_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """It cancels until the block ends; a call that can't be cancelled does not delay the others."""

    def fail() -> None:
        raise RuntimeError("no")

    broken, call = watch(WatchedCall(fail, 0.0)), CancelCounter()
    broken.begin()
    with StallWatchdog(0.1).with_call(call):
        until(lambda: call.cancelled > 1, "it is cancelled")
    broken.end()
    assert sum(message.startswith("cancelled a call") for message in caplog.messages) == 2


def test_a_call_that_is_forgotten() -> None:
    """The watchdog does not keep it alive."""
    call = watch(WatchedCall(lambda: None, TIMEOUT))
    call.begin()
    gone = weakref.ref(call)
    del call
    gc.collect()
    until(lambda: gone() is None, "nothing holds it")
