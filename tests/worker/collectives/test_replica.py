"""Collectives between real worker services, over each of the transports: what users see."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.waiting import until
from tests.worker.collectives.host import Host, Step, as_member, gang_of
from tests.worker.collectives.hosts import WAYS, Running, hosts_of, together

from pscluster.coordinator import ReduceOp, ReplicaContext, replica_context
from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import FunctionCancelled, MemberUnavailableError, MisuseError, StaleError, UnavailableError
from pscluster.core.transport import transport
from pscluster.core.transport.grpc_streams import GrpcStream
from pscluster.core.transport.tcp import peer
from pscluster.core.transport.tcp.packets import tuned
from pscluster.core.transport.tcp.stream import DataStream
from pscluster.worker.collectives import algorithms
from pscluster.worker.collectives.link import Link
from pscluster.worker.collectives.mailbox import ROOM_BYTES

LARGE = 300_000
SILENT_SECONDS = 0.3
"""How long a worker may be silent: many times longer than its answer takes on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sockets and certificates, with a short path."""
    return tmp_path_factory.mktemp("g")


@pytest.fixture(scope="module", params=WAYS)
def four(request: pytest.FixtureRequest, folder: Path) -> Iterator[list[Host]]:
    """Four workers, that reach each other in one of the ways."""
    with hosts_of(4, folder, request.param) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def three(folder: Path) -> Iterator[list[Host]]:
    """Three workers on the data plane."""
    with hosts_of(3, folder) as hosts:
        yield hosts


@pytest.fixture
def generation() -> int:
    """A number that rises from test to test."""
    _generations.append(len(_generations) + 1)
    return _generations[-1]


_generations: list[int] = []


class Pair(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


@dataclass
class Record:
    """A dataclass."""

    weights: Any
    loss: float


def of_rank(rank: int) -> dict[str, Any]:
    """A structure with leaves of several types and sizes; the dicts' order differs by rank."""
    items: list[tuple[str, Any]] = [
        ("large", np.arange(LARGE, dtype=np.float32) + rank),
        ("record", Record(np.full((2, 3), rank, np.float64), rank + 0.5)),
        ("pair", Pair(np.float32(rank), [np.full(3, rank, np.float32)])),
        ("flag", np.array([rank == 0, True])),
        ("none", np.empty((0, 4), np.float16)),
        ("count", rank),
        ("strided", np.arange(12, dtype=np.int16).reshape(3, 4).T + rank),
    ]
    return dict(items if rank % 2 else reversed(items))


def everything(replica: ReplicaContext) -> dict[str, Any]:
    """Call every collective."""
    rank, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    assert (rank, count) == (replica.replica_id, replica.num_replicas)
    replica.barrier()
    return {
        "sum": replica.all_reduce("sum", of_rank(rank)),
        "mean": replica.all_reduce(
            ReduceOp.MEAN, {"i": rank, "f": np.float32(rank), "h": np.array([rank], np.float16)}
        ),
        "min": replica.all_reduce("MIN", np.array([rank, -rank])),
        "max": replica.all_reduce("max", np.array([rank % 2 == 0])),
        "part": replica.reduce_scatter("sum", np.arange(70_000.0).reshape(7, 10_000) + rank),
        "columns": replica.reduce_scatter("mean", np.arange(18).reshape(3, 6) + rank, axis=-1),
        "gathered": replica.all_gather(np.full((rank, 2), rank)),
        "beside": replica.all_gather({"x": np.full((2, rank * 20_000), rank, np.float32), "n": rank}, axis=-1),
        "exchanged": replica.all_to_all([np.full((to, rank), 10 * rank + to) for to in range(count)]),
        "given": replica.broadcast({"w": np.full(LARGE, rank, np.int8), "b": rank}, source=count - 1),
    }


