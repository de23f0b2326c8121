"""Roles in network namespaces of their own, joined by a router whose links can be cut, lose packets, or be slow.

They do what a proxy cannot: packets vanish silently. No reset ever comes, and a connection stays half open until one
end times out. Nothing leaves this machine.

    coordinator (where the tests run)  10.N.0.2 --+
    first role                         10.N.1.2 --+-- router: one namespace; its FORWARD chain drops what is cut
    second role                        10.N.2.2 --+

It takes root (CAP_NET_ADMIN and CAP_SYS_ADMIN), `ip`, `iptables` and, for slow links, `tc`. Namespaces carry the
process id of their creator. What a process that was killed has left is removed by the next one that makes some.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

COORDINATOR = "coordinator"
"""The name of the place where this process is."""

_PREFIX = "pscluster-test-"
_serial = itertools.count()


def _run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _namespaces() -> list[tuple[int, str]]:
    """The namespaces made by this module in any process: the process that made each, and its name."""
    matches = re.findall(rf"^({_PREFIX}(\d+)-\S+)", _run("ip", "netns", "list"), re.MULTILINE)
    return [(int(pid), name) for name, pid in matches]


def _remove(name: str) -> None:
    """Remove a namespace and whatever runs in it."""
    with suppress(OSError):
        for pid in _run("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with suppress(OSError):
        _run("ip", "netns", "delete", name)


def remove_leftovers() -> None:
    """Remove what dead processes have left, including the processes in it."""
    for pid, name in _namespaces():
        if not _lives(pid):
            _remove(name)


@cache
def missing() -> str:
    """Why there can be no network here; empty if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "iptables", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need `{tool}`, which is not installed"
    try:
        with Network(["trial"]) as network:
            network.cut("trial", COORDINATOR)
            network.lossy("trial", COORDINATOR, 0.5)
            network.slow("trial", 1000)
            network.heal()
    except OSError as error:
        return f"network namespaces can't be had: {error}"
    return ""


class Network:
    """Hosts, each in a separate namespace except for the coordinator's; a context manager."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """Nothing is created before `with`."""
        self._key = f"{_PREFIX}{os.getpid()}-{next(_serial)}"
        self._router = f"{self._key}-router"
        self._outer = f"psc{self._key.removeprefix(_PREFIX)}"  # of at most 15 characters
        self._subnet = {name: subnet for subnet, name in enumerate([COORDINATOR, *hosts])}
        self._slow: set[str] = set()
        self._net = 0

    def address(self, host: str) -> str:
        """The address of that host."""
        return f"10.{self._net}.{self._subnet[host]}.2"

    def command(self, host: str) -> list[str]:
        """The prefix for a command that is to run there."""
        return [] if host == COORDINATOR else ["ip", "netns", "exec", self._name(host)]

    def _device(self, host: str) -> str:
        """The network device of that host, in its namespace."""
        return self._outer if host == COORDINATOR else "eth0"

    def cut(self, one: str, other: str) -> None:
        """From now on nothing gets through between the two, in either direction."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def cut_one_way(self, sender: str, receiver: str) -> None:
        """From now on nothing gets through from the first to the second."""
        self._forward(sender, receiver)

    def lossy(self, one: str, other: str, share: float) -> None:
        """From now on this share of all packets between the two is lost, at random."""
        for sender, receiver in ((one, other), (other, one)):
            self._forward(sender, receiver, "-m", "statistic", "--mode", "random", "--probability", f"{share:.3f}")

    def slow(self, host: str, kbit: int) -> None:
        """From now on traffic to and from that place is limited to this many kbit/s each way."""
        subnet = self._subnet[host]
        self._slow.add(host)
        limit = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "16kb", "latency", "200ms")
        _run(*self._in(self._router), "tc", "qdisc", "replace", "dev", f"to{subnet}", *limit)
        _run(*self.command(host), "tc", "qdisc", "replace", "dev", self._device(host), *limit)

    def heal(self) -> None:
        """Restore everything as it was at the beginning."""
        _run(*self._in(self._router), "iptables", "-w", "-F", "FORWARD")
        for host in list(self._slow):
            _run(*self._in(self._router), "tc", "qdisc", "delete", "dev", f"to{self._subnet[host]}", "root")
            _run(*self.command(host), "tc", "qdisc", "delete", "dev", self._device(host), "root")
            self._slow.discard(host)

    def dropped(self) -> int:
        """The number of packets lost since it was last healed."""
        lines = _run(*self._in(self._router), "iptables", "-w", "-L", "FORWARD", "-v", "-n", "-x").splitlines()
        return sum(int(line.split()[0]) for line in lines if " DROP " in line)

    def _forward(self, sender: str, receiver: str, *which: str) -> None:
        rule = ("-s", self.address(sender), "-d", self.address(receiver), *which, "-j", "DROP")
        _run(*self._in(self._router), "iptables", "-w", "-A", "FORWARD", *rule)

    def _name(self, host: str) -> str:
        return f"{self._key}-{host}"

    @staticmethod
    def _in(namespace: str) -> list[str]:
        return ["ip", "netns", "exec", namespace]

    def __enter__(self) -> Network:
        remove_leftovers()
        self._net = _free_net()
        try:
            self._make()
        except BaseException:
            self._unmake()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._unmake()

    def _unmake(self) -> None:
        with suppress(OSError):  # it may never have been made, or the router was removed first
            _run("ip", "link", "delete", self._outer)
        for _, name in _namespaces():
            if name.startswith(f"{self._key}-"):
                _remove(name)

    def _make(self) -> None:
        _run("ip", "netns", "add", self._router)
        _run(*self._in(self._router), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for host, subnet in self._subnet.items():
            router = f"10.{self._net}.{subnet}.1"
            link = ("ip", "-n", self._router, "link", "add", f"to{subnet}", "type", "veth", "peer", "name")
            if host == COORDINATOR:
                # Into this process's namespace, which has no name, by a process in it.
                _run(*link, self._outer)
                _run("ip", "-n", self._router, "link", "set", self._outer, "netns", str(os.getpid()))
                inner = ["ip"]
            else:
                name = self._name(host)
                _run("ip", "netns", "add", name)
                _run(*link, "eth0", "netns", name)
                inner = ["ip", "-n", name]
                _run(*inner, "link", "set", "lo", "up")
            _run("ip", "-n", self._router, "address", "add", f"{router}/24", "dev", f"to{subnet}")
            _run("ip", "-n", self._router, "link", "set", f"to{subnet}", "up")
            _run(*inner, "address", "add", f"{self.address(host)}/24", "dev", self._device(host))
            _run(*inner, "link", "set", self._device(host), "up")
            _run(*inner, "route", "add", f"10.{self._net}.0.0/16", "via", router)


def _free_net() -> int:
    """A number N for which nothing here has a route to 10.N.0.0/16."""
    routes = json.loads(_run("ip", "-json", "-4", "route", "show"))
    taken = [ipaddress.ip_network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]
    for step in range(254):
        candidate = 1 + (os.getpid() + step) % 254
        if not any(ipaddress.ip_network(f"10.{candidate}.0.0/16").overlaps(net) for net in taken):
            return candidate
    raise OSError("no network of 10.0.0.0/8 is free")


@contextmanager
def network(*hosts: str) -> Iterator[Network]:
    """A network of these places and the coordinator's, removed after the block."""
    with Network(hosts) as made:
        yield made
