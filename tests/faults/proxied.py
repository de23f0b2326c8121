"""A local cluster whose roles are dialled through proxies: links that can be cut, stall, or be slow.

Each role listens on 127.0.0.1 and advertises 127.0.0.2, where a proxy listens on each of its ports, so that its data
plane, too, is reached through a proxy. Needs no root.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import Any

from tests.faults.proxy import Proxy

from pscluster.coordinator.api import LocalCluster

_REACHED_AT = "127.0.0.2"
_BELOW_EPHEMERAL = range(20_000, 30_000)  # no connection takes one of these while a role is down


class Link:
    """The link to one role: a proxy for each of its ports, all with the same behaviour."""

    def __init__(self, host: str, ports: list[int]) -> None:
        self.proxies = [Proxy(f"{host}:{port}", (_REACHED_AT, port)) for port in ports]

    @property
    def address(self) -> str:
        """The address at which the role is dialled."""
        return self.proxies[0].address

    @property
    def carried(self) -> int:
        """The bytes carried over the data plane."""
        return self.proxies[1].forwarded

    @property
    def refused(self) -> int:
        """The number of refused connections."""
        return sum(proxy.refused for proxy in self.proxies)

    @property
    def held(self) -> int:
        """The number of pieces held up in a stalled direction."""
        return sum(proxy.held for proxy in self.proxies)

    def part(self) -> None:
        """See Proxy."""
        for proxy in self.proxies:
            proxy.part()

    def join(self) -> None:
        """See Proxy."""
        for proxy in self.proxies:
            proxy.join()

    def stall(self, back: bool) -> None:
        """See Proxy."""
        for proxy in self.proxies:
            proxy.stall(back)

    def slow(self, rate: float) -> None:
        """See Proxy."""
        for proxy in self.proxies:
            proxy.slow(rate)

    def stutter(self, longest: float, seed: int) -> None:
        """See Proxy."""
        for proxy in self.proxies:
            proxy.stutter(longest, seed)

    def flow(self) -> None:
        """See Proxy."""
        for proxy in self.proxies:
            proxy.flow()

    def close(self) -> None:
        """Stop listening."""
        for proxy in self.proxies:
            proxy.close()


class ProxiedCluster(LocalCluster):
    """A cluster whose workers and servers reach each other over links, unlike a coordinator that uses `cluster_spec()`.

    Attributes:
        links: by task, once all have been started.
    """

    links: dict[tuple[str, int], Link]

    def __init__(self, num_ps: int, num_workers: int, **options: Any) -> None:
        """As in the base class; links are for ports."""
        super().__init__(num_ps, num_workers, transport="tcp", **options)

    def addresses(self, role: str) -> list[str]:
        """The addresses at which the links listen."""
        return [link.address for (kind, _), link in sorted(self.links.items()) if kind == role]

    def tf_config(self, role: str, index: int) -> str:
        """All roles are at the addresses of their links."""
        return super().tf_config(role, index).replace("127.0.0.1:", f"{_REACHED_AT}:")

    def hand_over_port(self, role: str, index: int) -> list[str]:
        """The address at which a process is to listen."""
        host, port = self.cluster_spec().task_address(role, index).split(":")
        if (role, index) not in self.links:
            self.links[role, index] = Link(host, [int(port), _free_port(host)])
        data = self.links[role, index].proxies[1].port
        return [*super().hand_over_port(role, index), "--bind", f"{host}:{port}", "--data-port", str(data)]

    def _certified_hosts(self) -> list[str]:
        return [*super()._certified_hosts(), _REACHED_AT]

    def start(self) -> ProxiedCluster:
        """As in the base class."""
        self.links = {}
        return super().start()

    def stop(self) -> None:
        """As in the base class."""
        super().stop()
        for link in self.links.values():
            link.close()


def _free_port(host: str) -> int:
    for port in random.sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)):
        with suppress(OSError), socket.create_server((host, port)), socket.create_server((_REACHED_AT, port)):
            return port
    raise OSError("no port is free")
