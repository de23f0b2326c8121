"""A role's process: its server, its signals, its end.

States: STARTING -> SERVING -> DRAINING -> STOPPED. SIGTERM, Ctrl-C, the end of the job (with --until-done) and
the death of the parent (with --exit-with-parent) all ask for the same stop: health says NOT_SERVING, the
coordinator is told that the role leaves, the role drains (what runs ends or is given back), the server
closes, the exit code is 0. A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pscluster.core.cluster.spec import Task, TFConfig, is_loopback, is_on_this_machine, parse_address, split_address
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.functions.policy import (
    add_pickle_options,
    asked_for,
    choose,
    chosen_policy,
    find_modules,
    policy_of,
)
from pscluster.core.limits import MAX_MESSAGE_BYTES, connections, raise_descriptor_limit, server_options
from pscluster.core.metrics.exposition import MetricsServer
from pscluster.core.metrics.registry import Telemetry
from pscluster.core.role.node import NodeService, Role
from pscluster.core.role.open_health import OPEN_HEALTH_VARIABLE, OpenHealth
from pscluster.core.role.process import bind_log, configure_logging, log_options, tune_allocator
from pscluster.core.security.access import RoleInterceptor
from pscluster.core.security.authenticator import AuthenticationInterceptor, Authenticator, NoTokenInterceptor, Refused
from pscluster.core.security.connection_reaper import Doorkeeper
from pscluster.core.security.http_access import CertificateFiles, check_place
from pscluster.core.security.tls import (
    AUTHORITIES,
    CERTIFICATE,
    INSECURE_VARIABLE,
    KEY,
    SERVER_ONLY_VARIABLE,
    TLS_VARIABLE,
    Tls,
    check_no_tls,
    is_set,
    load_tls,
    token_for,
)
from pscluster.core.security.tokens import create_token_file, hide_token, load_token
from pscluster.core.transport.admission import Admission, AdmissionInterceptor
from pscluster.core.transport.channels import NODE_SERVICE, SERVER_OPTIONS
from pscluster.core.transport.methods import Greet, generic_handler
from pscluster.core.transport.tcp.packets import supported
from pscluster.core.transport.tcp.server import DataServer, listen
from pscluster.core.transport.unix_sockets import SocketLock, data_path, make_private, path_of
from pscluster.core.transport.unix_sockets import listen as listen_at
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
_LOOPBACK = "127.0.0.1"
_MAX_THREADS = 4096  # one for every open stream; they are made when needed


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

    def with_credentials(self, token: str | None, tls: Tls | None) -> RoleOptions:
        """The same with others."""
        return replace(self, token=token, tls=tls)


METRICS_PORT_VARIABLE = "PSCLUSTER_METRICS_PORT"
METRICS_HOST_VARIABLE = "PSCLUSTER_METRICS_HOST"


def _port_or_off(text: str, what: str) -> int | None:
    if text == "off":
        return None
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise ConfigurationError(f"{what} is {text!r}; give one from 1 to 65535, 0 (any free one) or off")
    return int(text)


def metrics_port_of(text: str) -> int | None:
    """The port that the text names, 0 for any free one; None for "off". ConfigurationError if it names neither."""
    return _port_or_off(text, "the port for metrics")


metrics_port_option = click.option(
    "--metrics-port",
    metavar="PORT|off",
    callback=lambda _context, _option, value: metrics_port_of(value),
    envvar=METRICS_PORT_VARIABLE,
    default="0",
    show_default="0: any free one, which the log names",
    help=f"Where /metrics, /healthz and /readyz are served, or off. Or ${METRICS_PORT_VARIABLE}.",
)


DATA_PORT_VARIABLE = "PSCLUSTER_DATA_PORT"


def data_port_of(text: str) -> int | None:
    """The port that the text names, 0 for any free one; None for "off". ConfigurationError if it names neither."""
    return _port_or_off(text, "the data port")


data_port_option = click.option(
    "--data-port",
    metavar="PORT|off",
    callback=lambda _context, _option, value: data_port_of(value),
    envvar=DATA_PORT_VARIABLE,
    default="0",
    show_default="0: any free one",
    help="Where functions, reads and updates go faster than over gRPC, for who can reach it; none with TLS. "
    f"Or ${DATA_PORT_VARIABLE}.",
)


def options_of_environ(environ: Mapping[str, str] = os.environ, role: str = "coordinator") -> RoleOptions:
    """What the environment says, for this role. ConfigurationError if that can't be used."""
    return RoleOptions(
        token=load_token(None, environ),
        tls=load_tls(role, environ=environ),
        insecure=is_set(INSECURE_VARIABLE, environ),
        open_health=is_set(OPEN_HEALTH_VARIABLE, environ),
        metrics_port=metrics_port_of(environ.get(METRICS_PORT_VARIABLE) or "0"),
        metrics_host=environ.get(METRICS_HOST_VARIABLE) or _LOOPBACK,
        data_port=data_port_of(environ.get(DATA_PORT_VARIABLE) or "0"),
    )


