"""The strategy as a step function sees it: one replica a worker, and reads of several variables at once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from pscluster.core.handles import Handle
from pscluster.core.values import map_structure
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.exchanges import Traffic
from pscluster.ps.handles.variable import read_structure


class ReduceOp(enum.Enum):
    """How `reduce` combines the values of replicas."""

    SUM = "sum"
    MEAN = "mean"


class Strategy(Handle):
    """What both the coordinator's strategy and its image on a worker can do."""

    handle_kind = "strategy"

    @property
    def handle_key(self) -> str:
        """There is one strategy in a job."""
        return ""

    def __init__(self, client: PsClient) -> None:
        self._client = client

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1: every worker is one replica, and workers do not wait for each other."""
        return 1

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `fn` on the one replica there is, here."""
        return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Combine the replicas' values: of one replica, itself; along `axis`, where one is given, as NumPy does."""
        op = ReduceOp(reduce_op.lower()) if isinstance(reduce_op, str) else reduce_op
        if axis is None:
            return value
        combine = np.sum if op is ReduceOp.SUM else np.mean
        return map_structure(lambda leaf: combine(leaf, axis=axis), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The replicas' values as a tuple: one."""
        return (value,)

    def traffic(self) -> Traffic:
        """Bytes that this process has pulled from and pushed to the parameter servers in this job."""
        return self._client.traffic

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: object = None) -> Any:
        """The peer's wrapper, around a `dataset_fn` or inside of one that returns its result. Changes nothing."""
        del options
        return dataset_fn

    def read(self, structure: Any) -> Any:
        """The values of any nesting of variables, in the same nesting: one request a server, all at once."""
        return read_structure(structure)


class StepStrategy(Strategy):
    """What a step function gets for the strategy that it has captured."""

    def __getattr__(self, name: str) -> NoReturn:
        """Say what there is. AttributeError always."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"in a step function a strategy has no {name!r}, only read(), run(), reduce() and the like: variables, "
            "optimizers and checkpoints are made in the script, and what is made there is used here by its name"
        )
