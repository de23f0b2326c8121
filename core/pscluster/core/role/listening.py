"""Where a role listens, whether its security allows that, and why it can't."""

from __future__ import annotations

import socket

import grpc

from pscluster.core.cluster.spec import is_on_this_machine, parse_address, split_address
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.role.options import RoleOptions
from pscluster.core.security.tls import TLS_VARIABLE, Tls, check_no_tls
from pscluster.core.transport.tcp.server import listen
from pscluster.core.transport.unix_sockets import data_path, path_of
from pscluster.core.transport.unix_sockets import listen as listen_at


def listen_address(own: str | None, options: RoleOptions) -> str:
    """Return where to listen: --bind, or the task's own address (every interface if that is not on this machine)."""
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
            f"refusing to listen on {address} without a cluster token, where anyone could use this role: set "
            "PSCLUSTER_TOKEN_FILE (`pscluster token --file PATH` makes one), listen on 127.0.0.1, or use --insecure"
        )
    if options.tls is None:
        raise ConfigurationError(
            f"refusing to listen on {address} in plain text, where anyone on the path could read and change "
            f"everything: give certificates with --tls DIR or {TLS_VARIABLE} (`pscluster certs DIR` makes them), "
            "listen on 127.0.0.1, or use --insecure"
        )
    return address


def listen_for_data(address: str, options: RoleOptions) -> socket.socket:
    """Listen for the data plane of a role with this address. Raise PsClusterError with the reason if it can't."""
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


def bind(server: grpc.Server, address: str, tls: Tls | None) -> int:
    """Let a server listen, and return its port. Raise PsClusterError with the reason if it can't."""
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
