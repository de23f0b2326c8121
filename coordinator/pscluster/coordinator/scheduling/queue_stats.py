"""The state of the queue and of the workers at a moment: as metrics, and in words."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.connections.server_link import unreachable
from pscluster.coordinator.scheduling.decisions.gang import Gang
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.errors import FunctionError
from pscluster.core.metrics.registry import Snapshot
from pscluster.core.transport.channels import PeerAddress

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""When no worker has returned anything for this long, log what the job is waiting for: once, until that changes."""

_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker as the coordinator sees it at a moment."""

    peer: PeerAddress
    up: bool
    why: str  # it is not up
    incarnation: int
    restarts: int  # how often it came back; -1: it has not been up yet
    has: int  # functions that run or wait there
    running: str  # the name of the first of these
    quiet: float  # seconds since anything was sent or came back
    outcomes: int  # functions that came back, begun or not
    done: int
    seconds: float | None  # of a function, smoothed


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The queue and the workers at a moment."""

    waiting: int
    oldest: float  # seconds since the next of these was scheduled
    in_flight: int
    scheduled: int  # ever
    done: int
    failed: int
    retried: int
    cancelled: int
    paused: bool
    error: str  # that has not been raised yet; "": none
    workers: Sequence[WorkerStats]


class QueueStatus:
    """Describes what is waiting, running and missing."""

    def __init__(self, state: DispatchState) -> None:
        self._state, self._scheduler = state, state.scheduler

    def pending(self) -> str:
        """Return the error that is to be raised, and what that waits for; "" if there is none."""
        with self._state.lock:
            return self.describe_error()

    def stranded(self, seconds: float) -> str:
        """Return why nothing that has begun ends, if no worker has been up for `seconds` seconds; otherwise ""."""
        away = time.monotonic() - self._state.no_worker_since
        if self._state.workers_up or away < seconds:
            return ""
        with self._state.lock:
            unended = self.unended()
        return f"no worker has been connected for {away:.0f} s, and {unended}" if unended else ""

    def metrics(self) -> Snapshot:
        """Return the metrics of the queue, the workers and the servers; see `CoordinatorTelemetry`."""
        stats = self.stats()
        workers = {str(worker.peer.index): worker for worker in stats.workers}
        return {
            "queue_functions": stats.waiting,
            "queue_age_seconds": stats.oldest,
            "functions_scheduled_total": stats.scheduled,
            "functions_running": stats.in_flight,
            "functions_done_total": stats.done,
            "functions_failed_total": stats.failed,
            "functions_cancelled_total": stats.cancelled,
            "worker_up": {index: int(worker.up) for index, worker in workers.items()},
            "worker_functions": {index: worker.has for index, worker in workers.items()},
            "worker_function_seconds": {index: worker.seconds or 0.0 for index, worker in workers.items()},
            "worker_outcomes_total": {index: worker.outcomes for index, worker in workers.items()},
            "worker_reconnects_total": {index: max(worker.restarts, 0) for index, worker in workers.items()},
            "server_up": {str(server.peer.index): int(not server.gone_since) for server in self._state.servers},
            "server_returns_total": {str(server.peer.index): server.returns for server in self._state.servers},
        }

    def missing(self) -> list[str]:
        """Return the tasks of the cluster that are down or unreachable."""
        workers = [str(handle.peer) for handle in self._state.members if not handle.up]
        return [*map(str, unreachable(self._state.servers)), *workers]

    def stats(self) -> QueueStats:
        """Return the present state, in time proportional to the number of workers, not of functions."""
        now = time.monotonic()
        with self._state.lock:
            scheduler, oldest = self._scheduler, self._scheduler.next_one
            workers = []
            for handle, worker in zip(self._state.workers, scheduler.workers, strict=True):
                if worker.gone is not None:
                    continue
                # Those that linger keep it busy as well.
                first = next(itertools.chain(worker.lingering.values(), worker.sent.values()), None)
                workers.append(
                    WorkerStats(
                        handle.peer,
                        handle.up,
                        handle.why,
                        0 if handle.connection is None else handle.connection.incarnation,
                        handle.restarts,
                        len(worker.lingering) + len(worker.sent),
                        "" if first is None else first.payload.function.name,
                        now - handle.heard if handle.heard else 0.0,
                        handle.outcomes,
                        worker.done,
                        worker.seconds,
                    )
                )
            return QueueStats(
                scheduler.waiting,
                0.0 if oldest is None else now - oldest.since,
                scheduler.in_flight,
                scheduler.entered,
                self.functions_done,
                scheduler.failed,
                self._state.metrics.retried_failed + self._state.metrics.retried_lost,
                scheduler.were_cancelled,
                bool(scheduler.barriers),
                "" if scheduler.error is None else str(scheduler.error).partition("\n\n")[0],
                workers,
            )

    def explain(self) -> str:
        """Return lines for people: what is waiting for what, and since when."""
        now = time.monotonic()
        with self._state.lock:
            lines = [self.describe_locked()]
            for index, handle in enumerate(self._state.workers):
                tasks = list(self._scheduler.workers[index].sent.values())
                if tasks:
                    others = f", {len(tasks) - 1} more after it" if len(tasks) > 1 else ""
                    name = tasks[0].payload.function.name
                    lines.append(f"{handle.peer}: {name}{others}; no message for {now - handle.heard:.0f} s")
                for task in self._scheduler.workers[index].lingering.values():
                    name = task.payload.function.name
                    lines.append(
                        f"{handle.peer}: {name} has ended but is still running there; nothing else runs until it stops"
                    )
                gone = self._scheduler.workers[index].gone is not None
                if not tasks and not handle.up and not self._state.closed and not gone:
                    lines.append(f"{handle.peer}: not connected: {handle.why}")
            lines += [self._why_waits(gang) for gang in self._scheduler.gangs.line]
            if self._scheduler.barriers:
                reason = "a checkpoint or evaluation snapshot is being made: no function starts until it is done"
                unended = self.unended()
                lines.append(f"{reason}; {unended}" if unended else reason)
        lines += [
            f"{peer}: unreachable for {seconds:.0f} s: reads and updates there wait for it"
            for peer, seconds in ({} if self._scheduler.final else unreachable(self._state.servers)).items()
        ]
        return "\n".join(lines)

    def warn_of_forgotten(self) -> None:
        """Log, as the job ends, functions that have not ended, and an error that was never raised."""
        with self._state.lock:
            scheduler, error = self._scheduler, self._scheduler.error
            waiting, running = scheduler.waiting, scheduler.running
            cancelled = 0 if error is None else self._state.cancelled_by_error
            raised = error is None or self._state.final_raised or (isinstance(error, FunctionError) and error._fetched)
        after = f", {cancelled} cancelled after the error of another one" if cancelled else ""
        if waiting or running or after:
            logger.warning(
                "the job ended before all of its functions finished: %d waiting, %d running%s; "
                "coordinator.join() waits for them and raises their errors",
                waiting,
                running,
                after,
            )
        if not raised:
            logger.error("the job ended with an error that was never raised (coordinator.join() raises it): %s", error)

    def describe(self) -> str:
        """Return a line for people: what is waiting and running, and which workers are missing."""
        with self._state.lock:
            return self.describe_locked()

    @property
    def functions_done(self) -> int:
        """Return how many functions have returned. Takes no lock."""
        return sum(worker.done for worker in self._scheduler.workers)

    def describe_error(self) -> str:
        """Return what `pending` does. Under the lock."""
        error = self._scheduler.error
        if error is None:
            return ""
        head = str(error).partition("\n\n")[0]
        if self._scheduler.final or not self._scheduler.in_flight:
            return f"the next call raises: {head}"
        return (
            f"an error will be raised once all running functions have stopped ({self.unended()}): {head}; "
            "RemoteValue.cancel() or coordinator.cancel() ends those that do not stop"
        )

    def running(self) -> str:
        """List the functions that workers have. Under the lock."""
        names = [
            f"{task.payload.function.name} on {handle.peer}"
            for index, handle in enumerate(self._state.workers)
            for task in self._scheduler.workers[index].sent.values()
        ]
        return _listed(names)

    def unended(self) -> str:
        """List what has begun and not ended, and the missing workers if that is why. Under the lock."""
        begun = [task for worker in self._scheduler.workers for task in worker.orphaned] + self._scheduler.begun
        gangs = self._scheduler.gangs.begun
        names = [f"{task.payload.function.name}, begun on {self._state.workers[task.begun_on].peer}" for task in begun]
        told = [f"functions still run: {running}"] if (running := self.running()) else []
        if self._scheduler.is_shutting_out:
            told.append("parameter servers are being told to refuse further updates of functions that were ended")
        names += [f"{gang.payloads[0].function.name}, begun on {len(set(gang.placed))} workers" for gang in gangs]
        if names:
            told.append(f"interrupted functions wait to be run again: {_listed(names)} ({self.who_is_up()})")
        return "; ".join(told)

    def _why_waits(self, gang: Gang[Call]) -> str:
        """Say what a gang in line waits for. Under the lock."""
        name, handles = gang.payloads[0].function.name, self._state.workers
        if gang.workers is None:
            return f"{name}: waits for {gang.size} free workers at once"
        needed = [(index, handles[index]) for index in dict.fromkeys(gang.workers)]
        together = f"to run on {len(needed)} workers together"
        if missing := [f"{handle.peer} ({handle.why})" for _, handle in needed if not handle.up]:
            if len(needed) - len(missing) < gang.min_workers:
                together += f", or on {gang.min_workers} of them"
            return f"{name}: waits for {', '.join(missing)}, {together}"
        busy = [str(handle.peer) for index, handle in needed if not self._scheduler.workers[index].empty]
        first = _listed(busy) or "an earlier function"
        return f"{name}: waits until {first} is done, {together}"

    def who_is_up(self) -> str:
        """Say how many workers are up, and which are missing."""
        members = self._state.members
        missing = ", ".join(f"{handle.peer} ({handle.why})" for handle in members if not handle.up)
        workers = f"{self._state.workers_up} of {len(members)} workers up"
        if not members:
            return "no worker has joined"
        return f"{workers}, missing: {missing}" if missing else workers

    def describe_locked(self) -> str:
        """Return what `describe` does. Under the lock."""
        if self._state.closed:
            return "the job is over: nothing is waiting or running"
        waiting = self._scheduler.waiting
        noun = "function" if waiting == 1 else "functions"
        line = f"{waiting} {noun} waiting, {self._scheduler.in_flight} with workers; {self.who_is_up()}"
        return f"{line}; {pending}" if (pending := self.describe_error()) else line

    async def warn_when_quiet(self) -> None:
        """Log what the job is waiting for whenever nothing has come back for a while."""
        watch = QuietWatch(time.monotonic())
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with self._state.lock:
                heard = max((handle.heard for handle in self._state.workers), default=0.0)
                quiet = watch.is_quiet(time.monotonic(), heard, busy=not self._scheduler.idle)
                state = f"{self.describe_locked()}; {self.running()}; {heard}" if quiet else ""
            if quiet and watch.is_new(time.monotonic(), state):
                logger.warning("nothing has come back for %g s:\n%s", QUIET_SECONDS, self.explain())


class QuietWatch:
    """Decides when to log that nothing comes back: after `QUIET_SECONDS`, and no state twice."""

    def __init__(self, now: float) -> None:
        self._idle_at, self._told_at, self._told = now, -math.inf, ""

    def is_quiet(self, now: float, heard: float, *, busy: bool) -> bool:
        """Return whether there has been work for this long, and nothing from any worker, last heard from at `heard`."""
        if not busy:
            self._idle_at = now
        return now - max(heard, self._idle_at) >= QUIET_SECONDS

    def is_new(self, now: float, state: str) -> bool:
        """Return whether to log this state, and take it for logged if so."""
        if state == self._told or now - self._told_at < QUIET_SECONDS:
            return False
        self._told_at, self._told = now, state
        return True


def _listed(names: Sequence[str]) -> str:
    """List each name once, with its count."""
    return ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in Counter(names).items())
