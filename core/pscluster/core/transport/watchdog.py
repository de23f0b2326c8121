"""Cancels calls that make no progress.

A call that waits for the other end, for the next message or for room to send, waits as long as the connection lasts,
and a peer that is alive and does nothing keeps it for ever. A server cancels such a call, since the call holds memory
and a thread. A client can't tell by silence alone: a parameter server may be at work on a slow request, or still
receiving a large one. While nothing comes, the client probes, on another connection, whether the server answers at all.

    idle    --begin--> waiting --end--> idle
    waiting --no progress for a while--> silent: the server is probed, again and again
    silent  --progress, or the server answers a probe--> waiting
    silent  --neither for as long as is allowed--> cancelled, with `SilentError`
    any     --its deadline has passed--> cancelled: the client tries again, on another connection
    any     --the server is given up--> cancelled

Where there is nothing to probe, a silent call is cancelled after the time that is allowed. `WatchedCall.check` decides;
one thread checks all calls of the process and acts. Time is counted in checks, not by the clock: a process that was
stopped itself has not been waiting.

A worker's lease is another matter: it is no call that ends, but the coordinator's hold on the worker; see
`WorkerConnection.until_silent`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from pscluster.core.awake import AwakeTime
from pscluster.core.errors import UnavailableError
from pscluster.core.transport.base import Cancellable

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5

_MAX_PROBE_SECONDS = 5.0


class SilentError(UnavailableError):
    """Nothing was heard from a server for `seconds` seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it has not answered for {seconds:.0f} s")
        self.seconds = seconds


class Liveness:
    """Whether one server answers at all: counts the probes that were `answered` and `unanswered`.

    `answers` probes it for at most the given seconds, on a separate thread. It may be unreachable for `max_silence`.
    """

    def __init__(self, answers: Callable[[float], bool], max_silence: float) -> None:
        self._answers = answers
        self.max_silence = max_silence
        self.probe_after = max(1.0, max_silence / 8)  # a probe takes a connection: rare where there is much time
        self.answered = self.unanswered = 0
        self.given_up = False  # all calls to the server are cancelled
        self._probing = threading.Lock()  # held during a probe

    def probe(self) -> None:
        """Start a probe, unless one is under way."""
        if self._probing.acquire(blocking=False):
            try:
                threading.Thread(target=self._probe, name="liveness", daemon=True).start()
            except BaseException:  # there are too many threads: the next check tries again
                self._probing.release()
                raise

    def _probe(self) -> None:
        try:
            if self._answers(min(_MAX_PROBE_SECONDS, max(1.0, self.max_silence / 4))):
                self.answered += 1
            else:
                self.unanswered += 1
        finally:
            self._probing.release()


class Action(Enum):
    """What a check decides to do about a call."""

    WAIT = auto()
    PROBE = auto()
    CANCEL = auto()


class WatchedCall:
    """A call, or an exchange on a stream, that at most one thread waits for.

    Args:
        cancel: ends the wait, whichever thread calls it. Called at every check until `end`: what it cancels may be
            opened only after the first.
        max_silence: seconds without progress after which the call is cancelled.
        liveness: of the server, which must also have left a probe unanswered since `begin`.
    """

    def __init__(self, cancel: Callable[[], object], max_silence: float, liveness: Liveness | None = None) -> None:
        self._cancel, self._max_silence, self._liveness = cancel, max_silence, liveness
        self._deadline: float | None = None  # None: idle
        self._silence = 0.0
        self._answered = self._unanswered = 0
        self._cancelled_after: float | None = None  # seconds of silence

    def begin(self, timeout: float = math.inf) -> None:
        """Begin to wait, for at most `timeout` seconds."""
        self._silence = 0.0
        if (liveness := self._liveness) is not None:
            self._answered, self._unanswered = liveness.answered, liveness.unanswered
        self._deadline = time.monotonic() + timeout

    def progress(self) -> None:
        self._silence = 0.0

    def end(self) -> None:
        self._deadline = None

    def check(self, seconds: float, now: float) -> Action:
        """Return what to do, `seconds` seconds after the last check."""
        deadline, liveness = self._deadline, self._liveness
        if deadline is None:
            return Action.WAIT
        self._silence += seconds
        if liveness is not None and liveness.answered != self._answered:
            self._answered, self._silence = liveness.answered, 0.0
        # A server that is silent for less time than a probe takes may be alive.
        is_silent = self._silence >= self._max_silence and (liveness is None or liveness.unanswered > self._unanswered)
        if is_silent or deadline < now or (liveness is not None and liveness.given_up):
            return Action.CANCEL
        return Action.PROBE if liveness is not None and self._silence >= liveness.probe_after else Action.WAIT

    def act(self, action: Action) -> None:
        """Do what a check has decided, on the watchdog's thread."""
        if action is Action.PROBE and self._liveness is not None:
            self._liveness.probe()
        elif action is Action.CANCEL:
            if self._liveness is None and self._cancelled_after is None:
                logger.warning("cancelled a call that made no progress for %.0f s", self._silence)
            self._cancelled_after = self._silence
            self._cancel()

    def raise_if_cancelled(self) -> None:
        """Raise UnavailableError if the watchdog cancelled the call: SilentError if the server was silent."""
        if self._cancelled_after is not None:
            if self._liveness is None or self._cancelled_after < self._liveness.probe_after:
                raise UnavailableError("no answer came in time") from None
            raise SilentError(self._cancelled_after) from None


class _Checks:
    """The thread that checks all watched calls; it starts with the first."""

    def __init__(self) -> None:
        self._watched: set[weakref.ref[WatchedCall]] = set()  # each call removes itself at its end
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, call: WatchedCall) -> WatchedCall:
        """Check a call for as long as it exists, and return it."""
        self._watched.add(weakref.ref(call, self._watched.discard))
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="stall-watchdog", daemon=True)
                    self._thread.start()
        return call

    def _run(self) -> None:
        awake = AwakeTime(CHECK_SECONDS)
        while True:
            time.sleep(CHECK_SECONDS)
            self._check_all(awake.check(), time.monotonic())

    def _check_all(self, seconds: float, now: float) -> None:
        for reference in self._watched.copy():  # a copy is one step of the interpreter: `add` needs no lock
            if (call := reference()) is None:
                continue
            try:
                call.act(call.check(seconds, now))
            except Exception:
                logger.exception("a watched call can't be cancelled")


watch = _Checks().add


class StallWatchdog:
    """Cancels a server's calls that make no progress for `seconds` seconds, or a little longer."""

    def __init__(self, seconds: float) -> None:
        self._max_silence = seconds + 2 * CHECK_SECONDS  # the first check may count so much of the time before

    @contextmanager
    def with_call(self, call: Cancellable) -> Iterator[Callable[[], None]]:
        """Watch a call for the block, which is given what to call whenever the call makes progress."""
        watched = watch(WatchedCall(call.cancel, self._max_silence))
        watched.begin()
        try:
            yield watched.progress
        finally:
            watched.end()
