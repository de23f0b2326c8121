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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pscluster.coordinator.job_progress import JobProgress
from pscluster.coordinator.visits import Visits
from pscluster.core.errors import MisuseError

if TYPE_CHECKING:
    from pscluster.coordinator.strategy import ParameterServerStrategy
    from pscluster.worker.pipelines import Pipeline

logger = logging.getLogger(__name__)

NAME = "pscluster/positions"
SAVE_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class Number:
    """Of a dataset among the workers' resources; they drop it with this."""

    value: int


class Position:
    """Of one dataset. Thread-safe."""

    owner: weakref.ref[object]
    _visits: Visits

    def __init__(self) -> None:
        self.moved = False  # since it was written last
        self.restored = 0  # how often it has come from a checkpoint
        self._lock = threading.Lock()
        self._done: list[int] = []  # keys of functions that have ended, which the written position does not show

    def begin(self, visits: Visits, owner: object) -> None:
        """This dataset goes on from there."""
        with self._lock:
            self._visits, self.owner = visits, weakref.ref(owner)

    @property
    def epoch(self) -> int:
        """How many epochs were visited wholly."""
        return self._visits.epoch

    @property
    def visited(self) -> int:
        """How much of the next one."""
        with self._lock:
            return self._visits.visited(self._visits.epoch)

    @property
    def pending(self) -> int:
        """How many examples were given out and not visited."""
        with self._lock:
            return self._visits.pending

    @property
    def unfinished(self) -> int:
        """The first epoch of which not all was given out."""
        with self._lock:
            return self._visits.unfinished

    def take(self, epoch: int, most: int) -> tuple[int, int] | None:
        """See `Visits.take`."""
        with self._lock:
            return self._visits.take(epoch, most)

    def commit(self, epoch: int, start: int, stop: int, key: int, *, counts: bool) -> None:
        """The function with this key has ended; it counts as a visit, or does not."""
        with self._lock:
            if counts:
                self._visits.commit(epoch, start, stop)
            self._done.append(key)
            self.moved = True

    def release(self, epoch: int, start: int, stop: int) -> None:
        """The function that was given this has failed, or was cancelled."""
        with self._lock:
            self._visits.release(epoch, start, stop)

    def state(self) -> tuple[dict[str, Any], list[int]]:
        """What was visited, and the keys of the functions that have."""
        with self._lock:
            self.moved = False
            return self._visits.state(), list(self._done)

    def forgot(self, count: int) -> None:
        """The first ones of these keys."""
        with self._lock:
            del self._done[:count]

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; None: from the beginning."""
        with self._lock:
            visits = Visits(self._visits.length, self._visits.kept)
            if state is not None:
                visits.load(state)
            self._visits, self._done = visits, []
            self.restored += 1


class Positions:
    """Those of a strategy.

    Args:
        strategy: whose variables keep them.
        send: gives the workers a pipeline.
    """

    def __init__(self, strategy: ParameterServerStrategy, send: Callable[[Pipeline], Number]) -> None:
        self.send = send
        self._strategy = strategy
        self._lock = threading.Lock()
        self._named = 0
        self._entered: dict[str, Position] = {}
        self._left: dict[str, Any] | None = None  # what was written for datasets that are not there, or not yet
        self._kept = JobProgress(strategy, NAME)
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
            visits = Visits(length, kept)
            state = self._left.get(name) if position is None else position.state()[0]
            if state is not None:
                visits.load(state)
            if position is None:
                position = self._entered[name] = Position()
            position.begin(visits, owner)
            self._left.pop(name, None)
            if self._timer is None:
                self._timer = threading.Thread(target=self._save_now_and_then, name="positions", daemon=True)
                self._timer.start()
            return position

    def check_idle(self) -> None:
        """MisuseError if a function that has a part has not ended."""
        for name, position in self._all().items():
            if pending := position.pending:
                raise MisuseError(
                    f"{pending:,} examples of the dataset {name!r} were given out and have not been visited: join() "
                    "before a checkpoint is restored, which moves the position"
                )

    def save(self) -> None:
        """Write the positions as they are now."""
        if self._entered:
            self._writer.submit(self._save).result()

    def _save(self) -> None:
        positions = self._all()
        states = {name: position.state() for name, position in positions.items()}
        self._kept.save((self._left or {}) | {name: state for name, (state, _) in states.items()})
        dispatcher = self._strategy.dispatcher
        for name, (_, keys) in states.items():
            if dispatcher is not None:
                dispatcher.forget(dict.fromkeys(keys, name))
            positions[name].forgot(len(keys))

    def _save_now_and_then(self) -> None:
        while not self._over.wait(SAVE_SECONDS):
            if any(position.moved for position in self._all().values()):
                try:
                    self.save()
                except Exception as error:  # the next one may succeed, and until then there is the last one
                    logger.warning("the positions of datasets could not be kept: %s", error)

    def restored(self) -> None:
        """A checkpoint was restored: its positions are those of the datasets."""
        left = self._kept.load()
        with self._lock:
            self._left = left
            for name, position in self._entered.items():
                position.restore(left.pop(name, None))

    def close(self) -> None:
        """The strategy is closed."""
        self._over.set()
        self._writer.shutdown(wait=False)

    def _all(self) -> dict[str, Position]:
        with self._lock:
            return dict(self._entered)
