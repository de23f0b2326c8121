"""Saving and restoring one checkpoint: a consistent cut.

No function runs while the servers mark their shards, so that no update is in one shard and missing in another. That
takes milliseconds; then each server writes its marked shards, copy-on-write, to its own file.

    save: pause (functions that have begun end, or the save fails after barrier_timeout) -> mark -> resume -> write the
          files -> write the index
          If any step fails, the run continues, earlier checkpoints stand, and the error reaches the waiting caller.
    restore: read and check the index -> every server reads and verifies its share beside its current state -> pause
          -> commit, under a new term -> resume
          If a step before the commit fails, nothing has changed. If one server fails in the commit, others have the
          checkpoint's values: the run continues, and nothing is saved until a restore succeeds or is given up. The
          next coordinator notices, since the servers' terms differ.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.json_format import MessageToDict

from pscluster.coordinator.checkpoints.deferred import DeferredRestore
from pscluster.coordinator.checkpoints.folder import INDEX, there, written
from pscluster.coordinator.checkpoints.index import Index, check_whole, read_index, write_index
from pscluster.coordinator.checkpoints.restore_plan import plan_variable, sent_ahead
from pscluster.coordinator.checkpoints.saved_layers import (
    LayerState,
    checked_layers,
    read_layers,
    states_of,
    write_layers,
)
from pscluster.coordinator.data.dataset_progress import DatasetProgress
from pscluster.coordinator.job.context import HasJob, JobContext
from pscluster.coordinator.job.terms import check_restored, restoring
from pscluster.coordinator.observability.events import Saved
from pscluster.core import checks
from pscluster.core.checks import configuration_errors, type_of
from pscluster.core.errors import (
    CheckpointError,
    CheckpointMismatchError,
    PsClusterError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
)
from pscluster.core.fault_points import reach
from pscluster.core.handles import StaysHere
from pscluster.core.ids import fresh_id
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.spec import part_name
from pscluster.ps.storage.files.tensor_files import Array, join
from pscluster.v1 import ps_pb2
from pscluster.worker.features.layer import Layer

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Attempts to have all servers mark their shards, and of `write` to have them written: one may die during each."""

BARRIER_SECONDS = 60.0


