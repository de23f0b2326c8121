"""The manager of a server's state: a thread that saves generations, and what the service calls.

The service tells it of a job that began or ended, asks it to make creations durable before they are acknowledged, and
applies updates within `logged`. All decisions are `plan`'s. Nothing that serves ever waits for a generation but who
made a variable, and updates beyond the first 64 MiB that change what is still to be written, for their old bytes to go
to the disk (`spill`); with a log, an update waits for its record.

What may be lost where the process dies, between any two lines: a generation that has no manifest yet, which nobody was
told of; updates that were not acknowledged; and what the user's choice says. A disk that is full or broken is logged
once and tried again: with snapshots the job goes on, with a log updates are refused until there is room.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.metrics.registry import Histogram
from pscluster.ps.server.directory import HeldVariable
from pscluster.ps.server.payload import Payload
from pscluster.ps.server.store import Store
from pscluster.ps.server.updates import Change
from pscluster.ps.storage.generations import DamagedError, DataFile, StateDirectory
from pscluster.ps.storage.log import Dropped, Log, lost_in, records
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.ps.storage.policy import SavePlan
from pscluster.ps.storage.replay import (
    captured,
    losses_of,
    manifest_of,
    replayed,
    restored,
    saved_optimizer,
    settle_losses,
)
from pscluster.ps.storage.spill import Spill
from pscluster.v1 import ps_pb2, state_pb2

logger = logging.getLogger(__name__)

_LEAST_LOG = 64 << 20
"""A generation is due behind so much of a log: its segments are written over while the kernel still holds them, and
little of that comes to the disk. Where the state is larger, to write it so often would cost more."""

_MAX_FILES = 8
"""Shards that lie in more files than so many are written anew."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which job a store is of.

    Attributes:
        holding: a number that is drawn for it on this server; 0: none.
        lineage: a number that all coordinators of the job share.
        epoch: how many of them there were.
        name: of the job.
    """

    holding: int = 0
    lineage: int = 0
    epoch: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was found at the start."""

    store: Store
    lineage: Lineage
    words: str


@dataclass(slots=True)
class _Job:
    """What is kept now."""

    store: Store
    lineage: Lineage
    saved: state_pb2.Manifest | None = None  # the last generation
    before: state_pb2.Manifest | None = None  # the one before it
    sizes: Counter[str] = field(default_factory=Counter)  # bytes of the files that are in use
    losses_written: int = 0  # how much of the news of losses


