"""Saving and restoring one checkpoint: a consistent cut.

A checkpoint is a cut through the job: no function runs while the servers mark their shards, so that no update is in one
shard and missing in another. Functions that run end first, those that have not started wait; marking takes
milliseconds. Then functions go on, and the servers write what was marked, copy-on-write, each its own file.

    save: paused (what has begun ends, or it fails after barrier_timeout) -> marked -> going on -> written -> index
          written
          whatever fails, the run goes on, what was there before stands, and the error is raised where it is waited for
    restore: the index is read and checked -> every server reads and verifies its part beside what there is -> paused
          -> commit, under a new term -> going on
          whatever fails before the commit, nothing has changed; where one server fails in it, others have the
          checkpoint's values: the run goes on, and nothing is saved until a restore has ended, or it is given up. The
          next coordinator sees it by the servers' terms, which differ
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Collection, Iterator

import fsspec
from google.protobuf.json_format import MessageToDict

from pscluster.coordinator.checkpoints.folder import INDEX, reason, there
from pscluster.coordinator.checkpoints.index import Index, check_whole, read_index, write_index
from pscluster.coordinator.checkpoints.restore_plan import plan_variable, sent_ahead
from pscluster.coordinator.data.dataset_progress import NAME as POSITIONS
from pscluster.coordinator.data.dataset_progress import DatasetProgress
from pscluster.coordinator.job.context import HasJob, JobContext
from pscluster.coordinator.job.progress import NAME as PROGRESS
from pscluster.coordinator.job.progress import TRAINING, JobProgress
from pscluster.coordinator.job.terms import check_restored, restoring
from pscluster.coordinator.observability.events import Saved
from pscluster.core.errors import CheckpointError, CheckpointMisfitError, ConfigurationError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.handles import StaysHere
from pscluster.core.ids import fresh_id
from pscluster.ps.spec import PINNED, part_name
from pscluster.ps.storage.tensor_files import join
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

BARRIER_SECONDS = 60.0

KEPT = PROGRESS, POSITIONS, TRAINING
"""Variables of our own, which a checkpoint has where something was kept."""


class Checkpoint(StaysHere):
    """Saves all of a strategy, variables, slots, averages, steps and progress, and restores it.

    Args:
        strategy: whose variables they are.
        barrier_timeout: seconds that running functions have to end in, before a save fails.
    """

    instead = "save and restore in the script"

    def __init__(self, strategy: HasJob, *, barrier_timeout: float = BARRIER_SECONDS) -> None:
        if not barrier_timeout > 0:
            raise ConfigurationError(f"barrier_timeout is {barrier_timeout}; give more than 0 seconds")
        self.context = strategy.context
        self.barrier_timeout = barrier_timeout

    def mark(self, number: int = 0) -> MarkedCheckpoint:
        """A cut through the job as it is now, to be written.

        Raises:
            WaitTimeoutError: functions that have begun have not ended after `barrier_timeout`; the message names them.
            CheckpointError: a restore was broken off in its last step, and neither repeated nor given up.
            UnavailableError: a server can't be reached.
        """
        try:
            return self._mark(number)
        except BaseException:
            self.context.counts.checkpoints_failed += 1
            raise

    def _mark(self, number: int) -> MarkedCheckpoint:
        context, begin = self.context, time.monotonic()
        check_restored(context)
        context.client.directory()  # wait for a server that is gone here, not while functions are paused
        with self._paused():
            check_restored(context)  # others may have tried meanwhile
            if context.dataset_progress is not None:
                context.dataset_progress.save()
            forgotten = context.dispatcher.forgotten() if context.dispatcher is not None else set()
            index = Index(number, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), 0.0)
            directory = context.client.directory()[0]
            variables = [spec for spec in directory.variables if not spec.name.startswith(PINNED)]
            for spec in variables:
                index.add_variable(spec)
            index.partly_applied = context.partly_applied.count
            index.partly_applied_last = context.partly_applied.last
            for optimizer in directory.optimizers:
                index.optimizers[optimizer.name] = MessageToDict(optimizer, preserving_proto_field_name=True)
            mark = fresh_id()
            try:
                context.client.checkpoint(ps_pb2.CheckpointRequest.MARK, mark)
                reach("coordinator.mark.after")
            except BaseException:
                with contextlib.suppress(PsClusterError):  # those that are there keep no old bytes for nobody
                    context.client.checkpoint(ps_pb2.CheckpointRequest.DROP, mark)
                raise
        index.pause_seconds = round(time.monotonic() - begin, 6)
        context.counts.checkpoint_pauses.add(index.pause_seconds)
        return MarkedCheckpoint(context, mark, index, {spec.id: spec.name for spec in variables}, forgotten)

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        """No function runs within the block."""
        dispatcher = self.context.dispatcher
        return contextlib.nullcontext() if dispatcher is None else dispatcher.barrier(self.barrier_timeout)

    def write(self, path: str) -> str:
        """Save to this directory, which every server must see under the same path; the path.

        Raises:
            WaitTimeoutError, UnavailableError: as `mark`.
            CheckpointError: it can't be written; the message says where and why.
        """
        return self.mark().write(str(path))

    def read(self, path: str, *, partial: bool = False, progress: bool = True) -> Index:
        """Restore from this directory, however the variables are cut and placed now. What was in it.

        Functions run while it is read; those that do when it takes its place end first, as in `mark`.

        Args:
            partial: variables that are not in the checkpoint stay as they are; otherwise that is an error.
            progress: with how far the job was: what `save_progress` has kept, the positions of datasets, that of `fit`.
                False: that stays as it is.

        Raises:
            WaitTimeoutError: functions that have begun have not ended after `barrier_timeout`. Nothing was changed.
            MisuseError: functions that have parts of distributed datasets have not ended. Nothing was changed.
            CheckpointError: it is damaged, of another program, or does not fit. Nothing was changed.
            UnavailableError: a server was lost. If that was during the last step, others may have the checkpoint's
                values, and nothing is saved until this is repeated, or given up with `give_up_restore`.
        """
        path = str(path)
        index = read_index(path)
        check_whole(index, path)
        context = self.context
        datasets = context.dataset_progress if progress else None
        if datasets is not None:
            datasets.check_idle()
        self._check_names(index, path, partial)
        if progress:
            for name in KEPT:  # there has to be a place for it
                JobProgress(context.variables, name).prepare(index.variables)
        requests = self._plan(index, path, progress)
        for request in requests.values():
            request.directory = path
        if index.partly_applied:
            many, last = index.partly_applied, index.partly_applied_last[-1:]
            logger.warning("%s may have parts of %d functions that had ended, the last: %s", path, many, *last or [""])
        with self._taking_place(requests, f"the restore of {path}", index.nbytes, datasets):
            context.partly_applied.clear()
            if datasets is not None:
                datasets.restored()
        return index

    def give_up_restore(self) -> None:
        """Go on with what the servers have, after a restore that was broken off in its last step.

        Some of them may have the checkpoint's values, and others not: from now on that is what is saved.

        Raises:
            WaitTimeoutError, UnavailableError: as `read`; it is not given up yet.
        """
        nothing = {server: ps_pb2.RestoreRequest() for server in range(self.context.client.num_servers)}
        with self._taking_place(nothing, "giving up a restore"):
            self.context.partly_applied.add("a restore", "was broken off in its last step, and given up")

    @contextlib.contextmanager
    def _taking_place(
        self,
        requests: dict[int, ps_pb2.RestoreRequest],
        what: str,
        nbytes: int = 0,
        datasets: DatasetProgress | None = None,
    ) -> Iterator[None]:
        """Within the block the servers have what they were to read, and no function runs yet."""
        context, number = self.context, fresh_id()
        for request in requests.values():
            request.id = number
        with contextlib.ExitStack() as pause:
            try:
                for ahead in sent_ahead(requests):
                    context.client.restore(ahead)
                context.client.restore(requests, nbytes)
                reach("coordinator.stage.after")
                pause.enter_context(self._paused())
                if datasets is not None:
                    datasets.check_idle()
            except BaseException:
                drops = {server: ps_pb2.RestoreRequest(id=number, drop=True) for server in requests}
                with contextlib.suppress(PsClusterError):
                    context.client.restore(drops)
                raise
            with restoring(context, what) as term:
                commits = {server: ps_pb2.RestoreRequest(id=number, commit=True, term=term) for server in requests}
                context.client.restore(commits, nbytes)
                reach("coordinator.commit.after")
            yield

    def _check_names(self, index: Index, path: str, partial: bool) -> None:
        known = {variable.name for variable in self.context.variables.all}
        missing = sorted(known - index.variables.keys() - set(KEPT))
        if missing and not partial:
            raise CheckpointMisfitError(
                f"{path} has no {', '.join(map(repr, missing))}: give partial=True to leave them as they are"
            )
        if surplus := [name for name in index.variables if name not in known and name not in KEPT]:
            logger.warning("%s has variables that this job does not have: %s", path, ", ".join(surplus))

    def _plan(self, index: Index, path: str, progress: bool) -> dict[int, ps_pb2.RestoreRequest]:
        requests = {server: ps_pb2.RestoreRequest() for server in range(self.context.client.num_servers)}
        for variable in self.context.variables.all:
            if variable.name in KEPT and not progress:
                continue
            if variable.name in index.variables:
                plan_variable(variable, index.variables[variable.name], path, requests, named=progress)
            elif variable.name in KEPT:  # none was kept then: zeros, which say so
                shard = requests[variable.owners[0]].shards.add(variable=variable.number)
                shard.arrays.add(array="value")
        return requests


class MarkedCheckpoint:
    """A cut that the servers hold, until it is written or another one is made."""

    def __init__(
        self,
        context: JobContext,
        mark: int,
        index: Index,
        names: dict[int, str],
        forgotten: Collection[int] = (),
    ) -> None:
        self._context = context
        self._forgotten = forgotten
        self._mark = mark
        self._names = names
        self.index = index

    def write(self, path: str) -> str:
        """Have it written; see `Checkpoint.write`."""
        counts, begin, event_log = self._context.counts, time.monotonic(), self._context.event_log
        try:
            self._write(path)
        except BaseException as error:
            counts.checkpoints_failed += 1
            event_log.not_saved(path, str(error))
            raise
        seconds = time.monotonic() - begin
        counts.checkpoints.add(seconds)
        event_log.saved(Saved(path, time.time(), seconds, self.index.pause_seconds, self.index.nbytes))
        return path

    def _write(self, path: str) -> None:
        client, index = self._context.client, self.index
        try:
            fs, where = fsspec.core.url_to_fs(path)
            fs.makedirs(where, exist_ok=True)
            if there(fs, join(where, INDEX)):
                raise CheckpointError(
                    f"{path} already holds a checkpoint, which is never overwritten: give another path"
                )
            replies = client.checkpoint(ps_pb2.CheckpointRequest.WRITE, self._mark, path, _bytes(self._context))
            reach("coordinator.parts.after")
            for server, reply in enumerate(replies):
                name = part_name(server, client.num_servers)
                if not there(fs, join(where, name)) or fs.size(join(where, name)) != reply.bytes:
                    raise CheckpointError(
                        f"ps {server} has written {name}, which is not here in {path}: the directory must be the same "
                        "for all parameter servers and the coordinator"
                    )
                index.add_file(name, reply, self._names, self._forgotten)
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(f"{path} can't be written: {reason(error)}") from error
        finally:
            with contextlib.suppress(PsClusterError):
                client.checkpoint(ps_pb2.CheckpointRequest.DROP, self._mark)
        check_whole(index, path)
        write_index(path, index)


def _bytes(context: JobContext) -> int:
    return sum(variable.nbytes for variable in context.variables.all) * 4  # slots
