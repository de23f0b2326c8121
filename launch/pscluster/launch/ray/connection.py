"""The connection to Ray: imported when it is needed, connected, and asked for room for a cluster's tasks."""

from __future__ import annotations

import importlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pscluster.coordinator.local.monitor import ClusterError
from pscluster.core.cluster.addresses import split_address
from pscluster.core.errors import ConfigurationError
from pscluster.core.limits import one_line

PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")


class RayClusterError(ClusterError):
    """A cluster can't be had from Ray, or one of its tasks has died for good; the message says why."""


def import_ray() -> Any:
    """Return the module. ConfigurationError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            f'RayCluster needs Ray, which can\'t be imported ({error}): pip install "pscluster[ray]"'
        ) from None


def connect(address: str, timeout: float, runtime_env: Mapping[str, Any]) -> bool:
    """Connect this process to a running Ray cluster; return False if it is connected already, so to that one.

    All its actors get this runtime environment. Only here Ray takes folders of this machine in it.

    Raises:
        ConfigurationError: Ray is not installed, or this process is only a client of Ray's.
        RayClusterError: there is no cluster at the address.
    """
    ray = import_ray()
    if address.startswith("ray://") or ray.util.client.ray.is_connected():
        raise ConfigurationError(
            "this process is a client of Ray's (ray://), which the workers can't reach: run the script on a node of "
            "the Ray cluster, for example with `ray job submit`"
        )
    if ray.is_initialized():
        return False
    try:
        if ":" in address:  # Ray itself would try for minutes
            socket.create_connection(split_address(address, "address"), timeout).close()
        ray.init(address=address, logging_level=logging.WARNING, runtime_env=dict(runtime_env))
    except (OSError, RuntimeError, ValueError) as error:
        raise RayClusterError(
            f"there is no Ray cluster at the address {address!r}: {reason(error)}; start one on this machine "
            "with `ray start --head`, join one with `ray start --address HOST:PORT`, or give address="
        ) from None
    return True


def has_working_dir(runtime_env: Mapping[str, Any]) -> bool:
    """Return whether actors with this runtime environment, beside that of this process, get a folder from Ray."""
    inherited = import_ray().get_runtime_context().runtime_env or {}
    return "working_dir" in {**inherited, **runtime_env}


def reason(error: BaseException) -> str:
    """Return the cause of an error of Ray's: the first sentence of its last line, since tracebacks come before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1].partition(". ")[0]).removesuffix(".") if lines else type(error).__name__


def place(bundles: Sequence[Mapping[str, float]], placement: str, timeout: float) -> Any:
    """Return a placement group of these bundles, which has its place. RayClusterError if it has none in time."""
    (group,) = _placed(
        [bundles],
        placement,
        timeout,
        f"{len(bundles)} tasks with placement={placement!r}",
        "stop what uses it, add nodes, or ask for less with ps_resources= and worker_resources=",
    )
    return group


def place_each(bundles: Sequence[Mapping[str, float]], timeout: float) -> list[Any]:
    """Return a placement group for each of these bundles, on any nodes. RayClusterError if one has no place in time."""
    whose = f"{len(bundles)} more worker{'s' * (len(bundles) != 1)}"
    return _placed([[bundle] for bundle in bundles], "PACK", timeout, whose, "stop what uses it, or add nodes")


def _placed(
    groups: Sequence[Sequence[Mapping[str, float]]], placement: str, timeout: float, whose: str, hint: str
) -> list[Any]:
    """Return placement groups, which all have their place; otherwise none is left, and the error says for whom."""
    ray, until = import_ray(), time.monotonic() + timeout
    placed: list[Any] = []
    try:
        placed.extend(
            ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=placement) for bundles in groups
        )
        for group in placed:
            if not group.wait(max(until - time.monotonic(), 0.0)):
                needed = [bundle for bundles in groups for bundle in bundles]
                raise RayClusterError(
                    f"the Ray cluster has no room for {whose} after {timeout:g} s: they need {shortage(needed)}; {hint}"
                )
    except BaseException as error:  # Ctrl-C included
        for group in placed:
            ray.util.remove_placement_group(group)
        if isinstance(error, ValueError):
            raise ConfigurationError(f"Ray refuses the tasks' resources: {reason(error)}") from None
        raise
    return placed


def shortage(bundles: Sequence[Mapping[str, float]]) -> str:
    """Return what bundles need, and what of it the Ray cluster has, and has free."""
    ray = import_ray()
    total, free = ray.cluster_resources(), ray.available_resources()
    needed: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0) + amount
    listed = ", ".join(
        f"{name} {amount:g} ({free.get(name, 0):g} free of {total.get(name, 0):g})" for name, amount in needed.items()
    )
    return f"{listed}, and there are {sum(node['Alive'] for node in ray.nodes())} nodes"


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as the options of an actor."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}  # what Ray would add for itself is no part of the bundle
    options |= {own[name]: amount for name, amount in resources.items() if name in own}
    return options | {"resources": {name: amount for name, amount in resources.items() if name not in own}}
