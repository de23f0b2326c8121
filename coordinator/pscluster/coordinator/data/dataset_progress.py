"""The positions of distributed datasets: what was visited, kept with the variables.

That a function has ended and that its part was visited are one event, in the dispatcher, under its lock. While a
checkpoint's cut is made no function runs: the positions that are written then are those of the same moment as the
variables. Beside that they are written every few seconds, as a lower bound; what was visited behind it is repeated, by
a coordinator that goes on with live servers, under the same keys, so that it counts once. Keys are forgotten when the
position that was written says the same.

Locks: the dispatcher's may be held when a position's is taken, never the other way round. Positions are written by one
thread alone, so that an older one never lands on a newer one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.coordinator.job.progress import JobProgress
from pscluster.coordinator.scheduling.waiting import result_of
from pscluster.coordinator.variables.creation import VariableCreator
from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle
from pscluster.ps.spec import OURS
from pscluster.worker.data.pipelines import Pipeline

logger = logging.getLogger(__name__)

T = TypeVar("T")

StopOf = Callable[[int, int], int]

NAME = f"{OURS}positions"
SAVE_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class Number:
    """Of a dataset among the workers' resources; they drop it with this."""

    value: int
    handles: Sequence[Handle] = ()  # what its functions reach


@dataclass(slots=True, eq=False)
class Range:
    """What was given out: of a life of the position, see there; `holders` are the functions that have it."""

    life: int
    epoch: int
    start: int
    stop: int
    holders: int = 0


class Position:
    """Of one dataset. Thread-safe.

    A range that is given out is free again when its function fails (`release`), or, for the next pass, when nobody has
    it any more and no function was given it (`abandon`). Each restore begins another life: what is of the life before
    it counts for nothing.
    """

    owner: weakref.ref[object]
    _coverage: EpochCoverage

    def __init__(self) -> None:
        self.moved = False  # since it was written last
        self.life = 0
        self.entered = 0  # functions with parts that are scheduled and have not ended
        self._lock = threading.Lock()
        self._done: set[int] = set()  # keys of functions that have ended, which the written position does not show
        self._abandoned: deque[Range] = deque()

    def begin(self, coverage: EpochCoverage, owner: object) -> None:
        """This dataset goes on from there."""
        with self._lock:
            self._coverage, self.owner = coverage, weakref.ref(owner)

    @property
    def epoch(self) -> int:
        """How many epochs were visited wholly."""
        return self._coverage.epoch

    @property
    def visited(self) -> int:
        """How much of the next one."""
        with self._lock:
            return self._coverage.visited(self._coverage.epoch)

    def begin_pass(self) -> tuple[int, int]:
        """The life, and the first epoch of which not all was given out, or was given to nobody who is still there.

        Only here is that given out again: a loop that drops its parts would have no end.
        """
        with self._lock:
            while self._abandoned:
                self._release(self._abandoned.popleft())
            return self.life, self._coverage.unfinished

    def take(self, life: int, stop_of: StopOf) -> Range | None:
        """The next range; None if it lies behind what `stop_of` gives.

        Args:
            life: in which the pass began.
            stop_of: of an epoch and the first place of the range in it, the place behind its last one; that first
                place itself for a range that is not wanted.

        Raises:
            MisuseError: the position was restored since that life.
        """
        with self._lock:
            self.check(life)
            epoch = self._coverage.unfinished
            found = self._coverage.take(epoch, lambda start: stop_of(epoch, start))
            return None if found is None else Range(life, epoch, *found)

    def check(self, life: int) -> None:
        """MisuseError if the position was restored since that life."""
        if life != self.life:
            raise MisuseError("the dataset's position was restored meanwhile: begin a new iter() of it")

    def enter(self, given: Range) -> None:
        """A function that is given this is scheduled. MisuseError if it is of another life."""
        with self._lock:
            self.check(given.life)
            given.holders += 1
            self.entered += 1

    def commit(self, given: Range, key: int) -> None:
        """The function with this key has ended."""
        with self._lock:
            self._leave(given)
            if given.life == self.life:
                self._coverage.commit(given.epoch, given.start, given.stop)
                self._done.add(key)
                self.moved = True

    def release(self, given: Range) -> None:
        """The function that was given this has failed, was cancelled, or could not be scheduled."""
        with self._lock:
            self._leave(given)
            if not given.holders:
                self._release(given)

    def abandon(self, given: Range) -> None:
        """Nobody has it any more. By the garbage collector, on any thread: takes no lock."""
        self._abandoned.append(given)

    def _leave(self, given: Range) -> None:
        """Under the lock: a function has ended. One whose caller was interrupted was counted out by then."""
        if given.holders:
            given.holders -= 1
            self.entered -= 1

    def _release(self, given: Range) -> None:
        """Under the lock."""
        if given.life == self.life:
            self._coverage.release(given.epoch, given.start, given.stop)

    def state(self) -> tuple[dict[str, Any], set[int]]:
        """What was visited, and the keys of the functions that have."""
        with self._lock:
            self.moved = False
            return self._coverage.state(), set(self._done)

    def forgot(self, keys: Iterable[int]) -> None:
        """These keys."""
        with self._lock:
            self._done.difference_update(keys)

    def at(self, state: Mapping[str, Any] | None) -> EpochCoverage:
        """What a saved state comes to; None: the beginning. CheckpointMisfitError if it is of another dataset."""
        coverage = EpochCoverage(self._coverage.length, self._coverage.kept)
        if state is not None:
            coverage.load(state)
        return coverage

    def restore(self, coverage: EpochCoverage) -> None:
        """Go on from there."""
        with self._lock:
            self._coverage, self._done = coverage, set()
            self.life += 1


