"""The tasks of a cluster, by job and index.

A `ClusterSpec` is always valid: known jobs, good addresses, none of them twice. The needs of a coordinator (a ps, a
worker, one chief) are checked by `validate_for_strategy`, since a worker or a parameter server may know only a part of
the cluster.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pscluster.core.cluster.addresses import parse_address
from pscluster.core.cluster.errors import quoted, wrong

JOBS = ("chief", "worker", "ps", "evaluator")
MAX_INDEX = 999_999
Tasks: TypeAlias = Sequence[str] | Mapping[int, str] | Mapping[str, str]

VARIABLE = "TF_CONFIG"
COORDINATOR_VARIABLE = "PSCLUSTER_COORDINATOR"
"""The address of the coordinator that a worker joins."""

CLUSTER = '{"cluster": {"worker": ["worker0:2222"], "ps": ["ps0:2222"]}}'
"""An example."""


def tasks_in_words(indices: Sequence[int]) -> str:
    """Describe a job's tasks by their rising indices, for example "2 tasks (0 and 1)"."""
    if len(indices) < 2:
        return f"1 task ({indices[0]})" if indices else "no tasks"
    *first, last = map(str, indices)
    if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{len(indices)} tasks ({first[0]} to {last})"
    return f"{len(indices)} tasks ({', '.join(first[:5])}{', ...' if first[5:] else ''} and {last})"


def checked_job(value: object, key: str) -> str:
    """Return the name of a job. Raise ConfigurationError if there is no such job."""
    if isinstance(value, str) and value in JOBS:
        return value
    word = value[:20] if isinstance(value, str) else ""
    close = ["chief"] if word == "master" else difflib.get_close_matches(word, JOBS)  # TensorFlow's old name for it
    right = quoted(close[0] if close else "worker")
    raise wrong(key, f"is {quoted(value)}", "the jobs are chief, worker, ps and evaluator", right)


