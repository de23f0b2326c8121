"""A variable of which each worker has a value of its own: an array in the worker's process, not on the servers.

It is a dataclass with the handle of a per-worker object (see `objects`), which holds the array, and a lock: functions
that run at the same time, such as those of several replicas, read whole values, and no update is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pscluster.core.context import experimental_get_current_worker_index
from pscluster.core.dtypes import converted, dtype_named
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.ps.handles.indexing import Array
from pscluster.ps.handles.variables.operators import Arithmetic
from pscluster.ps.spec import check_kind
from pscluster.v1 import ps_pb2


class OwnValue:
    """The value of one worker. Thread-safe."""

    def __init__(self, initial: Array) -> None:
        self._lock = threading.Lock()
        self._array = initial.copy()

    def read(self) -> Array:
        """Return a copy."""
        with self._lock:
            return self._array.copy()

    def change(self, function: Callable[[Array, Array], object], value: Array) -> None:
        """Have a function change the array by a value."""
        with self._lock:
            function(self._array, value)


@dataclass(eq=False, repr=False)
class PerWorkerVariable(Arithmetic):
    """A variable with a value of its own on each worker; `ClusterCoordinator.per_worker_variable` makes it.

    In a function that runs on a worker it is read and assigned as other variables are, at no cost, and stands for its
    value in arithmetic of NumPy. What a function does to it is there for the next function of the same worker, and for
    no other worker. It is not undone if the function fails, and happens again if the function is run again. A worker
    that restarts begins with the initial value; checkpoints don't have it.

        count = coordinator.per_worker_variable(0, name="batches")

        def step(batch):                        # runs on a worker
            count.assign_add(1)

        count.read_all()                        # in the script: of each worker, by its index

    Attributes:
        name: for people.
        shape, dtype: of each value.
        own: the handle of the values; for internal use, like `dtype_name`.
    """

    own: Any
    name: str
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtype_named(self.dtype_name)

    @property
    def device(self) -> str:
        """In a function, its worker, such as `/job:worker/task:1`. RuntimeError in the script."""
        return f"/job:worker/task:{experimental_get_current_worker_index()}"

    def read_value(self) -> Array:
        """Return a copy of the value of this worker. MisuseError in the script, where there is none: see `read_all`."""
        return self._here.read()

    def assign(self, value: npt.ArrayLike) -> Self:
        """Replace the value of this worker.

        Args:
            value: of the variable's shape, or one number for all elements.

        Raises:
            InvalidUpdateError: it has another shape, or does not fit the type without loss. Nothing has changed.
            MisuseError: called in the script, where there is no value.
        """
        return self._change(ps_pb2.ASSIGN, _assign, value)

    def assign_add(self, value: npt.ArrayLike) -> Self:
        """Add to the value of this worker; as `assign`."""
        return self._change(ps_pb2.ADD, _add, value)

    def assign_sub(self, value: npt.ArrayLike) -> Self:
        """Subtract from the value of this worker; as `assign`."""
        return self._change(ps_pb2.SUB, _subtract, value)

    def read_all(self, timeout: float | None = None) -> list[Array]:
        """Return, in the script, the value of each worker, by its index: after all that was scheduled before.

        Args:
            timeout: seconds to wait, also for workers that are gone; None: until all are there.

        Raises:
            WaitTimeoutError: they took longer.
            MisuseError: called on a worker.
        """
        if self._is_on_worker:
            raise MisuseError(
                f"read_all of per-worker variable {self.name!r} was called on a worker: call it in the script, or "
                "read_value() for the value of this worker"
            )
        values: list[Array] = self.own.on_all_workers(value_here, self, timeout=timeout)
        return values

    def _change(self, kind: ps_pb2.UpdateKind, function: Callable[[Array, Array], object], value: Any) -> Self:
        array = converted(value, self.dtype, self.name, "value")
        check_kind(kind, self.dtype, self.name)
        if array.ndim and array.shape != self.shape:
            raise InvalidUpdateError(
                f"variable {self.name!r} has shape {self.shape}, but the value has shape {array.shape}"
            )
        self._here.change(function, array)
        return self

    @property
    def _is_on_worker(self) -> bool:
        return not hasattr(self.own, "on_all_workers")

    @property
    def _here(self) -> OwnValue:
        if not self._is_on_worker:
            raise MisuseError(
                f"per-worker variable {self.name!r} has a value on each worker, and none here: use it in a function "
                "that runs on a worker, or read_all() for the values of all"
            )
        value: OwnValue = self.own.get()
        return value

    def __repr__(self) -> str:
        return f"<PerWorkerVariable {self.name!r}: {self.dtype_name} {self.shape}>"


def value_here(variable: PerWorkerVariable) -> Array:
    """Return the value of the worker on which this runs."""
    return variable.read_value()


def _assign(array: Array, value: Array) -> None:
    array[...] = value


def _add(array: Array, value: Array) -> None:
    array += value


def _subtract(array: Array, value: Array) -> None:
    array -= value