class StateManager:
    """Keeps the state of one server. Thread-safe.

    Raises:
        ConfigurationError: the directory can't be used, or holds what can't be read and must not be passed over.
    """

    def __init__(self, options: DurabilityOptions) -> None:
        self.options = options
        self._directory: StateDirectory | None = None
        self._log: Log | None = None
        self._changed = threading.Condition()
        self._plan = SavePlan(options.every)
        self._job: _Job | None = None
        self._generation = 0
        self._owed = 0  # the change that has to be saved before an update is logged
        self._segment_before = 0  # the last segment of the log that was found
        self._clear = False
        self._closing = self._ended = False
        self.saves = Histogram()
        """Seconds of each generation that was saved."""
        self.spill = Spill(None if options.kind is Durability.NONE else options.directory)
        """Keeps what changes before it is written."""
        self.saved_bytes = self.failures = 0
        self._thread: threading.Thread | None = None
        if options.kind is Durability.NONE:
            return
        if options.directory is None:
            raise ConfigurationError(f"durability {options.kind.value} needs a directory: give --state-dir")
        self._directory = StateDirectory(options.directory, fsync=options.fsync)
        if options.kind is Durability.LOG:
            self._log = Log(self._directory)

    # The life of a job

    def restore(self) -> Restored | None:
        """What was kept of a job, if anything was. To be called once, before the first job."""
        if self._directory is None:
            return None
        begin, found = time.monotonic(), None
        self._segment_before = max(self._directory.log_segments(), default=0)
        damaged = 0
        for generation in self._directory.generations():
            self._generation = max(self._generation, generation)
            try:
                manifest = self._directory.manifest(generation)
                store = restored(manifest, self._directory.read_all(manifest))
            except OSError as error:  # what can't be read now may be whole: it is not to be passed over
                raise ConfigurationError(
                    f"the state in {self.options.directory} can't be read ({error.strerror or error}): fix that, "
                    "or move it away to start over"
                ) from None
            except (PsClusterError, ValueError, KeyError) as error:
                damaged += 1
                logger.error(
                    "generation %d of the state in %s can't be used: %s", generation, self.options.directory, error
                )
            else:
                found = manifest, store
                break
        segments = self._directory.log_segments()
        self._generation = max([self._generation, *segments])
        self._thread = threading.Thread(target=self._run, name="state-manager", daemon=True)
        self._thread.start()
        if found is None:
            if damaged:
                raise ConfigurationError(
                    f"none of the state in {self.options.directory} can be used; see the messages above, or move "
                    "it away to start over"
                )
            return None
        manifest, store = found
        paths, dropped = [self._directory.log_file(number) for number in segments], Dropped()
        try:
            logged, epoch = self._replay(store, manifest, paths, dropped, newest=not damaged)
        except DamagedError as error:
            if self.options.kind is Durability.LOG:
                raise ConfigurationError(
                    f"{error}. To go on without the updates after the last generation, start it once with "
                    "--durability snapshot"
                ) from None
            logger.error("%s: the updates after the last generation are lost", error)
            dropped = lost_in(paths, manifest.generation)
            store, logged = restored(manifest, self._directory.read_all(manifest)), 0
            epoch = manifest.epoch
            self._plan.changed()  # the next generation stands without it
        settle_losses(store, manifest, self._directory.losses(), dropped)
        lineage = Lineage(manifest.holding, manifest.lineage, epoch, manifest.job_name)
        self._job = _Job(store, lineage, saved=manifest, sizes=_sizes(manifest))
        words = f"its state of {max(time.time() - manifest.saved_at, 0):.1f} s ago"
        if self.options.kind is Durability.LOG:
            words += f" and {logged} updates after it"
        if damaged:
            words += f", since {damaged} newer generation{'s were' if damaged > 1 else ' was'} damaged"
        logger.info("restored %s in %.2f s, from %s", words, time.monotonic() - begin, self.options.directory)
        if self._log is not None:  # with a generation begins a segment of the log
            with contextlib.suppress(PsClusterError):  # it is tried again, and updates are refused until then
                self.save()
        return Restored(store, lineage, words)

    def _replay(
        self, store: Store, manifest: state_pb2.Manifest, paths: list[Path], dropped: Dropped, *, newest: bool
    ) -> tuple[int, int]:
        """Apply the log, whatever is chosen now: what was acknowledged under another choice counts, too.

        Returns:
            How many updates of shards that were, and the epoch of the coordinator that the job has behind them.
        """
        if not manifest.logged:
            return 0, manifest.epoch
        found = records(paths, manifest.generation, cut=True, dropped=dropped)
        return replayed(store, manifest, found, newest=newest)

    def begin(self, store: Store, lineage: Lineage) -> None:
        """A new job: what was kept of the one before goes."""
        self._replace(_Job(store, lineage))

    def go_on(self, lineage: Lineage) -> None:
        """The job has another coordinator."""
        with self._changed:
            if self._job is not None:
                self._job.lineage = lineage
                self._plan.changed()
                # The log's records are of functions with numbers of their own: it has to be known whose they are.
                self._owed = self._plan.ask()
                self._changed.notify_all()

    def end(self) -> None:
        """The job is over."""
        self._replace(None)

    def _replace(self, job: _Job | None) -> None:
        if self._directory is None:
            return
        with self._changed:
            self._job, self._clear = job, True
            if job is not None:
                self._plan.changed()
                self._plan.ask()  # it is to be found again; and a log needs a segment before the first update
            self._changed.notify_all()

    def close(self) -> None:
        """Save what there is, and end. A failure is logged."""
        if self._directory is None:
            return
        with self._changed:
            self._closing = True
            self._plan.ask()
            self._changed.notify_all()
            if self._thread is None:
                self._ended = True
        if self._thread is not None:
            self._thread.join()
        if self._log is not None:
            self._log.close()
        self._directory.close()

    @property
    def words(self) -> str:
        """For the status."""
        if self._directory is None:
            return "durability none"
        failed = (self._log.broken if self._log else "") or self._plan.failed
        state = f"failing: {failed}" if failed else f"{self._plan.saved} generations saved"
        return f"durability {self.options.kind.value}, {state}"

    @property
    def log_bytes(self) -> int:
        """Of the segment that is being written; 0 without a log."""
        return self._log.size if self._log is not None else 0

    # What the service calls

    def check_rule(self, name: str) -> None:
        """A rule by value is to be declared. MisuseError if its updates could not be applied again."""
        if self._log is not None:
            raise MisuseError(
                f"the rule of optimizer {name!r} came as a pickle, which is never stored, so its updates could not be "
                "replayed from the log: put the class into a module that the servers can import, or use "
                "durability snapshot"
            )

    def save(self) -> None:
        """Return when everything up to now is on disk. PsClusterError, with the reason, if it can't be put there."""
        if self._directory is None:
            return
        with self._changed:
            if self._job is None:
                return
            self._plan.changed()
            mine, job = self._plan.ask(), self._job
            self._changed.notify_all()
            while not self._plan.is_saved(mine):
                if self._job is not job:
                    return  # what was asked for is gone
                if self._ended:
                    raise UnavailableError("the server has stopped")
                if self._plan.has_failed(mine):
                    raise PsClusterError(f"the state could not be saved: {self._plan.failed}")
                self._changed.wait()

    @property
    def logs(self) -> bool:
        """Does it need an update's payload behind the update?"""
        return self._log is not None

    @contextlib.contextmanager
    def logged(
        self, store: Store, request: ps_pb2.UpdateRequest, changes: Sequence[Change], payload: Payload, total: int
    ) -> Iterator[list[int]]:
        """Have what the block applies of an update written down; behind it the update may be acknowledged.

        Gives the list that `updates.apply` fills.

        Raises:
            UnavailableError: with a log, it can't be taken, or can't be acknowledged.
        """
        applied: list[int] = []
        if self._log is None:
            try:
                yield applied
            finally:
                self._note_change()
            return
        with self._changed:
            if not self._plan.is_saved(self._owed):
                raise UnavailableError("updates are refused until the change of coordinator has been saved")
        job = self._job
        mine = job.lineage if job is not None and job.store is store else Lineage()  # none: its job is over
        optimizers = {change.optimizer.spec.id: change.optimizer for change in changes if change.optimizer is not None}
        used = [saved_optimizer(known) for known in optimizers.values()]
        size = total + request.ByteSize() + 16 * len(request.items) + sum(saved.ByteSize() + 8 for saved in used)
        try:
            ticket, room = self._log.take(size)
        except UnavailableError:
            self._mend()
            raise
        try:
            yield applied
        finally:
            self._note_change()
            try:
                if not any(applied):
                    self._log.give_back(ticket, room)
                else:
                    counts = applied + [0] * (len(request.items) - len(applied))
                    record = state_pb2.LogRecord(update=request, updates=counts, total_bytes=total, last=True)
                    record.holding, record.epoch = mine.holding, mine.epoch
                    record.optimizers.extend(used)
                    reach("ps.log.before")
                    self._log.record(ticket, room, record, payload.chunks if total else ())
                    reach("ps.log.after")
                if 0 in applied:
                    self._log.wait_for_others()
                if self._log.size > self._log_limit():
                    self._mend()  # before the disk is full of it
            except UnavailableError:
                self._mend()
                raise

    def _log_limit(self) -> int:
        """Bytes of the log behind which a generation is due: twice the state."""
        job = self._job
        return max(_LEAST_LOG, 2 * sum(job.sizes.values()) if job is not None else 0)

    def _mend(self) -> None:
        """The log broke, has no room or is long: a generation is to be saved now, with which a segment begins."""
        with self._changed:
            self._plan.changed()
            self._plan.ask()
            self._changed.notify_all()

    def write_losses(self) -> None:
        """Have it written down what is lost, if more is known than is written."""
        with self._changed:
            if self._lost_more():
                self._changed.notify_all()

    def _note_change(self) -> None:
        if self._directory is None:
            return
        with self._changed:
            quiet = self._plan.due() is None
            self._plan.changed()
            if quiet or self._lost_more():
                self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._clear or self._closing or self._lost_more()) and not self._is_due():
                    due = self._plan.due() if self._job is not None else None
                    wait = None if due is None else min(max(due - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
                    self._changed.wait(wait)
                clear, self._clear = self._clear, False
                job, due = self._job, self._plan.due()
                wanted = job is not None and due is not None and (self._closing or due <= time.monotonic())
                if wanted:
                    self._plan.begin(time.monotonic())
                last = self._closing
            try:
                self._work(clear, job if wanted else None)
                error = ""
            except Exception as failure:
                error = str(failure) or repr(failure)
                self.failures += 1
                if isinstance(failure, OSError):
                    error = f"{failure.strerror or failure} in {self.options.directory}"
                if error != self._plan.failed:
                    unexpected = not isinstance(failure, OSError | PsClusterError)
                    logger.error("the state could not be saved: %s", error, exc_info=failure if unexpected else None)
            if wanted:
                with self._changed:
                    if self._plan.failed and not error:
                        logger.warning("the state is saved again")
                    self._plan.end(time.monotonic(), error)
                    self._changed.notify_all()
            self._write_losses()
            if last:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return

    def _is_due(self) -> bool:
        due = self._plan.due()
        return self._job is not None and due is not None and due <= time.monotonic()

    def _lost_more(self) -> bool:
        """Are losses known that are not written?"""
        return self._job is not None and self._job.store.losses.news > self._job.losses_written

    def _write_losses(self) -> None:
        job = self._job
        if job is not None and self._lost_more():
            assert self._directory is not None
            job.losses_written = job.store.losses.news  # written or not: it is tried again with the next
            try:
                reach("ps.losses.before")
                self._directory.write_losses(losses_of(job.store, job.lineage.holding))
                reach("ps.losses.after")
            except OSError as error:
                logger.error("the record of lost updates could not be saved: %s", error)

    def _work(self, clear: bool, job: _Job | None) -> None:
        assert self._directory is not None
        if clear:
            reach("ps.clear.before")
            self._directory.clear()
            reach("ps.clear.after")
        if job is not None:
            self._save(job)

    def _save(self, job: _Job) -> None:
        directory, broken, begin = self._directory, False, time.monotonic()
        assert directory is not None
        self._generation += 1
        generation = self._generation
        if self._log is not None:
            saved = job.saved.generation if job.saved is not None else 0
            broken = self._log.begin_segment(generation, self._segment_before, saved)
        variables, optimizers, awaited = job.store.held()
        manifest = manifest_of(job.store, variables, optimizers, awaited.values())
        mine = job.lineage
        manifest.holding, manifest.lineage, manifest.epoch = mine.holding, mine.lineage, mine.epoch
        manifest.job_name, manifest.generation, manifest.saved_at = mine.name, generation, time.time()
        manifest.logged = self._log is not None
        try:
            reach("ps.generation.before")
            with directory.data_file(generation) as data:
                self._write_shards(job, variables, manifest, data)
            with self._changed:
                if self._job is not job:
                    return  # what was written is cleared next
            if job.store.job != manifest.job:  # some of it may be the next coordinator's: that has asked for another
                raise UnavailableError("another coordinator took over while a generation was written")
            directory.commit(manifest)
            self.saves.add(time.monotonic() - begin)
            self.saved_bytes += data.size
            reach("ps.manifest.after")
        except BaseException:
            directory.give_up(generation)
            if job.saved is not None:  # should there be no room: the one before may go, this one stays
                job.before = None
                self._remove_unused(job)
            raise
        job.before, job.saved, job.sizes = job.saved, manifest, _sizes(manifest)
        if self._log is not None and broken:
            self._log.mended()
        self._remove_unused(job)
        reach("ps.generation.after")

    def _remove_unused(self, job: _Job) -> None:
        assert self._directory is not None
        needed = [each for each in (job.saved, job.before) if each is not None]
        try:
            self._directory.remove_unused(needed, min(each.generation for each in needed))
        except OSError as error:
            logger.warning("files that are no longer needed could not be removed: %s", error)

    @staticmethod
    def _write_shards(job: _Job, variables: list[HeldVariable], manifest: state_pb2.Manifest, data: DataFile) -> None:
        known = {}
        if job.saved is not None:
            kept = {name for name, _ in job.sizes.most_common(_MAX_FILES - 1)}
            known = {
                (each.variable, each.shard): each
                for each in job.saved.shards
                if all(array.file in kept for array in each.arrays)
            }
        for held in variables:
            for number, shard in held.shards.items():
                saved, capture = captured(job.store, held.spec.id, number, shard, known.get((held.spec.id, number)))
                if capture is not None:
                    try:
                        saved.arrays.extend(data.add(capture.arrays, capture))
                    finally:
                        shard.release(capture)
                manifest.shards.append(saved)


def _sizes(manifest: state_pb2.Manifest) -> Counter[str]:
    """By file: the bytes of it that are in use."""
    sizes: Counter[str] = Counter()
    for shard in manifest.shards:
        for array in shard.arrays:
            sizes[array.file] += array.bytes + 1  # an empty file would not count
    return sizes
