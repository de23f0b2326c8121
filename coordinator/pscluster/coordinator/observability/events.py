"""The coordinator's record of a job, for the live page: events, the progress of training, checkpoints.

It is always written, since it costs little and pages are opened late.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MAX_EVENTS, MAX_ERRORS, MAX_CHECKPOINTS = 300, 30, 20
MAX_DETAIL = 20_000  # characters of a traceback that are recorded: its end
MAX_LOGS = 12  # numbers that are recorded of a training, including the loss
MAX_POINTS = 300

RECENT = 4  # samples from which the current rate is computed
SAME_DEATH_SECONDS = 30.0  # a broken connection and the end of a process within this time are one death


@dataclass(frozen=True, slots=True)
class Event:
    number: int  # from 1
    time: float  # seconds since the epoch
    who: str  # the task, such as "worker 1"
    kind: str  # "up", "down", "retry", "error", "saved", or "note"
    text: str  # one line
    detail: str = ""  # a traceback


@dataclass(frozen=True, slots=True)
class Training:
    label: str = ""
    done: int = 0
    total: int | None = None
    unit: str = "step"
    logs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    path: str
    time: float
    seconds: float
    pause_seconds: float
    nbytes: int


class EventLog:
    """Record what happens in one job. Any thread may call it; nothing here waits.

    Lists and mappings are replaced, never changed, so that they can be read without the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.events: list[Event] = []  # the latest ones, the newest last; so, too, errors and checkpoints
        self.errors: list[Event] = []  # separate, so that a flood of retries does not push them out
        self.checkpoints: list[Saved] = []
        self.unsaved: dict[str, str] = {}  # why the last checkpoint was not written, for each folder where that is so
        self.deaths: dict[str, int] = {}  # how often each task was lost
        self._lost_at: dict[str, float] = {}  # when each task was last lost, in monotonic seconds
        self.exits: dict[str, str] = {}  # how the processes of tasks that are down ended, as their launcher reports it
        self.training = Training()  # as last reported
        self.steps = 0, 0  # that loops have done, and the examples in them
        self._loss = [0.0, 0.0]  # sum and count since the last `take_loss`
        self.loss_name = "loss"
        self.began = time.time()
        self.since = time.monotonic()  # the same moment

    def record(self, who: str, kind: str, text: str, detail: str = "") -> None:
        with self._lock:
            if kind == "down" and who in self.exits:  # the launcher has reported this death already
                return
            self._add(who, kind, text, detail)

    def _add(self, who: str, kind: str, text: str, detail: str = "") -> None:
        event = Event(next(self._numbers), time.time(), who, kind, text[:2000], detail[-MAX_DETAIL:])
        self.events = [*self.events, event][-MAX_EVENTS:]
        if kind == "error":
            self.errors = [*self.errors, event][-MAX_ERRORS:]
        elif kind == "down":
            self.deaths = {**self.deaths, who: self.deaths.get(who, 0) + 1}
            self._lost_at[who] = time.monotonic()
        elif kind == "up":
            self.exits = {task: text for task, text in self.exits.items() if task != who}

    def exited(self, who: str, text: str) -> None:
        """Record how a task's process ended, as its launcher reports it.

        The report replaces the event of the lost connection, which is a consequence of the same death.
        """
        with self._lock:
            events = list(self.events)
            story = [at for at, event in enumerate(events) if event.who == who and event.kind in ("up", "down")]
            went = next((at for at in reversed(story) if events[at].kind == "down"), None)
            if went is None or time.monotonic() - self._lost_at[who] > SAME_DEATH_SECONDS:
                self._add(who, "down", text)
                self.exits = {**self.exits, who: text}
                return
            events[went] = replace(events[went], text=text[:2000])
            self.events = events
            if story[-1] == went:  # it has not come back yet
                self.exits = {**self.exits, who: text}

    def saved(self, checkpoint: Saved) -> None:
        with self._lock:
            self.checkpoints = [*self.checkpoints, checkpoint][-MAX_CHECKPOINTS:]
            written = os.path.dirname(checkpoint.path)
            self.unsaved = {folder: why for folder, why in self.unsaved.items() if folder != written}
        self.record("coordinator", "saved", f"saved {checkpoint.path}")

    def not_saved(self, path: str, why: str) -> None:
        """Record that a checkpoint was not written; `unsaved` has it until one is written to the same folder."""
        text = f"the checkpoint {path} was not written: {why}"
        with self._lock:
            self.unsaved = {**self.unsaved, os.path.dirname(path): text}
        self.record("coordinator", "error", text)

    def trained(self, training: Training, *, steps: int = 0, examples: int = 0) -> None:
        """Record the progress of a loop, and what it has done since the last call.

        The loss is the number of that name, else the first one.
        """
        # Convert to float: a tensor would keep its graph alive.
        logs = {name: float(value) for name, value in itertools.islice(training.logs.items(), MAX_LOGS)}
        with self._lock:
            self.training = replace(training, logs=logs)
            self.steps = self.steps[0] + steps, self.steps[1] + examples
            name = "loss" if "loss" in logs else next(iter(logs), None)
            if name is not None:
                if name != self.loss_name:
                    self.loss_name, self._loss = name, [0.0, 0.0]
                self._loss[0] += logs[name]
                self._loss[1] += 1

    def take_loss(self) -> tuple[float, float]:
        """Return the sum and the count of the losses reported since the last call."""
        with self._lock:
            (total, count), self._loss = self._loss, [0.0, 0.0]
        return total, count


