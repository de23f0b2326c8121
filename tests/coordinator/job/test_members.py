"""Which worker is which task: a state machine, and the rules for where a worker may be."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.conftest import search
from tests.fakes import FakeCall
from tests.roles.messages import messages

from pscluster.coordinator.job.members import PENDING_SECONDS, Claim, Members
from pscluster.coordinator.job.registration import BURST, RATE, RateLimit, Registration, parse_ranges, place_of
from pscluster.core.errors import (
    BusyError,
    ConfigurationError,
    ProtocolError,
    PsClusterError,
    RefusedError,
    UnavailableError,
    VersionMismatchError,
)
from pscluster.core.ids import make_identity
from pscluster.core.role.options import RoleOptions
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import coordinator_pb2, node_pb2

LIMIT = 4
secrets = st.integers(0, 5).map(lambda number: bytes([number]) * 16)


class MembersMachine(RuleBasedStateMachine):
    """Workers that claim, come up, die and leave in any order, against a dict of who has which index."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Members([0], LIMIT)
        self.owners: dict[int, bytes] = {0: b""}
        self.since: dict[int, float] = {}
        self.up: set[int] = set()
        self.names: dict[str, int] = {}
        self.now = 0.0

    def claim(self, claim: Claim) -> int | None:
        """Claim, and check that nobody who is there has lost its index."""
        before = self.members.indices
        try:
            index = self.members.claim(claim, self.now, self.up.__contains__)
        except (BusyError, RefusedError):
            assert self.members.indices == before
            return None
        owner = self.owners.get(index)
        if owner is not None and owner != claim.secret:
            assert index not in self.up, "it was taken from a worker that is connected"
            assert self.now - self.since.get(index, -PENDING_SECONDS) >= PENDING_SECONDS, "it has just registered"
            assert claim.task or index == claim.last_index or index == 0
        self.owners[index], self.since[index] = claim.secret, self.now
        if claim.task or owner is None:  # a name whose worker is away gives way if no other index is left
            self.names = {other: at for other, at in self.names.items() if at != index and other != claim.task}
        if claim.task:
            self.names[claim.task] = index
        return index

    @rule(secret=secrets)
    def any_task(self, secret: bytes) -> None:
        known = {self.owners[index]: index for index in self.owners}
        if (index := self.claim(Claim(secret))) is not None and secret in known:
            assert self.owners[index] == secret
        free = [index for index in range(LIMIT) if index not in self.members.indices]
        if index is None:
            assert not free

    @rule(secret=secrets, name=st.sampled_from(["a", "b", "trainer-2"]))
    def by_name(self, secret: bytes, name: str) -> None:
        known = self.names.get(name)
        assert self.claim(Claim(secret, name)) in ((None, known) if known is not None else (None, *range(LIMIT)))

    @rule(secret=secrets, index=st.integers(0, LIMIT + 1))
    def by_index(self, secret: bytes, index: int) -> None:
        got = self.claim(Claim(secret, str(index)))
        assert got in (None, index)
        assert index < LIMIT or got is None

    @rule(secret=secrets, last=st.integers(0, LIMIT - 1))
    def returns(self, secret: bytes, last: int) -> None:
        was_free, named = last not in self.owners, set(self.names.values())
        index = self.claim(Claim(secret, last_index=last))
        if was_free and last not in named and len(self.owners) <= LIMIT:
            assert index in (None, last)

    @rule(index=st.integers(0, LIMIT - 1))
    def comes_up(self, index: int) -> None:
        if index in self.owners:
            self.up.add(index)
            self.since.pop(index, None)
            self.members.came_up(index)

    @rule(index=st.integers(0, LIMIT - 1))
    def goes_down(self, index: int) -> None:
        self.up.discard(index)

    @rule(index=st.integers(0, LIMIT - 1))
    def leaves(self, index: int) -> None:
        self.up.discard(index)
        self.owners.pop(index, None)
        self.since.pop(index, None)
        self.members.left(index)

    @rule(seconds=st.sampled_from([0.5, PENDING_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def agrees(self) -> None:
        assert self.members.indices == sorted(self.owners)
        assert len(self.members.indices) <= LIMIT
        assert len(self.members._names) <= LIMIT, "what is kept is bounded"


MembersMachine.TestCase.settings = search(100, 40)
test_members = MembersMachine.TestCase


def claim(members: Members, number: int, task: str = "", last: int | None = None, up: int = -1) -> int:
    """Claim a task, with a secret of this number."""
    return members.claim(Claim(bytes([number]) * 16, task, last), 100.0 * number, lambda index: index == up)


def test_a_name_keeps_its_index() -> None:
    """A fresh worker gets the lowest index that is free and nobody's; a name gets its own again."""
    members = Members([])
    assert [claim(members, number) for number in (1, 2)] == [0, 1]
    assert claim(members, 3, "pod-c") == 2
    members.left(1)
    members.left(2)
    assert claim(members, 4) == 1
    assert claim(members, 5) == 3, "2 is kept for pod-c"
    assert claim(members, 6, "pod-c") == 2
    with pytest.raises(BusyError, match="worker 2 is another process, which is in the cluster now"):
        claim(members, 7, "pod-c", up=2)
    assert claim(members, 6, "pod-c", up=2) == 2, "the process itself, which proves it"
    assert claim(members, 7, "pod-c") == 2, "that one is down"


def test_it_keeps_its_index_under_the_next_coordinator() -> None:
    """Unless another worker was quicker, a worker has the index that it had."""
    members = Members([0])
    assert claim(members, 1, last=3) == 3
    assert claim(members, 2, last=3) == 1
    assert claim(members, 1, last=3) == 3


def test_what_is_malformed() -> None:
    """A short secret and a name that is none are refused."""
    with pytest.raises(ProtocolError, match="a secret of 3 bytes"):
        Members([]).claim(Claim(b"abc"), 0, lambda _: False)
    for name in ("a b", "-", "x" * 300, "1\n", "../x"):
        with pytest.raises(ProtocolError, match="the task is"):
            Members([]).claim(Claim(bytes(16), name), 0, lambda _: False)


def register(host: str = "", port: int = 2222, path: str = "") -> coordinator_pb2.RegisterRequest:
    """A request, as far as it says where the worker is."""
    return coordinator_pb2.RegisterRequest(host=host, port=port, path=path)


def test_where_a_worker_may_be() -> None:
    """At the address that it calls from, on loopback if it calls from there, and in the ranges that are allowed."""
    ranges = parse_ranges(["10.0.0.0/8", "fd00::/8"])
    own = "0.0.0.0:2222"
    assert place_of(register(), "ipv4:192.0.2.7:40000", own) == "192.0.2.7:2222"
    assert place_of(register(), "ipv6:%5Bfd00::7%5D:40000", own) == "[fd00::7]:2222"
    assert place_of(register(), "ipv6:%5B::ffff:192.0.2.7%5D:40000", own) == "192.0.2.7:2222"
    assert place_of(register("127.0.0.2"), "ipv4:127.0.0.1:40000", own) == "127.0.0.2:2222"
    assert place_of(register("10.1.2.3"), "ipv4:192.0.2.7:40000", own, ranges) == "10.1.2.3:2222"
    assert place_of(register("fd00::1"), "ipv4:192.0.2.7:40000", own, ranges) == "[fd00::1]:2222"
    for host in ("10.1.2.3", "127.0.0.1", "169.254.169.254", "::1"):
        with pytest.raises(RefusedError, match=f"advertises {host}, but calls from 192.0.2.7"):
            place_of(register(host), "ipv4:192.0.2.7:40000", own)
    with pytest.raises(RefusedError, match="which is not an IP address"):
        place_of(register("example.com"), "ipv4:192.0.2.7:40000", own, ranges)
    for port in (0, 70000):
        with pytest.raises(ProtocolError, match="the worker's address"):
            place_of(register(port=port), "ipv4:192.0.2.7:40000", own)
    with pytest.raises(ConfigurationError, match="is not a network"):
        parse_ranges(["10.0.0.1/8"])


def test_where_a_worker_may_be_on_unix_sockets() -> None:
    """In the coordinator's own folder, and only if it came over its socket."""
    own = "unix:/run/job/chief-0"
    assert place_of(register(path="/run/job/worker-3", port=0), "unix:", own) == "unix:/run/job/worker-3"
    for path in ("/run/other/worker-3", "/run/job/../x/y", ""):
        with pytest.raises(RefusedError, match="has its own in the coordinator's folder"):
            place_of(register(path=path, port=0), "unix:", own)
    with pytest.raises(RefusedError, match="but joins over TCP"):
        place_of(register(path="/run/job/worker-3"), "ipv4:127.0.0.1:4000", own)


class Joined:
    """A job that takes every worker, and keeps what it is told. It has no servers."""

    connected, closed = True, False
    client = SimpleNamespace(num_servers=0)
    request = node_pb2.AttachRequest(coordinator=make_identity("chief", 0), job_name="mine")

    def __init__(self) -> None:
        self.claims: list[tuple[Claim, PeerAddress]] = []

    def register(self, claim: Claim, peer: PeerAddress, _boot_id: int) -> PeerAddress:
        """Take it."""
        claim.check()
        self.claims.append((claim, peer))
        return peer


class Call(FakeCall):
    """A call from another machine."""

    def peer(self) -> str:
        """gRPC's name of it."""
        return "ipv4:192.0.2.7:40000"


def registration(job: Joined | None, **options: Any) -> Registration:
    """The service of a job."""
    return Registration(cast("Any", lambda: job), "0.0.0.0:2222", RoleOptions(**options))


def valid(**changes: Any) -> coordinator_pb2.RegisterRequest:
    """A request that is accepted, with changes."""
    request = coordinator_pb2.RegisterRequest(identity=make_identity("worker", 0), port=2222, secret=bytes(16))
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def test_who_may_register() -> None:
    """A worker of the same version and job, or one of its servers; all others are refused with a sentence."""
    job = Joined()
    service = registration(job)
    reply = service.register(valid(job_name="mine"), Call())  # type: ignore[arg-type]
    assert (reply.address, reply.job_name) == ("192.0.2.7:2222", "mine")
    other = valid()
    other.identity.version = "9.9"
    tool, server, unnamed = valid(), valid(task="16"), valid(task="first")
    tool.identity.role, server.identity.role, unnamed.identity.role = "tool", "ps", "ps"
    for request, error, sentence in (
        (other, VersionMismatchError, "runs pscluster 9.9, .* install the same version on every task"),
        (tool, ProtocolError, "a tool registers, but only workers and parameter servers join"),
        (server, RefusedError, "the task is 16, but the cluster has 0 parameter servers"),
        (unnamed, ProtocolError, "a parameter server registers as 'first'; give its index"),
        (
            valid(job_name="another"),
            RefusedError,
            "the worker is for the job 'another', and this coordinator's is 'mine'",
        ),
        (valid(job_name="x" * 2000), ProtocolError, "a job's name of 2,000 characters"),
        (valid(secret=b"short"), ProtocolError, "a secret of 5 bytes"),
    ):
        with pytest.raises(error, match=sentence):
            service.register(request, Call())  # type: ignore[arg-type]
    assert len(job.claims) == 1
    with pytest.raises(UnavailableError, match="is not ready for workers yet"):
        registration(None).register(valid(), Call())  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match=r"refusing to talk to worker 0 at 192\.0\.2\.7:2222 in plain text"):
        registration(job, token="x" * 40).register(valid(), Call())  # type: ignore[arg-type]
    service._limit._left["192.0.2.7"] = 0.0, time.monotonic() + 3600
    with pytest.raises(UnavailableError, match="too many registrations from this address"):
        service.register(valid(), Call())  # type: ignore[arg-type]


def test_where_its_cluster_has_started_tasks() -> None:
    """A worker may advertise such an address, as its cluster knows it by then, and no other one."""
    hosts = ["10.0.0.8"]
    service = Registration(cast("Any", Joined), "0.0.0.0:2222", RoleOptions(), lambda: hosts)
    assert service.register(valid(host="10.0.0.8"), Call()).address == "10.0.0.8:2222"  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match=r"advertises 10\.0\.0\.9, but calls from 192\.0\.2\.7"):
        service.register(valid(host="10.0.0.9"), Call())  # type: ignore[arg-type]
    hosts.append("10.0.0.9")
    assert service.register(valid(host="10.0.0.9"), Call()).address == "10.0.0.9:2222"  # type: ignore[arg-type]


@hypothesis.given(messages(cast("Any", coordinator_pb2.RegisterRequest.DESCRIPTOR), 1))
def test_rubbish(request: coordinator_pb2.RegisterRequest) -> None:
    """Whatever a request holds, it is taken or refused; only the caller's own address is dialled."""
    job = Joined()
    try:
        registration(job).register(request, Call())  # type: ignore[arg-type]
    except PsClusterError:
        assert job.claims == []
    for _, peer in job.claims:
        assert peer.address.startswith("192.0.2.7:")


def test_rate() -> None:
    """A caller that registers again and again is refused for a while; others are not."""
    limit = RateLimit()
    assert [limit.take("a", 0.0) for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]
    assert limit.take("b", 0.0)
    assert limit.take("a", 1 / RATE)
    assert not limit.take("a", 1 / RATE)
    for number in range(5000):
        limit.take(str(number), 1.0)
    assert len(limit._left) <= 1024
