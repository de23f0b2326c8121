"""The strategy as a step function sees it: one replica per worker, and reads of several variables at once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle
from pscluster.core.values import map_structure
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.exchanges import Traffic
from pscluster.ps.handles.reads import read_structure


class ReduceOp(enum.Enum):
    """How `reduce`, `all_reduce` and `reduce_scatter` combine the values of replicas."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the operation, also of its name in any case. Raise ValueError for another name."""
        try:
            return cls(op.lower()) if isinstance(op, str) else cls(op)
        except ValueError:
            names = ", ".join(repr(known.value) for known in cls)
            raise ValueError(f"there is no operation {op!r}: give one of {names}") from None


COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
"""What combines two values. A mean is then divided."""

_ALONG_AXIS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}


class Strategy(Handle):
    """The methods shared by the coordinator's strategy and its counterpart on a worker."""

    handle_kind = "strategy"

    @property
    def handle_key(self) -> str:
        """Empty: a job has one strategy."""
        return ""

    def __init__(self, client: PsClient) -> None:
        self._client = client

    @property
    def num_replicas_in_sync(self) -> int:
        """Return 1: every worker is one replica, and workers do not wait for each other."""
        return 1

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `fn` on the only replica: here."""
        return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Combine the replicas' values. With one replica: return the value, reduced along `axis` if that is given."""
        op = ReduceOp.of(reduce_op)
        if axis is None:
            return value
        combine = _ALONG_AXIS[op]
        return map_structure(lambda leaf: combine(leaf, axis=axis), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the replicas' values as a tuple of one."""
        return (value,)

    def traffic(self) -> Traffic:
        """Return the bytes that this process has pulled from and pushed to the parameter servers in this job."""
        return self._client.exchanges.traffic

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: object = None) -> Any:
        """Return `dataset_fn`: TensorFlow's wrapper around a `dataset_fn`, or around what one returns."""
        del options
        return dataset_fn

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_dataset(self, dataset: Any, options: object = None) -> Any:
        """Return the dataset: each worker is one replica, and takes whole batches of its own dataset.

        As in TensorFlow, this is for a `dataset_fn`, or for what `create_per_worker_dataset` is given. For examples
        that are each visited once, by any worker, see `ClusterCoordinator.distribute_dataset`.
        """
        del options
        return dataset

    def read(self, structure: Any) -> Any:
        """Return the values of nested variables, in the same nesting: one request per server, all at once."""
        return read_structure(structure)


class StepStrategy(Strategy):
    """The strategy that a step function gets for the one it has captured."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of workers that run this function together; 1 if it runs on one alone."""
        function = current_function()
        replicas: int = 1 if function is None or function.replica is None else function.replica.num_replicas
        return replicas

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Do what it does with one replica. Raise MisuseError in a function that several run together."""
        if (replicas := self.num_replicas_in_sync) > 1:
            raise MisuseError(
                f"strategy.reduce() has only this replica's value, of {replicas}, in a function that they run "
                "together: call replica_context().all_reduce() here, or reduce in the script what run() returns"
            )
        return super().reduce(reduce_op, value, axis)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"in a step function a strategy has no {name!r}, only read(), run(), reduce() and the like: create "
            "variables, optimizers and checkpoints in the script, and use them here by their names"
        )
