"""Exchanges on the wire: what is refused, before anything is read of it, and members that die, freeze or are late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.roles.processes import free_addresses
from tests.waiting import until
from tests.worker.collectives import member
from tests.worker.collectives.host import Host, as_member, gang_of
from tests.worker.collectives.hosts import TOKEN, Running, hosts_of

from pscluster.core.context import FunctionContext
from pscluster.core.errors import (
    MemberTimeoutError,
    MemberUnavailableError,
    NotPermittedError,
    ProtocolError,
    PsClusterError,
    StaleError,
    UnavailableError,
    from_rpc,
)
from pscluster.core.ids import make_identity
from pscluster.core.role.options import RoleOptions
from pscluster.core.security import access
from pscluster.core.transport.base import Stream
from pscluster.core.transport.frames import parts_of
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives import incoming
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.gang import Gang, Member
from pscluster.worker.collectives.membership import Membership
from pscluster.worker.collectives.replica import ReplicaContext

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", params=["tcp", "grpc"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two workers, with a data plane and without."""
    with hosts_of(2, tmp_path_factory.mktemp("pair"), request.param) as hosts:
        yield hosts


def seen_by(hosts: list[Host], rank: int, **how: Any) -> Gang:
    """Their gang, as one of them sees it."""
    return Gang.of(gang_of([(host.address, host.incarnation) for host in hosts], rank, **how))


@contextmanager
def exchange(host: Host, first: worker_pb2.ExchangeRequest) -> Iterator[Stream]:
    """An exchange with this worker that opens with this message."""
    pool = ConnectionPool(make_identity("worker", 0), RoleOptions(token=TOKEN))
    stream = pool.open(Member(1, host.role._servers.index, host.address, host.incarnation), lambda _call: None)
    try:
        stream.send(*parts_of(first))
        yield stream
    finally:
        stream.close()
        pool.close()


def outcome(stream: Stream) -> worker_pb2.ExchangeReply | PsClusterError:
    """What the worker answers."""
    try:
        return worker_pb2.ExchangeReply.FromString(stream.receive())
    except grpc.RpcError as error:
        return from_rpc(error, "worker 1")


def waits(replica: ReplicaContext) -> None:
    """Wait for the other member, which says nothing."""
    replica.barrier()


def barrier(replica: ReplicaContext) -> None:
    """Meet the other member."""
    replica.barrier()


@contextmanager
def waiting_member(hosts: list[Host], generation: int) -> Iterator[Running]:
    """Replica 1 runs, and waits for replica 0."""
    running = Running(hosts, (None, waits), generation=generation)
    gangs = hosts[1].job.membership.gangs
    try:
        until(lambda: any(known.mailbox for known in gangs._hosted.values()), "the function has started")
        yield running
    finally:
        running.contexts[1].cancel()
        running.results()


def changed(**fields: Any) -> Callable[[worker_pb2.Opening], None]:
    """Change an opening after its proof was made."""

    def change(opening: worker_pb2.Opening) -> None:
        for name, value in fields.items():
            setattr(opening, name, value)

    return change


