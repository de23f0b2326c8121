"""Saving and restoring: consistent cuts, several checkpoints in a directory, and what a script does when it starts.

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
import enum
import logging
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import fsspec
from google.protobuf.json_format import MessageToDict

from pscluster.coordinator.checkpoints import folder
from pscluster.coordinator.checkpoints.folder import INDEX, reason, there
from pscluster.coordinator.checkpoints.index import (
    Index,
    SavedTensor,
    SavedVariable,
    check_whole,
    read_index,
    write_index,
)
from pscluster.coordinator.data.positions import NAME as POSITIONS
from pscluster.coordinator.data.positions import Positions
from pscluster.coordinator.job.context import HasJob, JobContext, open_jobs
from pscluster.coordinator.job.progress import NAME as PROGRESS
from pscluster.coordinator.job.progress import TRAINING, JobProgress
from pscluster.coordinator.job.terms import check_restored, restoring
from pscluster.coordinator.observability.events import Saved
from pscluster.coordinator.scheduling.waiting import result_of, wait_for
from pscluster.core.errors import (
    CheckpointError,
    CheckpointMisfitError,
    ConfigurationError,
    MisuseError,
    PsClusterError,
)
from pscluster.core.fault_points import reach
from pscluster.core.geometry import moves
from pscluster.core.ids import fresh_id
from pscluster.core.values.handles import StaysHere
from pscluster.ps.handles.variable import Variable
from pscluster.ps.spec import PINNED, part_name
from pscluster.ps.storage.tensor_files import join
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

BARRIER_SECONDS = 60.0
LOOK_SECONDS = 0.5
KEYS_AT_ONCE = 1 << 19  # of functions, in a request to restore: 4 MiB

KEPT = PROGRESS, POSITIONS, TRAINING
"""Variables of our own, which a checkpoint has where something was kept."""


class RestoredFrom(enum.Enum):
    """What a job goes on with."""

    LIVE = "live"  # the servers have it: the coordinator before this one died
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing"  # the initial values


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
        context.client.directory()  # a server that is gone is waited for here, not while nothing runs
        with self._paused():
            check_restored(context)  # others may have tried meanwhile
            if context.positions is not None:
                context.positions.save()
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
        return contextlib.nullcontext() if dispatcher is None else dispatcher.paused(self.barrier_timeout)

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
        positions = context.positions if progress else None
        if positions is not None:
            positions.check_idle()
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
        with self._taking_place(requests, f"the restore of {path}", index.nbytes, positions):
            context.partly_applied.clear()
            if positions is not None:
                positions.restored()
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
        positions: Positions | None = None,
    ) -> Iterator[None]:
        """Within the block the servers have what they were to read, and no function runs yet."""
        context, number = self.context, fresh_id()
        for request in requests.values():
            request.id = number
        with contextlib.ExitStack() as pause:
            try:
                for ahead in _ahead(requests):
                    context.client.restore(ahead)
                context.client.restore(requests, nbytes)
                reach("coordinator.stage.after")
                pause.enter_context(self._paused())
                if positions is not None:
                    positions.check_idle()
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
            logger.warning("%s has variables that are not here: %s", path, ", ".join(surplus))

    def _plan(self, index: Index, path: str, progress: bool) -> dict[int, ps_pb2.RestoreRequest]:
        requests = {server: ps_pb2.RestoreRequest() for server in range(self.context.client.num_servers)}
        for variable in self.context.variables.all:
            if variable.name in KEPT and not progress:
                continue
            if variable.name in index.variables:
                _plan_variable(variable, index.variables[variable.name], path, requests, named=progress)
            elif variable.name in KEPT:  # none was kept then: zeros, which say so
                shard = requests[variable.owners[0]].shards.add(variable=variable.number)
                shard.arrays.add(array="value")
        return requests


def _plan_variable(
    variable: Variable,
    saved: SavedVariable,
    path: str,
    requests: dict[int, ps_pb2.RestoreRequest],
    *,
    named: bool = True,
) -> None:
    if saved.shape != variable.shape or saved.dtype != variable.dtype.name:
        raise CheckpointMisfitError(
            f"variable {variable.name!r} is {variable.dtype.name}{list(variable.shape)}, but {saved.dtype}"
            f"{list(saved.shape)} in {path}"
        )
    old, new = saved.partition, variable.partition
    shards = [
        requests[owner].shards.add(variable=variable.number, shard=number)
        for number, owner in enumerate(variable.owners)
    ]
    tensors = {key: {each.shard: each for each in parts} for key, parts in saved.arrays.items()}
    arrays: dict[tuple[int, str], Any] = {}
    updates = [dict[int, set[int]]() for _ in shards]  # of each shard, by key of a function
    for move in moves(old, new):
        shard = shards[move.new_shard]
        for same in saved.named[move.old_shard] if named else ():
            for function in same.numbers:
                updates[move.new_shard].setdefault(function, set()).update(same.nth)
        for optimizer, step in saved.steps[move.old_shard].items():
            shard.steps[optimizer] = max(step, shard.steps[optimizer])
        before, here = old.block(move.old_shard), new.block(move.new_shard)
        for key, parts in tensors.items():
            if move.old_shard not in parts:
                continue  # this shard had had no gradient yet
            array = arrays.get((move.new_shard, key))
            if array is None:
                array = arrays[move.new_shard, key] = shard.arrays.add(array=key)
            source = array.sources.add(file=parts[move.old_shard].file, tensor=_tensor(key, parts[move.old_shard]))
            getattr(source, "from").extend(a - b for a, b in zip(move.block.start, before.start, strict=True))
            source.to.extend(a - b for a, b in zip(move.block.start, here.start, strict=True))
            source.count.extend(move.block.shape)
    for number, shard in enumerate(shards):
        if (number, "value") not in arrays:
            shard.arrays.add(array="value")  # an empty one
        by_updates: dict[tuple[int, ...], list[int]] = {}
        for function, nths in updates[number].items():
            by_updates.setdefault(tuple(sorted(nths)), []).append(function)
        for nth, keys in by_updates.items():
            shard.named.add(nth=nth, keys=keys)


def _ahead(requests: dict[int, ps_pb2.RestoreRequest]) -> Iterator[dict[int, ps_pb2.RestoreRequest]]:
    """Take out what functions with keys had done, where that is much: to be sent before, in pieces."""
    for server, request in requests.items():
        if sum(len(same.keys) for shard in request.shards for same in shard.named) <= KEYS_AT_ONCE:
            continue
        for shard in request.shards:
            for same in shard.named:
                for first in range(0, len(same.keys), KEYS_AT_ONCE):
                    piece = ps_pb2.RestoreRequest(id=request.id, ahead=True)
                    mine = piece.shards.add(variable=shard.variable, shard=shard.shard)
                    mine.named.add(nth=same.nth, keys=same.keys[first : first + KEYS_AT_ONCE])
                    yield {server: piece}
            shard.ClearField("named")


def _tensor(key: str, saved: SavedTensor) -> ps_pb2.CheckpointTensor:
    return ps_pb2.CheckpointTensor(
        array=key,
        tensor=saved.tensor,
        dtype=saved.dtype,
        shape=saved.shape,
        offset=saved.offset,
        bytes=saved.bytes,
        sha256=saved.sha256,
    )


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
        counts, begin, observed = self._context.counts, time.monotonic(), self._context.observed
        try:
            self._write(path)
        except BaseException as error:
            counts.checkpoints_failed += 1
            observed.not_saved(path, str(error))
            raise
        seconds = time.monotonic() - begin
        counts.checkpoints.add(seconds)
        observed.saved(Saved(path, time.time(), seconds, self.index.pause_seconds, self.index.nbytes))
        return path

    def _write(self, path: str) -> None:
        client, index = self._context.client, self.index
        try:
            fs, where = fsspec.core.url_to_fs(path)
            fs.makedirs(where, exist_ok=True)
            if there(fs, join(where, INDEX)):
                raise CheckpointError(f"there is a checkpoint in {path} already: nothing is written over one")
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


def _remove_remains(path: str) -> None:
    """Of a checkpoint that was not written: on a full disk they would be in the way of the next."""
    fs, where = fsspec.core.url_to_fs(path)
    if there(fs, where) and not there(fs, join(where, INDEX)):
        fs.rm(where, recursive=True)


def _bytes(context: JobContext) -> int:
    return sum(variable.nbytes for variable in context.variables.all) * 4  # slots


class CheckpointManager(StaysHere):
    """Several checkpoints in one directory, `ckpt-000001` and so on; the newest ones are kept.

    Args:
        directory: which every server must see under the same path; or a URL of fsspec, such as s3://bucket/run.
        strategy: default: the one that is open.
        max_to_keep: how many; None: all.
        every: seconds between two that are made by themselves, in the background; None: none is.
        barrier_timeout: see `Checkpoint`.

    Raises:
        ConfigurationError: an argument is out of its range.
        MisuseError: no strategy, or several, are open.
    """

    instead = "save and restore in the script"

    def __init__(
        self,
        directory: str,
        *,
        strategy: HasJob | None = None,
        max_to_keep: int | None = 5,
        every: float | None = None,
        barrier_timeout: float = BARRIER_SECONDS,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ConfigurationError(f"max_to_keep is {max_to_keep}; give 1 or more, or None for all")
        if every is not None and not every > 0:
            raise ConfigurationError(f"every is {every}; give more than 0 seconds, or None")
        self.directory = str(directory)
        self.max_to_keep = max_to_keep
        self.checkpoint = Checkpoint(strategy or _the_open_one(), barrier_timeout=barrier_timeout)
        self._lock = threading.Lock()  # one save or restore at a time
        self._last = 0
        self._closed = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str] | None = None
        self._stop = threading.Event()
        self._timer: threading.Thread | None = None
        if every is not None:
            self._timer = threading.Thread(
                target=self._save_now_and_then, args=(every,), name="checkpoints", daemon=True
            )
            self._timer.start()
        self.checkpoint.context.managers.add(self)

    # What there is

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the whole ones, the newest last."""
        return [folder.path_of(self.directory, number) for number in folder.numbers(self.directory, whole=True)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest one."""
        return next(reversed(self.checkpoints), None)

    # Saving

    def save(self, *, wait: bool = True) -> Future[str]:
        """Make a checkpoint of the job as it is now.

        Args:
            wait: until it is written. Otherwise that goes on in the background; a failure is logged, and raised by
                the future's `result()`.

        Returns:
            A future of its path.

        Raises:
            WaitTimeoutError, UnavailableError: the cut could not be made; see `Checkpoint.mark`.
            CheckpointError: with `wait`, it could not be written. What was there before stands.
            MisuseError: the manager is closed.
        """
        with self._alone():
            if self._closed:
                raise MisuseError("this CheckpointManager is closed: make another one")
            # Never a number twice: a server that did not hear of a failure may still be writing there.
            number = self._last = max([self._last, *folder.numbers(self.directory, whole=False)]) + 1
            folder.go_on(self.directory)  # before there is one more: who looks on must not take it for the last
            marked = self.checkpoint.mark(number)
            future = self._pending = self._writer.submit(self._write, marked, folder.path_of(self.directory, number))
        if wait:
            result_of(future)
        return future

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One after the other, of saves and restores: what is being written is waited for."""
        with self._lock:
            if self._pending is not None:
                wait_for(self._pending)  # its own caller is told of its failure
            yield

    def _write(self, marked: MarkedCheckpoint, path: str) -> str:
        try:
            marked.write(path)
        except BaseException as error:
            logger.error("the checkpoint %s was not written; the run goes on: %s", path, error)
            with contextlib.suppress(OSError, ValueError, ImportError):
                _remove_remains(path)
            raise
        logger.info("saved %s (functions paused for %.3f s)", path, marked.index.pause_seconds)
        try:
            self._remove_old()
        except (OSError, CheckpointError) as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.directory, error)
        return path

    def remove_all(self) -> None:
        """Remove all checkpoints; one that is being written is waited for.

        Raises:
            CheckpointError: they can't be removed.
        """
        with self._alone():
            try:
                self._remove(keep=())
            except OSError as error:
                raise CheckpointError(f"checkpoints in {self.directory} can't be removed: {reason(error)}") from error

    def _remove_old(self) -> None:
        whole = folder.numbers(self.directory, whole=True)
        self._remove(keep=whole if self.max_to_keep is None else whole[-self.max_to_keep :])

    def _remove(self, keep: Collection[int]) -> None:
        """All but these, and but what is newer than all whole ones: somebody may be writing it."""
        newest = max(folder.numbers(self.directory, whole=True), default=0)
        fs, where = fsspec.core.url_to_fs(self.directory)
        for number in folder.numbers(self.directory, whole=False):
            if number not in keep and number <= newest:
                old = folder.path_of(where, number)
                reach("coordinator.remove.before")
                with contextlib.suppress(FileNotFoundError):
                    fs.rm_file(join(old, INDEX))  # first: what is half removed is no checkpoint
                reach("coordinator.remove.after")
                fs.rm(old, recursive=True)

    def _save_now_and_then(self, every: float) -> None:
        while not self._stop.wait(every):
            try:
                self.save()
            except Exception as error:  # the run goes on
                if not self._stop.is_set():
                    logger.error("no checkpoint was made: %s", error)

    def finish(self) -> None:
        """Say that no more come, once the last one is written: those who look on, such as a `SidecarEvaluator`, end.

        None is made by itself any more. A save takes it back, also one of another manager into the same directory.

        Raises:
            CheckpointError: it can't be written.
        """
        self._end_timer()
        with self._alone():
            folder.finish(self.directory)

    def close(self, *, wait: bool = True) -> None:
        """No more are made.

        Args:
            wait: for one that is being written. Otherwise it may yet be, as long as the job's connections are open.
        """
        self._end_timer(wait)
        with self._lock if wait else contextlib.nullcontext():  # a save has it
            self._closed = True
        self._writer.shutdown(wait)
        self.checkpoint.context.managers.discard(self)

    def end(self) -> None:
        """Close it since the job is over: what is being written is waited for, unless a server is gone."""
        self._end_timer(wait=False)
        while self._pending is not None and not wait_for(self._pending, LOOK_SECONDS):
            if why := self.checkpoint.context.hopeless():
                logger.error("the checkpoint that is being written is not waited for: %s", why)
                break
        self.close(wait=False)

    def _end_timer(self, wait: bool = True) -> None:
        self._stop.set()
        if self._timer is not None and wait:
            self._timer.join()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Restoring

    def restore(self, path: str | None = None, *, partial: bool = False, progress: bool = True) -> str:
        """Restore this one, or the newest, what is being written among them; its path.

        See `Checkpoint.read` for the arguments.

        Raises:
            CheckpointError: there is none; or it is damaged or does not fit, and nothing was changed. The message then
                names the one before it.
        """
        with self._alone():  # the one that is being written may be the newest, and remove the oldest
            known = self.checkpoints
            chosen = next(reversed(known), None) if path is None else str(path).rstrip("/")
            if chosen is None:
                raise CheckpointError(f"there is no checkpoint in {self.directory}")
            try:
                self.checkpoint.read(chosen, partial=partial, progress=progress)
            except CheckpointError as error:
                mine = chosen.rpartition("/")[0] == self.directory.rstrip("/")  # of another directory none is known
                before = [each for each in known if mine and (len(each), each) < (len(chosen), chosen)]
                if before:
                    raise type(error)(f"{error}. The one before it is {before[-1]}") from error
                raise
        logger.info("restored %s", chosen)
        return chosen

    def restore_or_initialize(self) -> RestoredFrom:
        """What a script does at its start, behind its variables and optimizers: go on with what is best.

        If this coordinator has attached to live variables, they stay, unless the one before it died while it restored
        a checkpoint. Else the newest checkpoint that is whole is
        restored; of a damaged one the error is logged. Else the initial values are what there is.

        Raises:
            CheckpointMisfitError: the newest whole one is of other variables than there are here. To begin with the
                initial values all the same, give another directory.
        """
        context = self.checkpoint.context
        if context.resumed:
            try:
                check_restored(context)
            except CheckpointError as error:
                logger.error("the variables that live on the servers are not gone on with: %s", error)
            else:
                logger.info("going on with the variables that live on the servers")
                return RestoredFrom.LIVE
        with self._alone():
            for path in reversed(self.checkpoints):
                try:
                    self.checkpoint.read(path)
                except CheckpointMisfitError:
                    raise  # it is no less worth for that: later ones would take its place
                except CheckpointError as error:
                    logger.error("%s can't be restored: %s", path, error)
                else:
                    logger.info("restored %s", path)
                    return RestoredFrom.CHECKPOINT
        if context.resumed:  # and not whole: these are no initial values
            check_restored(context)
        logger.info("there is no checkpoint in %s: beginning with the initial values", self.directory)
        return RestoredFrom.NOTHING


def _the_open_one() -> HasJob:
    found = open_jobs()
    if len(found) != 1:
        raise MisuseError(f"{len(found)} strategies are open: say strategy=")
    return found[0]
