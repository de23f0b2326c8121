"""The parameter server's process: `pscluster ps`, or `python -m pscluster.ps`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import click

from pscluster.core.identity import make_identity
from pscluster.core.process import main_of
from pscluster.core.serving import (
    RoleOptions,
    RoleServer,
    StopRequest,
    listen_address,
    own_task,
    role_options,
    run_role,
)
from pscluster.ps.budget import DEFAULT_MIB
from pscluster.ps.service import SERVICE, ParameterServerRole, ParameterServerService

logger = logging.getLogger(__name__)


def serve_ps(
    index: int, address: str, options: RoleOptions, in_flight_mib: int = DEFAULT_MIB
) -> Callable[[StopRequest], Callable[[], None]]:
    """What `run_role` starts: a parameter server that listens on `address`."""

    def serve(stop: StopRequest) -> Callable[[], None]:
        role = ParameterServerRole(index)
        service = ParameterServerService(role, in_flight_mib << 20)
        server = RoleServer(
            make_identity("ps", index),
            role,
            {"ps": (SERVICE, service)},
            address,
            options,
            on_job_end=lambda: stop.ask("the job is over") if options.until_done else None,
        )
        server.ready()
        logger.info("parameter server %d serving on %s", index, address)

        def close() -> None:
            server.leave()
            if not service.drain.close(options.grace):
                logger.warning("requests were still under way after %g s; they are cut off", options.grace)
            server.stop(0)  # streams do not end by themselves

        return close

    return serve


@click.command("ps", help="Run a parameter server: the task that TF_CONFIG names.")
@click.option(
    "--in-flight-mib",
    envvar="PSCLUSTER_IN_FLIGHT_MIB",
    default=DEFAULT_MIB,
    show_default=True,
    type=click.IntRange(1),
    help="Memory for large requests in flight, in MiB; beyond it clients wait. Or $PSCLUSTER_IN_FLIGHT_MIB.",
)
@role_options
def command(options: RoleOptions, in_flight_mib: int) -> None:
    """Run this process' task."""
    config, index = own_task("ps")
    address = listen_address(config.cluster.task_address("ps", index), options)
    run_role("ps", index, options, serve_ps(index, address, options, in_flight_mib))


def main() -> None:
    """Entry point."""
    main_of(command)