REFUSED: dict[str, tuple[dict[str, Any], Callable[[worker_pb2.Opening], None], type[PsClusterError], str]] = {
    "another secret": ({"secret": bytes(32)}, changed(), NotPermittedError, "does not know the secret"),
    "no proof": ({}, changed(proof=b""), NotPermittedError, "does not know the secret"),
    "another source": ({}, changed(source=1), NotPermittedError, "does not know the secret"),
    "another target": ({}, changed(target=0), NotPermittedError, "does not know the secret"),
    "an earlier generation": ({"generation": 49}, changed(), StaleError, "generation 49 of this gang is over"),
    "another incarnation": ({}, changed(incarnation=5), StaleError, "this attachment to the worker is over"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(pair: list[Host], case: str) -> None:
    """An exchange that does not prove to be a member's of this generation is refused; nothing of it reaches anyone."""
    how, change, error, words = REFUSED[case]
    with waiting_member(pair, 50 + next(_numbers)):
        generation = max(known.gang.generation for known in pair[1].job.membership.gangs._hosted.values())
        opening = seen_by(pair, 0, **{"generation": generation, **how}).opening(1)
        change(opening)
        with exchange(pair[1], worker_pb2.ExchangeRequest(opening=opening)) as stream:
            stream.send(*parts_of(worker_pb2.ExchangeRequest(sequence=1), [bytes(100)]))
            refusal = outcome(stream)
        assert type(refusal) is error, refusal
        assert words in str(refusal)
        (hosted,) = (known for known in pair[1].job.membership.gangs._hosted.values() if known.mailbox)
        assert hosted.mailbox is not None
        assert hosted.mailbox.kept_bytes == 0


_numbers = iter(range(1000))


def test_a_second_exchange_of_one_source_is_refused(pair: list[Host]) -> None:
    """A member has one exchange with another: a repeated opening, which anyone could record, opens nothing."""
    generation = 50 + next(_numbers)
    with waiting_member(pair, generation):
        opening = worker_pb2.ExchangeRequest(opening=seen_by(pair, 0, generation=generation).opening(1))
        (hosted,) = (known for known in pair[1].job.membership.gangs._hosted.values() if known.mailbox)
        with exchange(pair[1], opening):
            until(lambda: hosted._joined, "the first one is accepted")
            with exchange(pair[1], opening) as second:
                refusal = outcome(second)
    assert type(refusal) is StaleError
    assert "already" in str(refusal)


@pytest.mark.parametrize(
    "first",
    [
        worker_pb2.ExchangeRequest(),
        worker_pb2.ExchangeRequest(sequence=1),
        worker_pb2.ExchangeRequest(opening=worker_pb2.Opening(proof=bytes(5000))),
    ],
    ids=["empty", "no opening", "too large"],
)
def test_an_opening_that_is_none(pair: list[Host], first: worker_pb2.ExchangeRequest) -> None:
    """A first message that opens nothing, or is too large to be one, is refused."""
    with exchange(pair[1], first) as stream:
        refusal = outcome(stream)
    assert isinstance(refusal, NotPermittedError | StaleError | ProtocolError), refusal


def test_exchanges_that_wait_are_bounded(pair: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number may wait for gangs to start, and none whose caller has gone."""
    monkeypatch.setattr(incoming, "MAX_WAITING_EXCHANGES", 1)
    generation = 50 + next(_numbers)
    gangs = pair[1].job.membership.gangs
    opening = worker_pb2.ExchangeRequest(opening=seen_by(pair, 0, generation=generation).opening(1))
    with exchange(pair[1], opening):
        until(lambda: gangs._waiting == 1, "it waits")
        with exchange(pair[1], opening) as second:
            refusal = outcome(second)
        assert type(refusal) is UnavailableError
        assert "which is the limit" in str(refusal)
    until(lambda: not gangs._waiting, "it has gone")


def test_a_member_learns_late_how_another_has_ended(pair: list[Host]) -> None:
    """A member that asks after another one's function has ended is told how, and how much it was sent."""
    generation = 50 + next(_numbers)
    with waiting_member(pair, generation):
        pass
    with exchange(pair[1], worker_pb2.ExchangeRequest(opening=seen_by(pair, 0, generation=generation).opening(1))) as (
        stream
    ):
        reply = outcome(stream)
        assert isinstance(reply, worker_pb2.ExchangeReply)
        assert reply.kind == worker_pb2.ExchangeReply.STOPPED
        stream.send(*parts_of(worker_pb2.ExchangeRequest(sequence=1), [bytes(1 << 20)]))
        stream.end()
        end = outcome(stream)
    assert "OK" in str(end), "what comes after the end is dropped"


def test_a_function_that_is_stopped_when_it_has_ended_breaks_no_connection_of_the_next(pair: list[Host]) -> None:
    """Connections are kept for the next gang, whose messages would be lost."""
    for _ in range(2):
        gang = Running(pair, [barrier, barrier], generation=50 + next(_numbers), timeout=10.0)
        assert gang.results() == [None, None]
        until(lambda: "exchange" not in [thread.name for thread in threading.enumerate()], "its exchanges are over")
        for context in gang.contexts:
            context.cancel()


def test_a_worker_may_call_it() -> None:
    """A worker's certificate opens exchanges, and none of a worker's other methods."""
    assert access.may_call("worker", "/pscluster.v1.Worker/Exchange")
    assert not access.may_call("ps", "/pscluster.v1.Worker/Exchange")
    assert not access.may_call("tool", "/pscluster.v1.Worker/Exchange")
    assert not access.may_call("worker", "/pscluster.v1.Worker/Steps")


def test_the_end_of_the_attachment(tmp_path: Path) -> None:
    """When a worker's job ends, its exchanges break, and the others learn that it is gone."""
    with hosts_of(2, tmp_path) as hosts:
        running = Running(hosts, (waits, None))
        gangs = hosts[1].job.membership.gangs
        until(lambda: gangs._waiting, "an exchange waits there")
        hosts[1].role.job_ended()
        (error, _) = running.results()
    assert isinstance(error, StaleError), error
    assert "this attachment to the worker is over" in str(error)


# Processes


@contextmanager
def processes(step: str, ranks: list[int], addresses: list[str]) -> Iterator[dict[int, subprocess.Popen[str]]]:
    """Workers in processes of their own, which run a function of `member`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = {
        rank: subprocess.Popen(
            [sys.executable, member.__file__, str(rank), addresses[rank], step],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in ranks
    }
    try:
        yield started
    finally:
        for process in started.values():
            with suppress(ProcessLookupError):
                process.kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            process.wait()


def read(process: subprocess.Popen[str]) -> Any:
    """The next line that a process prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return line.strip() if not line[:1].isdigit() and line[:1] not in "[n" else json.loads(line)


def tell(process: subprocess.Popen[str], members: list[tuple[str, int]]) -> None:
    """Tell a process who the members are."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(members) + "\n")
    process.stdin.flush()


def test_members_in_processes() -> None:
    """Three processes sum small and large arrays."""
    addresses = free_addresses(3)
    with processes("sums", [0, 1, 2], addresses) as started:
        members = [(addresses[rank], read(started[rank])) for rank in range(3)]
        for process in started.values():
            tell(process, members)
        expected = [6.0 * size for size in (1, 1000, 300_000)]
        assert [read(process) for process in started.values()] == [expected] * 3


@pytest.mark.parametrize("how", ["killed", "frozen while receiving", "frozen while sending"])
def test_a_process_that_dies_or_freezes(how: str) -> None:
    """A killed member is reported at once, a frozen one at the deadline: by name, with the operation and the place."""
    addresses = free_addresses(2)
    options = RoleOptions(metrics_port=None)
    host = Host(0, addresses[0], options)
    try:
        with processes("stops_answering", [1], addresses) as started:
            process = started[1]
            members = [(addresses[0], host.incarnation), (addresses[1], read(process))]
            tell(process, members)

            def step(replica: ReplicaContext) -> None:
                replica.barrier()
                assert read(process) == "ready"
                process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                if how == "frozen while sending":
                    replica.broadcast(np.ones(4_000_000))
                replica.all_reduce("sum", 1)

            gang = gang_of(members, 0, timeout=30.0 if how == "killed" else 0.6)
            with pytest.raises(MemberUnavailableError) as caught:
                as_member(host, gang, step)
        assert caught.type is (MemberUnavailableError if how == "killed" else MemberTimeoutError)
        said = str(caught.value)
        assert f"replica 1 (worker 1 at {addresses[1]})" in said
        assert "at test_exchange.py:" in said
        assert ("broadcast" if how == "frozen while sending" else "all_reduce") in said
    finally:
        host.close()


def test_a_mailbox_is_made_at_first_use() -> None:
    """By the function or by what arrives, once; of one whose function has ended, nothing is kept."""
    pool = ConnectionPool(make_identity("worker", 0), RoleOptions())
    membership = Membership(pool)
    context = FunctionContext(function=1, attempt=1, worker_index=0, num_workers=2)
    try:
        with membership.member(gang_of([("a:1", 1), ("b:1", 2)], 0), context):
            (hosted,) = membership.gangs._hosted.values()
            links: Any = context.replica._gang
            assert links._mailbox is None
            context.cancel()  # there is no thread to wake
            assert links._mailbox is None
            made = hosted.mailbox
            assert made is links.mailbox
            assert made is not None
            assert made.arrive(1, 1, 8) is not None
        assert hosted.mailbox is None
        assert made.arrive(1, 2, 8) is None
        with membership.member(gang_of([("a:1", 1), ("b:1", 2)], 0, generation=2), context):
            links = context.replica._gang
        assert links._mailbox is None
        assert links.mailbox.arrive(1, 1, 8) is None, "what looked for it just before the function ended"
    finally:
        membership.close()
