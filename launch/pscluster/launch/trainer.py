"""Trainer: one function and one configuration, on one process or many.

Workers import the script, and this with it: what only `fit` needs is imported there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.launch.clusters import Clusters
from pscluster.launch.config import RunConfig, ScalingConfig
from pscluster.launch.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pscluster.coordinator.local.supervised import SupervisedCluster
    from pscluster.launch.result import Result

BACKENDS = ("numpy", "torch", "jax", "tensorflow")


class Trainer:
    """Runs a function on several workers, collects what they report, and restarts what fails.

    Args:
        train_fn: takes the configuration, or nothing. It runs once on each worker, and calls `report`,
            `get_checkpoint`, `get_dataset_shard`, `get_context`.
        config: given to the function; any data.
        scaling: how many workers and parameter servers.
        run: the name of the run, where its files are, what happens when something fails.
        datasets: by name: arrays, sequences, iterables, or functions that return one; see `DatasetShard`.
        backend: "numpy": the function runs in the worker's process, with the variables that `variables` made. "torch",
            "jax", "tensorflow": in a process of its own, with the environment that this framework expects, such as
            `RANK` and `MASTER_ADDR`; if one dies, all begin again.
        variables: called with the configuration, here, in the strategy's scope; what it returns (variables, optimizers,
            in any structure) each member finds in `get_context().variables`. Only with the backend "numpy".
        split: how rows that do not divide are cut: "all" gives every row to one member, "drop" leaves the rest out,
            "pad" gives some rows twice, so that all have as many.
        seed: of the order of datasets.
        launcher: makes the cluster for the run: `RayCluster`, a `functools.partial` of it, or another callable that
            takes `ps`, `workers`, `env` and `log_level`, and `durability` if the scaling has one. Default: a
            `LocalCluster`.
        resume_from: a checkpoint to start a new run from.

    Raises:
        TypeError, ValueError: an argument is wrong.

    Examples:
        >>> def train(config):
        ...     for epoch in range(config["epochs"]):
        ...         launch.report({"epoch": epoch, "rank": launch.get_context().world_rank})
        >>> run = launch.RunConfig("example", storage=folder)
        >>> here = launch.ScalingConfig(workers=0)  # in this process; workers=4: in four, at the same time
        >>> result = launch.Trainer(train, {"epochs": 2}, here, run).fit()
        example  report 1  epoch 0  rank 0
        example  report 2  epoch 1  rank 0
        >>> result.metrics["epoch"]
        1
    """

    def __init__(
        self,
        train_fn: Callable[..., Any] | None = None,
        config: Any = None,
        scaling: ScalingConfig | None = None,
        run: RunConfig | None = None,
        *,
        datasets: Mapping[str, Any] | None = None,
        backend: str = "numpy",
        variables: Callable[[Any], Any] | None = None,
        split: str = "all",
        seed: int = 0,
        launcher: Callable[..., SupervisedCluster] | None = None,
        resume_from: Checkpoint | None = None,
        train_loop_per_worker: Callable[..., Any] | None = None,
        train_loop_config: Any = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        train_fn = _one("train_fn", train_fn, "train_loop_per_worker", train_loop_per_worker)
        if not callable(train_fn):
            raise TypeError(f"Trainer takes a function, not {type_of(train_fn)}")
        self._train_fn = train_fn
        self._config = _one("config", config, "train_loop_config", train_loop_config)
        self._scaling = _one("scaling", scaling, "scaling_config", scaling_config) or ScalingConfig()
        self._run = _one("run", run, "run_config", run_config) or RunConfig()
        resume_from = _one("resume_from", resume_from, "resume_from_checkpoint", resume_from_checkpoint)
        for name, value, kind in (
            ("scaling", self._scaling, ScalingConfig),
            ("run", self._run, RunConfig),
            ("resume_from", resume_from, Checkpoint | None),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name} is {type_of(value)}, not a {getattr(kind, '__name__', 'Checkpoint')}")
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; give one of {', '.join(map(repr, BACKENDS))}")
        _check_elastic(self._scaling, self._run, backend, split)
        if variables is not None and (backend != "numpy" or not self._scaling.workers):
            raise ValueError(
                'variables are on parameter servers, which only functions with the backend "numpy" on one worker or '
                "more can use"
            )
        if launcher is not None and not callable(launcher):
            raise TypeError(f"launcher is {type_of(launcher)}; give a callable, such as RayCluster")
        if launcher is not None and not self._scaling.workers:
            raise ValueError(
                "a launcher starts workers, and with workers=0 the function runs in this process: give a number of "
                "workers, or no launcher"
            )
        self._backend, self._variables, self._launcher = backend, variables, launcher
        self._datasets = dict(datasets or {})
        self._split, self._seed = split, checks.whole("seed", seed, at_least=0)
        self._resume_from = resume_from
        self._clusters = Clusters()

    def scale(self, workers: int, *, timeout: float = 60.0) -> None:
        """Change the number of workers of an elastic run while `fit` runs, in another thread. Return when that is done.

        New ones become members between two reports. Those with the highest indices are stopped: each leaves after its
        next report, or is ended after ten seconds, and others get the rows that it had not reported. Workers that had
        been given up are started again.

        Args:
            workers: how many, within the limits of `ScalingConfig(workers=(fewest, most))`.
            timeout: seconds for new workers to serve, and beyond its grace for each that is stopped to end.

        Raises:
            ValueError: `workers` is not within these limits.
            MisuseError: the run is not elastic, or `fit` does not run.
            ClusterError, UnavailableError, WaitTimeoutError: as `LocalCluster.scale`.
        """
        if self._scaling.limits is None:
            raise MisuseError(
                f"the run has {self._scaling.workers} workers throughout: give ScalingConfig(workers=(fewest, most))"
            )
        fewest, most = self._scaling.limits
        workers = checks.whole("workers", workers, at_least=fewest, at_most=most)
        self._clusters.scale(workers, timeout)

    def fit(self) -> Result:
        """Train: run the function on all workers until it has returned on each. Return what they have reported.

        If the run has reports already, of an earlier `fit` under its name, it goes on after them.

        Raises:
            TrainingFailedError: a member failed too often.
            TypeError: the function, its configuration or a dataset can't be sent.
            MisuseError: another process writes this run.
            CheckpointError: the run's folder can't be written.
        """
        from pscluster.launch.fit import Job, fit

        return fit(
            Job(
                train_fn=self._train_fn,
                config=self._config,
                scaling=self._scaling,
                run=self._run,
                datasets=self._datasets,
                backend=self._backend,
                variables=self._variables,
                split=self._split,
                seed=self._seed,
                launcher=self._launcher,
                resume_from=self._resume_from,
                clusters=self._clusters,
            )
        )


class TorchTrainer(Trainer):
    """A `Trainer` of functions in torch: `backend="torch"`."""

    def __init__(self, *args: Any, torch_config: object = None, **options: Any) -> None:
        """Do what `Trainer` does. `torch_config` is ignored: Ray Train's."""
        del torch_config
        super().__init__(*args, backend="torch", **options)