@dataclass(frozen=True, slots=True)
class _Point:
    begin: float
    end: float
    done: int
    loss: float
    losses: float


class Series:
    """Functions done, and the loss, over monotonic time. Pure.

    When it is full, pairs of points are merged, and from then on a point spans twice as long. Current values come from
    the last samples, independent of that span.
    """

    def __init__(self, now: float, done: int = 0, max_points: int = MAX_POINTS) -> None:
        self._origin = now, done
        self._max_points = max_points
        self._span = 0.0
        self._points: list[_Point] = []
        self._recent = deque([(now, done, 0, 0)], maxlen=RECENT)
        self.loss: float | None = None  # the mean of the last sample that had losses

    def add(
        self, now: float, done: int, loss: tuple[float, float] = (0.0, 0.0), steps: tuple[int, int] = (0, 0)
    ) -> None:
        """Add a sample: the functions done; sum and count of the losses since the last; steps and examples done."""
        self._recent.append((now, done, *steps))
        if loss[1]:
            self.loss = loss[0] / loss[1]
        points = self._points
        begin = points[-1].end if points else self._origin[0]
        if points and now - points[-1].begin <= self._span:
            points[-1] = _merged(points[-1], _Point(begin, now, done, *loss))
            return
        points.append(_Point(begin, now, done, *loss))
        if len(points) > self._max_points:
            self._span = 2 * max(self._span, (points[-1].end - self._origin[0]) / len(points))
            self._points = [_merged(*points[at : at + 2]) for at in range(0, len(points), 2)]

    @property
    def rate(self) -> float:
        """The current rate, in functions per second."""
        return self._recent_rate(1)

    @property
    def step_rate(self) -> float | None:
        """The current rate, in steps per second; None: no loop has reported any."""
        return self._recent_rate(2) if self._recent[-1][2] else None

    @property
    def example_rate(self) -> float | None:
        """The current rate, in examples per second; None: no loop has reported any."""
        return self._recent_rate(3) if self._recent[-1][3] else None

    def _recent_rate(self, column: int) -> float:
        first, last = self._recent[0], self._recent[-1]
        return (last[column] - first[column]) / (last[0] - first[0]) if last[0] > first[0] else 0.0

    def curve(self) -> list[float]:
        """Return functions per second for the curve: by point, but while points are samples averaged over the last few.

        The last one is the current rate, so that the curve ends at the number beside it.
        """
        before = [self._origin, *((point.end, point.done) for point in self._points)]
        back = 1 if self._span else RECENT - 1
        rates = []
        for at, point in enumerate(self._points, start=1):
            then, done = before[max(at - back, 0)]
            rates.append((point.done - done) / (point.end - then) if point.end > then else 0.0)
        return [*rates[:-1], self.rate] if rates else []

    def rows(self) -> tuple[list[float], list[float | None]]:
        """Return times (of the ends of points) and mean losses (None: none was reported)."""
        losses = [point.loss / point.losses if point.losses else None for point in self._points]
        return [point.end for point in self._points], losses


def _merged(first: _Point, second: _Point | None = None) -> _Point:
    if second is None:
        return first
    return _Point(first.begin, second.end, second.done, first.loss + second.loss, first.losses + second.losses)