def checked_index(value: object, key: str) -> int:
    """Return a task's index as an int. Raise ConfigurationError if it is not one."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,6}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INDEX:
        return value
    raise wrong(key, f"is {quoted(value)}", f"an index is a whole number from 0 to {MAX_INDEX}", "0")


class ClusterSpec:
    """The addresses of all tasks, by job and index, like tf.train.ClusterSpec. Immutable.

    Examples:
        >>> spec = ClusterSpec({"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]})
        >>> spec.num_tasks("worker"), spec.task_address("worker", 1)
        (2, '10.0.0.3:2222')
    """

    __slots__ = ("_source", "_tasks")
    _source: str
    _tasks: dict[str, dict[int, str]]

    def __init__(self, cluster: ClusterSpec | Mapping[str, Tasks], *, source: str = "ClusterSpec") -> None:
        """Check and copy the description; errors say that it came from `source`.

        For each job (chief, worker, ps, evaluator), it has a list of addresses, or a mapping of index to address, which
        may omit indices. An address is `host:port` or `unix:/PATH`. Raise ConfigurationError for a wrong type, an
        unknown job, a bad index or address, or an address twice.
        """
        if isinstance(cluster, ClusterSpec):
            self._source, self._tasks = cluster._source, cluster._tasks
        else:
            self._source, self._tasks = source, _read_cluster(cluster, source)

    @property
    def source(self) -> str:
        """Where the description came from: errors begin with it. Equality ignores it."""
        return self._source

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order given."""
        return list(self._tasks)

    def num_tasks(self, job: str) -> int:
        """Return how many tasks a job has. Raise ConfigurationError if there is no such job."""
        return len(self._job(job))

    def task_indices(self, job: str) -> list[int]:
        """Return the rising indices of a job's tasks. Raise ConfigurationError if there is no such job."""
        return list(self._job(job))

    def task_address(self, job: str, index: int) -> str:
        """Return the address of a task. Raise ConfigurationError if there is no such task."""
        tasks = self._job(job)
        if index not in tasks:
            limit = f"cluster.{job} has {tasks_in_words(list(tasks))}"
            right = str(max(tasks)) if tasks else CLUSTER
            raise wrong(f"{self._source}: cluster.{job}[{quoted(index)}]", "is requested", limit, right)
        return tasks[index]

    def job_tasks(self, job: str) -> list[str | None]:
        """Return a job's addresses by index, None for omitted ones. Raises as `num_tasks`."""
        tasks = self._job(job)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the spec as plain values: a list for a job without gaps, else a dict by index."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._tasks.items()
        }

    def _job(self, job: str) -> dict[int, str]:
        if job not in self._tasks:
            limit = f"the cluster has {', '.join(self._tasks) or 'no jobs'}"
            right = quoted(next(iter(self._tasks))) if self._tasks else CLUSTER
            raise wrong(f"{self._source}: cluster", f"is queried for the job {quoted(job)}", limit, right)
        return self._tasks[job]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return self._tasks == other._tasks if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._tasks.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _read_cluster(cluster: object, source: str) -> dict[str, dict[int, str]]:
    if not isinstance(cluster, Mapping):
        raise wrong(f"{source}: cluster", f"is {quoted(cluster)}", "it must be an object of jobs", CLUSTER)
    jobs: dict[str, dict[int, str]] = {}
    owners: dict[tuple[str, int], str] = {}
    for name, tasks in cluster.items():
        job = checked_job(name, f"{source}: a key of cluster")
        if not isinstance(tasks, list | tuple | Mapping):
            right = '["host0:2222"] or {"0": "host0:2222"}'
            raise wrong(f"{source}: cluster.{job}", f"is {quoted(tasks)}", "it must list addresses", right)
        read: dict[int, str] = {}
        for given, address in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
            index = checked_index(given, f"{source}: an index of cluster.{job}")
            key = f"cluster.{job}[{index}]"
            actual = f"is {quoted(address)}"
            if not isinstance(address, str):
                raise wrong(f"{source}: {key}", actual, "an address is a string", '"host0:2222"')
            if index in read:
                raise wrong(f"{source}: {key}", actual, f"it was {quoted(read[index])} before", CLUSTER)
            host, port = parse_address(address, f"{source}: {key}")
            owner = owners.setdefault((host.lower() if port else host, port), key)
            if owner != key:
                raise wrong(f"{source}: {key}", actual, f"{owner} has that address too", '"host1:2222"')
            read[index] = address
        jobs[job] = dict(sorted(read.items()))
    return jobs


def check_task(spec: ClusterSpec, task_type: str, task_id: int | None) -> None:
    """Raise ConfigurationError unless the spec has the task. An evaluator need not be in it."""
    named = spec.source == VARIABLE
    type_key = f"{spec.source}: {'task.type' if named else 'task_type'}"
    checked_job(task_type, type_key)
    indices = spec.task_indices(task_type) if task_type in spec.jobs else []
    if not indices and task_type != "evaluator":
        right = f'{{"cluster": {{"{task_type}": ["{task_type}0:2222"]}}}}'
        raise wrong(type_key, f'is "{task_type}"', f"cluster.{task_type} has no tasks", right)
    if indices and task_id is not None and task_id not in indices:
        key = f"{spec.source}: {'task.index' if named else 'task_id'}"
        right = f'{{"task": {{"type": "{task_type}", "index": {indices[-1]}}}}}'
        limit = f"cluster.{task_type} has {tasks_in_words(indices)}"
        raise wrong(key, f"is {quoted(task_id)}", limit, right if named else f"task_id={indices[-1]}")


def validate_for_strategy(
    spec: ClusterSpec, task_type: str | None, task_id: int | None, *, needs_worker: bool = True
) -> None:
    """Check that a strategy can use the cluster; it needs no worker if workers will join.

    Raise ConfigurationError if it has no tasks, no ps or no worker, or several chiefs or evaluators; or if a task is
    given that is not in the cluster (an evaluator need not be).
    """
    if not spec:
        raise wrong(f"{spec.source}: cluster", "is empty", "a strategy needs a ps and a worker", CLUSTER)
    if task_type is not None:
        check_task(spec, task_type, task_id)
    for job in JOBS:
        indices = spec.task_indices(job) if job in spec.jobs else []
        key, actual = f"{spec.source}: cluster.{job}", f"has {tasks_in_words(indices)}"
        if not indices and (job == "ps" or (job == "worker" and needs_worker)):
            raise wrong(key, actual, f"a strategy needs at least one {job}", CLUSTER)
        if job in ("chief", "evaluator") and len(indices) > 1:
            right = f'{{"cluster": {{"{job}": ["{job}0:2222"]}}}}'
            raise wrong(key, actual, f"a cluster has at most one {job}", right)
