"""Several checkpoints in a directory, and what a script does when it starts."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import fsspec

from pscluster.coordinator.checkpoints import folder
from pscluster.coordinator.checkpoints.checkpoint import BARRIER_SECONDS, Checkpoint, MarkedCheckpoint
from pscluster.coordinator.checkpoints.folder import INDEX, reason, there
from pscluster.coordinator.job.context import HasJob, open_jobs
from pscluster.coordinator.job.terms import check_restored
from pscluster.coordinator.scheduling.waiting import result_of, wait_for
from pscluster.core.errors import CheckpointError, CheckpointMisfitError, ConfigurationError, MisuseError
from pscluster.core.fault_points import reach
from pscluster.core.handles import StaysHere
from pscluster.ps.storage.tensor_files import join

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class RestoredFrom(enum.Enum):
    """What a job goes on with."""

    LIVE = "live"  # the servers have it: the coordinator before this one died
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing"  # the initial values


def _remove_remains(path: str) -> None:
    """Of a checkpoint that was not written: on a full disk they would be in the way of the next."""
    fs, where = fsspec.core.url_to_fs(path)
    if there(fs, where) and not there(fs, join(where, INDEX)):
        fs.rm(where, recursive=True)


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
                logger.error("not waiting for the checkpoint that is being written: %s", why)
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
                logger.error("not continuing with the variables on the servers: %s", error)
            else:
                logger.info("continuing with the variables on the servers")
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
        logger.info("there is no checkpoint in %s; starting from the initial values", self.directory)
        return RestoredFrom.NOTHING


def _the_open_one() -> HasJob:
    found = open_jobs()
    if len(found) != 1:
        raise MisuseError(f"{len(found)} strategies are open: give strategy=")
    return found[0]
