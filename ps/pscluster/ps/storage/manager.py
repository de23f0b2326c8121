"""The manager of a server's state: the methods that the service calls, beside the thread that saves (`saver`).

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.ps.server.embedding.table_changes import record_bytes
from pscluster.ps.server.requests.changes import Change
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.requests.updates import Applied
from pscluster.ps.server.state.shard import Array, Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.combine import Contribution
from pscluster.ps.storage import replay
from pscluster.ps.storage.arrivals import ShardFile, log_begins, may_extend
from pscluster.ps.storage.files.generations import DamagedError
from pscluster.ps.storage.job_state import JobIdentity, JobState, sizes_of
from pscluster.ps.storage.log.reader import Dropped, lost_in, records
from pscluster.ps.storage.options import Durability
from pscluster.ps.storage.saver import Extension, StateSaver
from pscluster.v1 import ps_pb2, state_pb2

logger = logging.getLogger(__name__)


_LEAST_LOG = 64 << 20
"""A generation is due once the log is longer than this and than twice the state. Short segments are overwritten while
the kernel still caches them, so that little reaches the disk; a larger state would cost more to write so often."""


@dataclass(frozen=True, slots=True)
class Restored:
    store: Store
    identity: JobIdentity
    words: str


class StateManager(StateSaver):
    """Persists the state of one server. Thread-safe. ConfigurationError if the directory can't be used."""

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
        self._job = JobState(store, identity, saved=manifest, sizes=sizes_of(manifest))
        words = f"the state saved {max(time.time() - manifest.saved_at, 0):.1f} s ago"
        if damaged:
            words += f" ({damaged} newer snapshot{'s were' if damaged > 1 else ' was'} damaged)"
        if self.options.kind is Durability.LOG:
            words += f" and {logged} updates logged since"
        logger.info("restored %s, from %s in %.2f s", words, self.options.directory, time.monotonic() - begin)
        if self._log is not None:  # a segment of the log begins with a generation
            with contextlib.suppress(PsClusterError):  # it is retried, and updates are refused until then
                self.save()
        return Restored(store, identity, words)

    def begin(self, store: Store, identity: JobIdentity) -> None:
        """Begin a new job, and remove the state of the previous one."""
        self._replace(JobState(store, identity))

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

    def _replace(self, job: JobState | None) -> None:
        if self._directory is None:
            return
        with self._changed:
            self._job, self._clear = job, True
            if job is not None:
                self._request_save()  # to be found again; and a log needs a segment before the first update
            self._changed.notify_all()

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
        state = f"failing: {failed}" if (failed := self.unsaved) else f"{self._plan.saved} snapshots saved"
        return f"durability {self.options.kind.value}, {state}"

    @property
    def unsaved(self) -> str:
        """Why the state can't be saved now; empty if it can."""
        return (self._log.broken if self._log else "") or self._plan.failed

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

    @property
    def logs(self) -> bool:
        """Whether there is a log, which needs an update's payload after the update."""
        return self._log is not None

    def _check_saved(self, store: Store) -> JobState | None:
        """Return the job, if there is one. UnavailableError if the log can't take updates yet.

        Its records go on from what was saved last: a coordinator or a restore since then would be missing.
        """
        with self._changed:
            if not self._plan.is_saved(self._owed):
                raise UnavailableError("updates are refused until the change of coordinator has been saved")
            job = self._job
            if job is not None and job.store is store and job.saved is not None and store.term > job.saved.term:
                raise UnavailableError("updates are refused until the restored checkpoint has been saved")
            return job

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
        job = self._check_saved(store)
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
                limit = max(_LEAST_LOG, 2 * sum(job.sizes.values()) if job is not None else 0)
                if self._log.is_short or self._log.size > limit:
                    self._request_save()
            except UnavailableError:
                self._request_save()
                raise

    def log_contribution(self, store: Store, contribution: Contribution) -> None:
        """Log a contribution to a synchronous step, if there is a log. UnavailableError if it can't be written."""
        if self._log is None:
            return
        job = self._check_saved(store)
        if job is None or job.store is not store:
            return  # its job is over
        record, size = job.record_of(contribution)
        try:
            ticket, room = self._log.take(size)
            self._log.record(ticket, room, record, contribution.payload.chunks if contribution.total_bytes else ())
        except UnavailableError:
            self._request_save()  # so that a new segment begins
            raise

    # Shards that move: see `arrivals`

    def note_placement(self) -> None:
        """Have it saved in the background that shards have left."""
        with self._changed:
            if self._job is not None and self._directory is not None:
                self._extensions.append(Extension(self._job.store, in_background=True))
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

    def may_extend(self, store: Store, arriving: int) -> bool:
        """Return whether this many shards may be saved beside what was saved before; else `save` saves them, too."""
        with self._changed:
            job = self._job
        return job is not None and job.saved is not None and may_extend(job.saved, store, arriving)

    def save_shards(
        self, store: Store, arrived: Mapping[tuple[int, int], tuple[Shard, ShardFile | None]] | None = None
    ) -> None:
        """Return once shards that have arrived, and do not change yet, are saved, and that others have left.

        PsClusterError if it can't be saved. `arrived`: by variable and shard, with their files.
        """
        arrived = arrived or {}
        files = {name: (shard, file) for name, (shard, file) in arrived.items() if file is not None}
        extension = Extension(store, files)
        with self._changed:
            if self._directory is not None and len(files) == len(arrived):
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

    # What has changed

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
