"""A worker in a process of its own, which runs one function as a member: `python member.py RANK ADDRESS STEP`.

Prints its incarnation, reads the members as JSON, runs the function of that name below, and prints its result.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import numpy as np
from tests.worker.collectives.host import Host, as_member, gang_of

from pscluster.core.role.options import RoleOptions
from pscluster.worker.collectives.replica import ReplicaContext


def sums(replica: ReplicaContext) -> Any:
    """Sum some arrays, small and large."""
    return [
        float(replica.all_reduce("sum", np.full(size, replica.replica_id + 1.0)).sum()) for size in (1, 1000, 300_000)
    ]


def stops_answering(replica: ReplicaContext) -> None:
    """Take part in one collective, and never in another."""
    replica.barrier()
    print("ready", flush=True)
    signal.pause()


def stops_amid_a_message(replica: ReplicaContext) -> None:
    """Take part in two collectives, and send more than fits in a third."""
    replica.barrier()
    replica.barrier()
    print("ready", flush=True)
    replica.broadcast(np.ones(4_000_000), source=1)


def main() -> None:
    """Be a member."""
    rank, address, step = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    host = Host(rank, address, RoleOptions(metrics_port=None))
    print(host.incarnation, flush=True)
    members = json.loads(sys.stdin.readline())
    result = as_member(host, gang_of(members, rank), globals()[step])
    print(json.dumps(result), flush=True)
    sys.stdin.readline()  # the others may not have received yet what this one has sent last
    host.close()


if __name__ == "__main__":
    main()
