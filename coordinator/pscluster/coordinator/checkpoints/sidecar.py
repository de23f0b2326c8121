"""Evaluation beside a job: a separate process, anywhere, polls for new checkpoints and evaluates them.

Nothing in the cluster knows of it or waits for it. It only reads the directory of checkpoints, and copes with whatever
happens there: checkpoints are removed while it reads them, another job begins, the disk does not answer.

    the newest one not yet evaluated -> fn(its variables) -> event files, a line of evaluations.jsonl
    (every=True: the oldest)            without that line, the next evaluator repeats it
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
from pscluster.coordinator.checkpoints.best import BestCheckpoint
from pscluster.coordinator.checkpoints.saved import SavedVariables
from pscluster.coordinator.training.callbacks.monitor import Mode
from pscluster.coordinator.training.events import EventWriter, appended_file
from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.errors import CheckpointError, ConfigurationError, MisuseError, WaitTimeoutError

logger = logging.getLogger(__name__)

RESULTS = "evaluations.jsonl"
LOG_SECONDS = 30.0  # the time between two log lines that there is no new checkpoint


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a checkpoint. Times are in ISO 8601."""

    checkpoint: str  # its path
    number: int
    created: str  # when the checkpoint was made
    time: str  # when the evaluation ended
    seconds: float  # how long it took
    values: dict[str, float]  # what `fn` returned, by name

    def to_json(self) -> str:
        """Return one line. JSON has no NaN and no infinities, which are the strings "NaN", "Infinity", "-Infinity"."""
        values = {name: value if math.isfinite(value) else _NAMES[str(value)] for name, value in self.values.items()}
        return json.dumps({**asdict(self), "values": values}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Evaluation:
        """Read a line of `to_json`. ValueError, TypeError, LookupError or AttributeError if it is not one."""
        body = json.loads(line)
        return cls(**{**body, "values": {name: float(value) for name, value in body["values"].items()}})


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class SidecarEvaluator:
    """Evaluates checkpoints as they appear in a directory, beside the job that makes them, on this or another host.

    Every result is a line of `log_dir/evaluations.jsonl` (see `Evaluation`) and, if tensorboardX is installed, in an
    event file beside it, with the checkpoint's number as its step. An evaluator that is started again skips the
    checkpoints of these lines. Concurrent evaluators need different `log_dir`s.

    Args:
        fn: takes the `SavedVariables` of a checkpoint; returns a number, or a mapping of names to numbers.
        directory: that of a `CheckpointManager`; need not exist yet. A path or a URL of fsspec.
        every: evaluate every checkpoint, in order; otherwise the newest only, skipping those made in the meantime.
        log_dir: a path or a URL of fsspec; default: DIRECTORY/evaluations.
        max_evaluations: the number after which it ends.
        poll: seconds between two checks of the directory.
        timeout: seconds without a new checkpoint after which it gives up; None: never.
        monitor: the name of a number that `fn` returns, "value" if it returns one alone: the checkpoint with the best
            one is copied to `best_dir`, where `SavedVariables(best_dir)` and a `CheckpointManager` find it. None: none.
        mode: whether the best one is the smallest ("min") or the largest ("max"); "auto": as the name suggests.
        best_dir: a path or a URL of fsspec; default: LOG_DIR/best.

    Raises:
        ConfigurationError: an argument is out of its range, or a path is of no known file system.
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
        monitor: str | None = None,
        mode: Mode = "auto",
        best_dir: str | Path | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigurationError(f"fn is {fn!r}; give a function of a checkpoint's variables")
        with configuration_errors():
            if max_evaluations is not None:
                max_evaluations = checks.whole("max_evaluations", max_evaluations, ", or None for no limit", at_least=1)
            poll = checks.real("poll", poll, kind="number of seconds", above=0)
            if timeout is not None:
                timeout = checks.real("timeout", timeout, ", or None", kind="number of seconds", finite=False, above=0)
        self.fn = fn
        self.directory = str(directory).rstrip("/")
        self.every = every
        self.log_dir = f"{self.directory}/evaluations" if log_dir is None else str(log_dir).rstrip("/")
        self.max_evaluations = max_evaluations
        self.poll = poll
        self.timeout = timeout
        self.best_dir = f"{self.log_dir}/best" if best_dir is None else str(best_dir).rstrip("/")
        if monitor is None and best_dir is not None:
            raise ConfigurationError(f"best_dir is {self.best_dir}, but nothing says what is best: give a monitor")
        if self.best_dir == self.directory:
            raise ConfigurationError(f"best_dir is {self.best_dir}, that of the checkpoints: give another one")
        self._best = None if monitor is None else BestCheckpoint(self.best_dir, monitor, mode)
        for path in (self.directory, self.log_dir, self.best_dir):
            try:
                fsspec.core.url_to_fs(path)
            except (ValueError, ImportError) as error:
                raise ConfigurationError(f"{path} can't be reached: {error}") from error
        self._handled: set[int] = set()  # of the existing checkpoints: evaluated or unreadable
        self._trouble = ""

    def run(self) -> list[Evaluation]:
        """Evaluate until `CheckpointManager.finish` records that no more checkpoints come; return the evaluations.

        A checkpoint that is removed or damaged while `fn` reads it is logged and skipped.

        Raises:
            WaitTimeoutError: there was no new checkpoint for `timeout` seconds.
            MisuseError: `fn` returned something else than numbers.
            CheckpointError, ConfigurationError, OSError: the results can't be read or written.
            Exception: whatever `fn` raises, with a note that names the checkpoint.
        """
        evaluations: list[Evaluation] = []
        with contextlib.closing(_Results(self.log_dir)) as results:
            if self._best is not None:
                self._best.begin()
            last = logged = time.monotonic()
            while self.max_evaluations is None or len(evaluations) < self.max_evaluations:
                finished, checkpoint_number = self._poll()
                if checkpoint_number is not None:
                    if (evaluation := self._evaluate(checkpoint_number, results)) is not None:
                        evaluations.append(evaluation)
                    last = logged = time.monotonic()
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
                if now - logged >= LOG_SECONDS:
                    logged = now
                    logger.info("no new checkpoint in %s for %.0f s", self.directory, now - last)
                time.sleep(self.poll if self.timeout is None else min(self.poll, last + self.timeout - now))
        return evaluations

    def _poll(self) -> tuple[bool, int | None]:
        """Return whether no more checkpoints will come, and the number of the next one to evaluate, if any."""
        try:
            finished = folder.exists(self.directory, folder.FINISHED)  # first, so as to see the last checkpoint
            numbers = folder.numbers(self.directory, whole=True)
        except CheckpointError as error:
            if str(error) != self._trouble:
                logger.warning("%s; trying again", error)
            self._trouble = str(error)
            return False, None
        self._trouble = ""
        self._handled &= set(numbers)
        return finished, next_of(numbers, self._handled, every=self.every)

    def _evaluate(self, checkpoint_number: int, results: _Results) -> Evaluation | None:
        self._handled.add(checkpoint_number)
        path = folder.path_of(self.directory, checkpoint_number)
        try:
            saved = SavedVariables(path)
        except CheckpointError as error:
            _log_skipped(path, error)
            return None
        if (saved.number, saved.created) in results.known:
            return None
        begin = time.monotonic()
        try:
            values = _values(self.fn(saved))
        except Exception as error:
            failure = saved.failure
            if failure is None and isinstance(error, FileNotFoundError) and _is_removed(path):
                failure = CheckpointError(str(error))  # fn opens the files itself
            if failure is None:
                error.add_note(f"This was raised while {path} was evaluated.")
                raise
            _log_skipped(path, failure)
            return None
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        seconds = round(time.monotonic() - begin, 6)
        evaluation = Evaluation(path, saved.number, saved.created, now, seconds, values)
        if self._best is not None:  # before the line that says that the checkpoint is done with
            self._best.offer(path, checkpoint_number, values)
        results.add(evaluation)
        shown = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        logger.info("%s: %s (%.1f s)", path, shown, seconds)
        return evaluation


def next_of(numbers: list[int], handled: set[int], *, every: bool) -> int | None:
    wanted = numbers if every else numbers[-1:]
    return next((number for number in wanted if number not in handled), None)


def _is_removed(path: str) -> bool:
    try:
        return not folder.exists(path, folder.INDEX)
    except CheckpointError:
        return False


def _log_skipped(path: str, error: CheckpointError) -> None:
    if _is_removed(path):
        logger.warning("skipping %s: it was removed before it could be evaluated", path)
    else:
        logger.error("%s can't be evaluated: %s", path, error)


def _values(result: Any) -> dict[str, float]:
    """Return what `fn` returned, by name; a number alone is named "value"."""
    values = {}
    for name, value in (result if isinstance(result, Mapping) else {"value": result}).items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            values[name] = float(value)
        except (TypeError, ValueError):
            raise MisuseError(
                f"fn returned {value!r} for {name!r}; return a number, or a mapping of names to numbers"
            ) from None
    return values


class _Results:
    """The evaluations, as lines and as events."""

    def __init__(self, log_dir: str) -> None:
        self.known: set[tuple[int, str]] = set()  # number and time of checkpoints, those of earlier evaluators included
        self._log_dir = log_dir
        path = f"{log_dir}/{RESULTS}"
        for line in _whole_lines(path):
            try:
                evaluation = Evaluation.from_json(line)
            except (ValueError, TypeError, LookupError, AttributeError):
                logger.warning("%s has a line that was not written by an evaluator: %.80s", path, line)
            else:
                self.known.add((evaluation.number, evaluation.created))
        self._lines = appended_file(path)
        self._events: EventWriter | None = None
        if not EventWriter.available():
            logger.info("no event files are written: tensorboardX is not installed")

    def add(self, evaluation: Evaluation) -> None:
        """Write an evaluation; its line last, to say that all of it was written."""
        if self._events is None and EventWriter.available():
            self._events = EventWriter(self._log_dir)
        if self._events is not None:
            self._events.scalars(evaluation.number, evaluation.values)
        self._lines.write(f"{evaluation.to_json()}\n".encode())
        self._lines.flush()
        self.known.add((evaluation.number, evaluation.created))

    def close(self) -> None:
        with contextlib.closing(self._lines):
            if self._events is not None:
                self._events.close()


def _whole_lines(path: str) -> list[str]:
    """Return an earlier evaluator's lines, and remove an incomplete one. CheckpointError if that is not possible."""
    with folder.written(path) as (fs, file):
        if not folder.there(fs, file):
            return []
        data: bytes = fs.cat_file(file)
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            folder.written_aside(path, whole)()
        return whole.decode(errors="replace").splitlines()
