"""How a job begins: the cluster is described and reached, its servers are taken, what lives there is found."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

from pscluster.coordinator.dashboard.server import Dashboard
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.job.live_job import LiveJob, continue_job, default_job_name
from pscluster.coordinator.job.role import serve_role
from pscluster.coordinator.job.settings import process_options
from pscluster.coordinator.job.terms import begin_term
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.scheduling import loop
from pscluster.coordinator.scheduling.server_link import ServerAttachment
from pscluster.coordinator.variables.creation import VariableCreator
from pscluster.coordinator.variables.evaluation_snapshot import prefix_of
from pscluster.coordinator.variables.placement import ShardPlacer
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import ClusterSpec, is_loopback, is_on_this_machine, validate_for_strategy
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.functions.policy import SerializationPolicy, asked_for, policy_of
from pscluster.core.ids import fresh_id, make_identity
from pscluster.core.role.options import RoleOptions, with_user_token
from pscluster.core.role.server import serve_metrics
from pscluster.core.security.tls import CERTIFICATE, KEY
from pscluster.core.transport.channels import PeerAddress, wait_for_peers
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.scope import Partitioner
from pscluster.ps.spec import OURS
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)


def describe_job(
    resolver: ClusterResolver | LocalCluster,
    partitioner: Partitioner | None,
    *,
    placement: str | Callable[..., int],
    seed: int,
    token: str | None,
    ps_timeout: float,
    job_name: str | None,
    take_over: bool,
    allow_pickle: bool | None,
) -> JobContext:
    """Make the context of a new job on this cluster; nothing is connected yet.

    See `ParameterServerStrategy` for the arguments. ConfigurationError if the cluster's description is wrong.
    """
    if not ps_timeout > 0:
        raise ConfigurationError(f"ps_timeout is {ps_timeout}; give more than 0 seconds")
    if isinstance(resolver, LocalCluster):
        resolver.check_not_stopped()
    spec = resolver.cluster_spec()
    validate_for_strategy(spec, resolver.task_type, resolver.task_id)
    options = process_options()
    mine = resolver if isinstance(resolver, LocalCluster) else options
    tls = mine.tls
    if token is None:
        token = mine.token
    if token is None and mine is options:
        jobs = [job for job in ("ps", "worker", "chief") if job in spec.jobs]
        addresses = [spec.task_address(job, i) for job in jobs for i in spec.task_indices(job)]
        token = with_user_token(options, addresses).token
    knows_peers = token is not None or (tls is not None and tls.is_mutual)
    policy = _policy_of(resolver, spec, knows_peers, allow_pickle, options)
    placer = ShardPlacer(spec.num_tasks("ps"), placement)
    options = options.with_credentials(token, tls)
    ps, workers = (
        [_peer(resolver, spec, job, index, options) for index in spec.task_indices(job)] for job in ("ps", "worker")
    )
    for peer in (*ps, *workers):
        peer.check_plain(insecure=options.insecure)
    if [peer.index for peer in ps] != list(range(len(ps))):
        raise ConfigurationError("the cluster's parameter servers must be numbered from 0 without gaps")
    request = node_pb2.AttachRequest(
        coordinator=make_identity("chief", 0),
        job=fresh_id(),
        num_workers=len(workers),
        seed=seed,
        ps_timeout=ps_timeout,
        job_name=default_job_name() if job_name is None else job_name,
        lineage=fresh_id(),
        epoch=1,
        take_over=take_over,
        ps_addresses=[peer.address for peer in ps],
        workers=[peer.index for peer in workers],
    )
    client = PsClient(ps, request.coordinator, job=request.job, incarnation=fresh_id(), retry_seconds=ps_timeout)
    variables = VariableCreator(client, policy, placer, partitioner)
    return JobContext(resolver, spec, options, client, request, variables, [*ps, *workers])


def attach(context: JobContext, telemetry: CoordinatorTelemetry, timeout: float | None, resume: bool) -> None:
    """Wait for all tasks, and take the servers for the job; whoever looks on can do so from the first moment.

    Args:
        context: of the job.
        telemetry: its figures.
        timeout: seconds to wait for the tasks; None: as the process' options say.
        resume: whether to go on with what the servers hold of a job of this name.

    Raises:
        UnavailableError: tasks were missing when the time was over; the message names them.
        BusyError: another coordinator works with this cluster; the message names it.
    """
    options, client, request = context.options, context.client, context.request
    timeout = options.connect_timeout if timeout is None else timeout
    try:
        if options.dashboard:
            _show(context)
        context.metrics_server = serve_metrics(telemetry, options)
        context.role_server = serve_role(context)
        servers = [peer for peer in context.tasks if peer.role == "ps"]
        wait_for_peers(context.tasks, request.coordinator, timeout=timeout, purpose="coordinator", num_ps=len(servers))
        client.connect(timeout)
        must_hold = continue_job(request, client.introductions()) if resume else [0] * len(servers)
        loop.run(_attach(context, servers, must_hold))
        if context.resumed:
            context.variables.go_on_with(_find_live(client))
            context.partly_applied.add("functions", "had begun under a coordinator that died: which is not known")
    except BaseException:
        context.close("the coordinator could not connect")
        raise
    if context.role_server is not None:
        context.role_server.ready()
    if context.metrics_server is not None:
        context.metrics_server.tell()
    context.begin()
    if isinstance(context.resolver, LocalCluster):
        context.resolver.serve(context)


def _show(context: JobContext) -> None:
    """The live page; where it can't listen, the job goes on without."""
    address, tls = context.options.dashboard_address, context.options.tls
    certificate = key = None
    if address is not None and tls is not None and not is_loopback(address.rpartition(":")[0]):
        certificate, key = tls.folder / CERTIFICATE, tls.folder / KEY
    try:
        page = Dashboard(context, address, certificate=certificate, key=key, insecure=context.options.insecure)
    except ConfigurationError:
        raise
    except PsClusterError as error:
        logger.error("%s; continuing without the live page", error)
    else:
        logger.info("the live page is at %s", page.url)


