"""What the coordinator has seen of a job, for whoever looks on: what happened, how training goes, checkpoints.

Always kept, since it costs little and who looks on comes late: events as they happen, the newest only; the loss as it
is reported. A `Series` holds a number over the whole run in bounded memory, more coarsely the longer it is.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MAX_EVENTS = 300
MAX_DETAIL = 20_000
"""Characters of a traceback that are kept, its end."""

MAX_LOGS = 12
"""Numbers beside the loss that are shown of a training."""

MAX_POINTS = 300

RECENT = 4
"""Samples of which the rate of now is made."""

SAME_DEATH_SECONDS = 30.0
"""A broken connection and a process that ended within this time are one death."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        number: from 1, in order.
        time: seconds since the epoch.
        who: the task, such as "worker 1".
        kind: "up", "down", "retry", "error", "saved", or "note".
        text: in a line.
        detail: a traceback, or "".
    """

    number: int
    time: float
    who: str
    kind: str
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Training:
    """How far a loop is, as it has last said."""

    label: str = ""
    done: int = 0
    total: int | None = None
    unit: str = "step"
    logs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written."""

    path: str
    time: float
    seconds: float
    pause_seconds: float
    nbytes: int


class EventLog:
    """Record what happens in one job. Any thread may call it; nothing here waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._errors: deque[Event] = deque(maxlen=MAX_EVENTS // 10)  # of their own: no flood of retries drives them out
        self._deaths: dict[str, int] = {}
        self._exits: dict[str, str] = {}  # of tasks that are down: how their processes ended
        self._saved: deque[Saved] = deque(maxlen=20)
        self._unsaved: dict[str, str] = {}  # by folder
        self._training = Training()
        self._steps = 0
        self._examples = 0
        self._loss = [0.0, 0.0]  # sum and count since it was taken
        self.loss_name = "loss"
        self.began = time.time()
        self.since = time.monotonic()
        """The same, of the clock that never jumps."""

    def record(self, who: str, kind: str, text: str, detail: str = "") -> None:
        """Record that something happened; see `Event`."""
        with self._lock:
            if kind == "down" and who in self._exits:  # the launcher was first: this is the same death
                return
            self._add(who, kind, text, detail)

    def _add(self, who: str, kind: str, text: str, detail: str = "") -> None:
        event = Event(next(self._numbers), time.time(), who, kind, text[:2000], detail[-MAX_DETAIL:])
        self._events.append(event)
        if kind == "error":
            self._errors.append(event)
        elif kind == "down":
            self._deaths[who] = self._deaths.get(who, 0) + 1
        elif kind == "up":
            self._exits.pop(who, None)

    def exited(self, who: str, text: str) -> None:
        """Record how a task's process ended, in its launcher's words.

        They take the place of what its connections said of the same death, which is what came of it.
        """
        with self._lock:
            story = [at for at, event in enumerate(self._events) if event.who == who and event.kind in ("up", "down")]
            went = next((at for at in reversed(story) if self._events[at].kind == "down"), None)
            if went is None or time.time() - self._events[went].time > SAME_DEATH_SECONDS:
                self._add(who, "down", text)
                self._exits[who] = text
                return
            self._events[went] = replace(self._events[went], text=text[:2000])
            if story[-1] == went:  # it is not back yet
                self._exits[who] = text

    def saved(self, checkpoint: Saved) -> None:
        """A checkpoint was written."""
        with self._lock:
            self._saved.append(checkpoint)
            self._unsaved.pop(os.path.dirname(checkpoint.path), None)
        self.record("coordinator", "saved", f"saved {checkpoint.path}")

    def not_saved(self, path: str, why: str) -> None:
        """A checkpoint was not written. That stands until one is, in the same folder."""
        text = f"the checkpoint {path} was not written: {why}"
        with self._lock:
            self._unsaved[os.path.dirname(path)] = text
        self.record("coordinator", "error", text)

    def trained(self, training: Training, *, steps: int = 0, examples: int = 0) -> None:
        """Record how far a loop is. Its first number is taken for the loss, unless one has that name.

        Args:
            steps, examples: done since the last call; examples only where the loop knows them.
        """
        # Numbers, whatever they come as: a tensor would keep its graph.
        logs = {name: float(value) for name, value in itertools.islice(training.logs.items(), MAX_LOGS)}
        with self._lock:
            self._training = replace(training, logs=logs)
            self._steps += steps
            self._examples += examples
            name = "loss" if "loss" in logs else next(iter(logs), None)
            if name is not None:
                if name != self.loss_name:
                    self.loss_name, self._loss = name, [0.0, 0.0]
                self._loss[0] += logs[name]
                self._loss[1] += 1

    def take_loss(self) -> tuple[float, float]:
        """The sum of what was reported since the last time, and how often."""
        with self._lock:
            (total, count), self._loss = self._loss, [0.0, 0.0]
        return total, count

    @property
    def steps(self) -> tuple[int, int]:
        """Steps that loops have done, and examples in them."""
        with self._lock:
            return self._steps, self._examples

    @property
    def exits(self) -> dict[str, str]:
        """How the processes of the tasks that are down ended, as far as their launcher said so."""
        with self._lock:
            return dict(self._exits)

    @property
    def training(self) -> Training:
        """As it was last told."""
        return self._training

    @property
    def checkpoints(self) -> list[Saved]:
        """The last ones, the newest at the end."""
        with self._lock:
            return list(self._saved)

    @property
    def unsaved(self) -> list[str]:
        """Of each folder whose last checkpoint was not written, what was said of it."""
        with self._lock:
            return list(self._unsaved.values())

    @property
    def events(self) -> list[Event]:
        """The last ones, the newest at the end."""
        with self._lock:
            return list(self._events)

    @property
    def errors(self) -> list[Event]:
        """The last ones, the newest at the end."""
        with self._lock:
            return list(self._errors)

    @property
    def deaths(self) -> dict[str, int]:
        """How often each task was lost."""
        with self._lock:
            return dict(self._deaths)


@dataclass(slots=True)
class _Point:
    begin: float
    end: float
    done: int
    loss: float
    losses: float


class Series:
    """Functions done, and the loss, over time, which is that of a clock that never jumps. Pure.

    When it is full two points each become one, and from then on a point takes twice as long. What is so now comes from
    the last samples, whatever a point takes.

    Attributes:
        loss: the mean of the last sample that had any; None: nothing was reported.
    """

    def __init__(self, now: float, done: int = 0, max_points: int = MAX_POINTS) -> None:
        self._origin = now, done
        self._max_points = max_points
        self._span = 0.0
        self._points: list[_Point] = []
        self._recent = deque([(now, done, 0, 0)], maxlen=RECENT)
        self.loss: float | None = None

    def add(
        self, now: float, done: int, loss: tuple[float, float] = (0.0, 0.0), steps: tuple[int, int] = (0, 0)
    ) -> None:
        """Take a sample.

        Args:
            now: seconds, monotonic.
            done: functions, in all.
            loss: the sum of what was reported since the last sample, and how often.
            steps: steps and examples that loops have done, in all.
        """
        self._recent.append((now, done, *steps))
        if loss[1]:
            self.loss = loss[0] / loss[1]
        points = self._points
        begin = points[-1].end if points else self._origin[0]
        if points and now - points[-1].begin <= self._span:
            last = points[-1]
            last.end, last.done, last.loss, last.losses = now, done, last.loss + loss[0], last.losses + loss[1]
            return
        points.append(_Point(begin, now, done, *loss))
        if len(points) > self._max_points:
            self._span = 2 * max(self._span, (points[-1].end - self._origin[0]) / len(points))
            self._points = [_merged(*points[at : at + 2]) for at in range(0, len(points), 2)]

    @property
    def rate(self) -> float:
        """Functions a second, lately."""
        return self._lately(1)

    @property
    def step_rate(self) -> float | None:
        """Steps a second, lately; None: no loop has said any."""
        return self._lately(2) if self._recent[-1][2] else None

    @property
    def example_rate(self) -> float | None:
        """Examples a second, lately; None: no loop has said any."""
        return self._lately(3) if self._recent[-1][3] else None

    def _lately(self, column: int) -> float:
        first, last = self._recent[0], self._recent[-1]
        return (last[column] - first[column]) / (last[0] - first[0]) if last[0] > first[0] else 0.0

    def curve(self) -> list[float]:
        """Functions a second as they are drawn: as `rows` has them, but single samples as the mean of the last few.

        The last one is the rate of now, so that the curve ends where the number beside it is.
        """
        before = [self._origin, *((point.end, point.done) for point in self._points)]
        back = 1 if self._span else RECENT - 1
        rates = []
        for at, point in enumerate(self._points, start=1):
            then, done = before[max(at - back, 0)]
            rates.append((point.done - done) / (point.end - then) if point.end > then else 0.0)
        return [*rates[:-1], self.rate] if rates else []

    def rows(self) -> tuple[list[float], list[float], list[float | None]]:
        """Times (of the ends of points), functions a second, and mean losses (None: nothing was reported)."""
        times, rates, losses = [], [], list[float | None]()
        before = self._origin[1]
        for point in self._points:
            seconds = point.end - point.begin
            times.append(point.end)
            rates.append((point.done - before) / seconds if seconds > 0 else 0.0)
            losses.append(point.loss / point.losses if point.losses else None)
            before = point.done
        return times, rates, losses


def _merged(first: _Point, second: _Point | None = None) -> _Point:
    if second is None:
        return first
    return _Point(first.begin, second.end, second.done, first.loss + second.loss, first.losses + second.losses)
