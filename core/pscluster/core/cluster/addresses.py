"""The addresses of tasks: `host:port` or, for tasks of one user on one machine, `unix:/PATH`; see `unix_sockets`."""

from __future__ import annotations

import ipaddress
import re

from pscluster.core.cluster.errors import quoted, wrong
from pscluster.core.transport.unix_sockets import PREFIX, path_of, why_no_path

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_IPV6 = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]")


def split_address(text: str, key: str = "address") -> tuple[str, int]:
    """Return the host (IPv6 without brackets) and the port of `host:port` or `[IPv6]:port`.

    Raise ConfigurationError, which calls the address `key`, if it is invalid, or its port is not from 1 to 65535.
    """
    host, _, port = text.rpartition(":")
    ipv6 = _IPV6.fullmatch(host)
    right = "ps0:2222"
    if text.startswith(PREFIX):
        limit = "a host and a port are needed here"
    elif "://" in text:
        limit = "an address names no protocol"
    elif ":" not in text or text.endswith("]"):
        limit = "it has no port"
        right = f"{text}:2222" if _HOST.fullmatch(text) or _IPV6.fullmatch(text) else right
    elif not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        limit = "a port is a whole number from 1 to 65535"
    elif ":" in host and not ipv6:
        limit, right = "an IPv6 address stands in brackets", "[::1]:2222"
    else:
        limit = "its host is neither a name nor an IP address"
        try:
            if ipv6:
                return str(ipaddress.IPv6Address(ipv6[1])), int(port)
            if re.fullmatch("[0-9.]+", host):
                return str(ipaddress.IPv4Address(host)), int(port)
            if _HOST.fullmatch(host):
                return host, int(port)
        except ValueError:
            pass  # digits and dots, or hex and colons, but not an address
    raise wrong(key, f"is {quoted(text)}", limit, quoted(right))


def join_address(host: str, port: int) -> str:
    """Return `host:port`, or `[IPv6]:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, key: str = "address") -> tuple[str, int]:
    """Return the host and port of a task's address, or, of `unix:/PATH`, the path and 0. Raises as `split_address`."""
    if text.startswith(("unix-abstract:", "unix://")):
        raise wrong(key, f"is {quoted(text)}", "a Unix socket is written unix:/PATH", '"unix:/run/job/ps-0"')
    if (path := path_of(text)) is None:
        return split_address(text, key)
    if why := why_no_path(path):
        raise wrong(key, f"is {quoted(text)}", why, '"unix:/run/job/ps-0"')
    return path, 0


_UNREGISTERED = ".unregistered.invalid"  # a name that no host can have (RFC 2606)


def unregistered(job: str, index: int) -> str:
    """Return the address of a task that has not said where it is. Nothing dials it."""
    return f"{job}-{index}{_UNREGISTERED}:1"


def is_unregistered(address: str) -> bool:
    """Return whether this is the address of a task that has not said where it is."""
    return address.rpartition(":")[0].endswith(_UNREGISTERED)


def is_on_this_machine(address: str) -> bool:
    """Return whether a task's address is reachable on this machine only: a Unix socket, or on loopback."""
    return path_of(address) is not None or is_loopback(split_address(address)[0])


def is_loopback(host: str) -> bool:
    """Return whether a host (without a port) is this machine itself: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
