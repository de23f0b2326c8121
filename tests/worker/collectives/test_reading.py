"""Messages that the function's thread reads: who reads when, and what ends a wait that nothing else would."""

from __future__ import annotations

import fcntl
import itertools
import signal
import struct
import termios
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.roles.processes import free_addresses
from tests.waiting import until
from tests.worker.collectives.host import Host, as_member, gang_of
from tests.worker.collectives.hosts import Running, hosts_of, together
from tests.worker.collectives.test_exchange import exchange, processes, read, seen_by, tell

from pscluster.core.errors import FunctionCancelled, MemberTimeoutError, ProtocolError
from pscluster.core.role.options import RoleOptions
from pscluster.core.transport.frames import parts_of
from pscluster.core.transport.tcp.packets import Kind, as_buffers
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.mailbox import Mailbox, Posted
from pscluster.worker.collectives.reading import Reader, Reading, Turns
from pscluster.worker.collectives.replica import ReplicaContext

EVENTS = ("begin", "received", "ask", "give_back", "close", "end")


def test_all_orders_of_events() -> None:
    """The exchange never receives while the function reads, nor the function once it has ended, nor anyone at the end.

    After all orders of six events.
    """
    for events in itertools.product(EVENTS, repeat=6):
        turns, closed, over = Turns(), False, False
        for event in events:
            before, answer = turns.reader, getattr(turns, event)()
            closed, over = closed or event == "close", over or event == "end"
            if event == "begin":
                assert answer == (before is Reader.EXCHANGE_LISTENS), events
            if event == "ask":
                assert answer == (turns.reader is Reader.FUNCTION), events
                assert answer or before is not Reader.EXCHANGE_LISTENS or closed, events
            if before is Reader.EXCHANGE_RECEIVES and event not in ("received", "end"):
                assert turns.reader is before, "a message is received to its end"
            assert not (closed and turns.reader is Reader.FUNCTION), events
            assert not over or turns.reader is Reader.OVER, events


@pytest.mark.parametrize("way", ["tcp", "unix", "tls"])
def test_members_that_all_send_more_than_fits(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that all wait for room to send get what they were sent, after small messages, too; any thread may read.

    TLS does not tell what can be read: there the exchanges' threads do all.
    """
    read_here, real = list[bool](), Reading.wait

    def wait(self: Reading, *how: Any) -> bool:
        read_here.append(real(self, *how))
        return read_here[-1]

    monkeypatch.setattr(Reading, "wait", wait)

    def step(replica: ReplicaContext) -> list[float]:
        found = []
        for size in (1, 10, 800_000, 10, 800_000, 1):
            arrays = [np.full(size, 10.0 * replica.replica_id + to) for to in range(3)]
            found += [float(array[-1]) for array in replica.all_to_all(arrays)]
            found.append(float(replica.all_reduce("sum", np.ones(size))[-1]))
        return found

    with hosts_of(3, tmp_path, way) as hosts:
        for rank, result in enumerate(together(hosts, step)):
            assert result == [rank, 10 + rank, 20 + rank, 3] * 6
    assert any(read_here) == (way != "tls"), "functions have read by themselves"


def test_a_message_that_stops_amid_does_not_keep_a_function_that_is_told_to_stop(tmp_path: Path) -> None:
    """A function that receives a message, the rest of which does not come, stops when it is told to."""
    with hosts_of(2, tmp_path) as hosts:

        def step(replica: ReplicaContext) -> None:
            replica.barrier()
            replica.all_reduce("sum", np.ones(1000))

        running = Running(hosts, (None, step))
        opening = worker_pb2.ExchangeRequest(opening=seen_by(hosts, 0).opening(1))
        with exchange(hosts[1], opening) as stream:
            stream.send(*parts_of(worker_pb2.ExchangeRequest(sequence=1)))
            gangs = hosts[1].job.membership.gangs
            until(lambda: any(hosted.readings for hosted in gangs._hosted.values()), "it was accepted")
            ((reading, *_),) = (list(hosted.readings.values()) for hosted in gangs._hosted.values())
            until(lambda: reading._turns.reader is Reader.FUNCTION, "the function reads")
            whole = b"".join(
                as_buffers([(Kind.MESSAGE, parts_of(worker_pb2.ExchangeRequest(sequence=2), [bytes(8000)]))])
            )
            stream._connection._socket.sendall(whole[:4000])  # type: ignore[attr-defined]
            until(reading._receiving.locked, "it receives")
            running.contexts[1].cancel()
            (_, error) = running.results()
    assert isinstance(error, FunctionCancelled), error


def test_a_process_that_freezes_amid_a_message() -> None:
    """The function learns at the deadline that the rest does not come, and who should have sent it."""
    addresses = free_addresses(2)
    host = Host(0, addresses[0], RoleOptions(metrics_port=None))
    try:
        with processes("stops_amid_a_message", [1], addresses) as started:
            process = started[1]
            members = [(addresses[0], host.incarnation), (addresses[1], read(process))]
            tell(process, members)

            def step(replica: ReplicaContext) -> None:
                replica.barrier()
                replica.barrier()
                assert read(process) == "ready"
                (hosted,) = host.job.membership.gangs._hosted.values()
                reading = hosted.readings[1]
                until(reading.ask, "this thread may read")
                until(lambda: pending(reading) and sleeps(process.pid), "it waits to send more")
                process.send_signal(signal.SIGSTOP)
                replica.broadcast(np.ones(4_000_000), source=1)

            with pytest.raises(MemberTimeoutError, match=rf"broadcast.*replica 1 \(worker 1 at {addresses[1]}\)"):
                as_member(host, gang_of(members, 0, timeout=0.6), step)
    finally:
        host.close()


def pending(reading: Reading) -> int:
    """How many bytes can be received."""
    call: Any = reading._call
    (count,) = struct.unpack("i", fcntl.ioctl(call._connection.fileno(), termios.FIONREAD, bytes(4)))
    return int(count)


def sleeps(pid: int) -> bool:
    """Whether the first thread of a process waits for something."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_more_than_fits_before_what_is_awaited() -> None:
    """A function's thread that reads does not wait for room, which it alone could make: the sender is refused."""
    mailbox = Mailbox(0, ["replica 0", "replica 1"], lambda _posted: None, room_bytes=2000)
    posted = Posted(1, 1, memoryview(bytearray(8)), lambda _posted: None)
    with mailbox.reading_here(posted):
        assert mailbox.arrive(1, 1, 1000) is not None
        with pytest.raises(ProtocolError, match="more than there is room for"):
            mailbox.arrive(1, 1, 1000)
    waiting = threading.Thread(target=mailbox.arrive, args=(1, 1, 1000), daemon=True)
    waiting.start()
    until(lambda: mailbox._sources[1].room is not None, "another thread is held back")
    mailbox.close()
    waiting.join(10)
    assert not waiting.is_alive()
