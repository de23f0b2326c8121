"""A real Ray cluster on this machine, with two nodes that have addresses of their own; for the tests.

Run as a program, since Ray leaves files open in the process that starts it: it takes commands from its standard input,
and answers each with a line.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OTHER, THIRD, FOURTH = "127.0.0.2", "127.0.0.3", "127.0.0.4"
"""Addresses of the second node, and of others in its place. The first one has the machine's own."""


def missing() -> str:
    """Why there can be no Ray here; empty if there can."""
    return "" if importlib.util.find_spec("ray") else 'Ray is not installed: pip install "pscluster[launch]"'


class Nodes:
    """The nodes: a first one, which has the resource "stable", and one that can be removed, which has "away"."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._ask(f"add {OTHER}")
        self.other: str | None = OTHER  # the second node's

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(command, file=self._process.stdin, flush=True)
        while not (answer := self._process.stdout.readline()).startswith("nodes: "):
            assert answer, "the nodes are gone"
        return answer.removeprefix("nodes: ").strip()

    def add(self, address: str) -> None:
        """Add a second node, unless there is one."""
        if self.other is None:
            self._ask(f"add {address}")
            self.other = address

    def remove(self) -> None:
        """Remove the second node, with all that runs on it."""
        self._ask("remove")
        self.other = None

    def close(self) -> None:
        """Stop all nodes."""
        self._process.communicate(timeout=30)


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """Start the nodes; afterwards nothing is left."""
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()


def main() -> None:
    """Start the first node, and do what standard input says until its end."""
    from ray.cluster_utils import Cluster

    # That a node is gone is noticed after 5 s, not half a minute.
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    head = {"num_cpus": 8, "resources": {"stable": 8}, "include_dashboard": False, "_system_config": quick}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    other: Any = None
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "add":
            other = cluster.add_node(num_cpus=2, resources={"away": 4}, node_ip_address=arguments[0])
        else:
            cluster.remove_node(other, allow_graceful=False)
        print("nodes:", cluster.address, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