def test_every_collective(four: list[Host], generation: int) -> None:
    """Each of them returns what NumPy gives for all replicas' values, of the same types, on every transport."""
    results = together(four, everything, generation=generation)
    first = results[0]
    assert not isinstance(first, BaseException), first
    for rank, result in enumerate(results):
        summed = result["sum"]
        assert list(summed) == list(of_rank(rank))
        np.testing.assert_array_equal(summed["large"], np.arange(LARGE, dtype=np.float32) * 4 + 6)
        assert summed["large"].dtype == np.float32
        assert isinstance(summed["record"], Record)
        assert summed["record"].weights.tolist() == [[6.0] * 3] * 2
        assert (summed["record"].loss, summed["count"]) == (8.0, 6)
        assert summed["pair"].a == 6
        assert summed["pair"].b[0].tolist() == [6, 6, 6]
        assert summed["flag"].tolist() == [1, 4]
        assert (summed["none"].shape, summed["none"].dtype) == ((0, 4), np.float16)
        assert (summed["strided"].tolist(), summed["strided"].dtype) == (
            (np.arange(12).reshape(3, 4).T * 4 + 6).tolist(),
            np.int16,
        )
        assert (result["mean"]["i"], result["mean"]["f"], result["mean"]["h"].tolist()) == (1.5, 1.5, [1.5])
        assert result["mean"]["f"].dtype == np.float32
        assert (result["min"].tolist(), result["max"].tolist()) == ([0, -3], [True])
        whole = np.arange(70_000.0).reshape(7, 10_000) * 4 + 6
        np.testing.assert_array_equal(result["part"], np.array_split(whole, 4)[rank])
        columns = np.arange(18).reshape(3, 6) + 1.5
        np.testing.assert_array_equal(result["columns"], np.array_split(columns, 4, axis=1)[rank])
        assert result["gathered"].tolist() == [[n, n] for n in range(4) for _ in range(n)]
        beside = np.concatenate([np.full((2, n * 20_000), n, np.float32) for n in range(4)], axis=1)
        np.testing.assert_array_equal(result["beside"]["x"], beside)
        assert result["beside"]["n"].tolist() == [0, 1, 2, 3]
        assert [each.shape for each in result["exchanged"]] == [(rank, source) for source in range(4)]
        assert [set(each.flat) for each in result["exchanged"][1:]] == [
            {10 * source + rank} if rank else set() for source in (1, 2, 3)
        ]
        assert (set(result["given"]["w"]), result["given"]["b"]) == ({3}, 3)


def test_nothing_is_left_of_a_gang(four: list[Host], generation: int) -> None:
    """When all functions have ended, no thread of an exchange is left, and the next gang uses the same connections."""
    assert together(four, lambda replica: replica.all_reduce("sum", 1), generation=generation) == [4] * 4

    def exchanges() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("exchange")]

    until(lambda: not exchanges(), "the exchanges are over", exchanges)
    for host in four:
        hosted = host.job.membership.gangs._hosted
        assert all(known.mailbox is None for known in hosted.values())
        assert len(hosted) == 1
        links = (link for link in host.job.membership._pool.links if isinstance(link, Link))
        assert not [link for link in links if not link._is_over]


