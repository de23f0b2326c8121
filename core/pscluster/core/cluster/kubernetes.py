"""The cluster and the task of a Kubernetes pod, from its environment.

`pscluster k8s render` gives every pod these variables:

    PSCLUSTER_POD           the pod's name, by the downward API; a server's ends with its ordinal: train-ps-1
    PSCLUSTER_POD_ROLE      ps, worker or coordinator
    PSCLUSTER_PS_SERVICE    the servers' headless Service and their port: train-ps:2222
    PSCLUSTER_PS_REPLICAS   the number of servers
    PSCLUSTER_COORDINATOR   the coordinator's Service and its port: train-coordinator:2222

Server 1 is then at train-ps-1.train-ps:2222, whichever node it is on. Workers join the coordinator, so no variable
names or counts them, and a worker's index is not known here. The namespace is not needed either: the names are
resolved in the pod's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pscluster.core.cluster.addresses import split_address
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import COORDINATOR_VARIABLE, MAX_INDEX, ClusterSpec
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.errors import ConfigurationError

POD_VARIABLE = "PSCLUSTER_POD"
ROLE_VARIABLE = "PSCLUSTER_POD_ROLE"
SERVICE_VARIABLE = "PSCLUSTER_PS_SERVICE"
REPLICAS_VARIABLE = "PSCLUSTER_PS_REPLICAS"

_EXAMPLES = {
    POD_VARIABLE: "train-ps-0, from metadata.name by the downward API",
    ROLE_VARIABLE: "ps, worker or coordinator",
    SERVICE_VARIABLE: "train-ps:2222",
    REPLICAS_VARIABLE: "2",
    COORDINATOR_VARIABLE: "train-coordinator:2222",
}
_JOBS = {"ps": "ps", "worker": "worker", "coordinator": "chief"}
_SOURCE = "the pod's environment"


def server_addresses(service: str, replicas: int) -> list[str]:
    """Return the addresses of a StatefulSet's pods, from its headless Service (its own name) and port."""
    name, port = split_address(service, SERVICE_VARIABLE)
    return [f"{name}-{ordinal}.{name}:{port}" for ordinal in range(replicas)]


def is_pod(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is in a pod of `pscluster k8s render`."""
    return POD_VARIABLE in environ


class KubernetesClusterResolver(ClusterResolver):
    """Describes the cluster of `pscluster k8s render` from a pod's environment, at each access.

    The cluster has the servers and the coordinator; workers join it. A missing or wrong variable raises
    ConfigurationError.

        strategy = ParameterServerStrategy(KubernetesClusterResolver())

    Args:
        task_type, task_id, rpc_layer, environment: as in `SimpleClusterResolver`; what is given takes precedence over
            the pod's environment.
    """

    def cluster_spec(self) -> ClusterSpec:
        """Return the servers and the coordinator. ConfigurationError if a variable is missing or wrong."""
        return _cluster_of(os.environ)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return a task's address, by default this pod's; "" for a worker, whose address no variable holds.

        Raise ConfigurationError if there is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None or (task_type == "worker"):
            return ""
        return self._url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)

    def _config(self) -> Mapping[str, object]:
        role = _role_of(os.environ)
        index = _index_of(os.environ, role)
        return {"task": {"type": _JOBS[role]} | ({} if index is None else {"index": index})}


def config_of_pod(environ: Mapping[str, str] = os.environ) -> TFConfig:
    """Return what TF_CONFIG would say in this pod; no task for a worker, which joins.

    Raise ConfigurationError if a variable is missing or wrong.
    """
    role = _role_of(environ)
    index = _index_of(environ, role)
    return TFConfig(_cluster_of(environ), None if index is None else Task(_JOBS[role], index))


def _cluster_of(environ: Mapping[str, str]) -> ClusterSpec:
    coordinator = _value(environ, COORDINATOR_VARIABLE)
    split_address(coordinator, COORDINATOR_VARIABLE)
    servers = server_addresses(_value(environ, SERVICE_VARIABLE), _replicas(environ))
    return ClusterSpec({"ps": servers, "chief": [coordinator]}, source=_SOURCE)


def _value(environ: Mapping[str, str], variable: str) -> str:
    if not environ.get(variable):
        raise ConfigurationError(
            f"{variable} is not set in this pod; `pscluster k8s render` sets it, or set it to a value such as "
            f"{_EXAMPLES[variable]}"
        )
    return environ[variable]


def _replicas(environ: Mapping[str, str]) -> int:
    text = _value(environ, REPLICAS_VARIABLE)
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= MAX_INDEX:
        raise ConfigurationError(f"{REPLICAS_VARIABLE} is {text!r}; give the number of servers, from 1 to {MAX_INDEX}")
    return int(text)


def _role_of(environ: Mapping[str, str]) -> str:
    role = _value(environ, ROLE_VARIABLE)
    if role not in _JOBS:
        raise ConfigurationError(f"{ROLE_VARIABLE} is {role!r}; give {_EXAMPLES[ROLE_VARIABLE]}")
    return role


def _index_of(environ: Mapping[str, str], role: str) -> int | None:
    """Return the task's index; None for a worker."""
    if role != "ps":
        return 0 if role == "coordinator" else None
    pod, replicas = _value(environ, POD_VARIABLE), _replicas(environ)
    ordinal = re.search("-([0-9]{1,6})$", pod)
    if ordinal is None:
        raise ConfigurationError(
            f"{POD_VARIABLE} is {pod!r}, which does not end with an ordinal such as -0: run the servers as a "
            "StatefulSet, and set the variable from metadata.name"
        )
    if int(ordinal[1]) >= replicas:
        raise ConfigurationError(
            f"{POD_VARIABLE} is {pod!r}, but {REPLICAS_VARIABLE} is {replicas}, so the last server is {replicas - 1}: "
            "variables are placed on a fixed number of servers; render the cluster with --ps instead of scaling its "
            "StatefulSet"
        )
    return int(ordinal[1])
