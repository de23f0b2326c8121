"""The positions of distributed datasets: what was visited, saved with the variables.

The dispatcher records under its lock, as one event, that a function has ended and that its part was visited. No
function runs while a checkpoint is cut, so the positions written then belong to the same moment as the variables. They
are also written every few seconds, as a lower bound: a coordinator that resumes with live servers repeats what was
visited after that, under the same keys, so that it counts once. Keys are forgotten once a written position covers them.

Locks: a position's may be taken while the dispatcher's is held, never the other way round. Only one thread writes
positions, so that an older one never overwrites a newer one; it waits while a checkpoint takes their place.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.coordinator.data.file_lists import FileList
from pscluster.coordinator.job.progress import POSITIONS, load, save
from pscluster.coordinator.waiting import result_of
from pscluster.core.errors import CheckpointMismatchError, MisuseError
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.handles import Handle
from pscluster.ps.client.client import PsClient
from pscluster.worker.data.pipelines import Pipeline

logger = logging.getLogger(__name__)

T = TypeVar("T")

ChooseStop = Callable[[int, int], int]
"""Where a range ends, given its epoch and first item: the item after its last, or the first itself to take no range."""

SAVE_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class DatasetResource:
    """A dataset among the workers' resources; they drop it when this object is collected."""

    id: int
    handles: Sequence[Handle] = ()  # what its functions reach


@dataclass(slots=True, eq=False)
class EpochRange:
    """Items of an epoch that were assigned together."""

    term: int  # of the position
    epoch: int
    start: int
    stop: int
    functions: int = 0  # that were scheduled with it and have not ended


class Position:
    """How far one dataset is. Thread-safe.

    An assigned range is free again when its function fails (`release`), or, for the next pass, when it is collected
    before any function was scheduled with it (`abandon`). Each restore begins a new term, in which ranges of earlier
    terms count for nothing.
    """

    owner: weakref.ref[object]
    _coverage: EpochCoverage

    def __init__(self) -> None:
        self.term = 0
        self.functions = 0  # that were scheduled with parts and have not ended
        self._lock = threading.Lock()
        self.unwritten: set[int] = set()  # keys of functions that have ended since the position was written
        self._abandoned: deque[EpochRange] = deque()

    def begin(self, coverage: EpochCoverage, owner: object) -> None:
        with self._lock:
            self._coverage, self.owner = coverage, weakref.ref(owner)

    @property
    def epoch(self) -> int:
        """How many epochs have been visited completely."""
        return self._coverage.epoch

    @property
    def visited(self) -> int:
        """How many items of the next epoch have been visited."""
        with self._lock:
            return self._coverage.visited(self._coverage.epoch)

    def visited_ranges(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the epoch that is not visited completely, and the ranges of its items that were."""
        with self._lock:
            return self._coverage.epoch, self._coverage.visited_ranges()

    def begin_pass(self) -> tuple[int, int]:
        """Free abandoned ranges; return the term, and the first epoch that is not fully assigned.

        They are freed only here: otherwise a loop that drops its parts would never end.
        """
        with self._lock:
            while self._abandoned:
                self._release(self._abandoned.popleft())
            return self.term, self._coverage.unassigned_epoch

    def take(self, term: int, choose_stop: ChooseStop) -> EpochRange | None:
        """Assign the next range; None if `choose_stop` wants none. MisuseError if restored since the term began."""
        with self._lock:
            self._check(term)
            epoch = self._coverage.unassigned_epoch
            interval = self._coverage.take(epoch, lambda start: choose_stop(epoch, start))
            return None if interval is None else EpochRange(term, epoch, *interval)

    def enter(self, assigned: EpochRange) -> None:
        """Record that a function is scheduled with this range. MisuseError if the range is of an earlier term."""
        with self._lock:
            self._check(assigned.term)
            assigned.functions += 1
            self.functions += 1

    def commit(self, assigned: EpochRange, key: int) -> None:
        """Record that the function with this key has ended, and has visited the range."""
        with self._lock:
            self._leave(assigned)
            if assigned.term == self.term:
                self._coverage.commit(assigned.epoch, assigned.start, assigned.stop)
                self.unwritten.add(key)

    def release(self, assigned: EpochRange) -> None:
        """Record that the range's function has failed, was cancelled, or could not be scheduled."""
        with self._lock:
            self._leave(assigned)
            if not assigned.functions:
                self._release(assigned)

    def abandon(self, assigned: EpochRange) -> None:
        """Record that the range was dropped. Called by the garbage collector, on any thread: takes no lock."""
        self._abandoned.append(assigned)

    def _check(self, term: int) -> None:
        if term != self.term:
            raise MisuseError("the dataset's position was restored meanwhile: begin a new iter() of it")

    def _leave(self, assigned: EpochRange) -> None:
        """Count out a function that has ended, unless its interrupted caller already did. Call with the lock held."""
        if assigned.functions:
            assigned.functions -= 1
            self.functions -= 1

    def _release(self, assigned: EpochRange) -> None:
        """Free the range. Call with the lock held."""
        if assigned.term == self.term:
            self._coverage.release(assigned.epoch, assigned.start, assigned.stop)

    def state(self) -> tuple[dict[str, Any], set[int]]:
        """Return what was visited, and the keys of the functions that visited it since the last write."""
        with self._lock:
            return self._coverage.state(), set(self.unwritten)

    def forgot(self, keys: Iterable[int]) -> None:
        """Drop these keys, which the servers have forgotten."""
        with self._lock:
            self.unwritten.difference_update(keys)

    def at(self, state: Mapping[str, Any] | None) -> EpochCoverage:
        """Return the coverage of a saved state, or the beginning. CheckpointMismatchError if it is of other data."""
        now = self._coverage
        return EpochCoverage(now.length, now.used, state, now.files)

    def restore(self, coverage: EpochCoverage) -> None:
        """Continue from this coverage, in a new term."""
        with self._lock:
            self._coverage, self.unwritten = coverage, set()
            self.term += 1


@contextlib.contextmanager
def _naming(dataset: str) -> Iterator[None]:
    """Begin what is said of a saved position with the name of its dataset."""
    try:
        yield
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"dataset {dataset!r}: {error}") from None


