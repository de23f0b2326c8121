"""The addresses at which the processes of a local cluster listen: Unix sockets, or ports of a host.

A port that is probed, closed and passed on may be taken by another process before the child binds it, and again at
every restart. So the sockets stay bound for the cluster's life. They never listen, so they receive no connections;
SO_REUSEPORT lets the child, of the same user, bind the same port. Where the platform lacks it, the socket is closed
just before the child starts, and the race is short.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pscluster.coordinator.local.tasks import TaskKey
from pscluster.coordinator.local.temp_folder import OwnFolder, folder_for_sockets
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.errors import ConfigurationError
from pscluster.core.transport.unix_sockets import address_of

TRANSPORTS = ("unix", "tcp")
_SHARES_PORTS = hasattr(socket, "SO_REUSEPORT")
_HAS_UNIX_SOCKETS = hasattr(socket, "AF_UNIX")


def choose_transport(requested: str | None, host: str | None, tls: bool | None) -> str:
    """Return "unix" or "tcp". ConfigurationError if the arguments contradict each other."""
    wants_tcp = host is not None or bool(tls)
    if requested is None:
        return "tcp" if wants_tcp or not _HAS_UNIX_SOCKETS else "unix"
    if requested not in TRANSPORTS:
        raise ConfigurationError(f"transport is {requested!r}; give one of {', '.join(TRANSPORTS)}")
    if requested == "unix" and wants_tcp:
        raise ConfigurationError('transport is "unix", but host= and tls=True are for TCP; give transport="tcp"')
    if requested == "unix" and not _HAS_UNIX_SOCKETS:
        raise ConfigurationError('transport is "unix", but this system has no Unix sockets; give transport="tcp"')
    return requested


class Addresses:
    """An address for each task, held until `release()`."""

    def __init__(self, counts: Mapping[str, int], host: str | None, *, data_ports: bool = False) -> None:
        """Reserve them: ports of the host, with `data_ports` two for each worker and server; without one, Unix sockets.

        ConfigurationError if the host does not resolve or is not this machine, or there is nowhere to put sockets.
        """
        self._folder: OwnFolder | None = None
        self._host, self._is_tcp, self._data_ports = host, host is not None, data_ports
        self._reserved: dict[TaskKey, list[socket.socket]] = {}
        self.data_ports: dict[TaskKey, int] = {}
        addresses: dict[str, list[str]] = {}
        try:
            if host is None:
                self._folder = folder_for_sockets()
            for role, count in counts.items():
                addresses[role] = [self._address((role, index)) for index in range(count)]
        except BaseException:
            self.release()
            raise
        self.spec = ClusterSpec(addresses, source="LocalCluster")

    def _address(self, task: TaskKey) -> str:
        role, index = task
        if self._host is None:
            assert self._folder is not None
            return address_of(self._folder.path / f"{role}-{index}")
        name = f"[{self._host}]" if ":" in self._host else self._host
        needed = 2 if self._data_ports and role != "chief" else 1
        return f"{name}:{self._reserve(task, self._host, needed)[0]}"

    def add(self, task: TaskKey) -> None:
        """Reserve the address of another task, the next one of its role."""
        role, index = task
        addresses = self.spec.as_dict()
        known = [self.spec.task_address(role, at) for at in range(index)]
        self.spec = ClusterSpec({**addresses, role: [*known, self._address(task)]}, source="LocalCluster")

    def remove(self, task: TaskKey) -> None:
        """Release the address of the last task of a role."""
        role, index = task
        known = [self.spec.task_address(role, at) for at in range(index)]
        self.spec = ClusterSpec({**self.spec.as_dict(), role: known}, source="LocalCluster")
        self.data_ports.pop(task, None)
        _close(self._reserved.pop(task, []))

    def _reserve(self, task: TaskKey, host: str, count: int) -> list[int]:
        """Return the task's port for gRPC, and a second one, if any, for data."""
        sockets = self._reserved[task] = []
        sockets.extend(bound_socket(host) for _ in range(count))
        ports = [reserved.getsockname()[1] for reserved in sockets]
        if count > 1:
            self.data_ports[task] = ports[1]
        return ports

    def hand_over(self, task: TaskKey) -> list[str]:
        # Two coordinators may overlap for a while.
        if _SHARES_PORTS if self._is_tcp else task[0] == "chief":
            return ["--share-port"]
        _close(self._reserved.pop(task, []))
        return []

    def release(self) -> None:
        """Release the ports, and remove the sockets' folder. Idempotent."""
        while self._reserved:
            _close(self._reserved.popitem()[1])
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def _close(sockets: list[socket.socket]) -> None:
    for bound in sockets:
        bound.close()


def bound_socket(host: str, port: int = 0) -> socket.socket:
    """Return a socket that holds a port of the host, by default a free one, for processes of this user.

    ConfigurationError if the host does not resolve or is not this machine.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"host is {host!r}, which does not resolve ({error}); give one such as 127.0.0.1"
        ) from None
    bound = socket.socket(family, kind, protocol)
    try:
        if _SHARES_PORTS:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"host is {host!r}, where no port can be bound ({error.strerror}); give an address of this machine"
        ) from None
    return bound