class Checkpoint(StaysHere):
    """Saves and restores all of a strategy: variables, slots, averages, steps and progress.

    Args:
        strategy: whose variables to save.
        barrier_timeout: seconds within which running functions must end; otherwise a save fails.
        pause: if False, functions may be running: they must not update anything meanwhile, nor run again.
        features: preprocessing layers with different names, whose states, such as vocabularies, are saved and restored.
    """

    instead = "save and restore in the script"

    def __init__(
        self,
        strategy: HasJob,
        *,
        barrier_timeout: float = BARRIER_SECONDS,
        pause: bool = True,
        features: Sequence[Layer] = (),
    ) -> None:
        self._pauses = pause
        self.features = checked_layers(features)
        with configuration_errors():
            self.barrier_timeout = checks.real("barrier_timeout", barrier_timeout, kind="number of seconds", above=0)
        if not hasattr(strategy, "context"):
            raise TypeError(f"strategy is {type_of(strategy)}; give a ParameterServerStrategy")
        self.context = strategy.context

    def mark(self, checkpoint_number: int = 0) -> MarkedCheckpoint:
        """Make a cut through the job as it is now, which can then be written. If a server dies meanwhile, make another.

        Raises:
            WaitTimeoutError: functions that have begun, or updates of global arrays, have not ended after
                `barrier_timeout`; the message names them.
            CheckpointError: a restore failed in its last step, and was neither repeated nor given up.
            UnavailableError: a server can't be reached, or has died in each of three attempts.
        """
        try:
            for sender in list(self.context.senders):
                sender.settle(self.barrier_timeout)
            for _ in range(_ATTEMPTS - 1):
                try:
                    return self._mark(checkpoint_number)
                except UnavailableError as error:
                    if isinstance(error, PSUnavailableError):  # it has been waited for, or lost its state
                        raise
                    logger.warning("starting the checkpoint over: %s", error)
            return self._mark(checkpoint_number)
        except BaseException:
            self.context.metrics.checkpoints_failed += 1
            raise

    def _mark(self, checkpoint_number: int) -> MarkedCheckpoint:
        context, begin = self.context, time.monotonic()
        check_restored(context)
        context.client.directory()  # wait for a server that is down here, not while functions are paused
        with context.placing, self._paused():
            context.settle_steps()
            check_restored(context)  # another thread may have tried meanwhile
            if context.dataset_progress is not None:
                context.dataset_progress.save()
            forgotten = context.dispatcher.servers.forgotten() if context.dispatcher is not None else set()
            index = Index(checkpoint_number, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), 0.0)
            directory = context.client.directory()[0]
            variables = [spec for spec in directory.variables if not spec.evaluation]
            for spec in variables:
                index.add_variable(spec)
            index.partly_applied = context.partly_applied.count
            index.partly_applied_last = list(context.partly_applied.last)
            for optimizer in directory.optimizers:
                index.optimizers[optimizer.name] = MessageToDict(optimizer, preserving_proto_field_name=True)
            mark = fresh_id()
            try:
                replies = context.client.checkpoint(ps_pb2.CheckpointRequest.MARK, mark)
                index.job_metadata.update(replies[0].metadata)
                reach("coordinator.mark.after")
                names = {spec.id: spec.name for spec in variables}
                marked = MarkedCheckpoint(context, mark, index, names, forgotten, states_of(self.features))
                context.cuts.begin(marked)
            except BaseException:
                with contextlib.suppress(PsClusterError):  # those that have marked need not keep old bytes
                    context.client.checkpoint(ps_pb2.CheckpointRequest.DROP, mark)
                raise
        index.pause_seconds = round(time.monotonic() - begin, 6)
        context.metrics.checkpoint_pauses.add(index.pause_seconds)
        return marked

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        dispatcher = self.context.dispatcher if self._pauses else None
        return contextlib.nullcontext() if dispatcher is None else dispatcher.waits.barrier(self.barrier_timeout)

    def write(self, path: str) -> str:
        """Save to this directory, which every server must see under the same path, and return the path.

        If a server dies before it has written its part, what the others have written is removed, and another cut is
        written in its place.

        Raises:
            WaitTimeoutError: see `mark`.
            CheckpointError: it can't be written; the message says where and why.
            UnavailableError, StaleError: a server can't be reached, or has died in each of three attempts.
        """
        path = str(path)
        for _ in range(_ATTEMPTS - 1):
            marked = self.mark()
            try:
                return marked.write(path)
            except (UnavailableError, StaleError) as error:
                if isinstance(error, PSUnavailableError):
                    raise
                logger.warning("writing the checkpoint %s again: %s", path, error)
            marked.remove_parts(path)
        return self.mark().write(path)

    def read(self, path: str, *, partial: bool = False, progress: bool = True) -> Index:
        """Restore from this directory, however the variables are cut and placed now, and return its index.

        Functions run while it is read; those running when it is committed end first, as in `mark`.

        Args:
            partial: leave variables and layers that the checkpoint lacks as they are; otherwise they are an error.
                Variables that it has, and that are not there yet, are restored when they are made, with what optimizers
                keep beside them.
            progress: restore the job's progress as well: what `save_progress` saved, datasets' positions, and `fit`'s
                state. If False, they stay as they are.

        Raises:
            WaitTimeoutError: functions that have begun, or operations on global arrays, have not ended after
                `barrier_timeout`. Nothing was changed.
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
        states = read_layers(path, index, self.features, partial=partial)
        if index.partly_applied:
            many, last = index.partly_applied, index.partly_applied_last[-1:]
            logger.warning(
                "%s may contain some, but not all, of the updates of functions that failed or were cancelled (%d, "
                "the last one: %s)",
                path,
                many,
                *last or [""],
            )
        for sender in list(context.senders):  # what was asked for before is of the values before
            sender.settle(self.barrier_timeout, reads=True)
        with context.placing:  # the plan goes by where the shards are
            requests = self._plan(index, path, progress)
            for request in requests.values():
                request.directory = path
            with self._taking_place(requests, f"the restore of {path}", index.nbytes, datasets):
                context.partly_applied.clear()
                self._set_layers(states)
                if datasets is not None:
                    datasets.restored()
            self._defer(index, path, progress)
        return index

    def read_missing_layers(self, path: str) -> None:
        """Restore the layers that are not adapted yet, and nothing else. CheckpointError as `read` has it."""
        missing = [layer for layer in self.features if not layer.is_adapted]
        if missing:
            self._set_layers(read_layers(path, read_index(path), missing, partial=True))

    def _set_layers(self, states: Mapping[str, Mapping[str, Array]]) -> None:
        for layer in self.features:
            if layer.name in states:
                layer.set_state(states[layer.name])

    def _defer(self, index: Index, path: str, progress: bool) -> None:
        """Have variables that there are not yet restored when they are made."""
        context = self.context
        known = {variable.name for variable in context.variables.all}
        names = [name for name in index.variables if name not in known]

        def restore(variables: Sequence[Variable]) -> None:
            with context.placing:
                requests = {server: ps_pb2.RestoreRequest() for server in range(context.client.num_servers)}
                for variable in variables:
                    plan_variable(variable, index.variables[variable.name], path, requests, named=progress)
                for request in requests.values():
                    request.directory = path
                words = ", ".join(variable.name for variable in variables)
                with self._taking_place(requests, f"the restore of {words} from {path}", index.nbytes):
                    pass

        def scheduled() -> int:
            return 0 if context.dispatcher is None else context.dispatcher.status.stats().scheduled

        before = scheduled()

        def may_have_changed(variables: Sequence[Variable]) -> bool:
            return scheduled() > before or any(map(context.client.updater.has_updated, (v.id for v in variables)))

        deferred = DeferredRestore(index, path, names, restore, may_have_changed)
        context.variables.deferred = deferred if names else None

    def give_up_restore(self) -> None:
        """Continue with what the servers have, after a restore that failed in its last step.

        Some servers may have the checkpoint's values and others not: that mixture is saved from now on. Raises
        WaitTimeoutError and UnavailableError as `read` does; it is not given up then.
        """
        nothing = {server: ps_pb2.RestoreRequest() for server in range(self.context.client.num_servers)}
        with self._taking_place(nothing, "giving up a restore"):
            self.context.partly_applied.add("a restore", "was broken off in its last step, and given up")

    @contextlib.contextmanager
    def _taking_place(
        self,
        requests: dict[int, ps_pb2.RestoreRequest],
        action: str,
        nbytes: int = 0,
        datasets: DatasetProgress | None = None,
    ) -> Iterator[None]:
        """Have the servers read and commit what these requests name. No function runs within the block."""
        context, restore_id = self.context, fresh_id()
        for request in requests.values():
            request.id = restore_id
        with contextlib.ExitStack() as pause:
            try:
                for ahead in sent_ahead(requests):
                    context.client.restore(ahead)
                context.client.restore(requests, nbytes)
                reach("coordinator.stage.after")
                pause.enter_context(self._paused())
                if datasets is not None:
                    pause.enter_context(datasets.unsaved())
                    datasets.check_idle()
            except BaseException:
                drops = {server: ps_pb2.RestoreRequest(id=restore_id, drop=True) for server in requests}
                with contextlib.suppress(PsClusterError):
                    context.client.restore(drops)
                raise
            with restoring(context, action) as term:
                commits = {server: ps_pb2.RestoreRequest(id=restore_id, commit=True, term=term) for server in requests}
                context.client.restore(commits, nbytes)
                reach("coordinator.commit.after")
            yield

    def _check_names(self, index: Index, path: str, partial: bool) -> None:
        known = {variable.name for variable in self.context.variables.all}
        missing = sorted(known - index.variables.keys())
        if missing and not partial:
            raise CheckpointMismatchError(
                f"{path} has no {', '.join(map(repr, missing))}: give partial=True to leave them as they are"
            )
        if surplus := [name for name in index.variables if name not in known]:
            logger.warning(
                "%s has variables that this job does not have: %s; they get its values when they are made",
                path,
                ", ".join(surplus),
            )

    def _plan(self, index: Index, path: str, progress: bool) -> dict[int, ps_pb2.RestoreRequest]:
        requests = {server: ps_pb2.RestoreRequest() for server in range(self.context.client.num_servers)}
        for variable in self.context.variables.all:
            if variable.name in index.variables:
                plan_variable(variable, index.variables[variable.name], path, requests, named=progress)
        if progress:
            requests[0].metadata.SetInParent()  # none, where the checkpoint has none
            requests[0].metadata.texts.update(index.job_metadata)
        return requests


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class MarkedCheckpoint:
    """A cut that the servers hold until it is written, or until another one is made."""

    context: JobContext
    mark: int
    index: Index
    names: Mapping[int, str]  # of its variables, by id
    forgotten: Collection[int]  # keys of functions that are not scheduled again
    layers: Mapping[str, LayerState]  # by name

    def write(self, path: str) -> str:
        metrics, begin, event_log = self.context.metrics, time.monotonic(), self.context.event_log
        try:
            self._write(path)
        except BaseException as error:
            metrics.checkpoints_failed += 1
            event_log.not_saved(path, str(error))
            raise
        seconds = time.monotonic() - begin
        metrics.checkpoints.add(seconds)
        event_log.saved(Saved(path, time.time(), seconds, self.index.pause_seconds, self.index.nbytes))
        return path

    def _write(self, path: str) -> None:
        client, index = self.context.client, self.index
        nbytes = 4 * sum(variable.nbytes for variable in self.context.variables.all)  # with slots, about
        try:
            with written(path) as (fs, where):
                fs.makedirs(where, exist_ok=True)
                if there(fs, join(where, INDEX)):
                    raise CheckpointError(
                        f"{path} already holds a checkpoint, which is never overwritten: give another path, and each "
                        "job a directory of its own"
                    )
                replies = client.checkpoint(ps_pb2.CheckpointRequest.WRITE, self.mark, path, nbytes)
                reach("coordinator.parts.after")
                for server, reply in enumerate(replies):
                    name = part_name(server, client.num_servers)
                    if not there(fs, join(where, name)) or fs.size(join(where, name)) != reply.bytes:
                        raise CheckpointError(
                            f"ps {server} has written {name}, which is not here in {path}: the directory must be the "
                            "same for all parameter servers and the coordinator"
                        )
                    index.add_file(name, reply, self.names, self.forgotten)
                write_layers(path, index, self.layers)
        finally:
            with contextlib.suppress(PsClusterError):
                client.checkpoint(ps_pb2.CheckpointRequest.DROP, self.mark)
            self.context.cuts.end(self)
        check_whole(index, path)
        write_index(path, index)

    def remove_parts(self, path: str) -> None:
        """Remove what servers have written to a path where the whole was not. CheckpointError if that is impossible."""
        servers = self.context.client.num_servers
        with written(path) as (fs, where):
            for server in range(servers):
                with contextlib.suppress(FileNotFoundError):
                    fs.rm_file(join(where, part_name(server, servers)))
