"""The configuration of a run: how large, where, and what happens when something fails."""

from __future__ import annotations

import datetime
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

from pscluster.core import checks
from pscluster.core.checks import type_of

DEFAULT_STORAGE = "~/pscluster_runs"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ScalingConfig:
    """How many workers and parameter servers a run has.

        Trainer(train, scaling=ScalingConfig(workers=4, ps=2))

    Args:
        workers: how many members; 0: one, in this process. `(fewest, most)`: the run is elastic: members may join and
            leave while it runs. It begins with as many as this machine has cores, within these limits; on the cluster
            of a launcher with the fewest.
        ps: how many parameter servers; by default one. With the backend "tensorflow" they are TensorFlow's own, for a
            `ParameterServerStrategy`, beside a chief and the workers; by default none, and no chief.
        env: environment variables of their processes. `OMP_NUM_THREADS` is set to each worker's share of the cores,
            unless it is set here or in this process.
        durability: what the death of a parameter server may cost: "none", "snapshot" or "log", as for `LocalCluster`,
            or a launcher's cluster. Default: the cluster's own.
        join_timeout: seconds for which an elastic run may have fewer members than the fewest; then it fails.
        num_workers: the same as `workers`.
        use_gpu: only False. Which devices a framework sees, its own variables say, such as `CUDA_VISIBLE_DEVICES`.

    Raises:
        ValueError, TypeError: a number is out of range.
    """

    workers: int | tuple[int, int] = 2
    ps: int | None = None
    env: Mapping[str, str] | None = None
    join_timeout: float = 60.0
    durability: Literal["none", "snapshot", "log"] | None = None
    num_workers: InitVar[int | tuple[int, int] | None] = None
    use_gpu: InitVar[bool] = False

    @property
    def limits(self) -> tuple[int, int] | None:
        """The fewest and the most members of an elastic run; None: their number is fixed."""
        return self.workers if isinstance(self.workers, tuple) else None

    def at_start(self, *, is_here: bool) -> int:
        """Return with how many workers a run begins, on this machine or elsewhere."""
        if isinstance(self.workers, int):
            return self.workers
        fewest, most = self.workers
        return max(fewest, min(most, os.cpu_count() or 1)) if is_here else fewest

    def __post_init__(self, num_workers: int | tuple[int, int] | None, use_gpu: bool) -> None:
        if num_workers is not None:
            object.__setattr__(self, "workers", num_workers)
        object.__setattr__(self, "workers", _workers(self.workers))
        if self.ps is not None:
            object.__setattr__(self, "ps", checks.whole("ps", self.ps, at_least=1, at_most=1000))
        if self.durability not in (None, "none", "snapshot", "log"):
            raise ValueError(f"durability is {self.durability!r}; give 'none', 'snapshot' or 'log'")
        seconds = checks.real("join_timeout", self.join_timeout, kind="number of seconds", above=0)
        object.__setattr__(self, "join_timeout", seconds)
        if use_gpu:
            raise ValueError(
                "use_gpu: workers get no devices here; each process sees those of its environment, so give "
                'env={"CUDA_VISIBLE_DEVICES": "0"}'
            )
        if not isinstance(self.env, Mapping | None):
            raise TypeError(f"env is {type_of(self.env)}; give a dict of strings")
        env = dict(self.env or {})
        if wrong := [name for name, value in env.items() if not (isinstance(name, str) and isinstance(value, str))]:
            raise TypeError(f"env has {wrong[0]!r}, which is not a string with a string as its value")


def _workers(workers: object) -> int | tuple[int, int]:
    """Return a number of workers, or the fewest and the most, checked."""
    if not isinstance(workers, tuple | list):
        return checks.whole("workers", workers, ", or (fewest, most)", at_least=0, at_most=1000)
    if len(workers) != 2:
        raise ValueError(f"workers is {workers!r}; give a number, or (fewest, most), such as (2, 8)")
    fewest, most = (
        checks.whole("workers", number, " in (fewest, most)", at_least=1, at_most=1000) for number in workers
    )
    if fewest > most:
        raise ValueError(f"workers is ({fewest}, {most}), whose first number is the larger one: give (fewest, most)")
    return fewest, most


