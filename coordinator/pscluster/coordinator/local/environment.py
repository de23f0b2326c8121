"""The environment variables of the processes that this one starts, or its scheduler does, as a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias

from pscluster.core import checks
from pscluster.core.errors import ConfigurationError
from pscluster.core.functions.policy import FUNCTIONS_VARIABLE, PICKLE_VARIABLE, functions_from_also
from pscluster.core.role.options import (
    DATA_PORT_VARIABLE,
    JOIN_VARIABLES,
    METRICS_PORT_VARIABLE,
    data_port_of,
    metrics_port_of,
)
from pscluster.core.security.tls import SERVER_ONLY_VARIABLE, TLS_VARIABLE
from pscluster.core.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from pscluster.ps.storage.options import DURABILITY_VARIABLE, STATE_VARIABLE, durability_named

_RESERVED = {
    "TF_CONFIG",
    TOKEN_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TLS_VARIABLE,
    DURABILITY_VARIABLE,
    STATE_VARIABLE,
    PICKLE_VARIABLE,
}
# Without one of these in a task's own variables all tasks agree whether they have such ports.
_OF_ALL_TASKS = {DATA_PORT_VARIABLE, METRICS_PORT_VARIABLE}
THREADS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


TaskEnv: TypeAlias = Mapping[str, str] | Callable[[str, int], Mapping[str, str]]
"""Variables for all tasks, or a function of a task's role and index that returns those for it."""


def task_environ(env: TaskEnv | None, role: str, index: int) -> dict[str, str]:
    """Return the variables that a function gives one task; none if all tasks have the same.

    ConfigurationError if the function raises, or returns something else than strings by the names of variables that
    are its to set.
    """
    if not callable(env):
        return {}
    said = f"env({role!r}, {index})"
    try:
        given = env(role, index)
    except Exception as error:
        raise ConfigurationError(f"{said} raised {type(error).__name__}: {error}") from error
    _check(given, said)
    if common := _OF_ALL_TASKS.intersection(given):
        raise ConfigurationError(
            f"{said} names {', '.join(sorted(common))}, which all tasks have in common: set it in this process, before "
            "LocalCluster is made"
        )
    return dict(given)


def _check(env: Mapping[str, str], said: str) -> None:
    """Raise ConfigurationError unless these are variables that a process can have and a user may set."""
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"{said} is {checks.type_of(env)}; give a dictionary of strings by variables' names")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError(f"{said} has {name!r}: {value!r}; a variable's name and value are strings")
    if conflicts := _RESERVED.intersection(env):
        raise ConfigurationError(
            f"{said} names {', '.join(sorted(conflicts))}, which LocalCluster sets; use token=, tls=, durability=, "
            "state_dir= or allow_pickle="
        )


def role_environ(
    env: Mapping[str, str],
    num_workers: int,
    durability: str | None,
    allow_pickle: bool | None,
    cwd: str | os.PathLike[str] | None,
) -> dict[str, str]:
    """Return the variables that all processes of a cluster have in addition to those of this process.

    The arguments are those of `LocalCluster`. ConfigurationError if one is invalid.
    """
    _check(env, "env")
    threads = max(1, (os.cpu_count() or 1) // num_workers)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = cwd, script and os.path.dirname(os.path.abspath(script))
    environ = {**env, **common_environ({**os.environ, **env}, threads, *folders)}
    environ[DURABILITY_VARIABLE] = durability_named(durability).value
    if allow_pickle is not None:
        environ[PICKLE_VARIABLE] = str(int(allow_pickle))
    return environ


def common_environ(given: Mapping[str, str], threads: int, *folders: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the variables that each process of a cluster needs beside those that are given, or in their place.

    Args:
        threads: of its numeric libraries. They would take all cores in each process, and be in each other's way.
        folders: where functions may be from, beside the default.

    Raises:
        ConfigurationError: a port that is given is none.
    """
    environ = {name: str(threads) for name in THREADS_VARIABLES if name not in given}
    # Several processes are on one machine, so a given port would serve only one of them: each takes a free one.
    for variable, port_of in ((METRICS_PORT_VARIABLE, metrics_port_of), (DATA_PORT_VARIABLE, data_port_of)):
        environ[variable] = "off" if port_of(given.get(variable) or "0") is None else "0"
    if FUNCTIONS_VARIABLE not in given:
        environ[FUNCTIONS_VARIABLE] = functions_from_also(*folders)
    return environ


def child_environ(env: Mapping[str, str], tf_config: str, token: str, tls_folder: str = "") -> dict[str, str]:
    """Return this process's environment with what a process of the cluster needs."""
    # These would name files, a coordinator or a task of another cluster.
    others = (TOKEN_FILE_VARIABLE, TLS_VARIABLE, SERVER_ONLY_VARIABLE, *JOIN_VARIABLES)
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    environ = {**inherited, **env, "TF_CONFIG": tf_config, TOKEN_VARIABLE: token}
    if tls_folder:
        environ[TLS_VARIABLE] = tls_folder
    return environ
