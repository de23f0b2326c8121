"""Evaluation beside a job: a process of its own, anywhere, looks for new checkpoints and computes what they are worth.

Nothing in the cluster knows of it or waits for it. It only reads the directory of checkpoints, and whatever happens
there is to be expected: checkpoints are removed while they are read, another job begins, the disk does not answer.

    the newest one that was not evaluated -> fn(its variables) -> event files, a line of evaluations.jsonl
    (every=True: the oldest)                 whatever fails before the line is there is done again by its successor
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec

from pscluster.coordinator.checkpoints import folder
from pscluster.coordinator.checkpoints.saved import SavedVariables
from pscluster.coordinator.training.events import AppendedFile, EventWriter
from pscluster.core.errors import CheckpointError, ConfigurationError, MisuseError, WaitTimeoutError

logger = logging.getLogger(__name__)

RESULTS = "evaluations.jsonl"
SAID_SECONDS = 30.0
"""Between two lines of the log that say that there is nothing new."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a checkpoint was worth.

    Attributes:
        checkpoint: its path.
        number: its number.
        created: when it was made, in ISO 8601.
        time: when it had been evaluated, in ISO 8601.
        seconds: how long that took.
        values: what `fn` gave, by name.
    """

    checkpoint: str
    number: int
    created: str
    time: str
    seconds: float
    values: dict[str, float]

    def to_json(self) -> str:
        """One line. JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity"."""
        values = {name: value if math.isfinite(value) else _NAMES[str(value)] for name, value in self.values.items()}
        return json.dumps({**asdict(self), "values": values}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Evaluation:
        """What `to_json` gave. ValueError, TypeError or another LookupError if it did not."""
        found = json.loads(line)
        return cls(**{**found, "values": {name: float(value) for name, value in found["values"].items()}})


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class SidecarEvaluator:
    """Evaluates checkpoints as they appear in a directory, beside the job that makes them, on this or another host.

    Every result is a line of `log_dir/evaluations.jsonl` (see `Evaluation`) and, if tensorboardX is installed, in an
    event file beside it, as of the checkpoint's number. An evaluator that is started again reads these lines, and does
    not evaluate these checkpoints again. Two at a time need a `log_dir` each.

    Args:
        fn: is given the `SavedVariables` of a checkpoint; gives a number, or a mapping of names to numbers.
        directory: that of a `CheckpointManager`; need not exist yet. A path or a URL of fsspec.
        every: every checkpoint, in order; otherwise the newest only, which leaves out those made meanwhile.
        log_dir: a path or a URL of fsspec; default: DIRECTORY/evaluations.
        max_evaluations: ends after so many.
        poll: seconds between two looks into the directory.
        timeout: seconds without a new checkpoint, after which it gives up; None: it never does.

    Raises:
        ConfigurationError: an argument is out of its range, or is no place that can be reached.
    """

    def __init__(
        self,
        fn: Callable[[SavedVariables], Mapping[str, float] | float],
        directory: str | Path,
        *,
        every: bool = False,
        log_dir: str | Path | None = None,
        max_evaluations: int | None = None,
        poll: float = 1.0,
        timeout: float | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigurationError(f"fn is {fn!r}; give a function of a checkpoint's variables")
        if max_evaluations is not None and max_evaluations < 1:
            raise ConfigurationError(f"max_evaluations is {max_evaluations}; give 1 or more, or None for no limit")
        if not poll > 0:
            raise ConfigurationError(f"poll is {poll}; give more than 0 seconds")
        if timeout is not None and not timeout > 0:
            raise ConfigurationError(f"timeout is {timeout}; give more than 0 seconds, or None")
        self.fn = fn
        self.directory = str(directory).rstrip("/")
        self.every = every
        self.log_dir = f"{self.directory}/evaluations" if log_dir is None else str(log_dir).rstrip("/")
        self.max_evaluations = max_evaluations
        self.poll = poll
        self.timeout = timeout
        for place in (self.directory, self.log_dir):
            try:
                fsspec.core.url_to_fs(place)
            except (ValueError, ImportError) as error:
                raise ConfigurationError(f"{place} can't be reached: {error}") from error
        self._passed: set[int] = set()  # of those that are there: evaluated, or not to be read
        self._trouble = ""

    def run(self) -> list[Evaluation]:
        """Evaluate until no more checkpoints come, as `CheckpointManager.finish` says. What was evaluated by this call.

        Raises:
            WaitTimeoutError: there was no new one for `timeout` seconds.
            MisuseError: what `fn` gives are no numbers.
            CheckpointError, ConfigurationError, OSError: the results can't be read or written.
            Exception: what `fn` raises, with a note of the checkpoint. A checkpoint that is removed or damaged is none
                of its faults: it is logged, and the next one waited for.
        """
        evaluations: list[Evaluation] = []
        with _Results(self.log_dir) as results:
            last = said = time.monotonic()
            while self.max_evaluations is None or len(evaluations) < self.max_evaluations:
                finished, number = self._look()
                if number is not None:
                    if (evaluation := self._evaluate(number, results)) is not None:
                        evaluations.append(evaluation)
                    last = said = time.monotonic()
                    continue
                if finished:
                    logger.info("no more checkpoints will come in %s", self.directory)
                    break
                now = time.monotonic()
                if self.timeout is not None and now - last >= self.timeout:
                    raise WaitTimeoutError(
                        f"no new checkpoint in {self.directory} for {self.timeout:g} s{self._trouble and ': '}"
                        f"{self._trouble}; {len(evaluations)} were evaluated. Is the job still running? A job that "
                        "has ended calls CheckpointManager.finish()"
                    )
                if now - said >= SAID_SECONDS:
                    said = now
                    logger.info("no new checkpoint in %s for %.0f s", self.directory, now - last)
                time.sleep(self.poll if self.timeout is None else min(self.poll, last + self.timeout - now))
        return evaluations

    def _look(self) -> tuple[bool, int | None]:
        """Will no more come, and which one is to be evaluated, if any?"""
        try:
            finished = folder.is_finished(self.directory)  # first: one that comes in between is not overlooked
            there = folder.numbers(self.directory, whole=True)
        except CheckpointError as error:
            if str(error) != self._trouble:
                logger.warning("%s; trying again", error)
            self._trouble = str(error)
            return False, None
        self._trouble = ""
        self._passed &= set(there)
        return finished, next_of(there, self._passed, every=self.every)

    def _evaluate(self, number: int, results: _Results) -> Evaluation | None:
        self._passed.add(number)
        path = folder.path_of(self.directory, number)
        try:
            saved = SavedVariables(path)
        except CheckpointError as error:
            _pass_over(path, error)
            return None
        if (saved.number, saved.created) in results.known:
            return None
        begin = time.monotonic()
        try:
            values = _values(self.fn(saved))
        except Exception as error:
            failure = saved.failure
            if failure is None and isinstance(error, FileNotFoundError) and _is_gone(path):
                failure = CheckpointError(str(error))  # fn has opened the files by itself
            if failure is None:
                error.add_note(f"This was raised while {path} was evaluated.")
                raise
            _pass_over(path, failure)
            return None
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        seconds = round(time.monotonic() - begin, 6)
        evaluation = Evaluation(path, saved.number, saved.created, now, seconds, values)
        results.add(evaluation)
        shown = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        logger.info("%s: %s (%.1f s)", path, shown, seconds)
        return evaluation


def next_of(there: list[int], passed: set[int], *, every: bool) -> int | None:
    """Which of the checkpoints that are there, in order, is to be evaluated next."""
    wanted = there if every else there[-1:]
    return next((number for number in wanted if number not in passed), None)


def _is_gone(path: str) -> bool:
    try:
        return not folder.exists(path, folder.INDEX)
    except CheckpointError:
        return False


def _pass_over(path: str, error: CheckpointError) -> None:
    if _is_gone(path):
        logger.warning("skipping %s: it was removed before it could be evaluated", path)
    else:
        logger.error("%s can't be evaluated: %s", path, error)


def _values(given: Any) -> dict[str, float]:
    """What `fn` gave, by name; a number alone is named "value"."""
    found = given if isinstance(given, Mapping) else {"value": given}
    values = {}
    for name, value in found.items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            values[name] = float(value)
        except (TypeError, ValueError):
            raise MisuseError(
                f"fn gave {value!r} for {name!r}; give a number, or a mapping of names to numbers"
            ) from None
    return values


class _Results:
    """What was evaluated, as lines and as events.

    Attributes:
        known: number and time of the checkpoints that were, by evaluators before this one, too.
    """

    def __init__(self, log_dir: str) -> None:
        self.known: set[tuple[int, str]] = set()
        self._log_dir = log_dir
        path = f"{log_dir}/{RESULTS}"
        for line in _whole_lines(path):
            try:
                evaluation = Evaluation.from_json(line)
            except (ValueError, TypeError, LookupError, AttributeError):
                logger.warning("%s has a line that was not written by an evaluator: %.80s", path, line)
            else:
                self.known.add((evaluation.number, evaluation.created))
        self._lines = AppendedFile(path)
        self._events: EventWriter | None = None
        if not EventWriter.available():
            logger.info("no event files are written: tensorboardX is not installed")

    def add(self, evaluation: Evaluation) -> None:
        """Write it. The line comes last: where it is, all is."""
        if self._events is None and EventWriter.available():
            self._events = EventWriter(self._log_dir)
        if self._events is not None:
            self._events.scalars(evaluation.number, evaluation.values)
        self._lines.write(f"{evaluation.to_json()}\n".encode())
        self._lines.flush()
        self.known.add((evaluation.number, evaluation.created))

    def __enter__(self) -> _Results:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.closing(self._lines):
            if self._events is not None:
                self._events.close()


def _whole_lines(path: str) -> list[str]:
    """Of an earlier evaluator. One that it did not end is removed. CheckpointError if that can't be."""
    with folder.written(path):
        fs, place = fsspec.core.url_to_fs(path)
        if not folder.there(fs, place):
            return []
        data: bytes = fs.cat_file(place)
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            folder.written_aside(path, whole)()
        return whole.decode(errors="replace").splitlines()
