"""All objects of a cluster except its Secrets, by the file that holds them."""

from __future__ import annotations

from pscluster.launch.kubernetes.pods import DATA_PORT, PORT, Object, labels, pod_template, selector
from pscluster.launch.kubernetes.spec import COORDINATOR, PS, WORKER, ClusterOptions

_CALLERS = {PS: (WORKER, COORDINATOR), WORKER: (WORKER, COORDINATOR), COORDINATOR: (WORKER,)}
"""Who calls whom: workers talk to each other in collectives, and register with the coordinator."""


def manifests(spec: ClusterOptions) -> dict[str, list[Object]]:
    """Return the objects in an order in which they can be created, by the name of their file."""
    files = {
        "network-policies.yaml": [_network_policy(spec, role) for role in _CALLERS],
        "services.yaml": [_service(spec, role) for role in (PS, COORDINATOR)],
        "disruption-budgets.yaml": [_disruption_budget(spec, PS, 1), _disruption_budget(spec, WORKER, "50%")],
        "servers.yaml": [_servers(spec)],
        "workers.yaml": [_workers(spec)],
        "coordinator.yaml": [_coordinator(spec)],
    }
    if spec.source is not None:
        files = {"script.yaml": [_script(spec, spec.source)]} | files
    return files


def _object(spec: ClusterOptions, kind: str, version: str, suffix: str, role: str | None = None) -> Object:
    metadata: Object = {"name": spec.named(suffix)}
    if spec.namespace is not None:
        metadata["namespace"] = spec.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata | {"labels": labels(spec, role)}}


def _service(spec: ClusterOptions, role: str) -> Object:
    """Return a headless Service: names lead to the pods themselves.

    Also to those that are not ready: workers join, and servers answer, before they are. And since no address is
    translated, the coordinator dials a worker where its call came from.
    """
    ports = (("grpc", PORT), ("data", DATA_PORT))
    return _object(spec, "Service", "v1", role, role) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(spec, role),
            "ports": [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports],
        }
    }


def _servers(spec: ClusterOptions) -> Object:
    claim: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": spec.storage}}}
    if spec.storage_class is not None:
        claim["storageClassName"] = spec.storage_class
    return _object(spec, "StatefulSet", "apps/v1", PS, PS) | {
        "spec": {
            "serviceName": spec.named(PS),
            "replicas": spec.ps,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector(spec, PS)},
            "template": pod_template(spec, PS),
            "volumeClaimTemplates": [
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "state", "labels": selector(spec, PS)},
                    "spec": claim,
                }
            ],
        }
    }


def _workers(spec: ClusterOptions) -> Object:
    return _object(spec, "Deployment", "apps/v1", WORKER, WORKER) | {
        "spec": {
            "replicas": spec.workers,
            "selector": {"matchLabels": selector(spec, WORKER)},
            "template": pod_template(spec, WORKER),
        }
    }


def _coordinator(spec: ClusterOptions) -> Object:
    return _object(spec, "Job", "batch/v1", COORDINATOR, COORDINATOR) | {
        "spec": {
            "backoffLimit": spec.backoff_limit,
            "podReplacementPolicy": "Failed",  # servers refuse a second coordinator: wait for the end of the first
            "template": pod_template(spec, COORDINATOR),
        }
    }


def _script(spec: ClusterOptions, source: str) -> Object:
    return _object(spec, "ConfigMap", "v1", "script", COORDINATOR) | {"data": {spec.script_name: source}}


def _disruption_budget(spec: ClusterOptions, role: str, unavailable: int | str) -> Object:
    """Return how many pods of a role a drain of nodes may end at a time.

    The coordinator has none: it is one pod, so a budget would hold up every drain of its node, and it resumes.
    """
    return _object(spec, "PodDisruptionBudget", "policy/v1", role, role) | {
        "spec": {
            "maxUnavailable": unavailable,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(spec, role)},
        }
    }


def _network_policy(spec: ClusterOptions, role: str) -> Object:
    """Return which pods may connect to a role's. Connections from pods are not restricted: scripts load data."""
    callers = [{"podSelector": {"matchLabels": selector(spec, caller)}} for caller in _CALLERS[role]]
    ports = [{"port": port, "protocol": "TCP"} for port in (PORT, DATA_PORT)]
    return _object(spec, "NetworkPolicy", "networking.k8s.io/v1", role, role) | {
        "spec": {
            "podSelector": {"matchLabels": selector(spec, role)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": callers, "ports": ports}],
        }
    }