async def _attach(context: JobContext, peers: Sequence[PeerAddress], must_hold: Sequence[int]) -> None:
    client, request = context.client, context.request

    async def declare_again(server: int, optimizers: Sequence[int]) -> None:
        """For a server that came back: the rules that it keeps nowhere."""
        await asyncio.wrap_future(client.declare_again(server, list(optimizers)))

    def is_back(server: ServerAttachment) -> None:
        """On the loop's thread: a server that was restored."""

        async def tell_seen() -> None:
            if context.dispatcher is not None:
                await context.dispatcher.tell_seen([server.peer.index])

        context.losses.begin(tell_seen)

    servers = [
        ServerAttachment(peer, request, declare_again, holding, context.event_log)
        for peer, holding in zip(peers, must_hold, strict=True)
    ]
    try:
        await servers[0].take()  # of two coordinators that begin at once, server 0 picks one
        reach("coordinator.attach.first")
        await asyncio.gather(*(server.take() for server in servers[1:]))
    except BaseException:
        # The job has not begun: nobody is to be told that it is over, least of all another job's roles.
        await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)
        raise
    for server in servers:
        server.on_return = is_back
        server.begin()
    context.servers = servers
    reach("coordinator.attach.after")
    terms = [server.term for server in servers]
    if len(set(terms)) > 1:
        context.half_restored = "the coordinator that died has restored a checkpoint on some parameter servers only"
        logger.error("%s: restore it again", context.half_restored)
    begin_term(context, max(terms))
    holdings = [server.holding for server in servers]
    client.expect(holdings)
    request.holdings.extend(holdings)


def _find_live(client: PsClient) -> LiveJob:
    """What the job has; what a coordinator that died has left half made is removed."""
    live, remains = LiveJob.of(client.directory())
    evaluations = {prefix for spec in remains if (prefix := prefix_of(spec.name))}
    for prefix in evaluations:
        client.delete_variables(prefix, patient=True)
    for spec in remains:
        if not prefix_of(spec.name):
            client.delete_variable(spec.name, spec.id, patient=True)
    names = [name for name in live.variables if not name.startswith(OURS)]
    logger.info("resuming a job with %d variables: %s", len(names), ", ".join(names) or "none")
    return live


def _peer(
    resolver: ClusterResolver | LocalCluster, spec: ClusterSpec, job: str, index: int, options: RoleOptions
) -> PeerAddress:
    why_gone = functools.partial(resolver.why_gone, job, index) if isinstance(resolver, LocalCluster) else str
    return PeerAddress(job, index, spec.task_address(job, index), options.tls, options.token, why_gone)


def _policy_of(
    resolver: ClusterResolver | LocalCluster,
    spec: ClusterSpec,
    knows_peers: bool,
    asked: bool | None,
    options: RoleOptions,
) -> SerializationPolicy:
    """Whether what is sent may be pickled."""
    if asked is None and isinstance(resolver, LocalCluster):
        asked = resolver.allow_pickle
    exposed = ""
    if not knows_peers:
        addresses = [spec.task_address(job, index) for job in ("ps", "worker") for index in spec.task_indices(job)]
        if not options.insecure:
            exposed = f"the role at {addresses[0]} would take one from anybody, without a token"
        elif far := [address for address in addresses if not is_on_this_machine(address)]:
            exposed = f"the role at {far[0]} would take one from anybody, without a token"
    return policy_of(asked_for(options.allow_pickle if asked is None else asked), exposed)
