"""Which coordinator holds a role: the rules, and the service that follows them, without a network."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.fakes import FakeCall

from pscluster.core.errors import BusyError, StaleError, VersionMismatchError
from pscluster.core.ids import VERSION, make_identity
from pscluster.core.role.node import Attachment, NodeService, Role
from pscluster.v1 import node_pb2

TIMEOUT = 30.0
A, B = 11, 22


class TestAttachment:
    def test_first(self) -> None:
        """A free role is taken, and a new job starts with empty state."""
        attachment = Attachment("ps 0")
        assert attachment.attach(A, "chief") is True
        assert (attachment.job, attachment.holder, attachment.held) == (A, "chief", True)

    def test_same_job_again(self) -> None:
        """The same coordinator is accepted on a new connection, and its job keeps its state."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief")
        assert attachment.attach(A, "chief") is False
        assert attachment.held

    def test_held(self) -> None:
        """Another coordinator is refused while the role is held; the refusal names the holder and what to do."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief a")
        with pytest.raises(BusyError, match="ps 0 works for chief a; end that job, take it over with take_over=True"):
            attachment.attach(B, "chief b")
        assert (attachment.job, attachment.holder, attachment.held) == (A, "chief a", True)

    def test_detached(self) -> None:
        """After its stream has ended the job's state is kept until another coordinator comes."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief a")
        attachment.detach(attachment.attachment_id)
        assert (attachment.job, attachment.held) == (A, False)
        assert attachment.attach(A, "chief a") is False, "its own state is still there"
        attachment.detach(attachment.attachment_id)
        assert attachment.attach(B, "chief b") is True

    def test_late_end_of_an_earlier_stream(self) -> None:
        """The end of a stream that was replaced changes nothing."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief a")
        first = attachment.attachment_id
        attachment.attach(A, "chief a")
        attachment.detach(first)
        assert attachment.held

    def test_late_end_of_a_later_stream(self) -> None:
        """Of two attempts to attach the abandoned one may be accepted last; its end changes nothing either."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief a")
        attachment.attach(A, "chief a")
        attachment.detach(attachment.attachment_id)
        with pytest.raises(BusyError):
            attachment.attach(B, "chief b")

    def test_end(self) -> None:
        """The end of the job frees the role and forgets the job."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief a")
        attachment.end(A)
        assert (attachment.job, attachment.holder, attachment.held) == (0, "", False)
        assert attachment.attach(A, "chief a") is True, "fresh again: its state was dropped"

    def test_end_of_another_job(self) -> None:
        """A coordinator can't end another's job, even while that one's coordinator is unreachable."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief a")
        with pytest.raises(StaleError, match="ps 0 serves another job"):
            attachment.end(B)
        assert attachment.held
        attachment.detach(attachment.attachment_id)
        with pytest.raises(StaleError, match="ps 0 serves another job"):
            attachment.end(B)
        assert attachment.job == A

    def test_left(self) -> None:
        """A job is abandoned from the end of its stream until a coordinator attaches, or it is ended."""
        attachment = Attachment("ps 0")
        assert not attachment.is_left(0, 0)
        attachment.attach(A, "chief a")
        first = attachment.attachment_id
        assert not attachment.is_left(A, first), "it is held"
        attachment.detach(first)
        assert attachment.is_left(A, first)
        attachment.attach(A, "chief a")
        attachment.detach(attachment.attachment_id)
        assert not attachment.is_left(A, first), "it was back since"
        assert attachment.is_left(A, attachment.attachment_id)
        attachment.end(A)
        assert not attachment.is_left(A, attachment.attachment_id)

    def test_take_over(self) -> None:
        """A coordinator that takes over gets a held role; the late end of the previous stream changes nothing."""
        attachment = Attachment("ps 0")
        attachment.attach(A, "chief a")
        first = attachment.attachment_id
        assert attachment.attach(B, "chief b", take_over=True) is True
        attachment.detach(first)
        assert (attachment.job, attachment.holder, attachment.held) == (B, "chief b", True)


