"""How a role joins a running cluster, from its command line: which coordinator, as which task, and at which address."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from pscluster.core.cluster.addresses import join_address, parse_address, split_address
from pscluster.core.cluster.kubernetes import config_of_pod, is_pod
from pscluster.core.cluster.spec import COORDINATOR_VARIABLE, MAX_INDEX, VARIABLE
from pscluster.core.cluster.tf_config import TFConfig
from pscluster.core.errors import ConfigurationError
from pscluster.core.role.options import ADVERTISE_VARIABLE, JOB_NAME_VARIABLE, TASK_VARIABLE

EVERYWHERE = "0.0.0.0", "::"  # noqa: S104  # nosec B104
"""Addresses to listen at that no peer can dial."""
LOOPBACK = "127.0.0.1", "::1"
"""Loopback addresses: a role that listens at one of them can't be dialled at the other."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """How a role joins; see the command line's help for each."""

    coordinator: str  # its address
    task: str = ""
    advertise: str = ""
    job_name: str = ""

    def __post_init__(self) -> None:
        parse_address(self.coordinator, "--join")
        if self.task.isdecimal() and int(self.task) > MAX_INDEX:
            raise ConfigurationError(f"--task is {self.task}; give an index from 0 to {MAX_INDEX}, or a name")
        _ = self.advertised

    @property
    def advertised(self) -> tuple[str, int]:
        """Return the host and the port to be dialled at; "" and 0 for those that are not given."""
        text = self.advertise
        if not text:
            return "", 0
        if text.count(":") == 1 or (text.startswith("[") and not text.endswith("]")):
            return split_address(text, "--advertise")
        split_address(f"[{text}]:1" if ":" in text and not text.startswith("[") else f"{text}:1", "--advertise")
        return text.strip("[]"), 0


def join_options(noun: str, metavar: str, task: str, job: str = "") -> Callable[[Callable[..., None]], Any]:
    """Return what adds the options of a role that may join to its command; `joining_of` reads them."""
    options = (
        click.option(
            "--join",
            metavar="HOST:PORT",
            help=f"Join the cluster of the coordinator at this address. Or ${COORDINATOR_VARIABLE}.",
        ),
        click.option(
            "--task",
            metavar=metavar,
            default="",
            envvar=TASK_VARIABLE,
            help=f"With --join: {task} Or ${TASK_VARIABLE}.",
        ),
        click.option(
            "--advertise",
            metavar="IP[:PORT]",
            default="",
            envvar=ADVERTISE_VARIABLE,
            help=f"With --join: where the coordinator reaches this {noun}, which it must allow. "
            f"Default: the address that it sees. Or ${ADVERTISE_VARIABLE}.",
        ),
        click.option(
            "--job-name",
            default="",
            envvar=JOB_NAME_VARIABLE,
            help="With --join: join only a coordinator of the job with this name"
            f"{job and ', '}{job}. Or ${JOB_NAME_VARIABLE}.",
        ),
    )

    def decorate(command: Callable[..., None]) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def joining_of(join: str | None, task: str, advertise: str, job_name: str) -> JoinOptions | None:
    """Return how this process joins; None if TF_CONFIG, or its pod, names its task. ConfigurationError for both."""
    named = VARIABLE in os.environ and TFConfig.from_environ().task is not None
    pod = VARIABLE not in os.environ and is_pod() and config_of_pod().task is not None
    if not (join or (not pod and os.environ.get(COORDINATOR_VARIABLE))):
        if wrong := [name for name, value in (("--task", task), ("--advertise", advertise)) if value]:
            raise ConfigurationError(
                f"{wrong[0]} is given, but no coordinator to join: give --join HOST:PORT, or leave it out"
            )
        return None
    if named or pod:
        raise ConfigurationError(
            f"TF_CONFIG names a task, and --join or {COORDINATOR_VARIABLE} a coordinator to join: leave one of them out"
        )
    return JoinOptions(join or os.environ[COORDINATOR_VARIABLE], task, advertise, job_name)


def dialled_at(address: str, join: JoinOptions) -> str:
    """Return where the coordinator will dial a role that listens on `address`, as far as can be told from here."""
    host, port = split_address(address)
    advertised, other_port = join.advertised
    if advertised:
        host = advertised
    elif host in EVERYWHERE:
        try:
            family, *_, to = socket.getaddrinfo(*split_address(join.coordinator), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
                probe.connect(to)
                host = probe.getsockname()[0]
        except OSError:
            return address
    return join_address(host, other_port or port)
