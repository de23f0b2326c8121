"""The manager of a server's state: a thread that saves generations, and the methods that the service calls.

The service reports jobs that begin or end, has creations saved before it acknowledges them, and applies updates within
`logged`. All decisions are those of `policy`. Requests never wait for a generation, with two exceptions: creations, and
updates of blocks that are still to be written, once their old bytes exceed 64 MiB and go to the disk (`spill`). With a
log, an update waits for its record.

If the process dies, between any two lines, it may lose a generation without a manifest, which has not been reported;
updates that were not acknowledged; and what the user's choice of durability permits. A disk that is full or broken is
logged once and retried: with snapshots the job continues, with a log updates are refused until there is room.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.metrics.registry import Histogram
from pscluster.ps.server.directory import HeldVariable
from pscluster.ps.server.payload import Payload
from pscluster.ps.server.shard import Array, Shard, Snapshot
from pscluster.ps.server.store import Store
from pscluster.ps.server.synchronous.combine import Contribution
from pscluster.ps.server.table_changes import record_bytes
from pscluster.ps.server.update_checks import Change
from pscluster.ps.server.updates import Applied
from pscluster.ps.storage import replay
from pscluster.ps.storage.arrivals import ShardFile, extended, log_begins
from pscluster.ps.storage.generations import DamagedError, StateDirectory
from pscluster.ps.storage.log import Dropped, Log, lost_in, records
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.ps.storage.policy import SavePlan
from pscluster.ps.storage.spill import Spill
from pscluster.v1 import ps_pb2, state_pb2

logger = logging.getLogger(__name__)

_LEAST_LOG = 64 << 20
"""A generation is due once the log is longer than this and than twice the state. Short segments are overwritten while
the kernel still caches them, so that little reaches the disk; a larger state would cost more to write so often."""

_MAX_FILES = 8
"""The most files of generations that are in use; shards in others are written again."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job that a store belongs to."""

    store_id: int = 0  # drawn by this server for the store; 0: none
    job_id: int = 0  # shared by all coordinators of the job
    coordinator_number: int = 0  # the number of coordinators so far
    name: str = ""
    num_servers: int = 0  # of the job; 0: unknown


@dataclass(frozen=True, slots=True)
class Restored:
    store: Store
    identity: JobIdentity
    words: str


@dataclass(slots=True)
class _Job:
    store: Store
    identity: JobIdentity
    saved: state_pb2.Manifest | None = None  # the last generation
    before: state_pb2.Manifest | None = None  # the previous one
    sizes: Counter[str] = field(default_factory=Counter)  # by file, the bytes in use
    losses_written: int = 0  # `Losses.news` when the losses were last written


@dataclass(eq=False, slots=True)
class _Extension:
    """What the last generation is to be extended by: a shard that has arrived, or nothing, if others have left."""

    store: Store
    name: tuple[int, int] = 0, 0  # variable and shard
    shard: Shard | None = None
    file: ShardFile | None = None
    ended: bool = False
    saved: bool = False  # False, without an error: a whole generation is needed
    error: str = ""


