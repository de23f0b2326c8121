"""Where a role listens, and whether its security allows that."""

from __future__ import annotations

from pscluster.core.cluster.addresses import is_on_this_machine, join_address, parse_address, split_address
from pscluster.core.errors import ConfigurationError
from pscluster.core.role.join_options import EVERYWHERE
from pscluster.core.role.options import RoleOptions
from pscluster.core.security.tls import TLS_VARIABLE, check_no_tls


def everywhere(address: str) -> str:
    """Return the host that listens on all interfaces, of the family of this address of the cluster.

    At 0.0.0.0 gRPC accepts IPv6 too, but the data plane does not.
    """
    ipv4, ipv6 = EVERYWHERE
    return ipv6 if ":" in split_address(address)[0] else ipv4


def listen_address(own: str | None, options: RoleOptions) -> str:
    """Return where to listen: --bind, or the task's own address (every interface if that is not on this machine)."""
    if options.bind is not None:
        parse_address(options.bind)
        address = options.bind
    elif own is not None:
        address = own if is_on_this_machine(own) else join_address(everywhere(own), split_address(own)[1])
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
