"""A role's options, from the command line and the environment, and its task in TF_CONFIG."""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from pscluster.core.cluster.addresses import is_on_this_machine
from pscluster.core.cluster.kubernetes import config_of_pod, is_pod
from pscluster.core.cluster.spec import COORDINATOR_VARIABLE, VARIABLE
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.errors import ConfigurationError
from pscluster.core.functions.policy import add_pickle_options, choose, chosen_policy, policy_of
from pscluster.core.role.open_health import OPEN_HEALTH_VARIABLE
from pscluster.core.role.process import log_options
from pscluster.core.security.tls import (
    AUTHORITIES,
    CERTIFICATE,
    INSECURE_VARIABLE,
    KEY,
    SERVER_ONLY_VARIABLE,
    TLS_VARIABLE,
    Tls,
    is_set,
    load_tls,
    token_for,
)
from pscluster.core.security.tokens import create_token_file, hide_token, load_token

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """How a role serves; see the command line's help for each."""

    bind: str | None = None
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    insecure: bool = False
    open_health: bool = False
    until_done: bool = False
    exit_with_parent: bool = False
    share_port: bool = False
    connect_timeout: float = 600.0
    coordinator_timeout: float = math.inf
    grace: float = GRACE_SECONDS
    log_level: str = "INFO"
    metrics_port: int | None = 0  # None: no metrics are served
    metrics_host: str = _LOOPBACK
    data_port: int | None = 0  # None: there is no data plane
    allow_pickle: bool | None = None
    functions_from: tuple[str, ...] = ()
    data_from: tuple[str, ...] = ()
    log_format: str = "text"
    dashboard: bool = False
    dashboard_address: str | None = None
    max_workers: int | None = None  # None: 1000, and the cluster's TF_CONFIG names at least one
    worker_ranges: tuple[str, ...] = ()
    num_ps: int | None = None  # None: the parameter servers are those in the cluster's TF_CONFIG


MAX_WORKERS_VARIABLE = "PSCLUSTER_MAX_WORKERS"
NUM_PS_VARIABLE = "PSCLUSTER_NUM_PS"
WORKER_RANGE_VARIABLE = "PSCLUSTER_WORKER_RANGE"
TASK_VARIABLE = "PSCLUSTER_TASK"
ADVERTISE_VARIABLE = "PSCLUSTER_ADVERTISE"
JOB_NAME_VARIABLE = "PSCLUSTER_JOB_NAME"
JOIN_VARIABLES = COORDINATOR_VARIABLE, TASK_VARIABLE, ADVERTISE_VARIABLE, JOB_NAME_VARIABLE
"""Of a worker that joins."""

METRICS_PORT_VARIABLE = "PSCLUSTER_METRICS_PORT"
METRICS_HOST_VARIABLE = "PSCLUSTER_METRICS_HOST"
DATA_PORT_VARIABLE = "PSCLUSTER_DATA_PORT"


def _port_or_off(text: str, noun: str) -> int | None:
    """Return the port, 0 for any free one; None for "off". Raise ConfigurationError for any other text."""
    if text == "off":
        return None
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise ConfigurationError(f"{noun} is {text!r}; give one from 1 to 65535, 0 (any free port) or off")
    return int(text)


metrics_port_of = functools.partial(_port_or_off, noun="the port for metrics")
data_port_of = functools.partial(_port_or_off, noun="the data port")


def _port_option(
    flag: str, variable: str, port_of: Callable[[str], int | None], shown: str, text: str
) -> Callable[[Any], Any]:
    return click.option(
        flag,
        metavar="PORT|off",
        callback=lambda _context, _option, value: port_of(value),
        envvar=variable,
        default="0",
        show_default=f"0: any free port{shown}",
        help=f"{text} Or ${variable}.",
    )


data_port_option = _port_option(
    "--data-port",
    DATA_PORT_VARIABLE,
    data_port_of,
    "",
    "Second port, faster than gRPC for functions, reads and updates; clients that cannot reach it use gRPC.",
)


def options_of_environ(environ: Mapping[str, str] = os.environ, role: str = "coordinator") -> RoleOptions:
    """Return the options in the environment, for this role. Raise ConfigurationError if they are invalid."""
    return RoleOptions(
        token=load_token(None, environ),
        tls=load_tls(role, environ=environ),
        insecure=is_set(INSECURE_VARIABLE, environ),
        open_health=is_set(OPEN_HEALTH_VARIABLE, environ),
        metrics_port=metrics_port_of(environ.get(METRICS_PORT_VARIABLE) or "0"),
        metrics_host=environ.get(METRICS_HOST_VARIABLE) or _LOOPBACK,
        data_port=data_port_of(environ.get(DATA_PORT_VARIABLE) or "0"),
        max_workers=max_workers_of(environ.get(MAX_WORKERS_VARIABLE) or None),
        num_ps=num_ps_of(environ.get(NUM_PS_VARIABLE) or None),
        worker_ranges=tuple((environ.get(WORKER_RANGE_VARIABLE) or "").split()),
    )


