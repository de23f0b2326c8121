"""The pods of each role: what runs in them, with which credentials, storage, probes and rights."""

from __future__ import annotations

from typing import Any

from pscluster.core.cluster.kubernetes import (
    POD_VARIABLE,
    REPLICAS_VARIABLE,
    ROLE_VARIABLE,
    SERVICE_VARIABLE,
    server_addresses,
)
from pscluster.core.cluster.spec import COORDINATOR_VARIABLE, VARIABLE, ClusterSpec
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.ids import VERSION
from pscluster.core.role.options import DATA_PORT_VARIABLE, MAX_WORKERS_VARIABLE
from pscluster.core.security.tls import AUTHORITIES, CERTIFICATE, KEY, TLS_VARIABLE
from pscluster.core.security.tokens import TOKEN_FILE_VARIABLE
from pscluster.launch.kubernetes.spec import COORDINATOR, PS, ClusterOptions
from pscluster.ps.storage.options import STATE_VARIABLE

Object = dict[str, Any]
"""A manifest, or a part of one."""

PORT, DATA_PORT = 2222, 2223
USER = 10001
"""The user of the image."""

CREDENTIALS, STATE, SCRIPTS = "/run/pscluster", "/var/lib/pscluster", "/job"
TOKEN_KEY = "token"  # noqa: S105  (a key's name)  # nosec B105
TLS_KEYS = CERTIFICATE, KEY, AUTHORITIES

_GRACE = {"ps": 60, "worker": 40, "coordinator": 60}
"""Seconds until SIGKILL: a role takes 10 s for what runs; then servers save their state, and `fit` a backup."""


def service_of(spec: ClusterOptions, role: str) -> str:
    """Return the address of a role's Service."""
    return f"{spec.named(role)}:{PORT}"


def cluster_of(spec: ClusterOptions) -> ClusterSpec:
    """Return the servers and the coordinator by the names that pods of the namespace use."""
    servers = server_addresses(service_of(spec, PS), spec.ps)
    return ClusterSpec({"ps": servers, "chief": [service_of(spec, COORDINATOR)]})


def selector(spec: ClusterOptions, role: str | None = None) -> dict[str, str]:
    """Return the labels by which the cluster's pods are selected, or those of one role."""
    labels = {"app.kubernetes.io/name": "pscluster", "app.kubernetes.io/instance": spec.name}
    return labels if role is None else labels | {"app.kubernetes.io/component": role}


def labels(spec: ClusterOptions, role: str | None = None) -> dict[str, str]:
    """Return all labels of an object."""
    more = {"app.kubernetes.io/version": VERSION, "app.kubernetes.io/managed-by": "pscluster"}
    return selector(spec, role) | more


def pod_template(spec: ClusterOptions, role: str) -> Object:
    """Return the template of a role's pods."""
    pod: Object = {
        "automountServiceAccountToken": False,  # nothing calls the API
        "enableServiceLinks": False,  # variables for other Services, such as PSCLUSTER_PORT, could look like ours
        "terminationGracePeriodSeconds": _GRACE[role],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,  # whose files the credentials are, and who may write the state
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if spec.pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": spec.pull_secret}]
    if role == COORDINATOR:
        pod["restartPolicy"] = "OnFailure"
    else:
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector(spec, role)},
            }
        ]
    pod |= {"containers": [_container(spec, role)], "volumes": _volumes(spec, role)}
    return {"metadata": {"labels": labels(spec, role)}, "spec": pod}


