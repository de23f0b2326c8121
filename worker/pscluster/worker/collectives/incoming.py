"""What other members of gangs send to this worker: the server's side of Exchange.

An exchange opens with a message that names the gang, its generation, both members and the receiver's incarnation, with
a proof that the sender knows the gang's secret. It may arrive before the function itself has started here: then it
waits. Nothing more is read before it is accepted.

    a gang        unknown --its function starts--> running --it ends--> ended; the last few are remembered
    an exchange   waiting --its gang is running------------> accepted: its messages go to the mailbox
                          --its gang has ended-------------> answered: how it ended; what it sends is dropped
                          --a later generation, no proof---> refused
                          --its caller goes----------------> over
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc

from pscluster.core.errors import (
    MemberUnavailableError,
    NotPermittedError,
    ProtocolError,
    PsClusterError,
    StaleError,
    UnavailableError,
)
from pscluster.core.limits import MAX_WAITING_EXCHANGES, shortened
from pscluster.core.transport.base import server_call
from pscluster.core.transport.frames import head_of, unpack
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.gang import Gang
from pscluster.worker.collectives.mailbox import Arrival, Mailbox
from pscluster.worker.collectives.reading import Reading

_MAX_OPENING_BYTES = 1 << 10
_REMEMBERED = 32  # members of gangs that have ended: for members that ask later how
_CHECK_SECONDS = 1.0  # how often a waiting exchange checks that its caller is still there
_DROP_BYTES = 64 << 10

Reply = worker_pb2.ExchangeReply
OnEnd = Callable[[Reply], object]


class Hosted:
    """A gang whose function runs here, or has ended."""

    def __init__(self, gang: Gang, mailbox: Callable[[], Mailbox]) -> None:
        """Take what returns the function's mailbox, which may be made by that."""
        self.gang = gang
        self._mailbox: Callable[[], Mailbox] | None = mailbox
        self.readings: dict[int, Reading] = {}
        """Of the members whose messages the function's thread may read, by rank."""
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._on_end: dict[int, OnEnd] = {}
        self._reply_to: Callable[[int], Reply] | None = None

    @property
    def mailbox(self) -> Mailbox | None:
        """Where messages belong; None when the function has ended."""
        mailbox = self._mailbox
        return None if mailbox is None else mailbox()

    def join(self, source: int) -> None:
        """Accept an exchange. Raise StaleError if the source has one."""
        with self._lock:
            if source in self._joined:
                raise StaleError(f"replica {source} has opened an exchange with this one already")
            self._joined.add(source)

    def on_end(self, source: int, callback: OnEnd) -> None:
        """Call this with the reply to a source when the function ends; at once if it has."""
        with self._lock:
            if (reply_to := self._reply_to) is None:
                self._on_end[source] = callback
                return
        callback(reply_to(source))

    def leave(self, source: int) -> None:
        """Forget an exchange that is over."""
        with self._lock:
            self._on_end.pop(source, None)
        self.readings.pop(source, None)

    def end(self, reply_to: Callable[[int], Reply]) -> None:
        """Tell each source the reply to it, now or when it asks."""
        with self._lock:
            self._reply_to, self._mailbox = reply_to, None
            callbacks, self._on_end = self._on_end, {}
        for source, callback in callbacks.items():
            callback(reply_to(source))