class TensorflowTrainer(Trainer):
    """A `Trainer` of functions in TensorFlow: `backend="tensorflow"`."""

    def __init__(self, *args: Any, tensorflow_config: object = None, **options: Any) -> None:
        """Do what `Trainer` does. `tensorflow_config` is ignored: Ray Train's."""
        del tensorflow_config
        super().__init__(*args, backend="tensorflow", **options)


def _check_elastic(scaling: ScalingConfig, run: RunConfig, backend: str, split: str) -> None:
    """Raise ValueError if members are to come and go where they can't."""
    if scaling.limits is None:
        return
    why = ""
    if backend != "numpy":
        why = f"a process group of {backend} can't lose a rank: give one number, or keep parameters on the servers"
    elif run.failure.restart == "group":
        why = 'with restart="group" all begin again together: leave it at "worker", or give one number'
    elif split != "all":
        why = f'split="{split}" cuts rows for a fixed number: leave it at "all", or give one number'
    if why:
        raise ValueError(f"workers is {scaling.limits}, so members may come and go, but {why}")


def _one(name: str, value: Any, alias: str, other: Any) -> Any:
    """Return the argument that was given under one of two names."""
    if value is not None and other is not None:
        raise TypeError(f"{name} and {alias} are the same argument: give one of them")
    return value if value is not None else other