tls_option = click.option(
    "--tls",
    "tls_folder",
    type=click.Path(path_type=Path),
    help=f"Folder with {CERTIFICATE}, {KEY} and {AUTHORITIES}, or with a folder for each role. Or ${TLS_VARIABLE}.",
)
insecure_option = click.option(
    "--insecure",
    is_flag=True,
    help=f"Without a token, or with one in plain text, off loopback, too. Or ${INSECURE_VARIABLE}=1.",
)


def create_tls_folder(folder: Path | None) -> None:
    """Make certificates for all roles of the cluster in TF_CONFIG, unless there are some; the first to do so wins."""
    from pscluster.core.security.certificates import hosts_of, make_certificates  # imports what only certificates need

    path = folder or Path(os.environ.get(TLS_VARIABLE, ""))
    if path == Path():
        raise ConfigurationError(f"--create-tls needs --tls or {TLS_VARIABLE} to name the folder")
    make_certificates(path, by_role=hosts_of(TFConfig.from_environ().cluster))


def with_user_token(options: RoleOptions, addresses: Iterable[str]) -> RoleOptions:
    """The options of a process that was given no token: with that of its user, if all of these are of this machine."""
    token = token_for(options.token, addresses, options.tls, insecure=options.insecure, create=True)
    return replace(options, token=token)


def choose_serialization(address: str, options: RoleOptions, *, is_worker: bool = False) -> None:
    """Decide what this process takes from its peers. ConfigurationError if it was told nonsense."""
    exposed = ""
    known = options.token is not None or (options.tls is not None and options.tls.is_mutual)
    if not known and not (options.insecure and is_on_this_machine(address)):
        exposed = f"this role listens on {address} without a token, where anybody could send one"
    found = policy_of(
        asked_for(options.allow_pickle),
        exposed,
        options.functions_from,
        data_from=options.data_from,
        is_worker=is_worker,
    )
    choose(found)
    if not found.pickles:
        find_modules(found)


def log_serialization() -> None:
    """Log it, once the role serves."""
    found = chosen_policy()
    if not found.pickles:
        places = ", ".join(map(str, (*found.folders, *found.packages))) or "nowhere"
        logger.info("%s; functions are taken from %s", found.why, places)


def role_options(command: Callable[..., None]) -> Callable[..., None]:
    """Click options that all roles share; the command receives one `RoleOptions`."""
    decorators: list[Callable[..., Any]] = [
        click.option("--bind", metavar="HOST:PORT|unix:PATH", help="Where to listen. Default: the task's own address."),
        click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the cluster token."),
        click.option("--create-token", is_flag=True, help="Create the token file first if it is missing."),
        tls_option,
        click.option("--create-tls", is_flag=True, help="Create that folder first if it is missing, for all roles."),
        click.option(
            "--tls-server-only",
            is_flag=True,
            help=f"Ask callers for no certificate: the token alone opens. Or ${SERVER_ONLY_VARIABLE}=1.",
        ),
        insecure_option,
        click.option(
            "--open-health",
            is_flag=True,
            help=f"Answer health checks, and nothing else, without the token. Or ${OPEN_HEALTH_VARIABLE}=1.",
        ),
        add_pickle_options,
        click.option("--until-done", is_flag=True, help="Exit with 0 when the coordinator's job is over."),
        click.option("--exit-with-parent", is_flag=True, help="Stop when standard input reaches its end."),
        click.option("--share-port", is_flag=True, help="Listen on a port that the parent process reserved."),
        click.option(
            "--connect-timeout", default=600.0, show_default=True, help="Seconds to wait for the tasks it needs."
        ),
        click.option(
            "--coordinator-timeout",
            envvar="PSCLUSTER_COORDINATOR_TIMEOUT",
            default=math.inf,
            show_default="for ever",
            type=click.FloatRange(0, min_open=True),
            help="Seconds to keep a job for a coordinator that died. Or $PSCLUSTER_COORDINATOR_TIMEOUT.",
        ),
        click.option("--grace", default=GRACE_SECONDS, show_default=True, help="Seconds for what runs to end in."),
        metrics_port_option,
        click.option(
            "--metrics-host",
            envvar=METRICS_HOST_VARIABLE,
            default=_LOOPBACK,
            show_default=True,
            help=f"The host of that; off loopback the cluster token is asked for. Or ${METRICS_HOST_VARIABLE}.",
        ),
        log_options(),
    ]

    @functools.wraps(command)  # also hands on the options that the command has of its own
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
    ) -> None:  # the rest of the options and arguments is the command's own
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
    """TF_CONFIG and this task's index in it. ConfigurationError if it is not of that role."""
    config = TFConfig.from_environ()
    if config.task is None:
        raise ConfigurationError(
            f'TF_CONFIG: task is missing; this {role} needs one such as {{"task": {{"type": "{role}", "index": 0}}}}'
        )
    expect_type(config.task, role)
    return config, config.task.index