def _count_of(text: str | None, noun: str) -> int | None:
    """Return the number in a text. Raise ConfigurationError if it is not one from 1 to 100,000."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 100_000):
        raise ConfigurationError(f"the {noun} is {text!r}; give one from 1 to 100,000")
    return int(text)


max_workers_of = functools.partial(_count_of, noun="maximum number of workers")
num_ps_of = functools.partial(_count_of, noun="number of parameter servers")


def joining_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a coordinator whose workers may join, and whose servers register."""
    command = click.option(
        "--num-ps",
        metavar="N",
        callback=lambda _context, _option, value: num_ps_of(value),
        envvar=NUM_PS_VARIABLE,
        help="Number of parameter servers, if TF_CONFIG does not list them: each registers, with "
        f"`pscluster ps --join`. Or ${NUM_PS_VARIABLE}.",
    )(command)
    command = click.option(
        "--worker-range",
        "worker_ranges",
        multiple=True,
        metavar="CIDR",
        envvar=WORKER_RANGE_VARIABLE,
        help="Network in which workers that join may --advertise an address; repeatable. "
        f"Default: only the address that they call from. Or ${WORKER_RANGE_VARIABLE}, with spaces between.",
    )(command)
    return click.option(
        "--max-workers",
        metavar="N",
        callback=lambda _context, _option, value: max_workers_of(value),
        envvar=MAX_WORKERS_VARIABLE,
        show_default="1000",
        help="Maximum number of workers. With it, TF_CONFIG need not list any: they join with "
        f"`pscluster worker --join`. "
        f"Or ${MAX_WORKERS_VARIABLE}.",
    )(command)


tls_option = click.option(
    "--tls",
    "tls_folder",
    type=click.Path(path_type=Path),
    help=f"Folder that holds {CERTIFICATE}, {KEY} and {AUTHORITIES}, or one folder for each role. Or ${TLS_VARIABLE}.",
)
insecure_option = click.option(
    "--insecure",
    is_flag=True,
    help=f"Allow addresses other than loopback without a token or without TLS. Or ${INSECURE_VARIABLE}=1.",
)


def create_tls_folder(folder: Path | None) -> None:
    """Create certificates for all roles of the cluster in TF_CONFIG, unless there are some; the first process wins."""
    from pscluster.core.security.certificates import hosts_of, make_certificates  # slow to import

    path = folder or Path(os.environ.get(TLS_VARIABLE, ""))
    if path == Path():
        raise ConfigurationError(f"--create-tls needs --tls or {TLS_VARIABLE} to name the folder")
    make_certificates(path, by_role=hosts_of(TFConfig.from_environ().cluster))


def with_user_token(options: RoleOptions, addresses: Iterable[str]) -> RoleOptions:
    """Return the options with the user's token if none was given, and all addresses are on this machine."""
    token = token_for(options.token, addresses, options.tls, insecure=options.insecure, create=True)
    return replace(options, token=token)


def choose_serialization(address: str, options: RoleOptions, *, is_worker: bool = False) -> None:
    """Choose how this process deserializes its peers' messages. Raise ConfigurationError for invalid options."""
    exposed = ""
    known = options.token is not None or (options.tls is not None and options.tls.is_mutual)
    if not known and not (options.insecure and is_on_this_machine(address)):
        exposed = f"this role listens on {address} without a token, so anyone could send it a pickle"
    asked, folders, data = options.allow_pickle, options.functions_from, options.data_from
    policy = policy_of(asked, exposed, folders, data_from=data, is_worker=is_worker)
    choose(policy)
    if not policy.pickles:  # the folders come last in the search path
        sys.path.extend(str(folder) for folder in policy.folders if str(folder) not in sys.path)


def log_serialization() -> None:
    """Log the choice, once the role serves."""
    policy = chosen_policy()
    if not policy.pickles:
        sources = ", ".join(map(str, (*policy.folders, *policy.packages))) or "nowhere"
        logger.info("%s; functions are taken from %s", policy.why, sources)


