"""A crowd of hostile connections to a role of a working cluster: python scripts/hostile.py --connections 10000.

Print, before, during and after it, the role's memory and descriptors, the duration of an authorized call, and the job's
functions per second.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import threading
import time
from pathlib import Path

from google.protobuf.descriptor import ServiceDescriptor
from small_job import small_job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.roles.hostile import bombs, crowd, rubbish, trickle  # noqa: E402
from tests.roles.wire import SERVICES  # noqa: E402

from pscluster.core.limits import raise_descriptor_limit  # noqa: E402
from pscluster.core.transport.channels import NODE_SERVICE, open_channel  # noqa: E402
from pscluster.core.transport.methods import Stub  # noqa: E402
from pscluster.v1 import node_pb2  # noqa: E402

SECONDS = 5.0


def both(address: str, services: tuple[ServiceDescriptor, ...]) -> None:
    """Send rubbish, then bombs."""
    rubbish(address, random.Random(1))
    bombs(address, services)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    arguments = parser.parse_args()
    raise_descriptor_limit()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200
    count = min(arguments.connections, most)
    with small_job(batch=200) as (cluster, rate):

        def say(when: str, job: str) -> None:
            per_second = rate(SECONDS)
            pid = cluster.pids[(job, 0)]
            memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20
            address = cluster.cluster_spec().task_address(job, 0)
            began, tries = time.monotonic(), 0
            while True:
                tries += 1
                channel = open_channel(address, None, cluster.token)
                try:
                    Stub(channel, NODE_SERVICE).status(node_pb2.StatusRequest(), timeout=5)
                    break
                except Exception:  # no slot is free: retry
                    time.sleep(0.05)
                finally:
                    channel.close()
            took = (time.monotonic() - began) * 1000
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            print(
                f"{when:34} {per_second:7.0f} functions/s, {memory:5} MiB, {descriptors:6} descriptors, "
                f"a new connection and call: {took:.0f} ms ({tries} tries)",
                flush=True,
            )

        for job in ("ps", "worker"):
            address = cluster.cluster_spec().task_address(job, 0)
            say(f"{job}: alone", job)
            over = threading.Event()
            slow = threading.Thread(target=trickle, args=(address, 100, over.is_set))
            slow.start()
            begin = time.monotonic()
            with crowd(address, count) as connections:
                print(f"{len(connections):,} connections were opened in {time.monotonic() - begin:.1f} s")
                say(f"{job}: {count:,} connections", job)
            over.set()
            slow.join()
            say(f"{job}: after them", job)
            hostile = threading.Thread(target=both, args=(address, SERVICES[job][:-1]))
            hostile.start()
            say(f"{job}: rubbish and bombs", job)
            hostile.join()
            say(f"{job}: after these", job)


if __name__ == "__main__":
    main()