class AttachmentMachine(RuleBasedStateMachine):
    """Coordinators attach, attach again, vanish and end their jobs in any order."""

    jobs = st.integers(1, 3)

    def __init__(self) -> None:
        super().__init__()
        self.attachment = Attachment("ps 0")
        self.streams: dict[int, int] = {}  # number of an open stream: its job
        self.attached: set[int] = set()  # the open attachments of the latest job
        self.job = 0  # the job whose state the role has

    @property
    def holder(self) -> int:
        """The job that holds the role, 0 if none does."""
        return self.job if self.attached else 0

    @rule(job=jobs)
    def attach(self, job: int) -> None:
        """Only the holder may attach again; a job is new unless its state is here."""
        if self.holder and self.holder != job:
            with pytest.raises(BusyError):
                self.attachment.attach(job, f"chief {job}")
            return
        assert self.attachment.attach(job, f"chief {job}") == (job != self.job)
        if job != self.job:
            self.attached.clear()
        newest = self.attachment.attachment_id
        assert newest not in self.streams, "each attachment has a number of its own"
        self.streams[newest] = self.job = job
        self.attached.add(newest)

    @precondition(lambda self: bool(self.streams))
    @rule(data=st.data())
    def stream_ends(self, data: st.DataObject) -> None:
        """Streams end in any order."""
        stream = data.draw(st.sampled_from(sorted(self.streams)))
        del self.streams[stream]
        self.attached.discard(stream)
        self.attachment.detach(stream)

    @rule(job=jobs)
    def end(self, job: int) -> None:
        """Only the job whose state is here can end itself, even while no coordinator holds the role."""
        if self.job and self.job != job:
            with pytest.raises(StaleError):
                self.attachment.end(job)
            return
        self.attachment.end(job)
        self.job = 0
        self.attached.clear()

    @invariant()
    def agrees(self) -> None:
        """The role is held by its job as long as any of the job's streams is open."""
        assert self.attachment.held == bool(self.holder)
        assert self.attachment.job == self.job
        if self.holder:
            assert (self.attachment.job, self.attachment.holder) == (self.holder, f"chief {self.holder}")


AttachmentMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestAttachmentMachine = AttachmentMachine.TestCase


class Recorder(Role):
    """A role that records what happened to it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def job_began(self, request: node_pb2.AttachRequest) -> None:
        self.events.append(("began", request.job))

    def attached(self, request: node_pb2.AttachRequest, event: node_pb2.AttachEvent) -> None:
        self.events.append(("attached", request.job))
        event.incarnation = 100 + len(self.events)

    def job_ended(self) -> None:
        self.events.append(("ended", 0))

    def describe(self, reply: node_pb2.StatusReply) -> None:
        reply.detail = f"{len(self.events)} events"


class Stream:
    """An attachment that a thread reads, like grpc's."""

    def __init__(self, service: NodeService, job: int, version: str = VERSION, workers: Sequence[int] = ()) -> None:
        self.context = FakeCall()
        identity = node_pb2.Identity(version=version, role="chief", name=f"chief of {job}")
        request = node_pb2.AttachRequest(coordinator=identity, job=job, workers=workers, take_over=bool(workers))
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        events = service.attach(request, cast("grpc.ServicerContext", self.context))

        def read() -> None:
            try:
                for event in events:
                    self._events.put(event)
            except BaseException as error:  # for the reader below
                self._events.put(error)
            self._events.put(None)

        self._thread = threading.Thread(target=read, daemon=True)
        self._thread.start()

    def next(self) -> node_pb2.AttachEvent | None:
        """The next event; None at the end. Raises the service's error."""
        event = self._events.get(timeout=TIMEOUT)
        if isinstance(event, BaseException):
            raise event
        return cast("node_pb2.AttachEvent | None", event)

    def end(self) -> None:
        """End the client's side, and return when the service has noticed."""
        self.context.end()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()


@contextmanager
def opened(service: NodeService, job: int, workers: Sequence[int] = ()) -> Iterator[Stream]:
    """A stream whose first event has arrived. With workers, the coordinator lists these, and takes the role over."""
    stream = Stream(service, job, workers=workers)
    event = stream.next()
    assert event is not None
    assert event.kind == node_pb2.AttachEvent.ATTACHED
    try:
        yield stream
    finally:
        stream.end()


NO_CONTEXT = cast("grpc.ServicerContext", None)


