"""The worker's process: `pscluster worker`, or `python -m pscluster.worker`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import click

from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.errors import ConfigurationError, PsClusterError
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
from pscluster.core.security.tls import Tls
from pscluster.core.transport.channels import PeerAddress, wait_for_peers
from pscluster.ps.client.reads.cache import cache_bytes
from pscluster.v1 import node_pb2
from pscluster.worker.process import WorkerProcess
from pscluster.worker.servers import watch_listing

logger = logging.getLogger(__name__)


def ps_peers(cluster: ClusterSpec, tls: Tls | None = None, token: str | None = None) -> list[PeerAddress]:
    """Return the parameter servers in a worker's cluster, in order. Raise ConfigurationError if one is missing."""
    indices = cluster.task_indices("ps") if "ps" in cluster.jobs else []
    if indices != list(range(len(indices))):
        raise ConfigurationError(
            f"TF_CONFIG: cluster.ps has the indices {indices}, but a worker needs every parameter server, or none to "
            'take the coordinator\'s; write, for example, {"cluster": {"ps": ["ps0:2222", "ps1:2222"]}}'
        )
    return [PeerAddress("ps", index, cluster.task_address("ps", index), tls, token) for index in indices]


def serve_worker(
    index: int, address: str, cluster: ClusterSpec, options: RoleOptions
) -> Callable[[StopRequest], Callable[[], None]]:
    """Return a function for `run_role` that starts a worker listening on `address`."""
    dialled = [peer.address for peer in ps_peers(cluster)]

    def serve(stop: StopRequest) -> Callable[[], None]:
        own_options = with_user_token(options, (address, *dialled))
        peers = ps_peers(cluster, own_options.tls, own_options.token)
        for peer in peers:
            peer.check_plain(insecure=own_options.insecure)
        choose_serialization(address, own_options, is_worker=True)
        cache_bytes()  # an invalid size stops the worker now rather than when a coordinator attaches
        identity = make_identity("worker", index)
        own = cluster.task_address("worker", index) or ""
        worker = WorkerProcess(identity, address, own_options, stop, own=own, peers=peers)
        try:
            wait_for_peers(
                peers,
                identity,
                timeout=options.connect_timeout,
                stop=stop.event,
                purpose=f"worker {index}",
                place_of=worker.place_of,
            )
        except PsClusterError:
            if not stop.event.is_set():
                worker.close()
                raise
        else:
            worker.server.ready()
            logger.info("worker %d serving on %s", index, address)
            log_serialization()
            if peers:
                watched = (peers[0], identity, worker.server.node.not_ready, stop.event)
                threading.Thread(target=watch_listing, args=watched, name="listing", daemon=True).start()
        return worker.close

    return serve


@click.command(
    "worker", help="Run a worker.\n\nIt is the task that TF_CONFIG names, or with --join one that joins a cluster."
)
@join_options(
    "worker",
    "NAME|INDEX",
    "which worker this is, also after a restart elsewhere. Default: the coordinator hands out the lowest free index.",
)
@data_port_option
@role_options
def command(join: str | None, task: str, advertise: str, job_name: str, options: RoleOptions) -> None:
    if (joins := joining_of(join, task, advertise, job_name)) is None:
        config, index = own_task("worker")
        address = listen_address(config.cluster.task_address("worker", index), options)
        run_role("worker", index, options, serve_worker(index, address, config.cluster, options))
        return
    cache_bytes()  # an invalid size stops the worker now rather than when a coordinator attaches

    def start(
        identity: node_pb2.Identity, address: str, own_options: RoleOptions, stop: StopRequest, own: str
    ) -> WorkerProcess:
        return WorkerProcess(identity, address, own_options, stop, own=own)

    run_role("worker", None, options, serve_joining(Joiner("worker", "worker", start), joins, options))


def main() -> None:
    main_of(command)