class Endings(Protocol):
    """Where functions end: the dispatcher."""

    def atomically(self, look: Callable[[], T]) -> T:
        """Return what it gives while no function begins or ends."""
        ...

    def forget_ended(self, keys: Iterable[int]) -> set[int]:
        """Have the servers forget those of these keys that are not scheduled again; which they are."""
        ...


class DatasetProgress:
    """Keep how far the distributed datasets of a job are.

    Args:
        variables: keep them.
        endings: of the functions that have parts of the datasets.
        send: gives the workers a pipeline.
    """

    def __init__(self, variables: VariableCreator, endings: Endings, send: Callable[[Pipeline], Number]) -> None:
        self.send = send
        self._endings = endings
        self._lock = threading.Lock()
        self._named = 0
        self._entered: dict[str, Position] = {}
        self._left: dict[str, Any] | None = None  # what was written for datasets that are not there, or not yet
        self._kept = JobProgress(variables, NAME)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="positions")
        self._over = threading.Event()
        self._timer: threading.Thread | None = None

    def name(self) -> str:
        """For a dataset without one: the next in the order of the script."""
        with self._lock:
            self._named += 1
            return f"data-{self._named}"

    def enter(self, owner: object, name: str, length: int, kept: int) -> Position:
        """The position of a dataset that begins to be gone through.

        Raises:
            MisuseError: its name is in use.
            CheckpointMisfitError: what was kept under its name is of a dataset of another length.
        """
        left = self._kept.load() if self._left is None else None  # not under the lock: it asks a server
        with self._lock:
            if self._left is None:
                self._left = left or {}
            position = self._entered.get(name)
            if position is not None and position.owner() not in (None, owner):
                raise MisuseError(
                    f"another dataset named {name!r} is in use, with a position of its own: give this one another name"
                )
            coverage = EpochCoverage(length, kept)
            state = self._left.get(name) if position is None else position.state()[0]
            if state is not None:
                coverage.load(state)
            if position is None:
                position = self._entered[name] = Position()
            position.begin(coverage, owner)
            self._left.pop(name, None)
            if self._timer is None:
                self._timer = threading.Thread(target=self._save_now_and_then, name="positions", daemon=True)
                self._timer.start()
            return position

    def check_idle(self) -> None:
        """MisuseError if a function that has a part has not ended."""
        for name, position in self._all().items():
            if entered := position.entered:
                raise MisuseError(
                    f"{entered} functions with parts of the dataset {name!r} have not ended: join() before a "
                    "checkpoint is restored, which moves its position"
                )

    def save(self) -> None:
        """Write the positions as they are now."""
        if self._entered:
            result_of(self._writer.submit(self._save))

    def _save(self) -> None:
        positions = self._all()
        # Under the dispatcher's lock, so that a function that has parts of two datasets has ended for both or for none.
        states = self._endings.atomically(lambda: {name: position.state() for name, position in positions.items()})
        try:
            self._kept.save((self._left or {}) | {name: state for name, (state, _) in states.items()})
        except BaseException:
            for position in positions.values():
                position.moved = True
            raise
        for name, (_, keys) in states.items():
            positions[name].forgot(self._endings.forget_ended(keys))

    def _save_now_and_then(self) -> None:
        while not self._over.wait(SAVE_SECONDS):
            if any(position.moved for position in self._all().values()):
                try:
                    self.save()
                except Exception as error:  # the next one may succeed, and until then there is the last one
                    logger.warning("could not save the positions of datasets: %s", error)

    def restored(self) -> None:
        """A checkpoint was restored: its positions are those of the datasets."""
        left = self._kept.load()
        with self._lock:
            found = {name: position.at(left.pop(name, None)) for name, position in self._entered.items()}
            for name, coverage in found.items():  # all of them, or none
                self._entered[name].restore(coverage)
            self._left = left

    def close(self) -> None:
        """The job is over."""
        self._over.set()
        self._writer.shutdown(wait=False)

    def _all(self) -> dict[str, Position]:
        with self._lock:
            return dict(self._entered)