class TestNodeService:
    def setup_method(self) -> None:
        self.role = Recorder()
        self.job_ends: list[str] = []
        self.service = NodeService(make_identity("ps", 3), self.role, lambda: self.job_ends.append("told"))

    def state(self) -> str:
        """The state in the status."""
        return self.service.status(node_pb2.StatusRequest(), NO_CONTEXT).state

    def end_job(self, job: int) -> None:
        """End the job, as when the coordinator's script has ended."""
        self.service.end_job(node_pb2.EndJobRequest(job=job), NO_CONTEXT)

    def test_hello(self) -> None:
        """The handshake tells who this process is, with a new boot id."""
        ours = node_pb2.Identity(version=VERSION, role="worker")
        reply = self.service.hello(node_pb2.HelloRequest(identity=ours), NO_CONTEXT)
        assert (reply.identity.role, reply.identity.index, reply.identity.version) == ("ps", 3, VERSION)
        assert reply.identity.boot_id not in (0, make_identity("ps", 3).boot_id)

    @pytest.mark.parametrize("version", ["0.0.1", ""])
    def test_another_version(self, version: str) -> None:
        """Another version is refused with both versions, in Hello and in Attach."""
        theirs = node_pb2.Identity(version=version, role="worker", name="worker 1 (there)")
        refusal = f"worker 1 (there) runs pscluster {version or '(none given)'}, {self.service.identity.name} runs"
        with pytest.raises(VersionMismatchError, match=re.escape(f"{refusal} {VERSION}: install the same version")):
            self.service.hello(node_pb2.HelloRequest(identity=theirs), NO_CONTEXT)
        with pytest.raises(VersionMismatchError, match=f"ps 3 .* runs {VERSION}"):
            Stream(self.service, A, version).next()
        assert self.role.events == []

    def test_attach(self) -> None:
        """The role is told of a job before it is asked for an incarnation, and status names the coordinator."""
        assert self.state() == "waiting for a coordinator"
        with opened(self.service, A):
            assert self.role.events == [("began", A), ("attached", A)]
            reply = self.service.status(node_pb2.StatusRequest(), NO_CONTEXT)
            assert (reply.state, reply.coordinator, reply.detail) == ("serving", f"chief of {A}", "2 events")
        assert self.state() == "waiting for a coordinator"

    def test_first_event(self) -> None:
        """The first event carries this process's identity and the incarnation to work under."""
        stream = Stream(self.service, A)
        event = stream.next()
        assert event is not None
        assert event.identity == self.service.identity
        assert event.incarnation == 102
        stream.end()

    def test_busy(self) -> None:
        """A second coordinator is refused before the role is told of it."""
        with opened(self.service, A):
            with pytest.raises(BusyError, match=f"works for chief of {A}"):
                Stream(self.service, B).next()
            assert self.role.events == [("began", A), ("attached", A)]

    def test_return_of_the_coordinator(self) -> None:
        """The same job on a new connection attaches again but does not begin anew, even if the old stream ends late."""
        with opened(self.service, A) as first, opened(self.service, A):
            assert self.role.events == [("began", A), ("attached", A), ("attached", A)]
            first.end()
            assert self.state() == "serving"

    def test_state_is_kept(self) -> None:
        """A lost coordinator's state is dropped when another one attaches, not before."""
        with opened(self.service, A):
            pass
        assert self.role.events == [("began", A), ("attached", A)]
        with opened(self.service, B):
            assert self.role.events[2:] == [("began", B), ("attached", B)]

    def test_end_job(self) -> None:
        """At the end of the job the role drops its state, and every waiter is told once."""
        with opened(self.service, A):
            self.end_job(A)
            assert self.role.events[2:] == [("ended", 0)]
            assert self.job_ends == ["told"]
            assert self.state() == "waiting for a coordinator"
        assert self.job_ends == ["told"]

    def test_end_of_another_job(self) -> None:
        """A request to end a job that the role does not work for is refused, and nothing is dropped."""
        with opened(self.service, A):
            with pytest.raises(StaleError):
                self.end_job(B)
            assert self.job_ends == []
            assert ("ended", 0) not in self.role.events

    def test_leave(self) -> None:
        """A coordinator is told that the role is leaving, and keeps it until it has released it."""
        with opened(self.service, A) as stream:
            self.service.leave()
            event = stream.next()
            assert event is not None
            assert event.kind == node_pb2.AttachEvent.LEAVING
            assert self.state() == "stopping"

    def test_attach_while_leaving(self) -> None:
        """A coordinator that attaches to a role about to stop is told immediately."""
        self.service.leave()
        with opened(self.service, A) as stream:
            event = stream.next()
            assert event is not None
            assert event.kind == node_pb2.AttachEvent.LEAVING

    def hello_of(self, role: str, index: int) -> list[int]:
        """What a caller is told of the workers that the coordinator lists."""
        theirs = node_pb2.Identity(version=VERSION, role=role, index=index, name=f"{role} {index} (there)")
        return list(self.service.hello(node_pb2.HelloRequest(identity=theirs), NO_CONTEXT).workers)

    def test_worker_that_is_not_listed(self) -> None:
        """It is told which are listed, and the coordinator is told of it, once; no other caller is told anything."""
        assert self.hello_of("worker", 7) == [], "there is no coordinator"
        with opened(self.service, A, workers=(1, 0)) as stream:
            assert [self.hello_of("worker", 1), self.hello_of("chief", 7)] == [[], []]
            assert [self.hello_of("worker", index) for index in (7, 7, 8)] == [[0, 1]] * 3
            told = [stream.next(), stream.next()]
            assert [(event.kind, event.identity.name) for event in told if event is not None] == [
                (node_pb2.AttachEvent.UNLISTED, "worker 7 (there)"),
                (node_pb2.AttachEvent.UNLISTED, "worker 8 (there)"),
            ]
            with opened(self.service, B, workers=(7,)) as other:
                assert stream.next() is None, "another coordinator took the role over"
                assert [self.hello_of("worker", 7), self.hello_of("worker", 0)] == [[], [7]]
                event = other.next()
                assert event is not None
                assert event.identity.index == 0
        assert self.hello_of("worker", 0) == [], "it is gone"

    def test_stream_that_ended_before_it_began(self) -> None:
        """A client that left before the service looked does not hold the role."""
        context = FakeCall()
        context.end()
        identity = node_pb2.Identity(version=VERSION, name="gone")
        request = node_pb2.AttachRequest(coordinator=identity, job=A)
        events = list(self.service.attach(request, cast("grpc.ServicerContext", context)))
        assert len(events) <= 1
        assert self.state() == "waiting for a coordinator"
