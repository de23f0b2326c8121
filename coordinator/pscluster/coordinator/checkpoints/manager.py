"""Several checkpoints in a directory, and what a script does when it starts."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import fsspec

from pscluster.coordinator.checkpoints import folder
from pscluster.coordinator.checkpoints.checkpoint import BARRIER_SECONDS, Checkpoint, MarkedCheckpoint
from pscluster.coordinator.checkpoints.folder import INDEX, reason, there
from pscluster.coordinator.job.context import HasJob, open_jobs
from pscluster.coordinator.job.terms import check_restored
from pscluster.coordinator.waiting import result_of, wait_for
from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.errors import CheckpointError, CheckpointMismatchError, ConfigurationError, MisuseError
from pscluster.core.fault_points import reach
from pscluster.core.handles import StaysHere
from pscluster.ps.storage.files.tensor_files import join
from pscluster.worker.features.layer import Layer

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5


class RestoredFrom(enum.Enum):
    """What a job continues with."""

    LIVE = "live"  # what the servers hold: an earlier coordinator died
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing"  # the initial values


class CheckpointManager(StaysHere):
    """The checkpoints in one directory, `ckpt-000001` and so on, of which the newest are kept.

    Args:
        directory: a path that is the same for all servers, or a URL of fsspec such as s3://bucket/run.
        strategy: default: the open one.
        max_to_keep: how many checkpoints to keep; None: all.
        every: seconds between checkpoints that are made automatically, in the background; None: there are none.
        barrier_timeout, features: see `Checkpoint`.

    Raises:
        ConfigurationError: an argument is out of its range.
        MisuseError: no strategy is open, or several are.

    Examples:
        >>> with strategy.scope():
        ...     saved = Variable(np.ones(3), name="saved")
        >>> manager = CheckpointManager(os.path.join(folder, "checkpoints"), strategy=strategy, max_to_keep=3)
        >>> os.path.basename(manager.save().result())
        'ckpt-000001'
        >>> _ = saved.assign(np.zeros(3))
        >>> _ = manager.restore()
        >>> saved.numpy()
        array([1., 1., 1.])
        >>> manager.close()
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
        features: Sequence[Layer] = (),
    ) -> None:
        with configuration_errors():
            if max_to_keep is not None:
                max_to_keep = checks.whole("max_to_keep", max_to_keep, ", or None for all", at_least=1)
            if every is not None:
                every = checks.real("every", every, ", or None", kind="number of seconds", above=0)
        if strategy is None:
            jobs = open_jobs()
            if len(jobs) != 1:
                raise MisuseError(f"{len(jobs)} strategies are open: give strategy=")
            (strategy,) = jobs
        self.directory = checks.path("directory", directory)
        if not self.directory:
            raise ConfigurationError("the directory of a CheckpointManager is empty; give a path, such as /shared/run")
        self.max_to_keep = max_to_keep
        self.checkpoint = Checkpoint(strategy, barrier_timeout=barrier_timeout, features=features)
        self._lock = threading.Lock()  # one save or restore at a time
        self._last = 0
        self._shared = False  # whether another manager was found to save here, and that was logged
        self._closed = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str] | None = None
        self._stop = threading.Event()
        self._timer: threading.Thread | None = None
        if every is not None:
            self._timer = threading.Thread(target=self._save_every, args=(every,), name="checkpoints", daemon=True)
            self._timer.start()
        self.checkpoint.context.managers.add(self)

    @property
    def checkpoints(self) -> list[str]:
        """Return the paths of the complete checkpoints, the newest last."""
        return [folder.path_of(self.directory, number) for number in folder.numbers(self.directory, whole=True)]

    @property
    def latest_checkpoint(self) -> str | None:
        return next(reversed(self.checkpoints), None)

    # Saving

    def save(self, *, wait: bool = True) -> Future[str]:
        """Make a checkpoint of the job as it is now.

        Args:
            wait: until it is written. Otherwise it is written in the background; a failure is logged, and raised by
                the future's `result()`.

        Returns:
            A future of its path.

        Raises:
            WaitTimeoutError, UnavailableError: the cut could not be made; see `Checkpoint.mark`.
            CheckpointError, StaleError: with `wait`, it could not be written, or a server was restarted before it had
                written its part. Earlier checkpoints stand.
            MisuseError: the manager is closed.
        """
        with self._exclusive():
            if self._closed:
                raise MisuseError("this CheckpointManager is closed: make another one")
            # Never use a number twice: a server that missed a failure may still be writing there.
            found = max(folder.numbers(self.directory, whole=False), default=0)
            if found > self._last > 0 and not self._shared:
                self._shared = True
                logger.warning(
                    "%s was made by another job, or by another manager of this one: if both use this directory at the "
                    "same time, each may restore, and removes, what the other has saved; give each its own",
                    folder.path_of(self.directory, found),
                )
            checkpoint_number = self._last = max(self._last, found) + 1
            folder.clear_finished(self.directory)  # first, so that no evaluator takes the new one for the last
            marked = self.checkpoint.mark(checkpoint_number)
            future = self._pending = self._writer.submit(
                self._write, marked, folder.path_of(self.directory, checkpoint_number)
            )
        if wait:
            result_of(future)
        return future

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let saves and restores follow one another: wait until a pending checkpoint is written."""
        with self._lock:
            if self._pending is not None:
                wait_for(self._pending)  # its failure reaches its own caller
            yield

    def _write(self, marked: MarkedCheckpoint, path: str) -> str:
        try:
            marked.write(path)
        except BaseException as error:
            logger.error("the checkpoint %s was not written; the job continues: %s", path, error)
            with contextlib.suppress(OSError, ValueError, ImportError):
                fs, where = fsspec.core.url_to_fs(path)
                if there(fs, where) and not there(fs, join(where, INDEX)):
                    fs.rm(where, recursive=True)  # the next one may need the space
            raise
        logger.info("saved %s (functions paused for %.3f s)", path, marked.index.pause_seconds)
        try:
            self._remove(keep=self.max_to_keep)
        except (OSError, CheckpointError) as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.directory, error)
        return path

    def remove_all(self) -> None:
        """Remove all checkpoints, after one that is being written. CheckpointError if they can't be removed."""
        with self._exclusive():
            try:
                self._remove(keep=0)
            except OSError as error:
                raise CheckpointError(f"checkpoints in {self.directory} can't be removed: {reason(error)}") from error

    def _remove(self, keep: int | None) -> None:
        """Remove all but the newest `keep` complete ones (None: all), and but later ones, which may be unfinished."""
        complete = folder.numbers(self.directory, whole=True)
        newest = max(complete, default=0)
        kept = complete if keep is None else complete[max(0, len(complete) - keep) :]
        fs, where = fsspec.core.url_to_fs(self.directory)
        for checkpoint_number in folder.numbers(self.directory, whole=False):
            if checkpoint_number not in kept and checkpoint_number <= newest:
                old = folder.path_of(where, checkpoint_number)
                reach("coordinator.remove.before")
                with contextlib.suppress(FileNotFoundError):
                    fs.rm_file(join(old, INDEX))  # first: without it, the rest is no checkpoint
                reach("coordinator.remove.after")
                fs.rm(old, recursive=True)

    def _save_every(self, every: float) -> None:
        while not self._stop.wait(every):
            try:
                self.save()
            except Exception as error:  # the job continues
                if not self._stop.is_set():
                    logger.error("no checkpoint was made: %s", error)

    def finish(self) -> None:
        """Record, once the last one is written, that no more checkpoints come, so that a `SidecarEvaluator` ends.

        This ends automatic saves. A later save, of any manager of the directory, undoes it. CheckpointError if it can't
        be written.
        """
        self._end_timer()
        with self._exclusive():
            folder.finish(self.directory)

    def close(self, *, wait: bool = True) -> None:
        """Make no more checkpoints. With `wait=False`, a pending one may still be written until the job ends."""
        self._end_timer(wait)
        with self._lock if wait else contextlib.nullcontext():  # a save holds it
            self._closed = True
        self._writer.shutdown(wait)
        self.checkpoint.context.managers.discard(self)

    def end(self) -> None:
        """Close it at the end of the job, once a pending checkpoint is written, unless a server is down."""
        self._end_timer(wait=False)
        while self._pending is not None and not wait_for(self._pending, CHECK_SECONDS):
            if why := self.checkpoint.context.unreachable_too_long():
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
        """Restore a checkpoint, by default the newest, and return its path. Wait for a pending one first.

            manager.restore()                                    # the newest
            manager.restore("checkpoints/ckpt-000012")

        Args:
            path: a checkpoint's; None: the newest of this manager's directory.
            partial, progress: see `Checkpoint.read`.

        Raises:
            CheckpointError: there is none; or it is damaged or does not fit, and nothing was changed. The message then
                names the one before it.
        """
        with self._exclusive():  # a pending one may be the newest, and remove the oldest
            known = self.checkpoints
            chosen = next(reversed(known), None) if path is None else str(path).rstrip("/")
            if chosen is None:
                raise CheckpointError(f"there is no checkpoint in {self.directory}")
            try:
                self.checkpoint.read(chosen, partial=partial, progress=progress)
            except CheckpointError as error:
                inside = chosen.rpartition("/")[0] == self.directory.rstrip("/")
                earlier = [other for other in known if inside and (len(other), other) < (len(chosen), chosen)]
                if earlier:
                    raise type(error)(f"{error}. The one before it is {earlier[-1]}") from error
                raise
        logger.info("restored %s", chosen)
        return chosen

    def _restore_missing_layers(self) -> None:
        """Take the layers that the script has not adapted from the newest checkpoint: servers do not have them."""
        with self._exclusive():
            for path in reversed(self.checkpoints):
                try:
                    self.checkpoint.read_missing_layers(path)
                except CheckpointMismatchError:
                    raise
                except CheckpointError as error:
                    logger.error("the layers of %s can't be restored: %s", path, error)
                else:
                    return

    def restore_or_initialize(self) -> RestoredFrom:
        """Continue from the best state there is; call it once the script has made its variables and optimizers.

        Live variables that this coordinator has attached to stay, unless an earlier one died while it restored a
        checkpoint. Otherwise the newest undamaged checkpoint is restored, and errors of damaged ones are logged. If
        there is no checkpoint at all, the job begins with the initial values. Layers given as `features` are restored
        with the variables; beside live variables, those that are not adapted, from the newest checkpoint.

        Raises:
            CheckpointMismatchError: the newest undamaged checkpoint has other variables than the job. To begin with the
                initial values all the same, give another directory.
            CheckpointError: there are checkpoints, but none can be restored.
        """
        newest: CheckpointError | None = None
        context = self.checkpoint.context
        if context.resumed:
            try:
                check_restored(context)
            except CheckpointError as error:
                logger.error("not continuing with the variables on the servers: %s", error)
            else:
                logger.info("continuing with the variables on the servers")
                self._restore_missing_layers()
                return RestoredFrom.LIVE
        with self._exclusive():
            for path in reversed(self.checkpoints):
                try:
                    self.checkpoint.read(path)
                except CheckpointMismatchError:
                    raise  # it is valuable all the same, and new checkpoints would replace it
                except CheckpointError as error:
                    logger.error("%s can't be restored: %s", path, error)
                    newest = newest or error
                else:
                    logger.info("restored %s", path)
                    return RestoredFrom.CHECKPOINT
        if context.resumed:  # the servers hold half a restore, not initial values
            check_restored(context)
        if newest is not None:  # those of a job that started over would replace what may still be repaired
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be restored; of the newest, {newest}. To begin with "
                "the initial values, move them away"
            ) from newest
        logger.info("there is no checkpoint in %s; starting from the initial values", self.directory)
        return RestoredFrom.NOTHING