def expect_type(task: Task, job: str) -> None:
    """ConfigurationError if the task is not one of that job."""
    if task.type != job:
        command = "coordinator" if job == "chief" else job
        raise ConfigurationError(
            f'TF_CONFIG: task.type is "{task.type}", but this is `pscluster {command}`; write, for example, '
            f'{{"task": {{"type": "{job}", "index": 0}}}}'
        )


def listen_address(own: str | None, options: RoleOptions) -> str:
    """Where to listen: --bind, or the own address (every interface where that is not of this machine)."""
    if options.bind is not None:
        parse_address(options.bind)
        address = options.bind
    elif own is not None:
        address = own if is_on_this_machine(own) else f"0.0.0.0:{split_address(own)[1]}"
    else:
        raise ConfigurationError("the task has no address of its own in TF_CONFIG; give --bind HOST:PORT")
    check_no_tls(address, options.tls)
    if is_on_this_machine(address) or options.insecure:
        return address
    mutual = options.tls is not None and options.tls.is_mutual
    if options.token is None and not mutual:
        raise ConfigurationError(
            f"refusing to listen on {address} without a cluster token, where anybody could use this role: set "
            "PSCLUSTER_TOKEN_FILE (`pscluster token --file PATH` makes one), listen on 127.0.0.1, or say --insecure"
        )
    if options.tls is None:
        raise ConfigurationError(
            f"refusing to listen on {address} in plain text, where anybody on the way could read and change all: "
            f"give certificates with --tls DIR or {TLS_VARIABLE} (`pscluster certs DIR` makes them), listen on "
            "127.0.0.1, or say --insecure"
        )
    return address


def serve_metrics(telemetry: Telemetry, options: RoleOptions) -> MetricsServer | None:
    """Serve the figures of a role from now on, unless that is turned off.

    Raises:
        ConfigurationError: the port is in use, or the host is not loopback and there is no token, or no certificate.
    """
    host, port = options.metrics_host, options.metrics_port
    if port is None:
        return None
    files = None
    if options.tls is not None and not is_loopback(host):
        files = CertificateFiles("metrics", options.tls.folder / CERTIFICATE, options.tls.folder / KEY)
    check_place(
        "serve metrics",
        host,
        host,
        options.token,
        encrypted=files is not None,
        insecure=options.insecure,
        mend="leave --metrics-host at 127.0.0.1",
    )
    return MetricsServer(telemetry, host, port, options.token, files, open_health=options.open_health)


