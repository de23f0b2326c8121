"""The decisions of the state manager. Pure: told what happened and when, it says what to do.

States of an update, with a log:

    refused --------> (the log is broken: no update is taken until a generation is saved)
    taken(ticket) --> applied, its record queued --> flushed --> acknowledged
                                                \\--> the log broke --> not acknowledged

A repetition of an update that was applied already is acknowledged once the log is whole and all tickets that were open
when it arrived are closed: the first copy may still be on its way to the log. A generation that begins when no ticket
is open holds all that a broken log lacks, and so repairs it. Without a log every update is taken and acknowledged at
once.

A generation is due when something has changed, and `every` seconds, and nine times what the last one took, have passed
since that one: so saving takes at most a tenth of a thread, whatever the size of the state. A request to save (by a
creation or a stop) is served at once. After a failure the next one is due as after a success.

    idle --change--> due(at) --its time, or requested--> saving --saved--> idle, or due if more has changed
                                                              \\--failed--> due(later)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PAUSE_FACTOR = 9.0
"""The pause after a generation, in multiples of the time it took."""


@dataclass(slots=True)
class SavePlan:
    """When to save a generation."""

    every: float  # seconds between generations, if saving is quick
    saved: int = 0  # generations
    _changes: int = 0
    _saving: int | None = None  # changes that the generation in progress holds
    _persisted: int = 0  # changes that are saved
    _next: float = -math.inf
    _requested: int = 0  # changes that a caller waits for
    _began: float = 0.0
    _failed: int = 0  # changes that the last generation that failed would have saved
    failed: str = ""  # why the last generation was not saved; empty if it was

    def changed(self) -> int:
        """Note a change; return its number, to wait for."""
        self._changes += 1
        return self._changes

    def request(self) -> int:
        """Note that a caller waits for all changes so far; return the number to wait for."""
        self._requested = self._changes
        return self._changes

    def is_saved(self, change: int) -> bool:
        """Return whether the change with this number is on disk."""
        return change <= self._persisted

    def has_failed(self, change: int) -> bool:
        """Return whether the last attempt to save the change with this number failed."""
        return self._persisted < change <= self._failed

    def due(self) -> float | None:
        """Return when to begin the next generation; -inf: now. None: not until something happens."""
        if self._saving is not None or self._changes == self._persisted:
            return None
        return -math.inf if self._requested > self._persisted else self._next

    def begin(self, now: float) -> None:
        """Begin a generation, which holds all changes so far."""
        assert self._saving is None, "two generations at once"
        self._saving, self._began = self._changes, now

    def end(self, now: float, error: str = "") -> None:
        """End the generation: it is saved, or failed with this error."""
        assert self._saving is not None, "no generation was begun"
        took = now - self._began
        self._next = now + max(self.every, PAUSE_FACTOR * took)
        if error:
            self._failed = self._saving
            if self._requested <= self._saving:  # those who wait get the error
                self._requested = self._persisted
        else:
            self._persisted = self._saving
            self.saved += 1
        self._saving, self.failed = None, error


@dataclass(slots=True)
class LogPlan:
    """Which updates may be taken, and which may be acknowledged."""

    broken: str = ""
    _last: int = 0
    _open: set[int] = field(default_factory=set)

    def take(self) -> int:
        """Take an update, and return its ticket. Must not be called while the log is broken."""
        assert not self.broken, "an update was taken while the log is broken"
        self._last += 1
        self._open.add(self._last)
        return self._last

    def close(self, ticket: int) -> None:
        """Close a ticket, whose record is flushed, or whose update changed nothing."""
        self._open.discard(ticket)

    def break_off(self, reason: str) -> None:
        """Mark the log as broken: the records of open tickets will not be written."""
        self.broken = reason

    def repaired(self) -> None:
        """Mark the log as whole: a generation is saved that began once the log was broken and `all_ended`."""
        self.broken = ""

    @property
    def all_ended(self) -> bool:
        """Whether all updates that were taken have ended, flushed or not."""
        return not self._open

    def horizon(self) -> int:
        """Return the ticket that must be `passed` before a repetition may be acknowledged."""
        return self._last

    def passed(self, horizon: int) -> bool:
        """Return whether all tickets up to this one are closed."""
        return min(self._open, default=horizon + 1) > horizon
