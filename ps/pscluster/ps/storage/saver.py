"""The thread that saves a server's state, when `policy` says so: generations, shards that have moved, losses.

What it does can fail at any line, and is retried: see `manager` for what that may lose.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pscluster.core.errors import ConfigurationError, PsClusterError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.metrics.registry import Histogram
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage import replay
from pscluster.ps.storage.arrivals import ShardFile, extended, log_begins
from pscluster.ps.storage.files.generations import StateDirectory
from pscluster.ps.storage.files.spill import Spill
from pscluster.ps.storage.job_state import JobState, MoreArraysError, has_arrivals, sizes_of, write_shards
from pscluster.ps.storage.log.writer import Log
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.ps.storage.policy import SavePlan

logger = logging.getLogger(__name__)

_MORE = 1 << 20
"""Bytes of the disk for what a generation needs beside values: blocks of files, and the next segment of the log."""


@dataclass(eq=False, slots=True)
class Extension:
    """What the last generation is to be extended by: shards that have arrived, or none, if others have left."""

    store: Store
    arrived: Mapping[tuple[int, int], tuple[Shard, ShardFile]] = field(default_factory=dict)  # by variable and shard
    in_background: bool = False  # no request waits for it
    ended: bool = False
    saved: bool = False  # False, without an error: a whole generation is needed
    error: str = ""


class StateSaver:
    """The thread that saves generations, and extends the last one; `StateManager` tells it what there is to save."""

    def __init__(self, options: DurabilityOptions) -> None:
        self.options = options
        self._directory: StateDirectory | None = None
        self._log: Log | None = None
        self._changed = threading.Condition()
        self._plan = SavePlan(options.every)
        self._job: JobState | None = None
        self._generation = 0
        self._owed = 0  # the change that must be saved before an update is logged
        self._segment_before = 0  # the last segment of the log at the start
        self._clear = False
        self._extensions: list[Extension] = []  # in the order in which they are to be saved
        self._arriving: list[ShardFile] = []
        self._closing = self._ended = False
        self.saves = Histogram()
        """Seconds of each generation that was saved."""
        self.spill = Spill(None if options.kind is Durability.NONE else options.directory)
        """Old bytes of blocks that change before they are written or sent."""
        self.saved_bytes = self.failures = 0
        self._thread: threading.Thread | None = None
        if options.kind is Durability.NONE:
            return
        if options.directory is None:
            raise ConfigurationError(f"durability {options.kind.value} needs a directory: give --state-dir")
        self._directory = StateDirectory(options.directory, fsync=options.fsync)
        if options.kind is Durability.LOG:
            self._log = Log(self._directory)

    def _request_save(self) -> int:
        """Have a generation saved now; return the number of the change to wait for."""
        with self._changed:
            self._plan.changed()
            self._changed.notify_all()
            return self._plan.request()

    def save(self) -> None:
        """Return once everything so far is on disk. PsClusterError, with the reason, if it can't be saved."""
        if self._directory is None:
            return
        with self._changed:
            if self._job is None:
                return
            change, job = self._request_save(), self._job
            while not self._plan.is_saved(change):
                if self._job is not job:
                    return  # its state is no longer needed
                if self._ended:
                    raise UnavailableError("the server has stopped")
                if self._plan.has_failed(change):
                    raise PsClusterError(f"the state could not be saved: {self._plan.failed}")
                self._changed.wait()

    def _run(self) -> None:
        assert self._directory is not None
        while True:
            with self._changed:
                while not self._asked() and (wait := self._seconds_left()) != 0:
                    self._changed.wait(wait)
                clear, self._clear = self._clear, False
            if not clear:
                self._extend_all()
            with self._changed:
                clear = clear or self._clear
                self._clear = False
                last, wait = self._closing, self._seconds_left()
                job = self._job if wait == 0 or (last and wait is not None) else None
                if job is not None:
                    self._plan.begin(time.monotonic())
            kept_free: int | None = None
            try:
                if clear:
                    reach("ps.clear.before")
                    self._directory.clear()
                    reach("ps.clear.after")
                if job is not None:
                    kept_free = self._save(job)
                error = ""
            except Exception as failure:
                error = self._words_of(failure)
                self.failures += 1
                kept_free = 0
                if error != self._plan.failed:
                    unexpected = not isinstance(failure, OSError | PsClusterError)
                    logger.error("the state could not be saved: %s", error, exc_info=failure if unexpected else None)
            if job is not None:
                if self._log is not None:
                    self._log.end_generation(kept_free)
                with self._changed:
                    if self._plan.failed and not error:
                        logger.warning("saving the state works again")
                    self._plan.end(time.monotonic(), error)
                    self._changed.notify_all()
            self._write_losses()
            if last:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return

    def _asked(self) -> bool:
        """Return whether there is something to do, whatever the time. Needs the lock."""
        return self._clear or self._closing or self._lost_more() or bool(self._extensions)

    def _seconds_left(self) -> float | None:
        """Return the seconds until a generation is due; None: not until something happens."""
        due = self._plan.due() if self._job is not None else None
        return None if due is None else min(max(due - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def _lost_more(self) -> bool:
        return self._job is not None and self._job.store.losses.news > self._job.losses_written

    def _write_losses(self) -> None:
        job = self._job
        if job is not None and self._lost_more():
            assert self._directory is not None
            job.losses_written = job.store.losses.news  # also if it fails: the next loss triggers a retry
            try:
                reach("ps.losses.before")
                self._directory.write_losses(replay.losses_of(job.store, job.identity.store_id))
                reach("ps.losses.after")
            except OSError as error:
                logger.error("the record of lost updates could not be saved: %s", error)

    def _save(self, job: JobState) -> int | None:
        """Save a generation; return how many bytes of the disk the next one may take. None if the job has ended."""
        directory, broken, begin = self._directory, False, time.monotonic()
        assert directory is not None
        is_short = self._log is not None and self._log.is_short
        if is_short and job.before is not None:  # retain only the last generation, as after a failure
            job.before = None
            self._remove_unused(job)
        with self._changed:
            self._generation += 1
            generation = self._generation
        if self._log is not None:
            saved = log_begins(job.saved) if job.saved is not None else 0
            broken = self._log.begin_segment(generation, self._segment_before, saved)
            self._log_staged(self._log, job)
        contents, identity = job.store.held(), job.identity
        manifest = replay.manifest_of(job.store, contents)
        manifest.store_id, manifest.job_id, manifest.coordinator_number = (
            identity.store_id,
            identity.job_id,
            identity.coordinator_number,
        )
        manifest.job_name, manifest.generation, manifest.saved_at = identity.name, generation, time.time()
        manifest.logged, manifest.num_servers = self._log is not None, identity.num_servers
        try:
            reach("ps.generation.before")
            while True:
                with contextlib.suppress(MoreArraysError):
                    size = write_shards(directory, job, contents[0], manifest)
                    break
                manifest.ClearField("shards")
            # Some shards may have been written with a step, others without it: it must be in the log.
            job.store.runs.until_ended()
            if self._log is not None and self._log.broken and not broken and job.store.runs.torn:
                raise UnavailableError(self._log.broken)
            with self._changed:
                if self._job is not job:
                    return None  # the written files are cleared next
            if job.store.job != manifest.job:  # part of it may be the next coordinator's, which requested another one
                raise UnavailableError("another coordinator took over while a snapshot was written")
            directory.commit(manifest)
            self.saves.add(time.monotonic() - begin)
            self.saved_bytes += size
            reach("ps.manifest.after")
        except BaseException:
            directory.give_up(generation)
            if job.saved is not None:  # to free disk space, retain only the last generation, not the previous one
                job.before = None
                self._remove_unused(job)
            raise
        # A shard that has come from another server is in no earlier generation, from which its log would not go on.
        job.before = None if job.saved is None or is_short or has_arrivals(job.saved, manifest) else job.saved
        job.saved, job.sizes = manifest, sizes_of(manifest)
        if self._log is not None and broken:
            self._log.repaired()
        self._remove_unused(job)
        reach("ps.generation.after")
        return sum(job.sizes.values()) + manifest.ByteSize() + _MORE

    def _log_staged(self, log: Log, job: JobState) -> None:
        """Log what is staged again: the segments that have it are no longer read once this generation is saved."""
        for contribution in job.store.runs.staged() if job.store.index else ():
            record, size = job.record_of(contribution)
            log.carry_over(size, record, contribution.payload.chunks if contribution.total_bytes else ())

    def _remove_unused(self, job: JobState) -> None:
        assert self._directory is not None
        needed = [manifest for manifest in (job.saved, job.before) if manifest is not None]
        try:
            self._directory.remove_unused(needed, min(map(log_begins, needed)), self._names_arriving)
        except OSError as error:
            logger.warning("files that are no longer needed could not be removed: %s", error)

    def _names_arriving(self) -> list[str]:
        """Return the names of files to which nothing refers yet."""
        with self._changed:  # under which they are begun
            return [file.path.name for file in self._arriving if file.open]

    def _extend_all(self) -> None:
        with self._changed:
            extensions, self._extensions = self._extensions, []
        for extension in extensions:
            try:
                self._extend(extension)
            except Exception as failure:
                extension.error = self._words_of(failure)
                self.failures += 1
                logger.error("a shard that has moved could not be saved: %s", extension.error)
            if extension.in_background and not extension.saved:
                self._request_save()
            with self._changed:
                extension.ended = True
                self._changed.notify_all()

    def _extend(self, extension: Extension) -> None:
        """Save a manifest that extends the last generation, if that is possible."""
        directory, job, begin = self._directory, self._job, time.monotonic()
        assert directory is not None
        if job is None or job.store is not extension.store or job.saved is None:
            return
        saved, identity = job.saved, job.identity
        if (saved.coordinator_number, saved.logged) != (identity.coordinator_number, self._log is not None):
            return
        arrived = {}
        for name, (shard, file) in extension.arrived.items():
            with shard.lock:
                arrays = shard.arrays()
            if not file.tensors.keys() >= arrays.keys():
                return
            arrived[name] = shard, file.finish(arrays)
        manifest = extended(saved, job.store, arrived)
        if manifest is None:
            return
        with self._changed:
            if self._job is not job:
                return  # the files are cleared next
            self._generation += 1
            manifest.generation = self._generation
        try:
            directory.commit(manifest)
            reach("ps.manifest.after")
        except BaseException:
            directory.give_up(manifest.generation)
            raise
        # A shard that has come from another server is in no earlier generation, from which its log would not go on.
        job.before = None if arrived else saved
        job.saved, job.sizes = manifest, sizes_of(manifest)
        self._remove_unused(job)
        extension.saved = True
        if arrived:
            self.saves.add(time.monotonic() - begin)
            self.saved_bytes += sum(array.bytes for _, arrays in arrived.values() for array in arrays)

    def _words_of(self, failure: Exception) -> str:
        if isinstance(failure, OSError):
            return f"{failure.strerror or failure} in {self.options.directory}"
        return str(failure) or repr(failure)
