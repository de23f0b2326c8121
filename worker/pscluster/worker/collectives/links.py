"""A member's links to the others of its gang: dialled at first use, for what it sends and for how they end.

There is one exchange in each direction between two members, each opened by its sender, over a connection of its own:
see link.py. A member that waits for another one opens a link to it, even if it has nothing to send: otherwise it would
not learn of the other's end, nor the other one of the call.

A member may compute for any time before it takes part. So one that waits for it asks its worker now and then whether it
is there, over another connection. If there is no answer the worker is frozen or cut off, and the wait fails; else it
goes on, and the log says for whom. While it waits it reads what the other one sends by itself: see `reading`.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from pscluster.core.awake import AwakeTime, AwakeTimer
from pscluster.core.context import FunctionContext
from pscluster.core.errors import MemberTimeoutError, MisuseError, PsClusterError, UnavailableError
from pscluster.core.transport.frames import Buffer, parts_of
from pscluster.core.transport.watchdog import Liveness, WatchedCall, watch
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.gang import Gang, Member
from pscluster.worker.collectives.link import SILENT, Link
from pscluster.worker.collectives.mailbox import Mailbox, Posted
from pscluster.worker.collectives.reading import Reading

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.1
"""How often a wait looks whether its function was told to stop, and after which it opens a link to whom it awaits."""

PROBE_SECONDS = 10.0
"""Time for a worker to answer whether it is there, at most."""


_NO_SIGNATURE = worker_pb2.Signature()


class MemberLinks:
    """All links of one member's function, and its mailbox: see `algorithms.Links`."""

    def __init__(self, gang: Gang, pool: ConnectionPool, function: FunctionContext) -> None:
        self.gang, self._pool, self._function = gang, pool, function
        self.rank, self.size = gang.rank, gang.size
        self.readings: Mapping[int, Reading] = {}
        """Of members whose messages may be read here; membership puts it in place."""
        self._reading: Reading | None = None  # the one that is, or was asked for
        self._watched: dict[int, WatchedCall] = {}  # messages that are being read here
        self._lock = threading.Lock()
        self._mailbox: Mailbox | None = None
        self._links: dict[int, Link] = {}
        self._signature = _NO_SIGNATURE
        self._busy = False
        self._over = False
        self._failed: BaseException | None = None
        function.on_cancel(self.cancel)

    @property
    def mailbox(self) -> Mailbox:
        """What others send, made at first use: most gangs run one small program, and exchange nothing."""
        return self._mailbox or self._make_mailbox()

    def _make_mailbox(self) -> Mailbox:
        with self._lock:
            if self._mailbox is None:
                mailbox = Mailbox(self.rank, self.gang.names, self._wait)
                if self._over:
                    mailbox.close()
                self._mailbox = mailbox
            return self._mailbox

    @contextmanager
    def collective(self, signature: worker_pb2.Signature) -> Iterator[None]:
        """Make the block a collective. Raises errors that name it; after one, no other may follow."""
        with self._lock:
            if self._over:
                raise MisuseError(f"{_call(signature)}: its function has ended")
            if self._busy:
                raise MisuseError(
                    f"{_call(signature)}: another thread of this function is in {_call(self._signature)}; call "
                    "one after the other"
                )
            self._busy, self._signature = True, signature
        try:
            self._function.check()
            if self._failed is not None:
                raise MisuseError(f"{_call(signature)}: an earlier collective of this function has failed") from (
                    self._failed
                )
            self.mailbox.begin(signature)
            yield
            self.mailbox.check_agreed()
        except PsClusterError as error:
            named = error if isinstance(error, MisuseError) else type(error)(f"{_call(signature)}: {error}")
            self._failed = self._failed or named
            self._function.check()  # if it was told to stop, that broke the links
            if named is error:
                raise
            raise named from None
        except BaseException as error:
            self._failed = self._failed or error
            raise
        finally:
            with self._lock:
                self._busy = False

    def raise_failure(self) -> None:
        """Raise the error of a collective of this function, if one has failed."""
        if self._failed is not None:
            raise self._failed

    @property
    def disagreed(self) -> bool:
        """Whether a collective failed since the members' calls disagree."""
        return isinstance(self._failed, MisuseError)

    def send(self, to: int, *buffers: Buffer) -> None:
        if self._function.turn is None:
            self._send(to, *buffers)
            return
        with self._function.out_of_turn():  # the receiver may run here, and has room for little
            self._send(to, *buffers)

    def _send(self, to: int, *buffers: Buffer) -> None:
        self._function.check()
        self.mailbox.check_target(to)
        link = self._links.get(to) or self._link(to)
        if not link.ready.is_set():
            self._give_back()
            self._wait_ready(link)
        header = worker_pb2.ExchangeRequest(sequence=self.mailbox.sequence)
        if link.begun != header.sequence:
            link.begun = header.sequence
            header.signature.CopyFrom(self._signature)
        link.sent += 1  # before: a message that was sent is counted, whenever the function ends
        link.send(*parts_of(header, buffers), before_waiting=None if self._reading is None else self._give_back)

    def _announce(self, link: Link) -> None:
        """Tell a member which collective was called, unless it knows."""
        if link.begun != self.mailbox.sequence:
            link.begun = self.mailbox.sequence
            header = worker_pb2.ExchangeRequest(sequence=link.begun, signature=self._signature, alone=True)
            link.send(*parts_of(header), before_waiting=None if self._reading is None else self._give_back)

    def post(self, source: int, memory: memoryview) -> Posted:
        return self.mailbox.post(source, memory)

    def _link(self, rank: int) -> Link:
        with self._lock:
            if (link := self._links.get(rank)) is not None:
                return link
            member = self.gang.members[rank]
            link = Link(member, self.gang.opening(rank), self._pool, self.gang.seconds)
            link.on_ended = lambda reply: self.mailbox.ended(rank, reply)
            link.on_broken = lambda error: self.mailbox.broke(rank, error)
            self._links[rank] = link
            self._pool.links.add(link)
        link.start()
        return link

    def _wait(self, posted: Posted) -> None:
        """Wait until a receive is done. Raise an error if it will not be, or not in time."""
        if self._function.turn is None:
            self._wait_for(posted)
            return
        with self._function.out_of_turn():
            self._wait_for(posted)

    def _wait_for(self, posted: Posted) -> None:
        silence = AwakeTimer(self.gang.seconds, CHECK_SECONDS)
        while not self._comes(posted):
            self._function.check()
            if silence.is_due():
                if self.mailbox.has_ended(posted.source):
                    raise MemberTimeoutError(
                        f"{self.gang.members[posted.source]} has returned, and its last message has not come for "
                        f"{self.gang.seconds:g} s: the connection to it is broken"
                    )
                self.check_answer([posted.source], "sent nothing")
            link = self._links.get(posted.source) or self._link(posted.source)
            if link.ready.is_set():
                self._announce(link)  # it may wait for something else, and never make this call

    def _comes(self, posted: Posted) -> bool:
        """Wait a little for a receive: here, if this thread may read; otherwise until another one has."""
        if (reading := self.readings.get(posted.source)) is not self._reading:
            self._give_back()
            self._reading = reading
        if reading is None or not reading.ask():
            return self.mailbox.wait_for(posted, CHECK_SECONDS)
        watched = self._watched.get(posted.source) or self._watch(posted.source, reading)
        with self.mailbox.reading_here(posted):
            while not posted.done:
                self.mailbox.check(posted)
                watched.begin()
                try:
                    if not reading.wait(CHECK_SECONDS, self._function.check):
                        return False
                finally:
                    watched.end()
                try:
                    watched.raise_if_cancelled()
                except UnavailableError:
                    raise MemberTimeoutError(
                        f"{self.gang.members[posted.source]} has sent a part of a message, and nothing more for "
                        f"{self.gang.seconds:g} s, and {SILENT}"
                    ) from None
        return True

    def _watch(self, source: int, reading: Reading) -> WatchedCall:
        """Return what breaks the stream of a source off if it stops amid a message, and its worker does not answer."""
        liveness = Liveness(functools.partial(self._pool.answers, self.gang.members[source]), self.gang.seconds)
        watched = self._watched[source] = watch(WatchedCall(reading.break_off, self.gang.seconds, liveness))
        return watched

    def _give_back(self) -> None:
        """Let the exchanges' threads read everything: this one will wait for something else."""
        if (reading := self._reading) is not None:
            self._reading = None
            reading.give_back()

    def check_answer(self, ranks: Collection[int], failing: str, spare: int = 0) -> None:
        """Raise MemberTimeoutError if the workers of more than `spare` of these members do not answer.

        Otherwise log who is awaited. `failing` says what they have not done for as long as a worker may be silent.
        """
        seconds, silent = self.gang.seconds, list[Member]()
        for rank in ranks:
            if rank >= self.size or self.gang.runs_beside(rank):
                continue
            member = self.gang.members[rank]
            if not self._pool.answers(member, min(PROBE_SECONDS, max(1.0, seconds / 2))):
                silent.append(member)
                if len(silent) > spare:
                    names = " and ".join(map(str, silent))
                    raise MemberTimeoutError(f"{names} has {failing} for {seconds:g} s, and {SILENT}")
        if ranks:
            names = " and ".join(f"replica {rank}" for rank in ranks)
            why = "though its worker answers: it computes, or hangs"
            logger.warning("replica %d waits: %s has %s for %g s, %s", self.rank, names, failing, seconds, why)

    def _wait_ready(self, link: Link) -> None:
        awake = AwakeTime(CHECK_SECONDS)
        while not link.ready.wait(CHECK_SECONDS):
            self._function.check()
            awake.check()
            if awake.seconds >= self.gang.seconds:
                raise MemberTimeoutError(f"{link.member} can't be reached for {self.gang.seconds:g} s")
        self.mailbox.check_target(link.member.rank)

    def end(self) -> list[int]:
        """End the links: the function has ended. Return how many messages were sent to each member."""
        with self._lock:
            self._over = True
            links, mailbox = dict(self._links), self._mailbox
        if mailbox is not None:
            mailbox.close()
        for reading in tuple(self.readings.values()):
            reading.close()
        for link in links.values():
            link.end()
        return [links[rank].sent if rank in links else 0 for rank in range(self.size)]

    def cancel(self) -> None:
        """Break all links, and wake the function if it waits for a message: it was told to stop."""
        for link in tuple(self._links.values()):
            link.cancel()
        for reading in tuple(self.readings.values()):
            reading.cancel()
        if (mailbox := self._mailbox) is not None:
            mailbox.wake()


def _call(signature: worker_pb2.Signature) -> str:
    return f"{signature.operation} at {signature.place}"
