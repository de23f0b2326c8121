"""The parameter server's process: `pscluster ps`, or `python -m pscluster.ps`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import click

from pscluster.core import checks
from pscluster.core.errors import ConfigurationError
from pscluster.core.ids import make_identity
from pscluster.core.role.join_options import join_options, joining_of
from pscluster.core.role.joining import Joiner, serve_joining
from pscluster.core.role.lifecycle import StopRequest, run_role
from pscluster.core.role.listening import listen_address
from pscluster.core.role.options import (
    RoleOptions,
    choose_serialization,
    data_port_option,
    log_serialization,
    own_task,
    role_options,
    with_user_token,
)
from pscluster.core.role.process import main_of
from pscluster.ps.server.admission import DEFAULT_MIB
from pscluster.ps.server.process import ServerProcess, StoreOptions
from pscluster.ps.storage.options import (
    DURABILITY_VARIABLE,
    SNAPSHOT_SECONDS,
    STATE_VARIABLE,
    Durability,
    DurabilityOptions,
    default_directory,
    durability_named,
    joined_state_folder,
    state_folder,
)
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

IN_FLIGHT_VARIABLE = "PSCLUSTER_IN_FLIGHT_MIB"
ROOT_VARIABLE = "PSCLUSTER_CHECKPOINT_ROOT"


def serve_ps(
    index: int, address: str, options: RoleOptions, store: StoreOptions, own: str
) -> Callable[[StopRequest], Callable[[], None]]:
    """Return what `run_role` starts: a parameter server that listens on `address`, and that others know as `own`."""

    def serve(stop: StopRequest) -> Callable[[], None]:
        own_options = with_user_token(options, [address])
        choose_serialization(address, own_options)
        process = ServerProcess(make_identity("ps", index), address, own_options, store, stop, own)
        process.server.ready()
        logger.info("parameter server %d serving on %s", index, address)
        log_serialization()
        return process.close

    return serve


def store_of_environ(index: int, address: str) -> StoreOptions:
    """Return what the environment says of the store of the server with this address.

    ConfigurationError if it is invalid.
    """
    in_flight_mib = checks.mib_of_environ(IN_FLIGHT_VARIABLE, DEFAULT_MIB, 1)
    durability = DurabilityOptions(durability_named(None), state_folder(default_directory(), index, address))
    return StoreOptions(in_flight_mib, durability, tuple(os.environ.get(ROOT_VARIABLE, "").split()))


@click.command(
    "ps",
    help="Run a parameter server.\n\nIt is the task that TF_CONFIG names, or with --join one of a running cluster.",
)
@click.option(
    "--in-flight-mib",
    envvar=IN_FLIGHT_VARIABLE,
    default=DEFAULT_MIB,
    show_default=True,
    type=click.IntRange(1),
    help="Memory for large requests in flight, in MiB; clients wait once it is used up. Or $PSCLUSTER_IN_FLIGHT_MIB.",
)
@click.option(
    "--durability",
    envvar=DURABILITY_VARIABLE,
    default=Durability.SNAPSHOT.value,
    show_default=True,
    type=click.Choice([kind.value for kind in Durability]),
    help="What is lost if this process dies: everything (none), updates since the last snapshot, or nothing (log).",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Where to store the state, in one folder per task. Default: ${STATE_VARIABLE}, or ~/.local/state/pscluster.",
)
@click.option(
    "--snapshot-seconds",
    default=SNAPSHOT_SECONDS,
    show_default=True,
    type=click.FloatRange(0, 1e6, min_open=True),
    help="Time between snapshots; longer if one takes more than a tenth of it.",
)
@click.option("--fsync", is_flag=True, help="Also survive a crash of the machine, by syncing to disk.")
@click.option(
    "--checkpoint-root",
    "checkpoint_roots",
    envvar=ROOT_VARIABLE,
    multiple=True,
    metavar="DIRECTORY",
    help="Write and read checkpoints only inside this directory (or URL); repeatable. Default: anywhere.",
)
@join_options(
    "parameter server",
    "INDEX",
    "which parameter server this is, also after a restart elsewhere. The state is in a folder of that name. Needed.",
    "and name the state's folder after it, too",
)
@data_port_option
@role_options
def command(
    options: RoleOptions,
    join: str | None,
    task: str,
    advertise: str,
    job_name: str,
    checkpoint_roots: tuple[str, ...],
    in_flight_mib: int,
    durability: str,
    state_dir: Path | None,
    snapshot_seconds: float,
    fsync: bool,
) -> None:
    def store_in(folder: Path) -> StoreOptions:
        kept = DurabilityOptions(Durability(durability), folder, snapshot_seconds, fsync)
        return StoreOptions(in_flight_mib, kept, checkpoint_roots)

    directory = state_dir or default_directory()

    if (joins := joining_of(join, task, advertise, job_name)) is None:
        config, index = own_task("ps")
        own = config.cluster.task_address("ps", index)
        address = listen_address(own, options)
        store = store_in(state_folder(directory, index, own))
        run_role("ps", index, options, serve_ps(index, address, options, store, own or ""))
        return
    if not task.isdecimal():
        raise ConfigurationError(
            f"--task is {task!r}; a parameter server that joins is one of the cluster's, with its part of all "
            "variables: give its index, such as --task 0"
        )
    index = int(task)
    store = store_in(joined_state_folder(directory, index, job_name))

    def start(
        identity: node_pb2.Identity, address: str, own_options: RoleOptions, stop: StopRequest, own: str
    ) -> ServerProcess:
        return ServerProcess(identity, address, own_options, store, stop, own)

    run_role("ps", index, options, serve_joining(Joiner("ps", "parameter server", start), joins, options))


def main() -> None:
    main_of(command)
