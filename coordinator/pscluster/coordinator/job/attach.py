"""How a job begins: the cluster is described and reached, its servers are taken, and what lives there is found."""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from pscluster.coordinator.dashboard.server import Dashboard
from pscluster.coordinator.job.context import JobContext, open_jobs
from pscluster.coordinator.job.live_job import LiveJob, continue_job, default_job_name
from pscluster.coordinator.job.registration import SERVICE, Registration, addresses_of
from pscluster.coordinator.job.settings import process_options
from pscluster.coordinator.job.terms import begin_term
from pscluster.coordinator.local.supervised import SupervisedCluster
from pscluster.coordinator.moves.settle import settle_cuts, settle_moves
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.scheduling.connections import loop
from pscluster.coordinator.scheduling.connections.server_link import ServerAttachment
from pscluster.coordinator.variables.creation import VariableCreator
from pscluster.coordinator.variables.placement import ShardPlacer
from pscluster.core import checks
from pscluster.core.checks import configuration_errors, type_of
from pscluster.core.cluster.addresses import is_loopback, is_on_this_machine, is_unregistered, unregistered
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import ClusterSpec, validate_for_strategy
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.functions.policy import policy_of
from pscluster.core.ids import fresh_id, make_identity
from pscluster.core.role.listening import listen_address
from pscluster.core.role.node import Role
from pscluster.core.role.options import NUM_PS_VARIABLE, RoleOptions, with_user_token
from pscluster.core.role.server import RoleServer, serve_metrics
from pscluster.core.security.tls import CERTIFICATE, KEY
from pscluster.core.transport.channels import PeerAddress, wait_for_peers
from pscluster.core.transport.unix_sockets import SocketTakenError
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.scope import Partitioner
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)


def describe_job(
    resolver: ClusterResolver,
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
    """Return the context of a new job on this cluster, not connected yet. See `ParameterServerStrategy`."""
    if not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            f"a strategy needs a cluster, such as TFConfigClusterResolver() or LocalCluster(), not {type_of(resolver)}"
        )
    if not isinstance(job_name, str | None):
        raise TypeError(f"job_name is {type_of(job_name)}; give a string, or None for the path of the script")
    with configuration_errors():
        ps_timeout = checks.real("ps_timeout", ps_timeout, kind="number of seconds", above=0)
    if isinstance(resolver, SupervisedCluster):
        resolver.start()
    spec = resolver.cluster_spec()
    options = process_options()
    if options.num_ps is not None and not isinstance(resolver, SupervisedCluster):
        spec = _with_servers(spec, options.num_ps, may_register=resolver.task_type == "chief" and "chief" in spec.jobs)
    may_join = options.max_workers is not None and "chief" in spec.jobs and resolver.task_type == "chief"
    validate_for_strategy(spec, resolver.task_type, resolver.task_id, needs_worker=not may_join)
    mine = resolver if isinstance(resolver, SupervisedCluster) else options
    tls = mine.tls
    if token is None:
        token = mine.token
    if token is None and mine is options:
        jobs = [job for job in ("ps", "worker", "chief") if job in spec.jobs]
        addresses = [spec.task_address(job, i) for job in jobs for i in spec.task_indices(job)]
        token = with_user_token(options, [address for address in addresses if not is_unregistered(address)]).token
    placer = ShardPlacer(spec.num_tasks("ps"), placement)
    options = replace(options, token=token, tls=tls)
    ps, workers = (
        [_peer(resolver, spec, job, index, options) for index in (spec.task_indices(job) if job in spec.jobs else ())]
        for job in ("ps", "worker")
    )
    exposed = ""
    if token is None and (tls is None or not tls.is_mutual):
        others = (peer.address for peer in (*ps, *workers) if not peer.is_unregistered)
        if who := next((other for other in others if not (options.insecure and is_on_this_machine(other))), ""):
            exposed = f"the role at {who} accepts calls without a token, so anyone could send it a pickle"
    choices = (choice for choice in (allow_pickle, mine.allow_pickle, options.allow_pickle) if choice is not None)
    policy = policy_of(next(choices, None), exposed)
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
        job_id=fresh_id(),
        coordinator_number=1,
        take_over=take_over,
        ps_addresses=[peer.address for peer in ps],
        workers=[peer.index for peer in workers],
    )
    client = PsClient(ps, request.coordinator, job=request.job, incarnation=fresh_id(), retry_seconds=ps_timeout)
    variables = VariableCreator(client, policy, placer, partitioner)
    return JobContext(resolver, spec, options, client, request, variables, [*ps, *workers])


