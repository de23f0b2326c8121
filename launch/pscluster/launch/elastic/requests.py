"""Requests of other processes for another number of workers: `pscluster scale` writes one into the run's folder.

    NONE  --a file is there-------------> TAKEN   it is removed, and a thread starts or stops workers
    TAKEN --that is done, or has failed-> NONE    the log says so; the next file is taken

The newest request counts: one that comes before the last was taken replaces it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pscluster.core.errors import PsClusterError
from pscluster.launch.storage.run_folder import RunFolder

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Requests:
    """Carries out what others ask a run for. For one thread."""

    def __init__(self, folder: RunFolder, limits: tuple[int, int], scale: Callable[[int], object]) -> None:
        """Take requests from now on. `scale` changes the number of workers, and blocks until that is done; it is called
        in another thread.
        """
        self._folder, self._limits, self._scale = folder, limits, scale
        self._due = 0.0
        self._thread: threading.Thread | None = None
        folder.take_request()  # of an earlier time

    def poll(self, now: float) -> None:
        """Take a request, if there is one and the last is done."""
        if now < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = now + POLL_SECONDS
        workers, (fewest, most) = self._folder.take_request(), self._limits
        if workers is None:
            return
        if not fewest <= workers <= most:
            logger.warning("%s was asked for %d workers, but has %d to %d", self._folder.name, workers, fewest, most)
            return
        self._thread = threading.Thread(target=self._carry_out, args=(workers,), name="scale", daemon=True)
        self._thread.start()

    def _carry_out(self, workers: int) -> None:
        logger.info("%s was asked for %d workers", self._folder.name, workers)
        try:
            self._scale(workers)
        except PsClusterError as error:
            logger.warning("%s can't have %d workers: %s", self._folder.name, workers, error)
