"""Resolvers: they tell a strategy which cluster to use, and which of its tasks this process is."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from pscluster.core.cluster.spec import VARIABLE, ClusterSpec, checked_index, checked_job
from pscluster.core.cluster.tf_config import (
    checked_rpc_layer,
    cluster_in,
    environment_in,
    load_config,
    missing_key,
    task_in,
    value_in,
)
from pscluster.core.errors import ConfigurationError


class ClusterResolver(ABC):
    """Tells a strategy which cluster to use and which of its tasks this process is; as in TensorFlow.

    `task_type`, `task_id` and `rpc_layer` can be set; if None, they are read from `_config()` at each access. Setting
    or reading a wrong value raises ConfigurationError.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self._environment = environment

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current cluster."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return a task's address, prefixed by `rpc_layer://` if there is one. For code written for TensorFlow."""

    def _config(self) -> Mapping[str, object]:
        return {}

    @property
    def task_type(self) -> str | None:
        """The job of this process, or None if unknown."""
        own = self._task_type
        return value_in(task_in(self._config()), "task.type", checked_job) if own is None else own

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._task_type = None if value is None else checked_job(value, f"{type(self).__name__}: task_type")

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if unknown."""
        own = self._task_id
        return value_in(task_in(self._config()), "task.index", checked_index) if own is None else own

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = None if value is None else checked_index(value, f"{type(self).__name__}: task_id")

    @property
    def rpc_layer(self) -> str | None:
        """Either "grpc" or None, which only `master()` distinguishes."""
        own = self._rpc_layer
        return value_in(self._config(), "rpc_layer", checked_rpc_layer) if own is None else own

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = None if value is None else checked_rpc_layer(value, f"{type(self).__name__}: rpc_layer")

    @property
    def environment(self) -> str:
        """The platform's name, such as "cloud"; nothing here depends on it."""
        return environment_in(self._config()) if self._environment is None else self._environment

    def _url(self, address: str, rpc_layer: str | None) -> str:
        layer = self.rpc_layer if rpc_layer is None else checked_rpc_layer(rpc_layer, "rpc_layer")
        return f"{layer}://{address}" if layer and address else address


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG at each access; the constructor's arguments take precedence.

    Args:
        task_type, task_id, rpc_layer: take precedence over TF_CONFIG's. Default: those.
        environment: the platform's name; nothing here depends on it.
    """

    def _config(self) -> Mapping[str, object]:
        return load_config(os.environ.get(VARIABLE, "{}"))

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of TF_CONFIG; empty if it has none. ConfigurationError if it is wrong."""
        return cluster_in(self._config())

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return TF_CONFIG's `session_master`; else "" if the cluster has at most one task; else a task's address.

        Raise ConfigurationError if the task is neither given nor in TF_CONFIG, or is not in the cluster.
        """
        session_master = self._config().get("session_master")
        if isinstance(session_master, str):
            return session_master
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise missing_key("type" if task_type is None else "index")
        return self._url(spec.task_address(task_type, task_id), rpc_layer)


class SimpleClusterResolver(ClusterResolver):
    """Returns what it was given.

        resolver = SimpleClusterResolver(ClusterSpec({"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}))

    Args:
        cluster_spec: the addresses of the tasks.
        master: what `master()` returns without arguments.
        task_type, task_id: the task that this process is, such as "worker" and 0.
        environment: for the caller, as in TensorFlow.
        rpc_layer: what `master()` puts before addresses, as in "grpc://"; None: nothing.

    Raises:
        TypeError: `cluster_spec` is no ClusterSpec, or `master` no string.
        ConfigurationError: an unknown task type or RPC layer, or a bad index.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        rpc_layer: str | None = None,
    ) -> None:
        for name, value, wanted in (("cluster_spec", cluster_spec, ClusterSpec), ("master", master, str)):
            if not isinstance(value, wanted):
                raise TypeError(f"{name} must be of type {wanted.__name__}, not {type(value).__name__}")
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._cluster_spec, self._master = cluster_spec, master

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the task's address if both type and index are given, else the `master` of the constructor."""
        if task_type is None or task_id is None:
            return self._url(self._master, rpc_layer)
        return self._url(self._cluster_spec.task_address(task_type, task_id), rpc_layer)


class UnionResolver(ClusterResolver):
    """Describes a cluster whose tasks several resolvers describe.

    Tasks of a job that several have are listed one after the other, unless one of them numbers its tasks with gaps:
    then all keep their numbers. What is not given here is as the first resolver says.

        resolver = UnionResolver(of_servers, of_workers)

    Args:
        cluster_resolvers: one or more.
        task_type, task_id, rpc_layer: as in `SimpleClusterResolver`.

    Raises:
        ValueError: there is no resolver.
        TypeError: an argument is no resolver.
    """

    def __init__(
        self,
        *cluster_resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not cluster_resolvers:
            raise ValueError("a UnionResolver needs at least one resolver")
        for resolver in cluster_resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"a UnionResolver takes cluster resolvers, not a {type(resolver).__name__}")
        self._resolvers = cluster_resolvers
        super().__init__(task_type, task_id, rpc_layer)

    def _config(self) -> Mapping[str, object]:
        first = self._resolvers[0]
        task = {"type": first.task_type, "index": first.task_id}
        config = {"rpc_layer": first.rpc_layer, "environment": first.environment}
        return {
            "task": {key: value for key, value in task.items() if value is not None},
            **{key: value for key, value in config.items() if value is not None},
        }

    def cluster_spec(self) -> ClusterSpec:
        """Return the union. ConfigurationError if two tasks have the same number, or the same address."""
        merged: dict[str, list[str] | dict[int, str]] = {}
        dicts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        for job in dict.fromkeys(itertools.chain.from_iterable(dicts)):
            having = [tasks[job] for tasks in dicts if job in tasks]
            lists = [tasks for tasks in having if isinstance(tasks, list)]
            if len(lists) == len(having):
                merged[job] = list(itertools.chain.from_iterable(lists))
                continue
            numbered = [dict(enumerate(tasks)) if isinstance(tasks, list) else tasks for tasks in having]
            numbers = Counter(itertools.chain.from_iterable(numbered))
            if twice := [number for number, count in numbers.items() if count > 1]:
                raise ConfigurationError(
                    f"UnionResolver: several resolvers have {job} {min(twice)}, and one numbers its tasks with gaps: "
                    "give each task its own number"
                )
            merged[job] = {number: address for tasks in numbered for number, address in tasks.items()}
        return ClusterSpec(merged, source="UnionResolver")

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the task's address if both type and index are given, else the master of the first resolver."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=self.rpc_layer if rpc_layer is None else rpc_layer)
        return self._url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)


UnionClusterResolver = UnionResolver  # as TensorFlow's source calls it
