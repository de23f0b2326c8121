"""What has arrived at a member of a gang from each other one, and what it awaits. No I/O, only a lock.

Messages of one source arrive in order, one at a time, on the thread that reads them (see `reading`); each
fills one receive.

    a message   arriving --a receive is posted------------> filling it in place --> received
                         --none, and there is room--------> kept --a receive is posted--> copied --> received
                         --none, and no room--------------> held back: its thread waits, and reads no more

    a receive   posted --its message is whole-------------> done
                       --its source will not send it------> failed: it has ended, or its connection broke
                       --the members' calls disagree------> failed, like all receives of this member

A source that has ended says how many messages it has sent: those may still arrive, on another connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pscluster.core.errors import MemberUnavailableError, MisuseError, ProtocolError, PsClusterError
from pscluster.v1 import worker_pb2

ROOM_BYTES = 2 << 20
"""Of messages from one source that no receive awaits yet."""

_MESSAGE_BYTES = 512  # taken by a kept message in addition, and by what was announced with it
_MAX_ANNOUNCED = 4096  # collectives that a source has begun and this member has not

_OUTCOMES = worker_pb2.ExchangeReply


class Arrival:
    """Memory for a message, while it arrives."""

    __slots__ = ("memory", "receipt", "sequence", "whole")

    def __init__(self, memory: memoryview, sequence: int, receipt: Posted | None = None) -> None:
        self.memory, self.sequence, self.receipt = memory, sequence, receipt
        self.whole = False


class Posted:
    """A receive; see `algorithms.Receipt`."""

    __slots__ = ("_wait", "done", "memory", "nth", "source")

    def __init__(self, source: int, nth: int, memory: memoryview, wait: Callable[[Posted], None]) -> None:
        self.source, self.nth, self.memory, self._wait = source, nth, memory, wait
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self._wait(self)


@dataclass(slots=True)
class _Source:
    """What is known of one other member."""

    lock: threading.Lock  # the mailbox's
    posted: deque[Posted] = field(default_factory=deque)  # awaiting messages that have not begun to arrive
    kept: deque[Arrival] = field(default_factory=deque)  # messages that no receive awaits; the last may be arriving
    kept_bytes: int = 0
    begun: int = 0  # receives so far
    arrived: int = 0  # whole messages so far
    announced: deque[tuple[int, worker_pb2.Signature]] = field(default_factory=deque)  # collectives that it has begun
    ended: worker_pb2.ExchangeReply | None = None
    broken: PsClusterError | None = None  # why nothing more comes from it
    room: threading.Condition | None = None  # its thread waits here while its message is held back
    is_read_here: bool = False  # by the function's thread, which makes room: it must not wait for itself

    def wait_for_room(self, there_is: Callable[[], object]) -> None:
        """Hold back the source's thread. Under the lock."""
        if not there_is():
            if self.is_read_here:
                raise ProtocolError("a member has sent more than there is room for ahead of what is expected from it")
            self.room = self.room or threading.Condition(self.lock)
            self.room.wait_for(there_is)

    def check_room(self) -> None:
        """Let the source's thread check whether there is room. Under the lock."""
        if self.room is not None:
            self.room.notify_all()