class _Health(health.HealthServicer):  # type: ignore[misc]  # it has no types
    """The standard health check, whose callers are greeted like all others."""

    def __init__(self, greet: Greet) -> None:
        super().__init__(experimental_non_blocking=True, experimental_thread_pool=ThreadPoolExecutor(1))
        self._greet = greet

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  (gRPC's name)
        self._greet(context.peer())
        return super().Check(request, context)

    def Watch(self, request: Any, context: grpc.ServicerContext, *rest: Any) -> Any:  # noqa: N802
        self._greet(context.peer())
        return super().Watch(request, context, *rest)


class RoleServer:
    """The gRPC server of a role: its own services, the node service and the standard health check.

    With `telemetry`, its figures are served, too. Its own services are served on a data plane besides, for those who
    know it by its own address: where it listens, unless `own` says otherwise. `admission` bounds the messages that are
    coming, and `data_message_bytes` one of them on the data plane.
    """

    def __init__(
        self,
        identity: node_pb2.Identity,
        role: Role,
        services: Mapping[str, tuple[ServiceDescriptor, object]],
        address: str,
        options: RoleOptions,
        on_job_end: Callable[[], None] = lambda: None,
        telemetry: Telemetry | None = None,
        own: str = "",
        admission: Admission | None = None,
        data_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._serving = False
        self._metrics: MetricsServer | None = None
        raise_descriptor_limit()
        bind_log(role=identity.role, index=identity.index, incarnation=f"{identity.incarnation:016x}", pid=os.getpid())
        self.node = NodeService(identity, role, on_job_end, options.coordinator_timeout)
        # Where strangers may ask, who asks is not one of us for that.
        self._health = _Health((lambda _peer: None) if options.open_health else self._greet)
        interceptors: list[grpc.ServerInterceptor] = []
        self._authenticator = Authenticator(options.token, identity) if options.token else None
        if self._authenticator is not None:
            open_health = OpenHealth() if options.open_health else None
            interceptors.append(AuthenticationInterceptor(self._authenticator, open_health, self._refused))
        else:
            interceptors.append(NoTokenInterceptor())
        self._roles: RoleInterceptor | None = None
        if options.tls is not None and options.tls.is_mutual:
            self._roles = RoleInterceptor(tls=options.tls)
            interceptors.append(self._roles)
            self._roles.start()
        gates = list(interceptors)
        if admission is not None:
            gates.append(AdmissionInterceptor(admission))  # strangers are refused before they are counted
        largest = MAX_MESSAGE_BYTES if admission is None else admission.message_bytes
        self._server = grpc.server(
            ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="rpc"),
            interceptors=gates,
            options=list(
                {
                    **dict(SERVER_OPTIONS),
                    **dict(server_options()),
                    "grpc.max_receive_message_length": largest,
                    "grpc.so_reuseport": int(options.share_port),
                }.items()
            ),
        )
        for descriptor, servicer in ((NODE_SERVICE, self.node), *services.values()):
            self._server.add_generic_rpc_handlers((generic_handler(descriptor, servicer, self._greet),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = ["", *(descriptor.full_name for descriptor, _ in services.values())]
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        path = path_of(address)
        self._socket = None if path is None else SocketLock(path, 0.0 if options.share_port else None)
        try:
            self.port = _bind(self._server, address, options.tls)
            if path is not None:
                make_private(path)
        except BaseException:
            if self._socket is not None:
                self._socket.close()
            raise
        self._doorkeeper = Doorkeeper(self.port, connections())
        if self._authenticator is not None:
            self._authenticator.start()
        local = is_on_this_machine(address)
        if path is None and options.token is None and (options.tls is None or not options.tls.is_mutual):
            logger.warning(
                "listening on %s without a token%s: %s can %s",
                address,
                " (--insecure)" if options.insecure else "",
                "any user of this machine" if local else "anybody who reaches it",
                "run code here" if options.insecure else "read and change what is here, though not send code",
            )
        elif not local and options.insecure and options.tls is None:
            logger.warning(
                "listening on %s in plain text (--insecure): anybody on the way can read and change what travels",
                address,
            )
        if telemetry is not None:
            telemetry.ask_readiness(self._not_ready)
            telemetry.ask_refusals(lambda: self._doorkeeper.refusals.total)
            self._metrics = serve_metrics(telemetry, options)
            self.node.metrics_address = self._metrics.address if self._metrics is not None else ""
        self._data: DataServer | None = None
        if services and options.data_port is not None and supported():
            self._data = self._serve_data(
                address,
                options,
                services.values(),
                interceptors,
                self._authenticator,
                admission,
                data_message_bytes,
                self._refused,
            )
            listens = address if path is not None else f"{split_address(address)[0]}:{self.port}"
            self.node.data_port, self.node.address = self._data.port, own or listens
        self._server.start()
        self._doorkeeper.start()

    @staticmethod
    def _serve_data(
        address: str,
        options: RoleOptions,
        services: Iterable[tuple[ServiceDescriptor, object]],
        interceptors: Sequence[grpc.ServerInterceptor],
        authenticator: Authenticator | None,
        admission: Admission | None,
        message_bytes: int,
        refused: Refused,
    ) -> DataServer:
        handlers = [generic_handler(descriptor, servicer) for descriptor, servicer in services]
        # A connection is authenticated as a whole.
        rest = [each for each in interceptors if not isinstance(each, AuthenticationInterceptor)]
        server = DataServer(
            _listen_for_data(address, options),
            handlers,
            rest,
            authenticator,
            admission=admission,
            message_bytes=message_bytes,
            tls=options.tls,
            refused=refused,
        )
        server.start()
        return server

    def _greet(self, peer: str) -> None:
        self._doorkeeper.greet(peer)

    def _refused(self, peer: str, *, unknown_session: bool = False, is_large: bool = False) -> bool:
        return self._doorkeeper.refused(peer, unknown_session=unknown_session, is_large=is_large)

    def _not_ready(self) -> str:
        return self.node.not_ready() if self._serving else "it waits for the tasks that it needs"

    def _set_health(self, status: int) -> None:
        for name in self._names:
            self._health.set(name, status)

    def ready(self) -> None:
        """From now on health checks say SERVING."""
        self._serving = True
        if self._metrics is not None:
            self._metrics.tell()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def leave(self) -> None:
        """Health says NOT_SERVING and the coordinator is told; calls are still answered."""
        self._health.enter_graceful_shutdown()
        self.node.leave()

    def stop(self, grace: float) -> None:
        """Refuse new calls, give the running ones `grace` seconds, close."""
        self._doorkeeper.stop()
        for watched in (self._authenticator, self._roles):
            if watched is not None:
                watched.stop()
        stopped = self._server.stop(grace)
        if self._data is not None:
            self._data.stop(grace)
        stopped.wait()
        if self._socket is not None:
            self._socket.close()
        if self._metrics is not None:
            self._metrics.close()


def _listen_for_data(address: str, options: RoleOptions) -> socket.socket:
    if (path := path_of(address)) is not None:
        try:
            return listen_at(data_path(path))
        except OSError as error:
            raise PsClusterError(f"can't listen on {data_path(path)} for data: {error.strerror}") from None
    (host, _), port = split_address(address), options.data_port or 0
    try:
        return listen(host, port, share=options.share_port and port > 0)
    except OSError as error:
        raise PsClusterError(
            f"can't listen on port {port} of {host} for data: {error.strerror}; give another one with --data-port"
        ) from None


def _bind(server: grpc.Server, address: str, tls: Tls | None) -> int:
    credentials = None if tls is None else tls.server_credentials()
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError:
        raise PsClusterError(f"can't listen on {address}: {_why_not(address)}") from None


def _why_not(address: str) -> str:
    if path_of(address) is not None:
        return "gRPC could not bind it; can files be made in its folder?"
    host, port = split_address(address)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except socket.gaierror as error:
        return f"the host {host} does not resolve ({error.strerror}); give an address of this machine with --bind"
    except OSError as error:
        if error.errno == 98 or "in use" in str(error):
            return f"port {port} is in use by another process; stop it, or give another port"
        return f"{error.strerror}; give an address of this machine and a port above 1023 with --bind"
    return "gRPC could not bind it"


class StopRequest:
    """Set by whatever wants the role to stop; the first reason counts."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Ask for the stop."""
        if not self.event.is_set():
            self.reason = reason
            self.event.set()

    def on_signals(self) -> None:
        """Let SIGTERM and SIGINT ask; a second one ends the process at once. Main thread only."""

        def handle(number: int, _frame: object) -> None:
            if self.event.is_set():
                os._exit(128 + number)
            self.ask(signal.Signals(number).name)

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)


def on_parents_death(tell: Callable[[], None]) -> None:
    """Call `tell`, on a thread, when standard input, a pipe that only the parent holds, reaches its end."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        tell()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_role(
    role_name: str,
    index: int,
    options: RoleOptions,
    serve: Callable[[StopRequest], Callable[[], None]],
) -> None:
    """The main of a ps or worker process: serve, wait for the stop, drain.

    `serve` starts the role and returns what drains and closes it.
    """
    configure_logging(f"{role_name}/{index}", options.log_level, options.log_format)
    tune_allocator()
    stop = StopRequest()
    stop.on_signals()
    if options.exit_with_parent:
        on_parents_death(lambda: stop.ask("the parent process is gone"))
    close = serve(stop)
    # Awake now and then: a signal that the kernel gave to another thread does not wake a thread that waits on a lock.
    while not stop.event.wait(1.0):
        pass
    logger.info("stopping: %s", stop.reason)
    code = 1
    try:
        close()
        logger.info("stopped")
        code = 0
    except Exception:
        logger.exception("could not stop in order")
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # whoever read it may be gone
                stream.flush()
        os._exit(code)  # a user's own threads (a data loader's) must not keep a stopped role alive