@dataclass(frozen=True)
class FailureConfig:
    """What happens when a worker dies.

        RunConfig(failure=FailureConfig(max_failures=10))

    Args:
        max_failures: how often a member is begun again; -1: without a limit. In an elastic run, how often a worker is
            restarted: then the run goes on without it, if enough are left.
        restart: "worker": the one that died begins again, alone, and the others go on until they need it. "group": all
            begin again together; functions in torch, JAX or TensorFlow always do.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    max_failures: int = 3
    restart: Literal["worker", "group"] = "worker"

    @property
    def limit(self) -> int:
        """The number of failures after which a run fails: a large one in place of -1."""
        return self.max_failures if self.max_failures >= 0 else 1 << 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_failures", checks.whole("max_failures", self.max_failures, at_least=-1))
        if self.restart not in ("worker", "group"):
            raise ValueError(f"restart is {self.restart!r}; give 'worker' or 'group'")


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints of a run are kept.

        RunConfig(checkpoint=CheckpointConfig(num_to_keep=3, score="loss", order="min"))

    Args:
        num_to_keep: how many; None: all. The newest is always kept.
        score: the name of the metric of rank 0 by which the best are kept; None: the newest are.
        order: whether a "max" or "min" score is best.
        checkpoint_score_attribute, checkpoint_score_order: the same as `score` and `order`.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    num_to_keep: int | None = None
    score: str | None = None
    order: Literal["max", "min"] = "max"
    checkpoint_score_attribute: InitVar[str | None] = None
    checkpoint_score_order: InitVar[str | None] = None

    def __post_init__(self, checkpoint_score_attribute: str | None, checkpoint_score_order: str | None) -> None:
        if checkpoint_score_attribute is not None:
            object.__setattr__(self, "score", checkpoint_score_attribute)
        if checkpoint_score_order is not None:
            object.__setattr__(self, "order", checkpoint_score_order)
        if self.num_to_keep is not None:
            object.__setattr__(self, "num_to_keep", checks.whole("num_to_keep", self.num_to_keep, at_least=1))
        if self.order not in ("max", "min"):
            raise ValueError(f"order is {self.order!r}; give 'max' or 'min'")


def _new_name() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return f"run-{now:%Y-%m-%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class RunConfig:
    """The name of a run, where its files are, and how it fails and ends.

        Trainer(train, run=RunConfig(name="digits", storage="s3://bucket/runs"))

    Args:
        name: of the run, and of its folder. Default: the time, and something random. `fit` under a name that there is
            already goes on with that run.
        storage: the folder of all runs: a path, or a URL of fsspec that all workers can write to.
        failure, checkpoint: see `FailureConfig` and `CheckpointConfig`.
        report_timeout: seconds that a member waits for the others in a report, barrier or broadcast.
        storage_path, failure_config, checkpoint_config: the same as `storage`, `failure`, `checkpoint`.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    name: str = ""
    storage: str = DEFAULT_STORAGE
    failure: FailureConfig = field(default_factory=FailureConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report_timeout: float = 600.0
    storage_path: InitVar[str | None] = None
    failure_config: InitVar[FailureConfig | None] = None
    checkpoint_config: InitVar[CheckpointConfig | None] = None

    def __post_init__(
        self,
        storage_path: str | None,
        failure_config: FailureConfig | None,
        checkpoint_config: CheckpointConfig | None,
    ) -> None:
        aliases: dict[str, Any] = {
            "storage": storage_path,
            "failure": failure_config,
            "checkpoint": checkpoint_config,
            "name": None if self.name else _new_name(),
        }
        for name, value in aliases.items():
            if value is not None:
                object.__setattr__(self, name, value)
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name is {self.name!r:.120}: the name of a run is that of its folder; give up to 100 letters, digits, "
                "'.', '_' and '-', and no '.' at the beginning"
            )
        if not isinstance(self.storage, str | os.PathLike) or not os.fspath(self.storage):
            raise TypeError(f"storage is {type_of(self.storage)}; give a path or a URL")
        object.__setattr__(self, "storage", os.fspath(self.storage))
        for name, kind in (("failure", FailureConfig), ("checkpoint", CheckpointConfig)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} is {type_of(getattr(self, name))}, not a {kind.__name__}")
        seconds = checks.real("report_timeout", self.report_timeout, kind="number of seconds", above=0)
        object.__setattr__(self, "report_timeout", seconds)