class Mailbox:
    """The messages of one member's function.

    `names` are those of all members, by rank, for errors; `rank` is this one's. `wait` is what receives do until they
    are done: see `wait_for`.
    """

    def __init__(
        self, rank: int, names: Sequence[str], wait: Callable[[Posted], None], room_bytes: int = ROOM_BYTES
    ) -> None:
        self._rank, self._names, self._wait, self._room_bytes = rank, names, wait, room_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the function's thread
        self._sources = [_Source(self._lock) for _ in range(len(names))]
        self._awaited: Posted | None = None
        self._signature = worker_pb2.Signature()
        self._failure: PsClusterError | None = None
        self._closed = False
        self.sequence = 0

    # The function's side

    def begin(self, signature: worker_pb2.Signature) -> int:
        """Begin a collective, and return its number. Raise MisuseError if another member has begun a different one."""
        with self._lock:
            self.sequence += 1
            self._signature = signature
            for rank, state in enumerate(self._sources):
                while state.announced and state.announced[0][0] < self.sequence:
                    state.announced.popleft()
                    state.check_room()
                self._compare(rank)
            if self._failure is not None:
                raise self._failure
            return self.sequence

    def post(self, source: int, memory: memoryview) -> Posted:
        """Prepare to receive the next message of a source into this memory."""
        state = self._sources[source]
        with self._lock:
            state.begun += 1
            posted = Posted(source, state.begun, memory, self._wait)
            if not state.kept:
                state.posted.append(posted)
                state.check_room()
                return posted
            arrival = state.kept.popleft()
            state.kept_bytes -= len(arrival.memory) + _MESSAGE_BYTES
            state.check_room()
            if self._fits(source, arrival.sequence, len(arrival.memory), posted):
                if arrival.whole:
                    memory[:] = arrival.memory
                    posted.done = True
                else:  # copied when it is whole
                    arrival.receipt = posted
            return posted

    def wait_for(self, posted: Posted, seconds: float) -> bool:
        """Wait until a receive is done. Return False after `seconds` seconds; raise its error if it will never be."""
        with self._lock:
            self._awaited = posted
            try:
                self._changed.wait_for(
                    lambda: posted.done or self._awaited is None or self._why_never(posted) is not None, seconds
                )
                if not posted.done and (why := self._why_never(posted)) is not None:
                    raise why
                return posted.done
            finally:
                self._awaited = None

    def check(self, posted: Posted) -> None:
        """Raise the error of a receive that will never be done."""
        with self._lock:
            if not posted.done and (why := self._why_never(posted)) is not None:
                raise why

    @contextmanager
    def reading_here(self, posted: Posted) -> Iterator[None]:
        """Let the function's thread receive the messages of a source in the block, until a receive is done."""
        state = self._sources[posted.source]
        state.is_read_here = True
        try:
            yield
        finally:
            state.is_read_here = False

    def calls_ahead(self) -> dict[int, MisuseError]:
        """Return which members have called a collective that this one has not, with the error if it never will."""
        with self._lock:
            return {
                rank: _disagreement(
                    f"{self._names[rank]} has called {_called(state.announced[-1][1])}, where "
                    f"{self._names[self._rank]} has ended its step"
                )
                for rank, state in enumerate(self._sources)
                if state.announced and state.announced[-1][0] > self.sequence
            }

    def check_agreed(self) -> None:
        """Raise an error if what has come during this collective was sent in another one.

        All its receives may be done by then: the thread that waited for the last one may not have seen the failure.
        """
        if self._failure is not None:
            raise self._failure

    def has_ended(self, rank: int) -> bool:
        """Return whether a member's function has ended."""
        return self._sources[rank].ended is not None

    def check_target(self, rank: int) -> None:
        """Raise an error if a member takes no messages any more, or the members' calls disagree."""
        state = self._sources[rank]
        if self._failure is None and state.ended is None and not state.broken:  # as nearly always
            return
        with self._lock:
            why = self._failure or self._why_gone(rank)
        if why is not None:
            raise why

    def wake(self) -> None:
        """Make a wait return early: the function was told to stop."""
        with self._lock:
            self._awaited = None
            self._changed.notify_all()

    def close(self) -> None:
        """Drop everything: the function has ended. What arrives later is not kept.

        The rest of a message that is arriving in posted memory still does: do not use that memory again.
        """
        with self._lock:
            self._closed = True
            for state in self._sources:
                state.posted.clear()
                state.kept.clear()
                state.announced.clear()
                state.kept_bytes = 0
                state.check_room()

    @property
    def kept_bytes(self) -> int:
        """The bytes of all messages that no receive awaits."""
        with self._lock:
            return sum(state.kept_bytes for state in self._sources)

    # The side of the exchanges' threads

    def announce(self, source: int, sequence: int, signature: worker_pb2.Signature) -> None:
        """Note which collective a source has begun."""
        with self._lock:
            state = self._sources[source]
            state.wait_for_room(lambda: self._closed or len(state.announced) < _MAX_ANNOUNCED)
            if not self._closed:
                state.announced.append((sequence, signature))
                self._compare(source)

    def arrive(self, source: int, sequence: int, size: int) -> Arrival | None:
        """Return memory for the next message of a source, held back until there is room; None: drop it."""
        state = self._sources[source]
        with self._lock:
            state.wait_for_room(
                lambda: self._closed or state.posted or state.kept_bytes + size + _MESSAGE_BYTES <= self._room_bytes
            )
            if self._closed:
                return None
            if not state.posted:
                arrival = Arrival(memoryview(bytearray(size)), sequence)
                state.kept.append(arrival)
                state.kept_bytes += size + _MESSAGE_BYTES
                return arrival
            posted = state.posted.popleft()
            if not self._fits(source, sequence, size, posted):
                return None
            return Arrival(posted.memory, sequence, posted)

    def arrived(self, source: int, arrival: Arrival) -> None:
        """Note that a message is whole."""
        with self._lock:
            arrival.whole = True
            self._sources[source].arrived += 1
            if (posted := arrival.receipt) is None:
                return
            if posted.memory is not arrival.memory:
                posted.memory[:] = arrival.memory
            posted.done = True
            if posted is self._awaited:
                self._changed.notify_all()

    def ended(self, source: int, reply: worker_pb2.ExchangeReply) -> None:
        """Note that a source's function has ended, and how."""
        with self._lock:
            self._sources[source].ended = reply
            self._changed.notify_all()

    def broke(self, source: int, why: PsClusterError) -> None:
        """Note that a connection to or from a source is gone. Of no consequence if its function had ended."""
        with self._lock:
            self._sources[source].broken = self._sources[source].broken or why
            self._changed.notify_all()

    # Under the lock

    def _compare(self, rank: int) -> None:
        """Fail if a member has begun another collective than this one in its place."""
        announced = self._sources[rank].announced
        if self._failure is not None or not announced or announced[0][0] != self.sequence:
            return
        theirs, ours = announced[0][1], self._signature
        if (theirs.operation, theirs.digest) != (ours.operation, ours.digest):
            self._disagree(
                f"{self._names[rank]} has called {_called(theirs)}, where {self._names[self._rank]} has called "
                f"{_called(ours)}"
            )

    def _fits(self, source: int, sequence: int, size: int, posted: Posted) -> bool:
        """Return whether a message is the awaited one; fail if it is not."""
        if sequence == self.sequence and size == len(posted.memory):
            return True
        if self._failure is None:
            # Their signatures were equal: a message of another collective, or another size, is no mistake of a user's.
            self._failure = ProtocolError(
                f"{self._names[source]} sent {size} bytes of its collective {sequence}, where {len(posted.memory)} of "
                f"collective {self.sequence} were expected: are all workers of one version?"
            )
            self._changed.notify_all()
        return False

    def _disagree(self, how: str) -> None:
        self._failure = _disagreement(how)
        self._changed.notify_all()

    def _why_never(self, posted: Posted) -> PsClusterError | None:
        """Return the error of a receive whose message will not come."""
        if self._failure is not None:
            return self._failure
        state = self._sources[posted.source]
        if state.ended is not None and posted.nth <= state.ended.messages:
            return state.broken  # else it is on its way
        return self._why_gone(posted.source)

    def _why_gone(self, rank: int) -> PsClusterError | None:
        """Return the error of calls that need this member, if it takes part no more."""
        state, name = self._sources[rank], self._names[rank]
        if (ended := state.ended) is None:
            return state.broken
        if ended.kind == _OUTCOMES.MISUSED:
            return MisuseError(ended.reason)  # it names the members and their calls
        if ended.kind == _OUTCOMES.FAILED:
            return MemberUnavailableError(f"{name} has failed: {ended.reason}")
        if ended.kind == _OUTCOMES.STOPPED:
            return MemberUnavailableError(f"{name} was told to stop")
        return _disagreement(
            f"{name} has returned, where {self._names[self._rank]} has called {_called(self._signature)}"
        )


def _disagreement(how: str) -> MisuseError:
    return MisuseError(
        f"the replicas disagree: {how}. All replicas must make the same calls in the same order, with arrays of the "
        "same types and shapes"
    )


def _called(signature: worker_pb2.Signature) -> str:
    layout = f" of {signature.layout}" if signature.layout else ""
    return f"{signature.operation}{layout} at {signature.place or 'an unknown place'}"
