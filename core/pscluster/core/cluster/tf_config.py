"""TF_CONFIG: JSON that names the tasks of a cluster, and which of them this process is.

It has this form (docs/tf_config.md describes it for users):

    {"cluster": {"chief": ["c:2222"], "worker": ["w0:2222", "w1:2222"], "ps": {"0": "p0:2222"}},
     "task": {"type": "worker", "index": 0}, "rpc_layer": "grpc"}

A `TFConfig` is always valid, and names a task that its cluster has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pscluster.core.cluster.errors import quoted, wrong
from pscluster.core.cluster.spec import CLUSTER, VARIABLE, ClusterSpec, check_task, checked_index, checked_job
from pscluster.core.errors import ConfigurationError

_T = TypeVar("_T")
_TASK = '{"task": {"type": "worker", "index": 0}}'
_BOTH = f"{CLUSTER[:-1]}, {_TASK[1:]}"


def checked_rpc_layer(value: object, key: str) -> str:
    """Return the RPC layer. Raise ConfigurationError if it is not gRPC."""
    if value == "grpc":
        return "grpc"
    raise wrong(key, f"is {quoted(value)}", "only gRPC is supported", '"grpc", or leave it out')


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            right = f"{{{quoted(key)}: ...}} once"
            raise wrong(f"{VARIABLE}: the key {quoted(key)}", "occurs twice", "each key may occur only once", right)
        unique[key] = value
    return unique


def load_config(text: str) -> dict[str, object]:
    """Parse the JSON of TF_CONFIG. Raise ConfigurationError if it is not an object."""
    try:
        config = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as e:
        near = quoted(text[max(0, e.pos - 20) : e.pos + 20])
        actual = f"is not JSON at line {e.lineno}, column {e.colno}, near {near}"
        raise wrong(f"{VARIABLE}: the value", actual, f"must be ({e.msg})", _BOTH) from None
    except ConfigurationError:
        raise
    except (ValueError, RecursionError):  # too many digits or brackets
        raise wrong(
            f"{VARIABLE}: the value",
            f"is {quoted(text)}",
            "it is nested too deeply, or has a number with too many digits",
            _BOTH,
        ) from None
    if not isinstance(config, dict):
        raise wrong(f"{VARIABLE}: the value", f"is {quoted(config)}", "it must be a JSON object", _BOTH)
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
    raise wrong(key, f"is {quoted(value)}", "it must be an object", _TASK)


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
    return wrong(f"{VARIABLE}: task.{key}", "is missing", "a task has a type and an index", _TASK)


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
            check_task(self.cluster, self.task.type, self.task.index)

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