def attach(context: JobContext, telemetry: CoordinatorTelemetry, timeout: float | None, resume: bool) -> None:
    """Wait for all tasks, and take the servers for the job. It can be observed from the first moment.

    Without a `timeout` the process's options say how long to wait. See `ParameterServerStrategy` for the errors.
    """
    options, client, request = context.options, context.client, context.request
    with configuration_errors():
        kind = "number of seconds"
        timeout = (
            options.connect_timeout
            if timeout is None
            else checks.real("connect_timeout", timeout, ", or None", kind=kind, finite=False)
        )
    _close_earlier(context)
    try:
        if options.dashboard:
            _show(context)
        context.metrics_server = serve_metrics(telemetry, options)
        context.role_server = _serve_role(context)
        wait_for_peers(
            context.tasks,
            request.coordinator,
            timeout=timeout,
            purpose="coordinator",
            num_ps=client.num_servers,
            place_of=context.place_of,
        )
        client.connect(timeout)
        must_hold = continue_job(request, client.introductions()) if resume else [0] * client.num_servers
        loop.run(_attach(context, must_hold))
        if context.resumed:
            client.updater.settle_recorded(client.metadata())
            settle_cuts(context)
            settle_moves(context)
            context.variables.go_on_with(_find_live(client))
            context.partly_applied.add(
                "functions", "functions that had begun under a coordinator that died; it is not known which"
            )
    except BaseException:
        context.close("the coordinator could not connect")
        raise
    if context.role_server is not None:
        context.role_server.ready()
    if context.metrics_server is not None:
        context.metrics_server.wake()
    context.begin()
    if isinstance(context.resolver, SupervisedCluster):
        context.resolver.serve(context)


def _close_earlier(context: JobContext) -> None:
    """Close the jobs that earlier cells of a notebook have begun on this cluster: a cell was run again."""
    for job in open_jobs():
        is_same = job.resolver is context.resolver or job.spec == context.spec
        if context.cell is not None and job.cell not in (None, context.cell) and is_same:
            logger.warning(
                "the strategy that cell %d has made on this cluster is closed, and its variables are gone: this cell "
                "makes it again",
                job.cell,
            )
            job.close("its cell was run again")


class _CoordinatorRole(Role):
    """The coordinator's own role, which answers status requests."""

    def __init__(self, context: JobContext) -> None:
        self._context = weakref.ref(context)

    def describe(self, reply: node_pb2.StatusReply) -> None:
        context = self._context()
        reply.state = "coordinating" if context is not None and context.connected else "waiting for tasks"
        if context is not None and (dispatcher := context.dispatcher) is not None:
            reply.detail, stats = dispatcher.status.describe(), dispatcher.status.stats()
            reply.functions_waiting, reply.functions_running = stats.waiting, stats.in_flight
            reply.functions_done = stats.done
        if context is not None:
            reply.workers.extend(addresses_of(context.workers))
            reply.num_servers = len(context.request.ps_addresses)
            reply.moved_servers.extend(context.request.moved_servers)


