"""Several workers' services in this process, and functions that run there as the members of a gang."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.roles.processes import free_addresses
from tests.worker.collectives.host import TIMEOUT, Host, Step, as_member, gang_of

from pscluster.core.role.options import RoleOptions
from pscluster.core.security.certificates import make_certificates
from pscluster.core.security.tls import load_tls
from pscluster.core.transport.unix_sockets import PREFIX

TOKEN = "correct-horse-battery-staple"
WAYS = ("grpc", "tcp", "unix", "tls")


def options_of(way: str, folder: Path) -> RoleOptions:
    """The options of workers that reach each other in a way; certificates are made in the folder."""
    if way == "grpc":
        return RoleOptions(data_port=None, metrics_port=None, token=TOKEN)
    if way == "tls":
        certificates = folder / "certificates"
        if not certificates.exists():
            make_certificates(certificates)
        return RoleOptions(metrics_port=None, token=TOKEN, tls=load_tls("worker", certificates))
    return RoleOptions(metrics_port=None, token=TOKEN)


def addresses_of(way: str, folder: Path, count: int) -> list[str]:
    """Addresses for this number of workers."""
    if way != "unix":
        return free_addresses(count)
    folders = [folder / f"w{index}" for index in range(count)]
    for each in folders:
        each.mkdir(mode=0o700)
    return [f"{PREFIX}{each}/s" for each in folders]


@contextmanager
def hosts_of(count: int, folder: Path, way: str = "tcp") -> Iterator[list[Host]]:
    """So many workers, that reach each other in this way."""
    options, hosts = options_of(way, folder), list[Host]()
    try:
        for index, address in enumerate(addresses_of(way, folder, count)):
            hosts.append(Host(index, address, options))
        yield hosts
    finally:
        for host in hosts:
            host.close()


class Running:
    """Functions of one gang, each on a thread of its own."""

    def __init__(self, hosts: Sequence[Host], steps: Sequence[Step | None], **gang: Any) -> None:
        places = [(host.address, host.incarnation) for host in hosts]
        self.contexts = [host.context() for host in hosts]
        self._results: list[Any] = [None] * len(hosts)

        def run(rank: int, step: Step) -> None:
            try:
                message = gang_of(places, rank, **gang)
                self._results[rank] = as_member(hosts[rank], message, step, self.contexts[rank])
            except BaseException as error:
                self._results[rank] = error

        self._threads = [
            threading.Thread(target=functools.partial(run, rank, step), daemon=True)
            for rank, step in enumerate(steps)
            if step is not None
        ]
        for thread in self._threads:
            thread.start()

    def results(self) -> list[Any]:
        """What they have returned or raised, by rank."""
        for thread in self._threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a function that does not end"
        return self._results


def together(hosts: Sequence[Host], *steps: Step | None, **gang: Any) -> list[Any]:
    """Run one function on all hosts, or one on each, as a gang; what they have returned or raised, by rank."""
    return Running(hosts, steps * len(hosts) if len(steps) == 1 else steps, **gang).results()