class Endings(Protocol):
    """Knows which functions have ended: the dispatcher."""

    def atomically(self, read: Callable[[], T]) -> T:
        """Return what `read` returns, called while no function begins or ends."""
        ...

    def forget_ended(self, keys: Iterable[int]) -> set[int]:
        """Have the servers forget those of these keys that are not scheduled again; return them."""
        ...


class DatasetProgress:
    """Saves how far the distributed datasets of a job are.

    `send` gives the workers a pipeline; `over_shards` calls a function there with each of several shards of a dataset;
    `capture` takes a function as it is now, to be sent.
    """

    def __init__(
        self,
        client: PsClient,
        endings: Endings,
        send: Callable[[Pipeline], DatasetResource],
        over_shards: Callable[[Callable[[Any], Any], Any], list[Any]],
        capture: Callable[[Callable[..., Any]], CapturedFunction],
    ) -> None:
        self.send, self.over_shards, self.capture = send, over_shards, capture
        self._endings = endings
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # while positions are read and saved, or a checkpoint takes their place
        self._numbers = itertools.count(1)
        self._positions: dict[str, Position] = {}
        self._unclaimed: dict[str, Any] | None = None  # states that were written for datasets not (yet) in this script
        self._client = client
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="positions")
        self._over = threading.Event()
        self._timer: threading.Thread | None = None

    def name(self) -> str:
        """Return a name for a dataset without one: its number in the order of the script."""
        return f"data-{next(self._numbers)}"

    def enter(self, owner: object, name: str, length: int, used: int, files: FileList | None) -> Position:
        """Return the position of a dataset that is iterated over for the first time. MisuseError if its name is in use,
        CheckpointMismatchError if what was saved under it is of a dataset of another length, or of other files."""
        # Not under the lock: it queries a server.
        saved = load(self._client, POSITIONS) if self._unclaimed is None else None
        with self._lock:
            if self._unclaimed is None:
                self._unclaimed = saved or {}
            position = self._positions.get(name)
            if position is not None and position.owner() not in (None, owner):
                raise MisuseError(
                    f"another dataset named {name!r} is in use, with a position of its own: give this one another name"
                )
            state = self._unclaimed.get(name) if position is None else position.state()[0]
            with _naming(name):
                coverage = EpochCoverage(length, used, state, files)
            if position is None:
                position = self._positions[name] = Position()
            position.begin(coverage, owner)
            self._unclaimed.pop(name, None)
            if self._timer is None:
                self._timer = threading.Thread(target=self._save_now_and_then, name="positions", daemon=True)
                self._timer.start()
            return position

    def check_idle(self) -> None:
        """Raise MisuseError if a function that has a part has not ended."""
        for name, position in self._all().items():
            if count := position.functions:
                raise MisuseError(
                    f"{count} functions with parts of the dataset {name!r} have not ended: join() before a "
                    "checkpoint is restored, which moves its position"
                )

    def save(self) -> None:
        if self._positions:
            result_of(self._writer.submit(self._save))

    def unsaved(self) -> contextlib.AbstractContextManager[object]:
        """Save no positions within the block: they would take the place of those that it restores."""
        return self._saving

    def _save(self) -> None:
        with self._saving:
            self._save_all()

    def _save_all(self) -> None:
        positions = self._all()
        # Under the dispatcher's lock, so that a function with parts of two datasets has ended for both or for neither.
        states = self._endings.atomically(lambda: {name: position.state() for name, position in positions.items()})
        merged = (self._unclaimed or {}) | {name: state for name, (state, _) in states.items()}
        save(self._client, POSITIONS, merged)
        for name, (_, keys) in states.items():
            positions[name].forgot(self._endings.forget_ended(keys))

    def _save_now_and_then(self) -> None:
        while not self._over.wait(SAVE_SECONDS):
            if any(position.unwritten for position in self._all().values()):
                try:
                    self.save()
                except Exception as error:  # the next save may succeed; until then the last one stands
                    logger.warning("could not save the positions of datasets: %s", error)

    def restored(self) -> None:
        """Continue from the positions of the checkpoint that was restored: all of them, or none."""
        saved = load(self._client, POSITIONS)
        with self._lock:
            coverages: dict[str, EpochCoverage] = {}
            for name, position in self._positions.items():
                with _naming(name):
                    coverages[name] = position.at(saved.pop(name, None))
            for name, coverage in coverages.items():
                self._positions[name].restore(coverage)
            self._unclaimed = saved

    def close(self) -> None:
        self._over.set()
        self._writer.shutdown(wait=False)

    def _all(self) -> dict[str, Position]:
        with self._lock:
            return dict(self._positions)
