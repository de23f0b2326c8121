"""The cluster of a trainer, while `fit` runs on it: for other threads, which change its size."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pscluster.core.errors import MisuseError

if TYPE_CHECKING:
    from pscluster.coordinator.local.scaling import ScalableCluster


class Clusters:
    """Knows the cluster that a trainer uses now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cluster: ScalableCluster | None = None

    @contextmanager
    def using(self, cluster: ScalableCluster) -> Iterator[None]:
        """Let others change the size of this cluster within the block."""
        with self._lock:
            self._cluster = cluster
        try:
            yield
        finally:
            with self._lock:
                self._cluster = None

    def scale(self, workers: int, timeout: float) -> None:
        """Start or stop workers until there are `workers`: see `Trainer.scale`."""
        with self._lock:
            cluster = self._cluster
        if cluster is None:
            raise MisuseError(
                "fit() is not running: give ScalingConfig(workers=) the number, or call this while it runs"
            )
        cluster.scale(workers, timeout=timeout)
