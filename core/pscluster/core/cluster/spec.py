"""The tasks of the cluster, and which of them this process is.

TF_CONFIG is JSON of this form (docs/tf_config.md describes it for users):

    {"cluster": {"chief": ["c:2222"], "worker": ["w0:2222", "w1:2222"], "ps": {"0": "p0:2222"}},
     "task": {"type": "worker", "index": 0}, "rpc_layer": "grpc"}

An address is `host:port` or, for tasks of one user on one machine, `unix:/PATH`; see `unix_sockets`.

A `ClusterSpec` is always valid: known jobs, good addresses, none of them twice. A `TFConfig` also names a task that its
cluster has. The needs of a coordinator (a ps, a worker, one chief) are checked by `validate_for_strategy`, since a
worker or a parameter server may know only a part of the cluster.

Every error is a ConfigurationError of one line: the key, what was found, the limit, and a right value.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from pscluster.core.errors import ConfigurationError
from pscluster.core.transport.unix_sockets import PREFIX, path_of, why_no_path

JOBS = ("chief", "worker", "ps", "evaluator")
MAX_INDEX = 999_999
_T = TypeVar("_T")
Tasks: TypeAlias = Sequence[str] | Mapping[int, str] | Mapping[str, str]

VARIABLE = "TF_CONFIG"
COORDINATOR_VARIABLE = "PSCLUSTER_COORDINATOR"
"""The address of the coordinator that a worker joins."""

_MAX_QUOTED = 80
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_IPV6 = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]")
_CLUSTER = '{"cluster": {"worker": ["worker0:2222"], "ps": ["ps0:2222"]}}'
_TASK = '{"task": {"type": "worker", "index": 0}}'
_BOTH = f"{_CLUSTER[:-1]}, {_TASK[1:]}"


def _wrong(key: str, actual: str, limit: str, right: str) -> ConfigurationError:
    return ConfigurationError(f"{key} {actual}, but {limit}; write, for example, {right}")


def _quote(value: object) -> str:
    """Return the value as JSON: in ASCII, thus without line breaks of any kind, and cut to `_MAX_QUOTED`."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."


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
    right = _quote(close[0] if close else "worker")
    raise _wrong(key, f"is {_quote(value)}", "the jobs are chief, worker, ps and evaluator", right)


