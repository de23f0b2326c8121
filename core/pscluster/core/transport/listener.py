"""The server's side of both transports: a role's services over gRPC and on the data plane. No other module asks which.

gRPC listens on the role's address, the data plane on a port or a socket of its own. Each call over gRPC proves, in an
interceptor of gRPC's only, that its caller knows the token; a connection of the data plane does so once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from pscluster.core.cluster.addresses import split_address
from pscluster.core.errors import PsClusterError
from pscluster.core.limits import MAX_MESSAGE_BYTES, server_options
from pscluster.core.security.authenticator import Authenticator, Refused
from pscluster.core.security.tls import Tls
from pscluster.core.transport.admission import Admission, AdmissionInterceptor
from pscluster.core.transport.channels import SERVER_OPTIONS
from pscluster.core.transport.frames import CHUNK_BYTES, DATA_FRAME_BYTES
from pscluster.core.transport.tcp.packets import supported
from pscluster.core.transport.tcp.server import DataServer
from pscluster.core.transport.tcp.server import listen as listen_on_port
from pscluster.core.transport.unix_sockets import SocketLock, data_path, make_private, path_of
from pscluster.core.transport.unix_sockets import listen as listen_at_path

_MAX_THREADS = 4096  # one for every open stream, created on demand


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a role listens.

    Args:
        address: for gRPC: `host:port`, where port 0 is any free one, or `unix:PATH`.
        data_port: of the data plane, 0 for any free one; None: there is none. On a Unix socket it is a file beside.
        share_port: let a process that replaces this one listen on the same ports.
        tls: this side's certificates; None: plain text.
    """

    address: str
    data_port: int | None
    share_port: bool
    tls: Tls | None


@dataclass(frozen=True, slots=True)
class Checks:
    """What a call passes before its handler runs, and how large its messages may be.

    Args:
        grpc_only: interceptors of calls over gRPC, in order.
        interceptors: of every call, after those.
        authenticator: to which the data plane's connections must prove themselves; None: every caller is served.
        refused: called for a caller that was refused; returns whether to answer it.
        admission: bounds the memory for arriving messages; None: unbounded.
        overhead_bytes: of the largest message, beside a full frame; None: messages may have MAX_MESSAGE_BYTES.
    """

    grpc_only: Sequence[grpc.ServerInterceptor]
    interceptors: Sequence[grpc.ServerInterceptor]
    authenticator: Authenticator | None
    refused: Refused
    admission: Admission | None = None
    overhead_bytes: int | None = None

    def message_bytes(self, frame_bytes: int) -> int:
        """Return the size of the largest message on a transport with frames of this size."""
        return MAX_MESSAGE_BYTES if self.overhead_bytes is None else frame_bytes + self.overhead_bytes


class Listener:
    """Serves calls from `start` to `stop`: over gRPC all that `add_services` adds, on the data plane its handlers.

    Both ports are bound once it is made. Raise PsClusterError with the reason if it can't listen there.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        checks: Checks,
        add_services: Callable[[grpc.Server], object],
        data_handlers: Sequence[grpc.GenericRpcHandler],
    ) -> None:
        self._endpoint = endpoint
        interceptors = [*checks.grpc_only, *checks.interceptors]
        message_bytes = checks.message_bytes(CHUNK_BYTES)
        if checks.admission is not None:  # last: unauthenticated calls are refused before they are counted
            interceptors.append(AdmissionInterceptor(checks.admission, message_bytes))
        options = {
            **dict(SERVER_OPTIONS),
            **dict(server_options()),
            "grpc.max_receive_message_length": message_bytes,
            "grpc.so_reuseport": int(endpoint.share_port),
        }
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="rpc")
        self._server = grpc.server(self._threads, interceptors=interceptors, options=list(options.items()))
        add_services(self._server)
        path = path_of(endpoint.address)
        self._socket = None if path is None else SocketLock(path, 0.0 if endpoint.share_port else None)
        self._data: DataServer | None = None
        try:
            self.port = _bind(self._server, endpoint)
            if path is not None:
                make_private(path)
            if data_handlers and endpoint.data_port is not None and supported():
                self._data = DataServer(
                    _listen_for_data(endpoint),
                    data_handlers,
                    checks.interceptors,
                    checks.authenticator,
                    admission=checks.admission,
                    message_bytes=checks.message_bytes(DATA_FRAME_BYTES),
                    tls=endpoint.tls,
                    refused=checks.refused,
                )
        except BaseException:
            if self._socket is not None:
                self._socket.close()
            raise

    @property
    def address(self) -> str:
        """Return where it listens for gRPC, with the port that it got."""
        address = self._endpoint.address
        return address if path_of(address) is not None else f"{split_address(address)[0]}:{self.port}"

    @property
    def data_port(self) -> int:
        """Return the port of the data plane; 0 if there is none, and 1 on a Unix socket."""
        return 0 if self._data is None else self._data.port

    def start(self) -> None:
        """Begin to serve."""
        if self._data is not None:
            self._data.start()
        self._server.start()

    def stop(self, grace: float) -> None:
        """Refuse new calls, give the running ones `grace` seconds, close."""
        stopped = self._server.stop(grace)
        if self._data is not None:
            self._data.stop(grace)
        stopped.wait()
        self._threads.shutdown(wait=False)  # gRPC leaves them to the garbage collector
        if self._socket is not None:
            self._socket.close()


def _listen_for_data(endpoint: Endpoint) -> socket.socket:
    """Listen for the data plane. Raise PsClusterError with the reason if it can't."""
    if (path := path_of(endpoint.address)) is not None:
        try:
            return listen_at_path(data_path(path))
        except OSError as error:
            raise PsClusterError(f"can't listen on {data_path(path)} for data: {error.strerror}") from None
    (host, _), port = split_address(endpoint.address), endpoint.data_port or 0
    try:
        return listen_on_port(host, port, share=endpoint.share_port and port > 0)
    except OSError as error:
        raise PsClusterError(
            f"can't listen on port {port} of {host} for data: {error.strerror}; give another one with --data-port"
        ) from None


def _bind(server: grpc.Server, endpoint: Endpoint) -> int:
    """Let a gRPC server listen, and return its port. Raise PsClusterError with the reason if it can't."""
    credentials = None if endpoint.tls is None else endpoint.tls.server_credentials()
    try:
        if credentials is not None:
            return server.add_secure_port(endpoint.address, credentials)
        return server.add_insecure_port(endpoint.address)
    except RuntimeError:
        raise PsClusterError(f"can't listen on {endpoint.address}: {_why_not(endpoint.address)}") from None


def _why_not(address: str) -> str:
    if path_of(address) is not None:
        return "gRPC could not bind it; is its folder writable?"
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
