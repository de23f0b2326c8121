"""Waits end for a signal that did not wake their thread: it was given to another one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from pscluster.coordinator.waiting import Condition, Event

PATIENCE = 60.0


class Signalled(BaseException):
    """Raised by the handler."""


def on_condition(timeout: float | None) -> None:
    """Wait for what does not come."""
    condition = Condition()
    with condition:
        condition.wait(timeout)


def on_event(timeout: float | None) -> None:
    """The same."""
    Event().wait(timeout)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Another thread gets the signal in a moment; the main one, which does not take it, has to run its handler."""

    def raise_signalled(_number: int, _frame: object) -> None:
        raise Signalled

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_signalled)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    timer = threading.Timer(0.2, take)
    timer.start()
    yield
    timer.join()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("wait", [on_condition, on_event])
@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_a_signal_that_another_thread_got(wait: object, timeout: float | None, elsewhere: None) -> None:
    """Its handler runs all the same, long before the time is over."""
    assert callable(wait)
    with pytest.raises(Signalled):
        wait(timeout)


def test_what_waits_is_woken() -> None:
    """By what it waits for, and by the end of its time."""
    event, condition = Event(), Condition()
    assert not event.wait(0)
    assert not event.wait(0.01)
    with condition:
        assert not condition.wait(0.6)
    threading.Timer(0.7, event.set).start()
    assert event.wait(PATIENCE)

    def tell() -> None:
        with condition:
            condition.notify_all()

    with condition:
        threading.Timer(0.7, tell).start()
        assert condition.wait()
