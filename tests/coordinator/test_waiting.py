"""Waits end for a signal that did not wake their thread: it was given to another one."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from pscluster.coordinator.waiting import Condition, Event, result_of, wait_for

TIMEOUT = 60.0


class Signalled(BaseException):
    """Raised by the handler."""


def on_condition(timeout: float | None) -> None:
    """Wait for what does not come."""
    condition = Condition()
    with condition:
        condition.wait_for(lambda: False, timeout)


def on_event(timeout: float | None) -> None:
    """The same."""
    Event().wait(timeout)


def on_future(timeout: float | None) -> None:
    """The same."""
    result_of(Future(), timeout)


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


@pytest.mark.parametrize("wait", [on_condition, on_event, on_future])
@pytest.mark.parametrize("timeout", [None, TIMEOUT])
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
        assert not condition.wait(0.3)
        assert not condition.wait_for(lambda: False, 0.6)
    threading.Timer(0.7, event.set).start()
    assert event.wait(TIMEOUT)

    def tell() -> None:
        with condition:
            condition.notify_all()

    with condition:
        threading.Timer(0.7, tell).start()
        assert condition.wait()


def test_futures() -> None:
    """What they come to, whatever that is; a wait alone raises nothing."""
    future: Future[int] = Future()
    assert not wait_for(future, 0)
    with pytest.raises(TimeoutError, match=r"not done within 0.6 s"):
        result_of(future, 0.6)
    threading.Timer(0.7, future.set_result, (3,)).start()
    assert result_of(future) == 3
    failed: Future[int] = Future()
    failed.set_exception(ValueError("seven"))
    assert wait_for(failed)
    with pytest.raises(ValueError, match="seven"):
        result_of(failed, TIMEOUT)


@pytest.mark.parametrize("timeout", [math.nan, "1", True])
def test_a_wait_for_what_is_no_number_of_seconds(timeout: Any) -> None:
    """It is refused: it would be over at once, or never."""
    with pytest.raises(ValueError, match=r"^timeout is .*; it must be a number of seconds, or None$"):
        wait_for(Future(), timeout)


@pytest.mark.parametrize("timeout", [None, TIMEOUT])
def test_a_notification_as_a_slice_of_the_wait_ends_is_not_missed(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has timed out, and has not the lock again: who notifies now takes it for one that still waits."""
    condition, ended, results, come = Condition(), threading.Event(), list[bool](), False
    restore = condition._acquire_restore  # type: ignore[attr-defined]

    def note(state: object) -> None:
        ended.set()
        restore(state)

    monkeypatch.setattr(condition, "_acquire_restore", note)

    def wait() -> None:
        with condition:
            results.append(condition.wait_for(lambda: come, timeout))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    while not condition._waiters:  # type: ignore[attr-defined]
        pass
    with condition:
        assert ended.wait(TIMEOUT)
        come = True
        condition.notify_all()
    waiter.join(TIMEOUT)
    assert results == [True]
