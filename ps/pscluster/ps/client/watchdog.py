"""Ends exchanges with parameter servers that overstay, or whose server does not answer any more.

What waits on a stream has no timeout of its own, and the kernel of a machine takes what is sent to a process that is
frozen. A server that is at work on a slow request, or to which a large one is still under way, is none of these: so
while nothing comes it is asked, on a connection of its own, whether it answers at all.

    begun   --an answer--> ended
    begun   --nothing has come for a while--> silent: the server is asked, again and again
    silent  --it answers, or something comes--> begun
    silent  --neither, for as long as the server may be gone--> given up, with `SilentError`
    any     --its deadline has passed--> given up: it is tried again, on another connection

Time is counted in looks, not by the clock: a process that was stopped itself has not been waiting.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import grpc

from pscluster.core.awake import AwakeTime
from pscluster.core.errors import UnavailableError

LOOK_SECONDS = 0.5

_MOST_ASKING_SECONDS = 5.0


class SilentError(UnavailableError):
    """A server has not answered.

    Attributes:
        seconds: for how long nothing was heard of it.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it has not answered for {seconds:.0f} s")
        self.seconds = seconds


class Liveness:
    """Whether one server answers at all.

    Args:
        answers: asks it, for so many seconds at most; is called on a thread of its own.
        patience: seconds for which it may be gone.

    Attributes:
        heard: how often it has answered.
        unheard: how often it has not.
    """

    def __init__(self, answers: Callable[[float], bool], patience: float) -> None:
        self._answers = answers
        self.patience = patience
        self.heard = self.unheard = 0
        self._asking = threading.Lock()  # held while it is asked

    @property
    def ask_after(self) -> float:
        """Seconds of silence behind which it is worth to ask: seldom, where it may be gone for long."""
        return max(1.0, self.patience / 8)

    def ask(self) -> None:
        """Begin to ask, if nobody does."""
        if self._asking.acquire(blocking=False):
            threading.Thread(target=self._ask, name="ps-liveness", daemon=True).start()

    def _ask(self) -> None:
        try:
            if self._answers(min(_MOST_ASKING_SECONDS, max(1.0, self.patience / 4))):
                self.heard += 1
            else:
                self.unheard += 1
        finally:
            self._asking.release()


class Verdict(Enum):
    """What is to be done about an exchange."""

    GO_ON = auto()
    ASK = auto()
    GIVE_UP = auto()


class Exchange:
    """Something that was asked of a server, by one thread, which waits; watched from its first `begin` on.

    Args:
        cancel: ends the wait, whichever thread calls it.
    """

    def __init__(self, liveness: Liveness, cancel: Callable[[], object]) -> None:
        self._liveness, self._cancel = liveness, cancel
        self._deadline = math.inf  # inf: nobody waits
        self._silent = 0.0
        self._heard = self._unheard = 0
        self._gave_up: float | None = None

    def begin(self, timeout: float) -> None:
        """From now on it is waited for, for so many seconds at most."""
        self._silent, self._heard, self._unheard = 0.0, self._liveness.heard, self._liveness.unheard
        self._deadline = time.monotonic() + timeout

    def progress(self) -> None:
        """Something has come, or gone."""
        self._silent = 0.0

    def end(self) -> None:
        """Nobody waits any more."""
        self._deadline = math.inf

    def look(self, step: float, now: float) -> Verdict:
        """What is to be done, so many seconds behind the last look."""
        if self._deadline == math.inf:
            return Verdict.GO_ON
        self._silent += step
        if self._liveness.heard != self._heard:
            self._heard, self._silent = self._liveness.heard, 0.0
        # To be gone for less than it takes to find out is no reason.
        silent = self._silent >= self._liveness.patience and self._liveness.unheard > self._unheard
        if silent or self._deadline < now:
            return Verdict.GIVE_UP
        return Verdict.ASK if self._silent >= self._liveness.ask_after else Verdict.GO_ON

    def ask(self) -> None:
        """Find out whether the server answers."""
        self._liveness.ask()

    def give_up(self) -> None:
        """By the watchdog, while the thread that uses it waits."""
        self._gave_up = self._silent
        self._cancel()

    def check(self) -> None:
        """UnavailableError if it was given up; a SilentError if nothing was heard of the server."""
        if self._gave_up is not None:
            if self._gave_up < self._liveness.ask_after:
                raise UnavailableError("no answer came in time") from None
            raise SilentError(self._gave_up) from None


class Watchdog:
    """Looks at all exchanges."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Exchange] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, exchange: Exchange) -> None:
        """For as long as it is there."""
        with self._lock:
            self._watched.add(exchange)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="session-watchdog", daemon=True)
                self._thread.start()

    @contextmanager
    def call(self, liveness: Liveness, cancel: Callable[[], object], timeout: float) -> Iterator[Exchange]:
        """Watch a call for the block, which waits for it, and raises SilentError if it was given up."""
        exchange = Exchange(liveness, cancel)
        self.watch(exchange)
        exchange.begin(timeout)
        try:
            yield exchange
        except (grpc.RpcError, grpc.FutureCancelledError):
            exchange.check()
            raise
        finally:
            exchange.end()

    def _run(self) -> None:
        awake = AwakeTime(LOOK_SECONDS)
        while True:
            time.sleep(LOOK_SECONDS)
            step, now = awake.look(), time.monotonic()
            with self._lock:
                found = [(exchange, exchange.look(step, now)) for exchange in self._watched]
            for exchange, verdict in found:
                if verdict is Verdict.ASK:
                    exchange.ask()
                elif verdict is Verdict.GIVE_UP:
                    exchange.give_up()


watchdog = Watchdog()
