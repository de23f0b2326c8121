"""What the keeper of a server's state decides. Pure: it is told what happened and when, and says what to do.

States of an update, with a log:

    refused --------> (the log is broken: nothing is taken until a generation is saved)
    taken(ticket) --> applied, its record handed over --> flushed --> acknowledged
                                                     \\--> the log broke --> not acknowledged

A repetition of an update that was applied already is acknowledged when all tickets that were open as it came are
closed and the log is whole: the first copy may still be on its way there. A broken log is mended by a generation that
is begun when no ticket is open any more: it holds what the log lacks. Without a log every update is taken and
acknowledged at once.

When to save: something has changed, and `every` seconds, and nine times what the last saving took, have passed since:
so saving takes a tenth of a thread at most, whatever the size of the state. Whoever asks (a creation, a stop) is
served at once. After a failure it is tried again as after a success.

    idle --change--> due(at) --the time has come, or asked--> saving --saved--> idle, or due if more has changed
                                                                   \\--failed--> due(later)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PAUSE_FACTOR = 9.0
"""Saving pauses for so many times what it took."""


@dataclass(slots=True)
class SavePlan:
    """When to save a generation.

    Attributes:
        every: seconds between two, where saving is quick.
        saved: how many were saved, the number of the last included.
    """

    every: float
    saved: int = 0
    _changes: int = 0
    _saving: int | None = None  # how many changes the generation in the making has seen
    _kept: int = 0  # changes that are saved
    _next: float = -math.inf
    _asked: int = 0  # changes up to which somebody waits
    _began: float = 0.0
    _failed: int = 0  # changes that the last generation that failed would have saved
    failed: str = ""

    def changed(self) -> int:
        """Something is to be saved. The number to wait for."""
        self._changes += 1
        return self._changes

    def ask(self) -> int:
        """Somebody waits for all changes so far: the number to wait for."""
        self._asked = self._changes
        return self._changes

    def is_saved(self, change: int) -> bool:
        """Is the change with this number on disk?"""
        return change <= self._kept

    def has_failed(self, change: int) -> bool:
        """Was it tried to save the change with this number, in vain?"""
        return self._kept < change <= self._failed

    def due(self) -> float | None:
        """When to begin the next generation; None: not before something happens. -inf: now."""
        if self._saving is not None or self._changes == self._kept:
            return None
        return -math.inf if self._asked > self._kept else self._next

    def begin(self, now: float) -> None:
        """A generation is begun: it holds all changes so far."""
        assert self._saving is None, "two generations at once"
        self._saving, self._began = self._changes, now

    def end(self, now: float, error: str = "") -> None:
        """It is saved, or, for the reason given, is not."""
        assert self._saving is not None, "no generation was begun"
        took = now - self._began
        self._next = now + max(self.every, PAUSE_FACTOR * took)
        if error:
            self._failed = self._saving
            self._asked = self._asked if self._asked > self._saving else self._kept  # who waits is told
        else:
            self._kept = self._saving
            self.saved += 1
        self._saving, self.failed = None, error


@dataclass(slots=True)
class LogPlan:
    """Which updates may be taken, and which acknowledged."""

    broken: str = ""
    _last: int = 0
    _open: set[int] = field(default_factory=set)

    def take(self) -> int:
        """An update is to be applied: its ticket. To be asked only while the log is not broken."""
        assert not self.broken, "an update was taken while the log is broken"
        self._last += 1
        self._open.add(self._last)
        return self._last

    def close(self, ticket: int) -> None:
        """Its record is flushed, or it changed nothing."""
        self._open.discard(ticket)

    def break_off(self, reason: str) -> None:
        """A record could not be written: what is open never will be."""
        self.broken = reason

    def mended(self) -> None:
        """A generation is saved that was begun after the log broke and was `settled`: it holds what the log lacks."""
        self.broken = ""

    @property
    def settled(self) -> bool:
        """Have all updates that were taken ended, one way or the other?"""
        return not self._open

    def horizon(self) -> int:
        """For a repetition: it may be acknowledged once `passed` this."""
        return self._last

    def passed(self, horizon: int) -> bool:
        """Are all tickets up to this one closed?"""
        return min(self._open, default=horizon + 1) > horizon