class StateManager:
    """Persists the state of one server. Thread-safe. ConfigurationError if the directory can't be used."""

    def __init__(self, options: DurabilityOptions) -> None:
        self.options = options
        self._directory: StateDirectory | None = None
        self._log: Log | None = None
        self._changed = threading.Condition()
        self._plan = SavePlan(options.every)
        self._job: _Job | None = None
        self._generation = 0
        self._owed = 0  # the change that must be saved before an update is logged
        self._segment_before = 0  # the last segment of the log at the start
        self._clear = False
        self._extensions: list[_Extension] = []  # in the order in which they are to be saved
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

    # The job

    def restore(self) -> Restored | None:
        """Restore the saved job, if any. Call this once. ConfigurationError if there is one that can't be used."""
        if self._directory is None:
            return None
        begin, usable, damaged = time.monotonic(), None, 0
        generations, segments = self._directory.generations(), self._directory.log_segments()
        self._segment_before = max(segments, default=0)
        self._generation = max([self._segment_before, *generations])
        for generation in generations:
            try:
                manifest = self._directory.manifest(generation)
                store = replay.restored(manifest, self._directory.read_all(manifest))
            except OSError as error:  # it may be whole, so it must not be ignored
                raise ConfigurationError(
                    f"the state in {self.options.directory} can't be read ({error.strerror or error}): fix that, "
                    "or move it away to start over"
                ) from None
            except (PsClusterError, ValueError, KeyError) as error:
                damaged += 1
                logger.error(
                    "snapshot %d of the state in %s can't be used: %s", generation, self.options.directory, error
                )
            else:
                usable = manifest, store
                break
        self._thread = threading.Thread(target=self._run, name="state-manager", daemon=True)
        self._thread.start()
        if usable is None:
            if damaged:
                raise ConfigurationError(
                    f"none of the state in {self.options.directory} can be used; see the messages above, or move "
                    "it away to start over"
                )
            return None
        manifest, store = usable
        paths, dropped = [self._directory.log_file(segment) for segment in segments], Dropped()
        try:
            # Even if the present choice is another one: updates acknowledged under the previous choice count, too.
            in_log = records(paths, log_begins(manifest), cut=True, dropped=dropped) if manifest.logged else ()
            logged, coordinator_number = replay.replayed(store, manifest, in_log, newest=not damaged)
        except DamagedError as error:
            if self.options.kind is Durability.LOG:
                raise ConfigurationError(
                    f"{error}. To go on without the updates after the last snapshot, start it once with "
                    "--durability snapshot"
                ) from None
            logger.error("%s: the updates after the last snapshot are lost", error)
            dropped = lost_in(paths, log_begins(manifest))
            store, logged = replay.restored(manifest, self._directory.read_all(manifest)), 0
            coordinator_number = manifest.coordinator_number
            self._plan.changed()  # the next generation does not need the log
        replay.restore_losses(store, manifest, self._directory.losses(), dropped)
        store.runs.whole = manifest.logged and self._plan.due() is None and not dropped.records
        identity = JobIdentity(
            manifest.store_id, manifest.job_id, coordinator_number, manifest.job_name, manifest.num_servers
        )
        self._job = _Job(store, identity, saved=manifest, sizes=_sizes(manifest))
        words = f"the state saved {max(time.time() - manifest.saved_at, 0):.1f} s ago"
        if self.options.kind is Durability.LOG:
            words += f" and {logged} updates logged since"
        if damaged:
            words += f", since {damaged} newer snapshot{'s were' if damaged > 1 else ' was'} damaged"
        logger.info("restored %s, from %s in %.2f s", words, self.options.directory, time.monotonic() - begin)
        if self._log is not None:  # a segment of the log begins with a generation
            with contextlib.suppress(PsClusterError):  # it is retried, and updates are refused until then
                self.save()
        return Restored(store, identity, words)

    def begin(self, store: Store, identity: JobIdentity) -> None:
        """Begin a new job, and remove the state of the previous one."""
        self._replace(_Job(store, identity))

    def take_over(self, identity: JobIdentity) -> None:
        """Continue the job under another coordinator."""
        with self._changed:
            if self._job is not None:
                self._job.identity = identity
                # Each coordinator numbers its functions anew, so the log's records must be attributed to one.
                self._owed = self._request_save()

    def resize(self, identity: JobIdentity) -> None:
        """Save that the job has another number of servers. PsClusterError if it can't be saved."""
        with self._changed:
            if self._job is not None:
                self._job.identity = identity
        self.save()

    def end(self) -> None:
        """End the job, and remove its state."""
        self._replace(None)

    def _replace(self, job: _Job | None) -> None:
        if self._directory is None:
            return
        with self._changed:
            self._job, self._clear = job, True
            if job is not None:
                self._request_save()  # to be found again; and a log needs a segment before the first update
            self._changed.notify_all()

    def _request_save(self) -> int:
        """Have a generation saved now; return the number of the change to wait for."""
        with self._changed:
            self._plan.changed()
            self._changed.notify_all()
            return self._plan.request()

    def close(self) -> None:
        """Save the state, and stop. A failure is logged."""
        if self._directory is None:
            return
        with self._changed:
            self._closing = True
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
        """The durability and its state, for the status."""
        if self._directory is None:
            return "durability none"
        failed = (self._log.broken if self._log else "") or self._plan.failed
        state = f"failing: {failed}" if failed else f"{self._plan.saved} snapshots saved"
        return f"durability {self.options.kind.value}, {state}"

    @property
    def log_bytes(self) -> int:
        """Bytes of the log's current segment; 0 without a log."""
        return self._log.size if self._log is not None else 0

    # Called by the service

    def check_rule(self, name: str) -> None:
        """Raise MisuseError if updates by a rule that came as a pickle could not be replayed."""
        if self._log is not None:
            raise MisuseError(
                f"the rule of optimizer {name!r} came as a pickle, which is never stored, so its updates could not be "
                "replayed from the log: put the class into a module that the servers can import, or use "
                "durability snapshot"
            )

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

    @property
    def logs(self) -> bool:
        """Whether there is a log, which needs an update's payload after the update."""
        return self._log is not None

    @contextlib.contextmanager
    def logged(
        self, store: Store, request: ps_pb2.UpdateRequest, changes: Sequence[Change], payload: Payload, total: int
    ) -> Iterator[Applied]:
        """Save or log what the block applies of an update, and enters; then it may be acknowledged.

        With a log, UnavailableError if the update is refused, or can't be acknowledged.
        """
        applied = Applied()
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
        identity = job.identity if job is not None and job.store is store else JobIdentity()  # none: its job is over
        optimizers = {change.optimizer.spec.id: change.optimizer for change in changes if change.optimizer is not None}
        used = [replay.saved_optimizer(known) for known in optimizers.values()]
        size = total + request.ByteSize() + 16 * len(request.items) + sum(saved.ByteSize() + 8 for saved in used)
        size += sum(record_bytes(change.held.spec.table, change.item.rows.ids) for change in changes)
        try:
            ticket, room = self._log.take(size)
        except UnavailableError:
            self._request_save()  # so that a new segment begins
            raise
        try:
            yield applied
        finally:
            self._note_change()
            try:
                if not any(applied.counts):
                    self._log.give_back(ticket, room)
                else:
                    counts = applied.counts + [0] * (len(request.items) - len(applied.counts))
                    record = state_pb2.LogRecord(update=request, updates=counts, total_bytes=total, last=True)
                    record.store_id, record.coordinator_number = identity.store_id, identity.coordinator_number
                    record.optimizers.extend(used)
                    record.tables.extend(applied.tables)
                    reach("ps.log.before")
                    self._log.record(ticket, room, record, payload.chunks if total else ())
                    reach("ps.log.after")
                if 0 in applied.counts:
                    self._log.wait_for_others()
                job = self._job
                if self._log.size > max(_LEAST_LOG, 2 * sum(job.sizes.values()) if job is not None else 0):
                    self._request_save()
            except UnavailableError:
                self._request_save()
                raise

    def log_contribution(self, store: Store, contribution: Contribution) -> None:
        """Log a contribution to a synchronous step, if there is a log. UnavailableError if it can't be written."""
        if self._log is None:
            return
        with self._changed:
            if not self._plan.is_saved(self._owed):
                raise UnavailableError("updates are refused until the change of coordinator has been saved")
            job = self._job
        if job is None or job.store is not store:
            return  # its job is over
        record, size = self._record_of(job, contribution)
        try:
            ticket, room = self._log.take(size)
            self._log.record(ticket, room, record, contribution.payload.chunks if contribution.total_bytes else ())
        except UnavailableError:
            self._request_save()  # so that a new segment begins
            raise

    def _log_staged(self, log: Log, job: _Job) -> None:
        """Log what is staged again: the segments that have it are no longer read once this generation is saved."""
        for contribution in job.store.runs.staged() if job.store.index else ():
            record, size = self._record_of(job, contribution)
            log.carry_over(size, record, contribution.payload.chunks if contribution.total_bytes else ())

    def _record_of(self, job: _Job, contribution: Contribution) -> tuple[state_pb2.LogRecord, int]:
        """Return the record of a contribution, and its size."""
        total, identity = contribution.total_bytes, job.identity
        record = state_pb2.LogRecord(update=contribution.request, total_bytes=total, last=True)
        record.store_id, record.coordinator_number = identity.store_id, identity.coordinator_number
        known = [change.optimizer for change in contribution.changes if change.optimizer is not None]
        record.optimizers.extend(map(replay.saved_optimizer, {used.spec.id: used for used in known}.values()))
        return record, total + record.ByteSize()

    # Shards that move: see `arrivals`

    def note_placement(self) -> None:
        """Have it saved in the background that shards have left."""
        with self._changed:
            if self._job is not None and self._directory is not None:
                self._extensions.append(_Extension(self._job.store))
                self._changed.notify_all()

    def shard_file(self, variable: int, index: int, arrays: Mapping[str, Array]) -> ShardFile | None:
        """Begin the file of a shard that comes from another server; None without durability.

        PsClusterError if there is no room.
        """
        if self._directory is None:
            return None
        with self._changed:
            self._arriving = [file for file in self._arriving if file.open]
            self._generation += 1
            path = self._directory.array_file(self._generation)
            tensors = replay.entries_of(variable, index, arrays)
            try:
                file = ShardFile(path, tensors, fsync=self._directory.fsync)
            except OSError as error:
                raise PsClusterError(f"a shard can't be saved: {self._words_of(error)}") from None
            self._arriving.append(file)
        return file

    def save_shard(self, store: Store, variable: int, index: int, shard: Shard, file: ShardFile | None) -> None:
        """Return once a shard that has arrived, and does not change yet, is saved. PsClusterError if it can't be."""
        extension = _Extension(store, (variable, index), shard, file)
        with self._changed:
            if file is not None:
                self._extensions.append(extension)
                self._changed.notify_all()
                while not extension.ended:
                    if self._ended:
                        raise UnavailableError("the server has stopped")
                    self._changed.wait()
        if extension.error:
            raise PsClusterError(f"the state could not be saved: {extension.error}")
        if not extension.saved:
            self.save()

    def _extend(self, extension: _Extension) -> None:
        """Save a manifest that extends the last generation, if that is possible."""
        directory, job, begin = self._directory, self._job, time.monotonic()
        assert directory is not None
        shard, file, arrived = extension.shard, extension.file, {}
        if job is None or job.store is not extension.store or job.saved is None:
            return
        saved, identity = job.saved, job.identity
        if (saved.coordinator_number, saved.logged) != (identity.coordinator_number, self._log is not None):
            return
        if shard is not None and file is not None:
            with shard.lock:
                arrays = shard.arrays()
            if not file.tensors.keys() >= arrays.keys():
                return
            arrived[extension.name] = shard, file.finish(arrays)
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
        job.saved, job.sizes = manifest, _sizes(manifest)
        self._remove_unused(job)
        extension.saved = True
        if arrived:
            self.saves.add(time.monotonic() - begin)
            self.saved_bytes += sum(array.bytes for _, arrays in arrived.values() for array in arrays)

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
            if extension.shard is None and not extension.saved:
                self._request_save()
            with self._changed:
                extension.ended = True
                self._changed.notify_all()

    def _words_of(self, failure: Exception) -> str:
        if isinstance(failure, OSError):
            return f"{failure.strerror or failure} in {self.options.directory}"
        return str(failure) or repr(failure)

    def write_losses(self) -> None:
        """Have the losses written in the background if new ones were found."""
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
            try:
                if clear:
                    reach("ps.clear.before")
                    self._directory.clear()
                    reach("ps.clear.after")
                if job is not None:
                    self._save(job)
                error = ""
            except Exception as failure:
                error = self._words_of(failure)
                self.failures += 1
                if error != self._plan.failed:
                    unexpected = not isinstance(failure, OSError | PsClusterError)
                    logger.error("the state could not be saved: %s", error, exc_info=failure if unexpected else None)
            if job is not None:
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

    def _save(self, job: _Job) -> None:
        directory, broken, begin = self._directory, False, time.monotonic()
        assert directory is not None
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
                with contextlib.suppress(_MoreArraysError):
                    size = self._write_shards(job, contents[0], manifest)
                    break
                manifest.ClearField("shards")
            # Some shards may have been written with a step, others without it: it must be in the log.
            job.store.runs.until_ended()
            if self._log is not None and self._log.broken and not broken and job.store.runs.torn:
                raise UnavailableError(self._log.broken)
            with self._changed:
                if self._job is not job:
                    return  # the written files are cleared next
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
        job.before = None if job.saved is None or _has_arrivals(job.saved, manifest) else job.saved
        job.saved, job.sizes = manifest, _sizes(manifest)
        if self._log is not None and broken:
            self._log.mended()
        self._remove_unused(job)
        reach("ps.generation.after")

    def _remove_unused(self, job: _Job) -> None:
        assert self._directory is not None
        needed = [manifest for manifest in (job.saved, job.before) if manifest is not None]
        try:
            arriving = [file.path.name for file in list(self._arriving) if file.open]
            self._directory.remove_unused(needed, min(map(log_begins, needed)), arriving)
        except OSError as error:
            logger.warning("files that are no longer needed could not be removed: %s", error)

    def _write_shards(self, job: _Job, variables: list[HeldVariable], manifest: state_pb2.Manifest) -> int:
        """Write the shards that changed since the last generation, each as of one moment; return the bytes."""
        assert self._directory is not None
        before: dict[tuple[int, int], state_pb2.SavedShard] = {}
        if job.saved is not None:
            reusable = {name for name, _ in job.sizes.most_common(_MAX_FILES - 1)}
            before = {
                (saved_shard.variable, saved_shard.shard): saved_shard
                for saved_shard in job.saved.shards
                if all(array.file in reusable for array in saved_shard.arrays)
            }
        with contextlib.ExitStack() as captures:
            changed = self._changed_shards(job, variables, manifest, before, captures)
            arrays = [array for saved, _, _ in changed for array in saved.arrays]
            return self._directory.write_arrays(manifest.generation, arrays, _captured(job.store, changed))

    @staticmethod
    def _changed_shards(
        job: _Job,
        variables: Sequence[HeldVariable],
        manifest: state_pb2.Manifest,
        before: Mapping[tuple[int, int], state_pb2.SavedShard],
        captures: contextlib.ExitStack,
    ) -> list[_ChangedShard]:
        """Enter all shards in the manifest; return those to be written, of which `before` has no file to go on with."""
        changed: list[_ChangedShard] = []
        for held in variables:
            for index, shard in held.shards.items():
                known = before.get((held.spec.id, index))
                saved = manifest.shards.add(variable=held.spec.id, shard=index)
                with shard.lock:
                    # Slots or averages created since, without an update, need not be saved.
                    if known is not None and known.updates == shard.updates:
                        # Not with the remembered updates of that generation: if they are of the previous coordinator,
                        # they would be taken for those of this one, which numbers its functions anew.
                        replay.note_shard(job.store, shard, saved)
                        saved.arrays.extend(known.arrays)
                    else:
                        saved.arrays.extend(replay.arrays_to_save(held.spec.id, index, shard))
                        captured = None
                        if shard.row_limit:  # the next update may give it more rows than the file's header says
                            replay.note_shard(job.store, shard, saved)
                            captured = shard.capture(job.store.spill)
                            for array in captured.values():
                                captures.callback(array.close)
                        changed.append((saved, shard, captured))
        return changed