def checked_index(value: object, key: str) -> int:
    """Return a task's index as an int. Raise ConfigurationError if it is none."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,6}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INDEX:
        return value
    raise _wrong(key, f"is {_quote(value)}", f"an index is a whole number from 0 to {MAX_INDEX}", "0")


def checked_rpc_layer(value: object, key: str) -> str:
    """Return the RPC layer. Raise ConfigurationError if it is not gRPC."""
    if value == "grpc":
        return "grpc"
    raise _wrong(key, f"is {_quote(value)}", "only gRPC is supported", '"grpc", or leave it out')


def split_address(text: str, key: str = "address") -> tuple[str, int]:
    """Return the host (IPv6 without brackets) and the port of `host:port` or `[IPv6]:port`.

    Raise ConfigurationError, which calls the address `key`, if it is invalid, or its port is not from 1 to 65535.
    """
    host, _, port = text.rpartition(":")
    ipv6 = _IPV6.fullmatch(host)
    right = "ps0:2222"
    if text.startswith(PREFIX):
        limit = "a host and a port are needed here"
    elif "://" in text:
        limit = "an address names no protocol"
    elif ":" not in text or text.endswith("]"):
        limit = "it has no port"
        right = f"{text}:2222" if _HOST.fullmatch(text) or _IPV6.fullmatch(text) else right
    elif not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        limit = "a port is a whole number from 1 to 65535"
    elif ":" in host and not ipv6:
        limit, right = "an IPv6 address stands in brackets", "[::1]:2222"
    else:
        limit = "its host is neither a name nor an IP address"
        try:
            if ipv6:
                return str(ipaddress.IPv6Address(ipv6[1])), int(port)
            if re.fullmatch("[0-9.]+", host):
                return str(ipaddress.IPv4Address(host)), int(port)
            if _HOST.fullmatch(host):
                return host, int(port)
        except ValueError:
            pass  # digits and dots, or hex and colons, but not an address
    raise _wrong(key, f"is {_quote(text)}", limit, _quote(right))


def join_address(host: str, port: int) -> str:
    """Return `host:port`, or `[IPv6]:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, key: str = "address") -> tuple[str, int]:
    """Return the host and port of a task's address, or, of `unix:/PATH`, the path and 0. Raises as `split_address`."""
    if text.startswith(("unix-abstract:", "unix://")):
        raise _wrong(key, f"is {_quote(text)}", "a Unix socket is written unix:/PATH", '"unix:/run/job/ps-0"')
    if (path := path_of(text)) is None:
        return split_address(text, key)
    if why := why_no_path(path):
        raise _wrong(key, f"is {_quote(text)}", why, '"unix:/run/job/ps-0"')
    return path, 0


_UNREGISTERED = ".unregistered.invalid"  # a name that nobody can have (RFC 2606)


def unregistered(job: str, index: int) -> str:
    """Return the address of a task that has not said where it is. Nothing dials it."""
    return f"{job}-{index}{_UNREGISTERED}:1"


def is_unregistered(address: str) -> bool:
    """Return whether this is the address of a task that has not said where it is."""
    return address.rpartition(":")[0].endswith(_UNREGISTERED)


def is_on_this_machine(address: str) -> bool:
    """Return whether a task's address is reachable on this machine only: a Unix socket, or on loopback."""
    return path_of(address) is not None or is_loopback(split_address(address)[0])


def is_loopback(host: str) -> bool:
    """Return whether a host (without a port) is this machine itself: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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
            right = str(max(tasks)) if tasks else _CLUSTER
            raise _wrong(f"{self._source}: cluster.{job}[{_quote(index)}]", "is requested", limit, right)
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
            right = _quote(next(iter(self._tasks))) if self._tasks else _CLUSTER
            raise _wrong(f"{self._source}: cluster", f"is queried for the job {_quote(job)}", limit, right)
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
        raise _wrong(f"{source}: cluster", f"is {_quote(cluster)}", "it must be an object of jobs", _CLUSTER)
    jobs: dict[str, dict[int, str]] = {}
    owners: dict[tuple[str, int], str] = {}
    for name, tasks in cluster.items():
        job = checked_job(name, f"{source}: a key of cluster")
        if not isinstance(tasks, list | tuple | Mapping):
            right = '["host0:2222"] or {"0": "host0:2222"}'
            raise _wrong(f"{source}: cluster.{job}", f"is {_quote(tasks)}", "it must list addresses", right)
        read: dict[int, str] = {}
        for given, address in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
            index = checked_index(given, f"{source}: an index of cluster.{job}")
            key = f"cluster.{job}[{index}]"
            actual = f"is {_quote(address)}"
            if not isinstance(address, str):
                raise _wrong(f"{source}: {key}", actual, "an address is a string", '"host0:2222"')
            if index in read:
                raise _wrong(f"{source}: {key}", actual, f"it was {_quote(read[index])} before", _CLUSTER)
            host, port = parse_address(address, f"{source}: {key}")
            owner = owners.setdefault((host.lower() if port else host, port), key)
            if owner != key:
                raise _wrong(f"{source}: {key}", actual, f"{owner} has that address too", '"host1:2222"')
            read[index] = address
        jobs[job] = dict(sorted(read.items()))
    return jobs


def _check_task(spec: ClusterSpec, task_type: str, task_id: int | None) -> None:
    """Raise ConfigurationError unless the spec has the task. An evaluator need not be in it."""
    named = spec.source == VARIABLE
    type_key = f"{spec.source}: {'task.type' if named else 'task_type'}"
    checked_job(task_type, type_key)
    indices = spec.task_indices(task_type) if task_type in spec.jobs else []
    if not indices and task_type != "evaluator":
        right = f'{{"cluster": {{"{task_type}": ["{task_type}0:2222"]}}}}'
        raise _wrong(type_key, f'is "{task_type}"', f"cluster.{task_type} has no tasks", right)
    if indices and task_id is not None and task_id not in indices:
        key = f"{spec.source}: {'task.index' if named else 'task_id'}"
        right = f'{{"task": {{"type": "{task_type}", "index": {indices[-1]}}}}}'
        limit = f"cluster.{task_type} has {tasks_in_words(indices)}"
        raise _wrong(key, f"is {_quote(task_id)}", limit, right if named else f"task_id={indices[-1]}")


def validate_for_strategy(
    spec: ClusterSpec, task_type: str | None, task_id: int | None, *, needs_worker: bool = True
) -> None:
    """Check that a strategy can use the cluster; it needs no worker if workers will join.

    Raise ConfigurationError if it has no tasks, no ps or no worker, or several chiefs or evaluators; or if a task is
    given that is not in the cluster (an evaluator need not be).
    """
    if not spec:
        raise _wrong(f"{spec.source}: cluster", "is empty", "a strategy needs a ps and a worker", _CLUSTER)
    if task_type is not None:
        _check_task(spec, task_type, task_id)
    for job in JOBS:
        indices = spec.task_indices(job) if job in spec.jobs else []
        key, actual = f"{spec.source}: cluster.{job}", f"has {tasks_in_words(indices)}"
        if not indices and (job == "ps" or (job == "worker" and needs_worker)):
            raise _wrong(key, actual, f"a strategy needs at least one {job}", _CLUSTER)
        if job in ("chief", "evaluator") and len(indices) > 1:
            right = f'{{"cluster": {{"{job}": ["{job}0:2222"]}}}}'
            raise _wrong(key, actual, f"a cluster has at most one {job}", right)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            right = f"{{{_quote(key)}: ...}} once"
            raise _wrong(f"{VARIABLE}: the key {_quote(key)}", "occurs twice", "each key may occur only once", right)
        unique[key] = value
    return unique


def load_config(text: str) -> dict[str, object]:
    """Parse the JSON of TF_CONFIG. Raise ConfigurationError if it is not an object."""
    try:
        config = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as e:
        near = _quote(text[max(0, e.pos - 20) : e.pos + 20])
        actual = f"is not JSON at line {e.lineno}, column {e.colno}, near {near}"
        raise _wrong(f"{VARIABLE}: the value", actual, f"must be ({e.msg})", _BOTH) from None
    except ConfigurationError:
        raise
    except (ValueError, RecursionError):  # too many digits or brackets
        raise _wrong(
            f"{VARIABLE}: the value",
            f"is {_quote(text)}",
            "it is nested too deeply, or has a number with too many digits",
            _BOTH,
        ) from None
    if not isinstance(config, dict):
        raise _wrong(f"{VARIABLE}: the value", f"is {_quote(config)}", "it must be a JSON object", _BOTH)
    return config


# Keys are read one by one, so that a resolver's property complains only about its own. null counts as missing.
def value_in(config: Mapping[str, object], key: str, check: Callable[[object, str], _T]) -> _T | None:
    """Return the checked value of a key, or None if it is missing."""
    value = config.get(key)
    return None if value is None else check(value, f"{VARIABLE}: {key}")


def task_in(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return TF_CONFIG's task, by keys such as "task.type"."""
    task = value_in(config, "task", _object) or {}
    return {f"task.{key}": value for key, value in task.items()}


def _object(value: object, key: str) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    raise _wrong(key, f"is {_quote(value)}", "it must be an object", _TASK)


def cluster_in(config: Mapping[str, object]) -> ClusterSpec:
    """Return the cluster of TF_CONFIG, empty if it has none."""
    cluster = config.get("cluster")
    return ClusterSpec({} if cluster is None else cluster, source=VARIABLE)  # type: ignore[arg-type]  # it checks


def environment_in(config: Mapping[str, object]) -> str:
    """Return the platform's name in TF_CONFIG, or ""."""
    value = config.get("environment")
    return value if isinstance(value, str) else ""  # nothing depends on it, so no value of it is an error


def missing_key(key: str) -> ConfigurationError:
    """Return the error for a task without this key."""
    return _wrong(f"{VARIABLE}: task.{key}", "is missing", "a task has a type and an index", _TASK)


@dataclass(frozen=True)
class Task:
    """One process of the cluster. Raises ConfigurationError for an unknown type or a bad index."""

    type: str
    index: int

    def __post_init__(self) -> None:
        checked_job(self.type, f"{VARIABLE}: task.type")
        object.__setattr__(self, "index", checked_index(self.index, f"{VARIABLE}: task.index"))


_NO_CLUSTER = ClusterSpec({}, source=VARIABLE)


@dataclass(frozen=True)
class TFConfig:
    """The contents of TF_CONFIG.

    Raises ConfigurationError if the task is not in the cluster (an evaluator need not be), or the RPC layer not gRPC.
    """

    cluster: ClusterSpec = _NO_CLUSTER  # the tasks known to this process
    task: Task | None = None  # this process
    rpc_layer: str | None = None  # "grpc" or None
    environment: str = ""  # the platform's name, such as "cloud"; nothing here depends on it

    def __post_init__(self) -> None:
        if self.rpc_layer is not None:
            checked_rpc_layer(self.rpc_layer, f"{VARIABLE}: rpc_layer")
        if self.task is not None:
            _check_task(self.cluster, self.task.type, self.task.index)

    @classmethod
    def parse(cls, text: str) -> TFConfig:
        """Read the JSON of TF_CONFIG, ignoring unknown keys.

        Raise ConfigurationError if it is not JSON, or has a value that is wrong in every role.
        """
        config = load_config(text)
        given, task = task_in(config), None
        if given:
            task_type, index = value_in(given, "task.type", checked_job), value_in(given, "task.index", checked_index)
            if task_type is None or index is None:
                raise missing_key("type" if task_type is None else "index")
            task = Task(task_type, index)
        layer = value_in(config, "rpc_layer", checked_rpc_layer)
        return cls(cluster_in(config), task, layer, environment_in(config))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> TFConfig:
        """Read the variable TF_CONFIG; without it, everything is empty. Raises as `parse`."""
        return cls.parse(environ.get(VARIABLE, "{}"))

    def to_json(self) -> str:
        """Return one line of JSON that `parse` turns back into an equal value."""
        fields: dict[str, object] = {"cluster": self.cluster.as_dict()}
        if self.task:
            fields["task"] = {"type": self.task.type, "index": self.task.index}
        fields |= {"rpc_layer": self.rpc_layer, "environment": self.environment}
        return json.dumps({key: value for key, value in fields.items() if value})
