"""Measure what unauthenticated callers cost a job: python scripts/unauthenticated.py --rounds 60.

A cluster's job runs for a second beside a loop that is limited to half a core, then for a second beside a client,
limited to half a core, that calls the server without a token on 32 connections, then beside the loop, and so on. Print
the job's rate beside the callers as a share of that beside the loop, and what both cost the server.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from small_job import small_job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.roles.hostile import PREFACE, frame, head, opened  # noqa: E402

SHARE = 0.5
_DATA, _RST_STREAM, _SETTINGS, _END = 0, 3, 4, 1
_PATH = "/pscluster.v1.ParameterServer/Session"
_EMPTY = b"\x0f\x28\x00"  # a name from HPACK's table, and an empty value


class Share:
    """Limits this process to its share of a core, counted from its last SIGCONT."""

    def __init__(self) -> None:
        self._begin()
        signal.signal(signal.SIGCONT, self._begin)

    def _begin(self, *_: object) -> None:
        self._had, self._since = time.process_time(), time.monotonic()

    def rest(self) -> None:
        """Sleep until the share is no longer exceeded."""
        over = time.process_time() - self._had - SHARE * (time.monotonic() - self._since)
        if over > 0.002:
            time.sleep(over / SHARE)


class Caller:
    """A connection with one call after another, without a token."""

    def __init__(self, address: str, pairs: int) -> None:
        self._address, self._pairs = address, pairs
        self.calls = self.connections = 0
        self.socket: socket.socket
        self.open()

    def open(self) -> None:
        """Connect, and call."""
        self.socket = opened(self._address)
        self.socket.sendall(PREFACE + frame(_SETTINGS, 0, 0))
        self._stream, self._buffer = -1, b""
        self.connections += 1
        self._call()

    def _call(self) -> None:
        self._stream += 2
        self.calls += 1
        data = head(_PATH, self._stream)
        if self._pairs:
            block = data[9:] + _EMPTY * self._pairs
            data = b""
            while block or not data:
                kind = 9 if data else 1
                data += frame(kind, 4 if len(block) <= 16384 else 0, self._stream, block[:16384])
                block = block[16384:]
        self.socket.sendall(data + frame(_DATA, _END, self._stream))

    def react(self) -> None:
        """Read the received frames; call again if the call has ended, and reconnect if the connection has."""
        try:
            data = self.socket.recv(1 << 16)
            self._buffer += data
            if not data:
                raise ConnectionResetError
            while len(self._buffer) >= 9 and len(self._buffer) >= 9 + int.from_bytes(self._buffer[:3]):
                length, kind, flags = int.from_bytes(self._buffer[:3]), self._buffer[3], self._buffer[4]
                ended = int.from_bytes(self._buffer[5:9]) == self._stream
                self._buffer = self._buffer[9 + length :]
                if kind == _SETTINGS and not flags:
                    self.socket.sendall(frame(_SETTINGS, 1, 0))
                elif ended and (kind == _RST_STREAM or (kind == 1 and flags & _END)):
                    self._call()
        except OSError:
            self.socket.close()
            self.open()


def call(address: str, count: int, pairs: int, *, fresh: bool) -> None:
    """Call until killed; print every second the number of calls and connections."""
    callers = [Caller(address, pairs) for _ in range(count)]
    share = Share()
    with selectors.DefaultSelector() as selector:
        for caller in callers:
            selector.register(caller.socket, selectors.EVENT_READ, caller)
        printed = time.monotonic()
        while True:
            if time.monotonic() > printed + 1:
                printed = time.monotonic()
                calls = sum(caller.calls for caller in callers)
                connections = sum(caller.connections for caller in callers)
                print(f"{calls:,} calls on {connections:,}", flush=True)
            for key, _ in selector.select(1):
                caller = key.data
                old = caller.socket
                selector.unregister(old)
                with suppress(OSError):
                    if fresh:
                        old.close()
                        caller.open()
                    else:
                        caller.react()
                selector.register(caller.socket, selectors.EVENT_READ, caller)
                share.rest()


def burn() -> None:
    """Use half a core, and nothing else, until killed."""
    share = Share()
    while True:
        sum(range(10_000))
        share.rest()


class Other:
    """Another process of this program, which runs only within `working`."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
        time.sleep(3)  # its start must not count as load
        self._process.send_signal(signal.SIGSTOP)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let it run within the block."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def end(self) -> str:
        """Kill it, and return the last line that it printed."""
        self._process.kill()
        return self._process.communicate()[0].strip().rpartition("\n")[2]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=0, help="Empty pairs of metadata in each call.")
    parser.add_argument("--fresh", action="store_true", help="Use a new connection for each call.")
    parser.add_argument("--call", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--burn", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.burn:
        burn()
    if arguments.call:
        call(arguments.call, arguments.connections, arguments.pairs, fresh=arguments.fresh)
    with small_job(batch=50) as (cluster, rate):

        def cpu() -> float:
            fields = Path(f"/proc/{cluster.pids['ps', 0]}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        address = cluster.cluster_spec().task_address("ps", 0)
        more: tuple[str, ...] = ("--connections", str(arguments.connections), "--pairs", str(arguments.pairs))
        if arguments.fresh:
            more = (*more, "--fresh")
        rate(2)
        kinds = {"loop": Other("--burn"), "callers": Other("--call", address, *more)}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        shares: dict[str, list[float]] = {kind: [] for kind in kinds}
        try:
            for _ in range(arguments.rounds):
                for kind, other in kinds.items():
                    with other.working():
                        begin, before = time.monotonic(), cpu()
                        rates[kind].append(rate(arguments.seconds))
                        shares[kind].append((cpu() - before) / (time.monotonic() - begin))
        finally:
            printed = [other.end() for other in kinds.values()][-1]
    ratios = [ours / theirs for ours, theirs in zip(rates["callers"], rates["loop"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    for kind in kinds:
        print(
            f"{kind}: {statistics.mean(rates[kind]):.0f} functions/s, server {statistics.mean(shares[kind]):.2f} core"
        )
    print(f"the callers made {printed} connections in {arguments.rounds * arguments.seconds:.0f} s and left ", end="")
    print(f"{sum(rates['callers']) / sum(rates['loop']):.2f} of the rate beside the loop", end="")
    print(f" (median of rounds {middle:.2f}, quartiles {low:.2f} and {high:.2f})")


if __name__ == "__main__":
    main()