def _container(spec: ClusterOptions, role: str) -> Object:
    mounts: list[Object] = [
        {"name": "credentials", "mountPath": CREDENTIALS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # nosec B108
    ]
    if role == PS:
        mounts.append({"name": "state", "mountPath": STATE})
    if role == COORDINATOR and spec.source is not None:
        # By a subPath, since a ConfigMap's folder has links to another folder for each pod: the job is named after the
        # script's path, and the next coordinator is to find it.
        path = f"{SCRIPTS}/{spec.script_name}"
        mounts.append({"name": "script", "mountPath": path, "subPath": spec.script_name, "readOnly": True})
    return {
        "name": role,
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["pscluster"],
        "args": [_escape(word) for word in _arguments(spec, role)],
        "env": _environment(spec, role),
        "ports": [{"name": "grpc", "containerPort": PORT}, {"name": "data", "containerPort": DATA_PORT}],
        "resources": spec.resources[role].as_dict(),
        **_probes(role),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _arguments(spec: ClusterOptions, role: str) -> list[str]:
    bind = ["--bind", f"0.0.0.0:{PORT}"]
    if role != COORDINATOR:  # that servers and workers wait for the next job is what a StatefulSet can do
        return [role, *bind]
    script = spec.script if spec.source is None else f"{SCRIPTS}/{spec.script_name}"
    return [role, *bind, "--keep-job", script, *spec.args]


def _environment(spec: ClusterOptions, role: str) -> list[Object]:
    values = {
        ROLE_VARIABLE: role,
        SERVICE_VARIABLE: service_of(spec, PS),
        REPLICAS_VARIABLE: str(spec.ps),
        COORDINATOR_VARIABLE: service_of(spec, COORDINATOR),
        DATA_PORT_VARIABLE: str(DATA_PORT),
        TOKEN_FILE_VARIABLE: f"{CREDENTIALS}/{TOKEN_KEY}",
        TLS_VARIABLE: f"{CREDENTIALS}/tls",
    }
    if role == PS:
        values[STATE_VARIABLE] = STATE
    if role == COORDINATOR:
        values[MAX_WORKERS_VARIABLE] = str(spec.max_workers)
        values[VARIABLE] = TFConfig(cluster_of(spec), Task("chief", 0)).to_json()
    named: list[Object] = [{"name": name, "value": _escape(value)} for name, value in {**values, **spec.env}.items()]
    pod: Object = {"name": POD_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    if "OMP_NUM_THREADS" in spec.env:
        return [pod, *named]
    # As many threads as the container may use cores, not as many as the node has.
    cores = {"containerName": role, "resource": "limits.cpu", "divisor": "1"}
    return [pod, *named, {"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": cores}}]


def _escape(text: str) -> str:
    """Return the text so that Kubernetes, which replaces $(NAME), leaves it as it is."""
    return text.replace("$", "$$")


def _probes(role: str) -> Object:
    """Return the probes, which call the standard gRPC health check with the pod's own credentials.

    Kubernetes' own gRPC probe has no TLS, and no token.
    """

    def probe(**settings: int) -> Object:
        return {"exec": {"command": ["pscluster", "health", f"127.0.0.1:{PORT}"]}, "timeoutSeconds": 10, **settings}

    readiness = probe(periodSeconds=10, failureThreshold=3)
    if role == COORDINATOR:
        # It serves while the script has a strategy. What the script does before and after is not judged.
        return {"readinessProbe": readiness}
    # A server may have to restore a large state; a worker serves once it has joined. Nothing is lost if one that waits
    # for a coordinator is restarted after two hours.
    startup = probe(periodSeconds=10, failureThreshold=720)
    # Patient: a step that holds Python's lock for a minute is no reason to run it again.
    liveness = probe(periodSeconds=30, failureThreshold=10)
    return {"startupProbe": startup, "readinessProbe": readiness, "livenessProbe": liveness}


def _volumes(spec: ClusterOptions, role: str) -> list[Object]:
    token = {"name": spec.secret("token"), "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}]}
    tls = {"name": spec.secret(f"{role}-tls"), "items": [{"key": key, "path": f"tls/{key}"} for key in TLS_KEYS]}
    sources = [{"secret": token}, {"secret": tls}]
    volumes: list[Object] = [
        {"name": "credentials", "projected": {"defaultMode": 0o440, "sources": sources}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if role == COORDINATOR and spec.source is not None:
        volumes.append({"name": "script", "configMap": {"name": spec.named("script"), "defaultMode": 0o444}})
    return volumes
