"""What a training function knows of its run, and how it reports. On the workers, or wherever the function runs.

A member is in one process, with one `Member` at a time, which all its threads share. It asks the trainer by `ask`; see
`session` for what becomes of that.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.context import FunctionContext
from pscluster.core.errors import FunctionCancelled, MisuseError
from pscluster.core.values import encode
from pscluster.launch.members.shards import DatasetShard, ElasticShard, Position
from pscluster.launch.storage.checkpoint import Checkpoint

Ask = Callable[[dict[str, Any]], Any]
"""Asks the trainer; returns its answer, or raises the error that it answers with."""

_MAX_METRICS_BYTES = 256 << 10


@dataclass(slots=True)
class TrainContext:
    """Where a member stands among the others. In an elastic run it follows: each report may change ranks and sizes."""

    world_size: int
    world_rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    experiment_name: str
    run_path: str
    """The run's folder: a path, or a URL."""
    attempt: int
    """1 in a member that has been there from the beginning; more in one that began again, or joined later."""
    variables: Any = None
    """What `Trainer(variables=)` made: variables and optimizers on the parameter servers."""
    reports: int = 0
    """The number of this member's last report; of one that has joined a run, or loaded a checkpoint, of the last then.
    """

    def get_world_size(self) -> int:
        """Return the number of members."""
        return self.world_size

    def get_world_rank(self) -> int:
        """Return the number of this member, from 0."""
        return self.world_rank

    def get_local_rank(self) -> int:
        """Return its number among the members on its machine."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of members on its machine."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """Return the number of its machine."""
        return self.node_rank

    def get_experiment_name(self) -> str:
        """Return the name of the run."""
        return self.experiment_name


@dataclass(slots=True)
class Member:
    """One member's part in the run, in this attempt."""

    context: TrainContext
    ask: Ask
    datasets: Mapping[str, Any]  # the sources, by name
    split: str
    seed: int
    committed: int = 0  # reports, of all members, when this attempt began
    latest: tuple[int, str] | None = None  # the number of the report with the newest checkpoint, and its path
    resume_from: str | None = None
    restored: Mapping[str, Position] = field(default_factory=dict)  # positions that were reported with it
    furthest: Mapping[str, Position] = field(default_factory=dict)  # those of the last report
    function: FunctionContext | None = None  # None: it can't update variables on the servers
    updates: Mapping[int, int] = field(default_factory=dict)  # that it had made at the newest checkpoint, in this fit()
    began_after: int | None = None  # of an elastic run: the reports that were committed when it began
    _meetings: int = 0  # since the last report
    _has_reported: bool = False
    _is_restored: bool = False
    _shards: dict[str, DatasetShard] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_elastic(self) -> bool:
        """Return whether other members may join and leave: nothing is repeated then."""
        return self.began_after is not None

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None, name: str) -> None:
        plain = _plain_metrics(metrics)
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"checkpoint is {type_of(checkpoint)}; give Checkpoint.from_directory(path)")
        with_variables = checkpoint is not None and checkpoint.with_variables
        if with_variables and self.context.variables is None:
            raise MisuseError(
                "Checkpoint.from_variables() saves what is on parameter servers, where this run has nothing: make "
                "variables in the function that Trainer(variables=) takes, or give Checkpoint.from_directory(path)"
            )
        with self._lock:
            number = self.context.reports + 1
            files = None
            if checkpoint is not None and checkpoint.path and number > self.committed:
                from pscluster.launch.storage.uploads import upload  # with fsspec, which takes a tenth of a second

                files = upload(
                    self.context.run_path,
                    number,
                    self.context.world_rank,
                    self.context.attempt,
                    Path(checkpoint.path),
                )
            positions = self._take_positions()
            try:
                answer = self.ask(
                    {
                        "do": "report",
                        "number": number,
                        "metrics": plain,
                        "files": files,
                        "name": name,
                        "positions": positions,
                        "with_variables": with_variables,
                        "updates": [] if self.function is None else [*map(list, self.function.update_counts().items())],
                    }
                )
            except BaseException:
                self._put_back(positions)
                raise
            self.context.reports, self._meetings, self._has_reported = number, 0, True
            path = self._follow(answer) if self.is_elastic else answer
            if path:
                self.latest = number, path

    def _take_positions(self) -> dict[str, list[Any]]:
        """Return what a report says of the datasets."""
        return {
            name: shard.take_given() if isinstance(shard, ElasticShard) else list(dataclasses.astuple(shard.position))
            for name, shard in self._shards.items()
        }

    def _put_back(self, positions: Mapping[str, list[Any]]) -> None:
        """Take note that a report was not committed."""
        for name, shard in self._shards.items():
            if isinstance(shard, ElasticShard) and name in positions:
                shard.not_reported(positions[name])

    def _follow(self, answer: Mapping[str, Any]) -> str | None:
        """Take note of who the members are now; return the path of the report's checkpoint."""
        context = self.context
        context.world_rank, context.world_size = answer["rank"], answer["size"]
        context.local_rank = answer.get("local_rank", context.world_rank)
        context.local_world_size = answer.get("local_world_size", context.world_size)
        context.node_rank = answer.get("node_rank", 0)
        for name, shard in self._shards.items():
            if isinstance(shard, ElasticShard):
                shard.go_on_in(answer["epochs"][name])
        if answer["leave"]:
            raise FunctionCancelled  # in order: all that it was given is committed
        path: str | None = answer["path"]
        return path

    def end(self) -> None:
        """Tell the trainer that the function is returning, and what it was given since the last report."""
        self.ask({"do": "end", "positions": self._take_positions()})

    def checkpoint(self) -> Checkpoint | None:
        with self._lock:
            if self.latest is None:
                return None if self.resume_from is None else Checkpoint(self.resume_from)
            number, path = self.latest
            if not self.is_elastic and not self.context.reports and not self._is_restored:
                if self._shards:
                    raise MisuseError("call get_checkpoint() before get_dataset_shard(), whose position it restores")
                self.context.reports, self._is_restored = number, True
                if self.function is not None:  # else the servers would take its next updates for those before
                    self.function.go_on_after(self.updates)
            return Checkpoint(path)

    def meet(self, do: str, **sent: Any) -> Any:
        with self._lock:
            after = self.context.reports
            if self.began_after is not None and not self._has_reported:
                after = self.began_after  # where all others were when the run began
            place = [after + 1, self._meetings]
            self._meetings += 1
        return self.ask({"do": do, "place": place, **sent})

    def shard(self, name: str) -> DatasetShard:
        with self._lock:
            if (known := self._shards.get(name)) is not None:
                return known
            if name not in self.datasets:
                there = ", ".join(map(repr, self.datasets)) or "none"
                raise MisuseError(f"there is no dataset {name!r}: Trainer(datasets=) has {there}")
            context = self.context
            if self.is_elastic:
                ask = functools.partial(self._ask_of_dataset, name)
                self._shards[name] = elastic = ElasticShard(self.datasets[name], ask, seed=self.seed)
                return elastic
            shard = DatasetShard(
                self.datasets[name], context.world_rank, context.world_size, split=self.split, seed=self.seed
            )
            shard.restore(
                self.restored.get(name, Position()) if self._is_restored else Position(),
                self.furthest.get(name, Position()),
            )
            self._shards[name] = shard
            return shard

    def _ask_of_dataset(self, name: str, question: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask({**question, "dataset": name})
        return answer


_current: Member | None = None


@contextmanager
def membership(member: Member) -> Iterator[None]:
    """Make this the process's member within the block."""
    global _current
    if _current is not None:
        raise MisuseError("a training function already runs in this process: train in one at a time")
    _current = member
    try:
        yield
    finally:
        _current = None


def _member(name: str) -> Member:
    if _current is None:
        raise MisuseError(f"{name}() is for the function that Trainer.fit() runs: there is none in this process")
    return _current


def get_context() -> TrainContext:
    """Return where this member stands among the others.

        if get_context().world_rank == 0:
            print("begun")

    Raises:
        MisuseError: no training function runs in this process.
    """
    return _member("get_context").context


def report(
    metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, checkpoint_name: str | None = None
) -> None:
    """Report metrics, and perhaps a checkpoint. Return once those of all members are committed.

    Every member has to report as often as the others. When this returns, the report and the checkpoint are in the run's
    folder for good, whatever dies, and the checkpoint's own directory may be deleted. A member that was restarted, and
    has not loaded a checkpoint, repeats the reports it had made: those return at once.

        report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))

    Args:
        metrics: numbers, strings, bools and None by name; also arrays of one number.
        checkpoint: of this member: a directory, whose files are copied, or `Checkpoint.from_variables()`.
        checkpoint_name: for people; the run lists it with the checkpoint.

    Raises:
        MisuseError: no training function runs here.
        TypeError: the metrics are no mapping of names to such values.
        MemberTimeoutError: others have not reported in time; the message names them.
        CheckpointError: the checkpoint could not be written: the message says what failed, and where.
    """
    _member("report").report(metrics, checkpoint, checkpoint_name or "")


def get_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint of this run, else the one it was told to resume from; None if there is neither.

    Call it where the function begins, before it reports and before `get_dataset_shard`: the next report then follows
    the one that the checkpoint came with, and datasets go on where they were.

        if (checkpoint := get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                model.load(folder)

    Raises:
        MisuseError: no training function runs in this process, or `get_dataset_shard` was called before.
    """
    return _member("get_checkpoint").checkpoint()


def get_dataset_shard(name: str = "train") -> DatasetShard:
    """Return this member's part of a dataset: the same object each time.

        data = get_dataset_shard("train")
        for epoch in data.epochs(5):
            for batch in data.iter_batches(64, shuffle=True):
                ...

    Args:
        name: its name in `Trainer(datasets=)`.

    Raises:
        MisuseError: there is none of that name, or no training function runs in this process.
    """
    return _member("get_dataset_shard").shard(name)


def barrier() -> None:
    """Wait until all members have come here, for at most `RunConfig(report_timeout=)` seconds.

    Raises:
        MemberTimeoutError: others have not come in time; the message names them.
        MisuseError: no training function runs in this process.
    """
    _member("barrier").meet("barrier")


def broadcast(value: Any = None) -> Any:
    """Return what rank 0 gives, on all members. Wait for all of them, as `barrier` does.

        seed = broadcast(int(time.time()))

    Args:
        value: on rank 0: data, such as numbers, strings, arrays, and lists and dicts of those. Of others it is ignored.

    Raises:
        TypeError: the value can't be sent.
        MemberTimeoutError, MisuseError: as from `barrier`.
    """
    member = _member("broadcast")
    if member.context.world_rank:
        return member.meet("broadcast", nbytes=0)
    return member.meet("broadcast", value=value, nbytes=encode(value, path="the value").ByteSize())


broadcast_from_rank_zero = broadcast


def _plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON can represent them, but for NaN and infinity."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"report takes metrics by name, such as {{'loss': 0.5}}, not {type_of(metrics)}")
    plain: dict[str, Any] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a metric is {name!r}, not a string")
        plain[name] = _plain(name, value)
    if (size := len(repr(plain))) > _MAX_METRICS_BYTES:
        raise ValueError(
            f"the metrics of one report take {size:,} characters; the limit is {_MAX_METRICS_BYTES:,}: write large "
            "results into a file of the checkpoint"
        )
    return plain


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    item = getattr(value, "item", None)  # of NumPy, torch and JAX
    if callable(item) and np.size(value) == 1:
        return item()
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}[{key!r}]", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{at}]", each) for at, each in enumerate(value)]
    raise TypeError(
        f"metric {name!r} is {type_of(value)}: give a number, a string, or lists and dicts of those; float(x) makes "
        "a number of an array with one element"
    )