class _MoreArraysError(Exception):
    """A shard's arrays differ from those in the file's header: another optimizer has created its slots."""


_ChangedShard = tuple[state_pb2.SavedShard, Shard, Mapping[str, Snapshot] | None]
"""A shard to be written, with its entry, and its arrays if they were captured before."""


def _captured(store: Store, shards: Sequence[_ChangedShard]) -> Iterator[Snapshot]:
    """Yield snapshots of each shard's arrays, of the moment its first one is written, and enter its counts."""
    for saved, shard, before in shards:
        if before is not None:
            yield from before.values()
            continue
        with shard.lock:
            if replay.arrays_to_save(saved.variable, saved.shard, shard) != list(saved.arrays):
                raise _MoreArraysError
            replay.note_shard(store, shard, saved)
            captured = shard.capture(store.spill)
        try:
            yield from captured.values()
        finally:
            for array in captured.values():
                array.close()


def _has_arrivals(before: state_pb2.Manifest, manifest: state_pb2.Manifest) -> bool:
    """Return whether a generation has a shard that the one before lacks, though it has the variable."""
    known = {(shard.variable, shard.shard) for shard in before.shards}
    variables = {spec.id for spec in before.variables}
    return any(shard.variable in variables and (shard.variable, shard.shard) not in known for shard in manifest.shards)


def _sizes(manifest: state_pb2.Manifest) -> Counter[str]:
    """Return the bytes in use, by file."""
    sizes: Counter[str] = Counter()
    for shard in manifest.shards:
        for array in shard.arrays:
            sizes[array.file] += array.bytes + 1  # an empty file would not count
    return sizes
