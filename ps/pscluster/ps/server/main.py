"""The parameter server's process: `pscluster ps`, or `python -m pscluster.ps`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from pscluster.core import checks
from pscluster.core.fault_points import reach
from pscluster.core.ids import make_identity
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
from pscluster.core.role.server import RoleServer
from pscluster.ps.server.admission import DEFAULT_MIB
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.server.telemetry import ServerTelemetry
from pscluster.ps.spec import BESIDE_PAYLOAD_BYTES, SERVICE
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import (
    DURABILITY_VARIABLE,
    SNAPSHOT_SECONDS,
    STATE_VARIABLE,
    Durability,
    DurabilityOptions,
    default_directory,
    durability_named,
    state_folder,
)
from pscluster.ps.storage.roots import Roots

logger = logging.getLogger(__name__)

IN_FLIGHT_VARIABLE = "PSCLUSTER_IN_FLIGHT_MIB"
ROOT_VARIABLE = "PSCLUSTER_CHECKPOINT_ROOT"

SEND_SECONDS = 0.25
"""Time for the last answers to be sent before connections are closed."""


def serve_ps(
    index: int,
    address: str,
    options: RoleOptions,
    in_flight_mib: int,
    durability: DurabilityOptions,
    checkpoint_roots: Sequence[str],
    own: str,
) -> Callable[[StopRequest], Callable[[], None]]:
    """Return what `run_role` starts: a parameter server that listens on `address`, and that others know as `own`."""

    def serve(stop: StopRequest) -> Callable[[], None]:
        own_options = with_user_token(options, [address])
        choose_serialization(address, own_options)
        role = ParameterServerRole(index, StateManager(durability), Roots(checkpoint_roots))
        service = ParameterServerService(role, in_flight_mib << 20)
        server = RoleServer(
            make_identity("ps", index),
            role,
            {"ps": (SERVICE, service)},
            address,
            own_options,
            on_job_end=lambda: stop.ask("the job is over") if options.until_done else None,
            telemetry=ServerTelemetry(role, service.budget),
            own=own,
            admission=service.admission,
            overhead_bytes=BESIDE_PAYLOAD_BYTES,
        )
        server.ready()
        logger.info("parameter server %d serving on %s", index, address)
        log_serialization()

        def close() -> None:
            server.leave()
            if not service.drain.close(options.grace):
                logger.warning("requests still in progress after %g s were cancelled", options.grace)
            server.stop(SEND_SECONDS)  # streams do not end by themselves
            reach("ps.stop.before")
            role.manager.close()

        return close

    return serve


def bounds_of_environ() -> tuple[int, tuple[str, ...]]:
    """Return the environment's memory for large requests, in MiB, and its checkpoint roots.

    ConfigurationError if the memory is invalid.
    """
    return checks.mib_of_environ(IN_FLIGHT_VARIABLE, DEFAULT_MIB, 1), tuple(os.environ.get(ROOT_VARIABLE, "").split())


def durability_options(
    index: int,
    address: str,
    kind: str | None = None,
    state_dir: Path | None = None,
    every: float = SNAPSHOT_SECONDS,
    *,
    fsync: bool = False,
) -> DurabilityOptions:
    """Return the durability of the server with this address, as `durability_named` does."""
    folder = state_folder(state_dir or default_directory(), index, address)
    return DurabilityOptions(durability_named(kind), folder, every, fsync)


@click.command("ps", help="Run a parameter server: the task that TF_CONFIG names.")
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
    help="Write and read checkpoints only inside this directory (or URL); may be repeated. Default: anywhere.",
)
@data_port_option
@role_options
def command(
    options: RoleOptions,
    checkpoint_roots: tuple[str, ...],
    in_flight_mib: int,
    durability: str,
    state_dir: Path | None,
    snapshot_seconds: float,
    fsync: bool,
) -> None:
    config, index = own_task("ps")
    own = config.cluster.task_address("ps", index)
    address = listen_address(own, options)
    chosen = durability_options(index, own, durability, state_dir, snapshot_seconds, fsync=fsync)
    serve = serve_ps(index, address, options, in_flight_mib, chosen, checkpoint_roots, own or "")
    run_role("ps", index, options, serve)


def main() -> None:
    main_of(command)