class Gangs:
    """The members of gangs whose functions run here or have ended, and the exchanges that wait. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._hosted: dict[tuple[int, int], Hosted] = {}  # by the gang's id and the member's rank
        self._over: deque[Hosted] = deque()  # those that have ended and are remembered
        self._waiting = 0
        self._closed = False

    def begin(self, gang: Gang, mailbox: Callable[[], Mailbox]) -> Hosted:
        """Accept exchanges of a gang from now on. Raise StaleError if a later generation has run here."""
        hosted, member = Hosted(gang, mailbox), (gang.id, gang.rank)
        with self._lock:
            known = self._hosted.get(member)
            if known is not None and known.gang.generation >= gang.generation:
                raise StaleError(f"generation {gang.generation} of this gang is over: this worker has run a later one")
            self._hosted[member] = hosted
            if self._waiting:
                self._changed.notify_all()
        return hosted

    def end(self, hosted: Hosted, kind: worker_pb2.ExchangeReply.Kind, reason: str, sent: Sequence[int]) -> None:
        """Tell the other members that the function has ended, how, and how many messages each of them was sent."""
        reason = shortened(reason)
        hosted.end(lambda source: Reply(kind=kind, reason=reason, messages=sent[source]))
        with self._lock:
            self._over.append(hosted)
            if len(self._over) > _REMEMBERED:
                oldest = self._over.popleft()
                member = oldest.gang.id, oldest.gang.rank
                if self._hosted.get(member) is oldest:  # else a later generation is in its place
                    del self._hosted[member]

    def find(self, opening: worker_pb2.Opening, is_wanted: Callable[[], bool]) -> Hosted:
        """Return the gang of an exchange, once its function has started. Raise a refusal if it may not join."""
        with self._lock:
            hosted = self._known(opening)
            if hosted is None:
                if self._waiting >= MAX_WAITING_EXCHANGES:
                    raise UnavailableError(
                        f"{self._waiting} exchanges wait for gangs to start here, which is the limit"
                    )
                self._waiting += 1
                try:
                    hosted = self._wait(opening, is_wanted)
                finally:
                    self._waiting -= 1
        hosted.gang.check(opening)
        hosted.join(opening.source)
        return hosted

    def _wait(self, opening: worker_pb2.Opening, is_wanted: Callable[[], bool]) -> Hosted:
        while (hosted := self._known(opening)) is None:
            if not is_wanted():
                raise UnavailableError("the caller has gone before the function has started here")
            self._changed.wait(_CHECK_SECONDS)
        return hosted

    def _known(self, opening: worker_pb2.Opening) -> Hosted | None:
        """Return the gang of an opening; None if it may start later. StaleError if it won't. Under the lock."""
        if self._closed:
            raise StaleError("this attachment to the worker is over")
        hosted = self._hosted.get((opening.gang, opening.target))
        if hosted is None:
            self._refuse_elsewhere(opening)
        if hosted is None or hosted.gang.generation < opening.generation:
            return None
        if hosted.gang.generation > opening.generation:
            raise StaleError(f"generation {opening.generation} of this gang is over")
        return hosted

    def _refuse_elsewhere(self, opening: worker_pb2.Opening) -> None:
        """Raise NotPermittedError if others of this placement are here, and the target is not. Under the lock."""
        for (gang, _), other in self._hosted.items():
            if gang == opening.gang and other.gang.generation == opening.generation:
                if not other.gang.runs_beside(opening.target):
                    other.gang.check(opening)
                return

    def close(self) -> None:
        """Refuse all exchanges from now on: the attachment is over."""
        with self._lock:
            self._closed = True
            self._hosted.clear()
            self._over.clear()
            self._changed.notify_all()