def test_connections_are_kept(three: list[Host], generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second gang of the same workers dials nothing, and nothing goes over gRPC."""
    together(three, lambda replica: replica.all_reduce("sum", np.ones(LARGE)), generation=generation)
    pooled = [one for host in three for one in host.job.membership._pool._connections.values()]
    until(lambda: all(one._transport._idle for one in pooled), "all connections are idle")
    before = {one: list(one._transport._idle) for one in pooled}
    monkeypatch.setattr(transport, "GrpcStream", None)
    results = together(three, lambda replica: replica.all_reduce("sum", 1), generation=generation + 1)
    _generations.append(generation + 1)
    assert results == [3] * 3
    until(lambda: all(one._transport._idle for one in pooled), "all connections are idle")
    assert all(set(one._transport._idle) <= set(before[one]) for one in pooled)


def test_grpc_is_used_where_there_is_no_data_plane(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without a data plane exchange over gRPC."""
    opened: list[str] = []

    class Counted(GrpcStream):
        def __init__(self, channel: Any, path: str, metadata: Any = (), **how: Any) -> None:
            opened.append(path)
            super().__init__(channel, path, metadata, **how)

    monkeypatch.setattr(transport, "GrpcStream", Counted)
    with hosts_of(2, folder, "grpc") as hosts:
        assert together(hosts, lambda replica: replica.all_reduce("sum", 1)) == [2, 2]
    assert set(opened) == {"/pscluster.v1.Worker/Exchange"}
    assert len(opened) == 2


def test_eight_members_and_uneven_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight members reduce, scatter, gather and spread arrays that eight does not divide."""
    monkeypatch.setattr(algorithms, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(algorithms, "SMALL_BYTES", 10_000)

    def step(replica: ReplicaContext) -> tuple[Any, ...]:
        rank = replica.replica_id
        return (
            replica.all_reduce("sum", np.arange(50_001.0) + rank),
            replica.reduce_scatter("max", np.arange(11) + rank),
            replica.all_gather(np.full(rank * 1000, rank)),
            replica.broadcast(np.arange(100_003) * rank, source=5),
        )

    with hosts_of(8, folder) as hosts:
        results = together(hosts, step)
    gathered = np.repeat(np.arange(8), np.arange(8) * 1000)
    for rank, (summed, part, everyone, given) in enumerate(results):
        np.testing.assert_array_equal(summed, np.arange(50_001.0) * 8 + 28)
        np.testing.assert_array_equal(part, np.array_split(np.arange(11) + 7, 8)[rank])
        np.testing.assert_array_equal(everyone, gathered)
        np.testing.assert_array_equal(given, np.arange(100_003) * 5)


def test_two_runs_and_all_replicas_give_the_same_bits(three: list[Host]) -> None:
    """A sum that depends on the order of its terms is the same everywhere, and every time."""

    def step(replica: ReplicaContext) -> bytes:
        random = np.random.default_rng(replica.replica_id)
        small, large = (
            random.standard_normal(100).astype(np.float32),
            random.standard_normal(2 * LARGE).astype(np.float16),
        )
        return b"".join(array.tobytes() for array in replica.all_reduce("sum", [small, large]))

    runs = []
    for _ in range(2):
        _generations.append(len(_generations) + 1)
        runs += together(three, step, generation=_generations[-1])
    assert all(isinstance(run, bytes) for run in runs), runs
    assert len(set(runs)) == 1


def test_one_replica_returns_at_once() -> None:
    """A function that is in no gang is the only replica; its collectives return copies of its own values."""
    with pytest.raises(RuntimeError, match="inside a function that runs on a worker"):
        replica_context()
    value = np.arange(3)
    with running(FunctionContext(function=1, attempt=1, worker_index=0, num_workers=4)):
        replica = replica_context()
        assert replica is replica_context()
        assert (replica.replica_id, replica.num_replicas) == (0, 1)
        found = replica.all_reduce("sum", {"a": value, "b": 2.5})
        assert replica.all_reduce("mean", value).tolist() == [0, 1, 2]
        assert replica.reduce_scatter("max", value).tolist() == [0, 1, 2]
        assert replica.all_gather(value).tolist() == [0, 1, 2]
        assert [each.tolist() for each in replica.all_to_all([value])] == [[0, 1, 2]]
        assert replica.broadcast(value).tolist() == [0, 1, 2]
        replica.barrier()
    assert found["a"] is not value
    assert (found["a"].tolist(), found["b"]) == ([0, 1, 2], 2.5)


def test_threads_of_a_function_see_its_replica(three: list[Host], generation: int) -> None:
    """A thread that a member starts is the same replica."""

    def step(replica: ReplicaContext) -> list[Any]:
        found: list[Any] = []
        # The other functions of this process are on other threads, so it is told which one is its own.
        context = FunctionContext(function=2, attempt=1, worker_index=0, num_workers=3)
        context.replica = replica

        def work() -> None:
            with running(context):
                found.append(replica_context().all_reduce("sum", 1))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found

    assert together(three, step, generation=generation) == [[3]] * 3


WRONG: list[tuple[Any, str]] = [
    (lambda replica: replica.all_reduce("median", 1), "no operation 'median'.*'sum', 'mean', 'min', 'max'"),
    (
        lambda replica: replica.all_reduce("sum", {"a": ["x"]}),
        r"the value\['a'\]\[0\] is a str.* give arrays of numbers",
    ),
    (lambda replica: replica.all_reduce("sum", [[1, 2], None]), "None"),
    (lambda replica: replica.reduce_scatter("sum", 1), "axis 0 of an array with 0 axes"),
    (lambda replica: replica.all_gather(np.ones(2), axis=1), "axis 1 of an array with 1 axes"),
    (lambda replica: replica.all_to_all([1]), "one array per replica: 3, not 1"),
    (lambda replica: replica.all_to_all([1, 2.0, 3]), "float64 and int64"),
    (lambda replica: replica.broadcast(1, source=3), "from replica 3: there are 3"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(three: list[Host], generation: int, call: Step, message: str) -> None:
    """A call that can't be meant is refused before anything is sent."""
    for error in together(three, call, generation=generation):
        with pytest.raises(MisuseError, match=message):
            raise error


def barrier(replica: ReplicaContext) -> None:
    """Call barrier."""
    replica.barrier()


def total(replica: ReplicaContext) -> Any:
    """Call all_reduce."""
    return replica.all_reduce("sum", np.ones(3, np.float32))


DISAGREEING: dict[str, tuple[Sequence[Step], tuple[str, ...]]] = {
    "another operation": ((total, barrier, total), ("all_reduce", "barrier", r"float32\[3\]", "test_replica.py:")),
    "another reduction": (
        (total, total, lambda replica: replica.all_reduce("max", np.ones(3, np.float32))),
        ("max", "sum"),
    ),
    "another shape": (
        (total, lambda replica: replica.all_reduce("sum", np.ones((1, 3), np.float32)), total),
        (r"float32\[3\]", r"float32\[1, 3\]"),
    ),
    "another size": (
        (total, lambda replica: replica.all_reduce("sum", np.ones(LARGE, np.float32)), total),
        (r"float32\[3\]", rf"float32\[{LARGE}\]"),
    ),
    "another type": (
        (total, total, lambda replica: replica.all_reduce("sum", np.ones(3))),
        (r"float32\[3\]", r"float64\[3\]"),
    ),
    "another structure": (
        (lambda replica: replica.all_reduce("sum", {"a": 1}), lambda replica: replica.all_reduce("sum", {"b": 1})) * 2,
        (r"\['a'\]", r"\['b'\]"),
    ),
    "nothing": ((total, lambda _replica: None, total), ("replica 1", "has returned", "all_reduce")),
    "one call less": (
        (lambda replica: [total(replica), total(replica)], total, lambda replica: [total(replica), total(replica)]),
        ("has returned", "replica 1"),
    ),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_members_that_disagree(three: list[Host], generation: int, case: str) -> None:
    """Where members make different calls, all that wait learn which replica does what, and where: none hangs."""
    steps, words = DISAGREEING[case]
    results = together(three, *steps[:3], generation=generation)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert errors
    assert {type(error) for error in errors} == {MisuseError}, errors
    assert any(isinstance(results[rank], MisuseError) for rank in (0, 2))
    said = " ".join(map(str, errors))
    for word in ("the replicas disagree", "the same order", *words):
        assert re.search(word, said), said


def test_a_member_that_fails(three: list[Host], generation: int) -> None:
    """The others learn at once that a function has failed, and how."""

    def fail(replica: ReplicaContext) -> None:
        replica.barrier()
        raise ValueError("no such luck")

    def wait(replica: ReplicaContext) -> None:
        replica.barrier()
        replica.all_reduce("sum", 1)

    results = together(three, wait, fail, wait, generation=generation)
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert type(results[rank]) is MemberUnavailableError
        assert isinstance(results[rank], UnavailableError)
    assert any("replica 1 (worker 1 at 127.0.0.1:" in str(results[rank]) for rank in (0, 2))
    assert any("ValueError: no such luck" in str(results[rank]) for rank in (0, 2))
    assert "all_reduce(sum) at test_replica.py:" in str(results[0])


def test_a_member_whose_function_does_not_start(
    three: list[Host], generation: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is awaited while its worker answers, and the log names it, until the others are told to stop."""
    others = Running(three, (total, None, total), generation=generation, timeout=SILENT_SECONDS)
    expected = "replica 0 waits: replica 1 has sent nothing for 0.3 s, though its worker answers: it computes, or hangs"
    until(lambda: caplog.messages.count(expected) > 1, "it is named")
    for context in others.contexts:
        context.cancel()
    assert all(isinstance(others.results()[rank], FunctionCancelled) for rank in (0, 2))


@pytest.mark.parametrize("sends", [False, True], ids=["receiving", "sending"])
def test_a_member_that_computes_is_awaited(
    four: list[Host], generation: int, sends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """For longer than its worker may be silent, by one that receives of it, or has to send it much."""
    begun, over = threading.Barrier(2), threading.Event()

    def step(replica: ReplicaContext) -> float:
        if replica.replica_id == sends:
            replica.barrier()
            begun.wait(60)
            assert over.wait(60)
        else:
            replica.barrier()
            begun.wait(60)
        return float(replica.broadcast(np.full(20 * LARGE, replica.replica_id + 1.0))[0])

    both = Running(four[:2], (step, step), generation=generation, timeout=SILENT_SECONDS)
    if sends:
        links = four[0].job.membership._pool.links
        until(lambda: [link for link in links if isinstance(link, Link) and link._liveness.answered], "it is probed")
    else:
        until(lambda: any("waits: replica 0 has sent nothing" in message for message in caplog.messages), "it waits")
    over.set()
    assert both.results() == [1.0, 1.0]


def test_what_was_sent_last_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks after its sender has returned is noticed at once."""
    returned = threading.Event()
    sizes = ROOM_BYTES - (8 << 10), 150 << 10  # the second one is not read before it is awaited

    def small(connected: socket.socket) -> socket.socket:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        return tuned(connected)

    def send(replica: ReplicaContext) -> None:
        replica.barrier()
        for size in sizes:
            replica.broadcast(np.ones(size, np.int8))

    def receive(replica: ReplicaContext) -> None:
        replica.barrier()
        assert returned.wait(60)
        (link,) = (link for link in hosts[0].job.membership._pool.links if isinstance(link, Link))
        stream = link._stream
        assert isinstance(stream, DataStream)
        link.cancel()
        until(lambda: stream._connection.fileno() < 0, "it is gone, with what has not arrived")
        for size in sizes:
            replica.broadcast(np.ones(size, np.int8))

    monkeypatch.setattr(peer, "tuned", small)
    with hosts_of(2, folder) as hosts:
        both = Running(hosts, (send, receive), timeout=1000.0)
        both._threads[0].join(60)
        assert not both._threads[0].is_alive()
        returned.set()
        results = both.results()
    assert results[0] is None
    assert type(results[1]) is MemberUnavailableError
    assert "replica 0" in str(results[1])


def test_a_function_starts_late(three: list[Host], generation: int) -> None:
    """What the others send before a function has started waits for it."""
    places = [(host.address, host.incarnation) for host in three]
    others = Running(three, (total, None, total), generation=generation)
    gangs = three[1].job.membership.gangs
    until(lambda: gangs._waiting, "an exchange waits")
    late = as_member(three[1], gang_of(places, 1, generation=generation), total)
    results = others.results()
    for result in (results[0], late, results[2]):
        assert result.tolist() == [3, 3, 3]
    assert not gangs._waiting


@pytest.mark.parametrize("size", [3, 10 * LARGE], ids=["receiving", "sending"])
def test_a_function_that_is_told_to_stop(
    four: list[Host], generation: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that waits for a message, or to send one, stops when it is told to; the others learn of it."""
    monkeypatch.setattr(algorithms, "PIECE_BYTES", ROOM_BYTES // 8)  # a piece as large as the room would not be kept
    begun, over = threading.Barrier(3), threading.Event()

    def wait(replica: ReplicaContext) -> None:
        replica.barrier()
        begun.wait(60)
        replica.broadcast(np.ones(size))
        replica.barrier()

    def be_busy(replica: ReplicaContext) -> None:
        replica.barrier()
        begun.wait(60)
        assert over.wait(60)

    running_ = Running(four[:2], (wait, be_busy), generation=generation)
    begun.wait(60)
    (hosted,) = four[1].job.membership.gangs._hosted.values()
    assert hosted.mailbox is not None
    mailbox = hosted.mailbox
    reading = hosted.readings.get(0)
    if reading is not None:
        reading.give_back()  # as if it waited for another member now
    until(lambda: mailbox.kept_bytes > min(ROOM_BYTES // 2, size), "the other one has what it was sent")
    assert mailbox.kept_bytes <= ROOM_BYTES, "the sender is held back"
    running_.contexts[0].cancel()
    running_._threads[0].join(60)
    assert not running_._threads[0].is_alive()
    over.set()
    results = running_.results()
    assert isinstance(results[0], FunctionCancelled)
    assert results[1] is None


def test_an_error_is_the_last_collective(three: list[Host], generation: int) -> None:
    """After a collective has failed, no other is begun: the members' calls would be out of step."""

    def step(replica: ReplicaContext) -> None:
        if replica.replica_id == 1:
            raise ValueError("over")
        with pytest.raises(MemberUnavailableError):
            replica.barrier()
        replica.all_reduce("sum", 1)

    results = together(three, step, generation=generation)
    for rank in (0, 2):
        with pytest.raises(MisuseError, match="an earlier collective of this function has failed"):
            raise results[rank]


def test_two_threads_at_once(three: list[Host], generation: int) -> None:
    """A second thread's collective, while one is under way, is refused: their order would be any."""
    over = threading.Event()

    def step(replica: ReplicaContext) -> None:
        if replica.replica_id != 0:
            assert over.wait(60)
            replica.barrier()
            return
        thread = threading.Thread(target=replica.barrier, daemon=True)
        thread.start()
        links = replica._gang
        assert links is not None
        until(lambda: links._busy, "the other thread waits")
        try:
            with pytest.raises(MisuseError, match="another thread of this function is in barrier"):
                replica.all_reduce("sum", 1)
        finally:
            over.set()
            thread.join()

    assert together(three, step, generation=generation) == [None] * 3


def test_an_earlier_generation_is_refused(three: list[Host], generation: int) -> None:
    """A gang that was placed again can't be joined by, nor run as, an earlier one."""
    _generations.append(generation + 1)
    assert together(three, barrier, generation=generation + 1) == [None] * 3
    results = together(three, barrier, generation=generation)
    assert {type(result) for result in results} == {StaleError}