def role_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all roles share; the command receives them as one `RoleOptions`."""
    decorators: list[Callable[..., Any]] = [
        click.option("--bind", metavar="HOST:PORT|unix:PATH", help="Where to listen. Default: the task's own address."),
        click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the cluster token."),
        click.option("--create-token", is_flag=True, help="Create the token file first if it is missing."),
        tls_option,
        click.option("--create-tls", is_flag=True, help="Create the --tls folder, for all roles, if it is missing."),
        click.option(
            "--tls-server-only",
            is_flag=True,
            help=f"Do not require client certificates: the token alone admits callers. Or ${SERVER_ONLY_VARIABLE}=1.",
        ),
        insecure_option,
        click.option(
            "--open-health",
            is_flag=True,
            help=f"Answer health checks, and only those, without the token. Or ${OPEN_HEALTH_VARIABLE}=1.",
        ),
        add_pickle_options,
        click.option("--until-done", is_flag=True, help="Exit with code 0 when the job is over."),
        click.option("--exit-with-parent", is_flag=True, help="Stop when standard input is closed."),
        click.option("--share-port", is_flag=True, help="Listen on a port that the parent process reserved."),
        click.option(
            "--connect-timeout", default=600.0, show_default=True, help="Seconds to wait for the other tasks."
        ),
        click.option(
            "--coordinator-timeout",
            envvar="PSCLUSTER_COORDINATOR_TIMEOUT",
            default=math.inf,
            show_default="forever",
            type=click.FloatRange(0, min_open=True),
            help="Seconds to keep a job's state after its coordinator died. Or $PSCLUSTER_COORDINATOR_TIMEOUT.",
        ),
        click.option(
            "--grace", default=GRACE_SECONDS, show_default=True, help="Seconds for running work to finish on a stop."
        ),
        _port_option(
            "--metrics-port",
            METRICS_PORT_VARIABLE,
            metrics_port_of,
            ", which is logged",
            "Port that serves /metrics, /healthz and /readyz, or off.",
        ),
        click.option(
            "--metrics-host",
            envvar=METRICS_HOST_VARIABLE,
            default=_LOOPBACK,
            show_default=True,
            help=f"Host to serve metrics on; callers from other machines need the token. Or ${METRICS_HOST_VARIABLE}.",
        ),
        log_options(),
    ]

    @functools.wraps(command)  # also keeps the command's own options
    def receive(
        *args: Any,
        token_file: Path | None,
        create_token: bool,
        tls_folder: Path | None,
        create_tls: bool,
        tls_server_only: bool,
        insecure: bool,
        open_health: bool,
        **options: Any,
    ) -> None:  # the remaining options and arguments are the command's own
        names = RoleOptions.__dataclass_fields__
        mine = {name: options.pop(name) for name in list(options) if name in names}
        if create_token:
            path = token_file or Path(os.environ.get("PSCLUSTER_TOKEN_FILE", ""))
            if path == Path():
                raise ConfigurationError("--create-token needs --token-file or PSCLUSTER_TOKEN_FILE to name the file")
            create_token_file(path)
        if create_tls:
            create_tls_folder(tls_folder)
        role = click.get_current_context().command.name or ""
        credentials = RoleOptions(
            token=load_token(token_file),
            tls=load_tls(role, tls_folder, server_only=tls_server_only),
            insecure=insecure or is_set(INSECURE_VARIABLE),
            open_health=open_health or is_set(OPEN_HEALTH_VARIABLE),
            **mine,
        )
        hide_token()
        command(*args, options=credentials, **options)

    result: Callable[..., None] = receive
    for decorate in reversed(decorators):
        result = decorate(result)
    return result


def own_task(role: str) -> tuple[TFConfig, int]:
    """Return TF_CONFIG and this task's index in it. Raise ConfigurationError if the task has another role.

    A pod of `pscluster k8s render` has no TF_CONFIG: its other variables say the same.
    """
    config = config_of_pod() if VARIABLE not in os.environ and is_pod() else TFConfig.from_environ()
    if config.task is None:
        raise ConfigurationError(
            f'TF_CONFIG: task is missing; this {role} needs one such as {{"task": {{"type": "{role}", "index": 0}}}}'
        )
    expect_type(config.task, role)
    return config, config.task.index


def expect_type(task: Task, job: str) -> None:
    """Raise ConfigurationError if the task does not belong to that job."""
    if task.type != job:
        command = "coordinator" if job == "chief" else job
        raise ConfigurationError(
            f'TF_CONFIG: task.type is "{task.type}", but this is `pscluster {command}`; write, for example, '
            f'{{"task": {{"type": "{job}", "index": 0}}}}'
        )