def _serve_role(context: JobContext) -> RoleServer | None:
    """Answer health checks and status requests if the cluster gives the coordinator an address."""
    resolver, spec, options = context.resolver, context.spec, context.options
    if "chief" not in spec.jobs or resolver.task_type != "chief":
        return None
    address = listen_address(spec.task_address("chief", 0), options)
    task_hosts: Callable[[], list[str]] = list
    if isinstance(resolver, SupervisedCluster):
        options = replace(options, share_port="--share-port" in resolver.hand_over_port("chief", 0))
        task_hosts = resolver.task_hosts
    try:
        registration = Registration(weakref.ref(context), address, options, task_hosts)
        services = {"coordinator": (SERVICE, registration)}
        # Only over gRPC: workers register seldom, and the data plane does not name its callers in the same way.
        options = replace(options, data_port=None)
        server = RoleServer(context.request.coordinator, _CoordinatorRole(context), services, address, options)
    except SocketTakenError:
        if not options.share_port:
            raise
        logger.info("another coordinator answers at %s, so this one can't be asked for its status there", address)
        return None
    server.node.metrics_address = context.metrics_address
    return server


def _show(context: JobContext) -> None:
    """Show the live page; if it can't listen, the job goes on without it."""
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


async def _attach(context: JobContext, must_hold: Sequence[int]) -> None:
    client, request = context.client, context.request
    peers = [peer for peer in context.tasks if peer.role == "ps"]
    servers = context.taking = [
        ServerAttachment(peer, request, client.declare_again, store_id, context.event_log)
        for peer, store_id in zip(peers, must_hold, strict=True)
    ]
    try:
        await servers[0].take()  # if two coordinators begin at once, server 0 picks one
        reach("coordinator.attach.first")
        await asyncio.gather(*(server.take() for server in servers[1:]))
    except BaseException:
        # The job has not begun: no role must be told that it is over, least of all those of another job.
        await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)
        raise
    for server in servers:
        server.on_return, server.on_lost = context.server_is_back, client.give_up
        server.begin()
    context.servers = servers
    reach("coordinator.attach.after")
    terms = [server.term for server in servers]
    if len(set(terms)) > 1:
        context.half_restored = "the coordinator that died has restored a checkpoint on only some parameter servers"
        logger.error("%s: restore it again", context.half_restored)
    begin_term(context, max(terms))
    store_ids = [server.store_id for server in servers]
    client.expect(store_ids)
    request.store_ids.extend(store_ids)


def _find_live(client: PsClient) -> LiveJob:
    """Find what the job has, and delete what a coordinator that died has left half made."""
    live, remains = LiveJob.of(client.directory())
    for evaluation in {spec.evaluation for spec in remains} - {0}:
        client.delete_copies(evaluation, retry=True)
    for spec in remains:
        if not spec.evaluation:
            client.delete_variable(spec.name, spec.id, retry=True)
    logger.info("resuming a job with %d variables: %s", len(live.variables), ", ".join(live.variables) or "none")
    return live


def _with_servers(spec: ClusterSpec, count: int, *, may_register: bool) -> ClusterSpec:
    """Return the cluster with `count` parameter servers, which register. ConfigurationError if it lists others."""
    if (listed := spec.num_tasks("ps") if "ps" in spec.jobs else 0) not in (0, count):
        raise ConfigurationError(
            f"the number of parameter servers is {count} (--num-ps or {NUM_PS_VARIABLE}), but {spec.source}: "
            f"cluster.ps lists {listed}: leave one of them out"
        )
    if listed:
        return spec
    if not may_register:
        raise ConfigurationError(
            f"--num-ps or {NUM_PS_VARIABLE} is given, so {count} parameter servers will register, but the "
            "coordinator has no address for that: give it one in TF_CONFIG, as the task chief"
        )
    servers = [unregistered("ps", index) for index in range(count)]
    return ClusterSpec({**spec.as_dict(), "ps": servers}, source=spec.source)


def _peer(resolver: ClusterResolver, spec: ClusterSpec, job: str, index: int, options: RoleOptions) -> PeerAddress:
    address = spec.task_address(job, index)
    why_gone: Callable[[], str] = str
    if isinstance(resolver, SupervisedCluster):
        why_gone = functools.partial(resolver.why_gone, job, index, address)
    return PeerAddress(job, index, address, options.tls, options.token, why_gone)