class Receiver:
    """Puts the messages of one exchange where they belong: into posted memory, where the transport can."""

    def __init__(self, find: Callable[[worker_pb2.Opening], Hosted]) -> None:
        self._find = find
        self.hosted: Hosted | None = None
        self.source = 0
        self._arrival: tuple[Mailbox, Arrival] | None = None  # the message that is being received

    def messages(self, frames: Iterator[bytes]) -> Iterator[None]:
        """Receive message after message, until the source ends its exchange, or its connection breaks."""
        try:
            for data in frames:
                if data:  # else it was received in place
                    self.take(data, len(data))
                if self._arrival is not None:
                    mailbox, arrival = self._arrival
                    self._arrival = None
                    mailbox.arrived(self.source, arrival)
                yield
        except grpc.RpcError:
            self._broke("its connection broke")
            raise
        self._broke("it has ended its exchange")

    def _broke(self, how: str) -> None:
        if self.hosted is not None and (mailbox := self.hosted.mailbox) is not None:
            member = self.hosted.gang.members[self.source]
            mailbox.broke(self.source, MemberUnavailableError(f"{member} is gone: {how}"))

    def take(self, start: bytes, size: int) -> Iterable[memoryview] | None:
        """Take a message, or its first bytes, and return memory for the rest: see `base.Destination`."""
        if self.hosted is None:
            if size > _MAX_OPENING_BYTES:
                raise NotPermittedError(f"an exchange opens with {size:,} bytes; the limit is {_MAX_OPENING_BYTES:,}")
            if len(start) < size:
                return None
            opening = unpack(start, worker_pb2.ExchangeRequest)[0].opening
            self.hosted, self.source = self._find(opening), opening.source
            return ()
        if (mailbox := self.hosted.mailbox) is None:
            return _dropped(size - len(start))
        if len(start) == size:
            frame, payload = unpack(start, worker_pb2.ExchangeRequest)
        elif (head := head_of(start, size, worker_pb2.ExchangeRequest)) is None:
            return None
        else:
            frame, payload = head[0], memoryview(start)[head[1] :]
        if frame.HasField("signature"):
            mailbox.announce(self.source, frame.sequence, frame.signature)
            if frame.alone:
                if len(payload) or len(start) < size:
                    raise ProtocolError("a signature alone, with a payload")
                return ()
        rest = size - len(start)
        arrival = mailbox.arrive(self.source, frame.sequence, len(payload) + rest)
        if arrival is None:
            return _dropped(rest)
        arrival.memory[: len(payload)] = payload
        self._arrival = mailbox, arrival
        return (arrival.memory[len(payload) :],)


def _dropped(size: int) -> Iterator[memoryview]:
    """Yield memory for bytes that are not wanted."""
    memory = memoryview(bytearray(min(size, _DROP_BYTES)))
    while size > 0:
        yield memory[:size]
        size -= len(memory)


def serve(frames: Iterator[bytes], context: grpc.ServicerContext, gangs_of: Callable[[int], Gangs]) -> Iterator[Reply]:
    """Receive what one member sends, and yield how this one ends. `gangs_of` takes the incarnation that it names."""

    def find(opening: worker_pb2.Opening) -> Hosted:
        return gangs_of(opening.incarnation).find(opening, context.is_active)

    receiver, call = Receiver(find), server_call(context)
    call.receive_into(receiver.take)
    messages = receiver.messages(frames)
    if next(messages, _END) is _END:
        return
    hosted, source = receiver.hosted, receiver.source
    if hosted is None:
        raise ProtocolError("an exchange without an opening")
    try:
        if (send := call.sender()) is not None:
            hosted.on_end(source, lambda reply: send(reply.SerializeToString()))
            if (listen := call.listener()) is not None:
                reading = hosted.readings[source] = Reading(context, messages, listen)
                reading.run()
                return
            for _ in messages:
                pass
            return
        # This thread must yield the reply while the source may still be sending: another one reads.
        yield from _replies(hosted, source, messages, context)
    finally:
        hosted.leave(source)


def _replies(hosted: Hosted, source: int, messages: Iterator[None], context: grpc.ServicerContext) -> Iterator[Reply]:
    replies, errors, ready = list[Reply](), list[PsClusterError](), threading.Event()

    def read() -> None:
        try:
            for _ in messages:
                pass
        except grpc.RpcError:
            pass  # the caller is gone
        except PsClusterError as error:
            errors.append(error)
        finally:
            ready.set()

    def reply_with(reply: Reply) -> None:
        replies.append(reply)
        ready.set()

    reader = threading.Thread(target=read, name="exchange-read", daemon=True)
    reader.start()
    hosted.on_end(source, reply_with)
    if not context.add_callback(ready.set):
        ready.set()
    ready.wait()
    yield from replies
    reader.join()
    if errors:
        raise errors[0]


_END = object()
