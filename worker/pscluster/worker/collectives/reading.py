"""Which thread reads what a member sends to this one: that of its exchange, or the function's own, while it waits.

A message that the exchange's thread reads wakes two threads in a row: that one, and then the function's. So a function
that waits for a member reads what that one sends by itself, where the transport allows it. Often it has come by then,
and no thread is woken. (Leader/Followers, Schmidt et al., 2000, hands connections from thread to thread like this.)

    exchange listens  --a message begins to arrive-----> exchange receives --it is whole--> exchange listens
                      --the function waits for it------> function reads
    function reads    --it waits for another member, or for room to send, or has ended----> exchange listens
    any               --the stream ends, or breaks-----> over

The function's thread reads for one member at a time, and for none while it waits for room to send: then the threads of
all exchanges fill what was posted, so that no ring of members that all send can block. While it computes, no thread
reads what that one member sends: it stays in the sockets' buffers, then its sender waits, as it does when the mailbox
has no room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from enum import Enum, auto

import grpc

from pscluster.core.transport.base import Cancellable, Readable

_LISTEN_SECONDS = 60.0
_END = object()


class Reader(Enum):
    """Who reads."""

    EXCHANGE_LISTENS = auto()
    EXCHANGE_RECEIVES = auto()
    FUNCTION = auto()
    OVER = auto()


class Turns:
    """Decides who reads. Not thread-safe."""

    def __init__(self) -> None:
        self.reader = Reader.EXCHANGE_LISTENS
        self._is_closed = False

    def begin(self) -> bool:
        """Return whether the exchange may receive the message that has begun to arrive."""
        if self.reader is not Reader.EXCHANGE_LISTENS:
            return False
        self.reader = Reader.EXCHANGE_RECEIVES
        return True

    def received(self) -> None:
        """Note that a message has been received."""
        if self.reader is Reader.EXCHANGE_RECEIVES:
            self.reader = Reader.EXCHANGE_LISTENS

    def ask(self) -> bool:
        """Return whether the function reads now: not while the exchange receives a message."""
        if self.reader is Reader.EXCHANGE_LISTENS and not self._is_closed:
            self.reader = Reader.FUNCTION
        return self.reader is Reader.FUNCTION

    def give_back(self) -> None:
        """Note that the function reads no more until it asks."""
        if self.reader is Reader.FUNCTION:
            self.reader = Reader.EXCHANGE_LISTENS

    def close(self) -> None:
        """Note that the function has ended: it never reads again."""
        self._is_closed = True
        self.give_back()

    def end(self) -> None:
        """Note that nothing more comes."""
        self.reader = Reader.OVER


class Reading:
    """The messages of one exchange."""

    def __init__(self, call: Cancellable, messages: Iterator[None], listen: Callable[[], Readable]) -> None:
        """Take the call, what receives a message of it each time, and what makes a `Readable` of it for a thread."""
        self._call, self._messages = call, messages
        self._exchange_readable, self._function_readable = listen(), listen()
        self._turns = Turns()
        self._changed = threading.Condition(threading.Lock())
        self._receiving = threading.Lock()  # a thread of the function may still receive when that has ended
        self._error: BaseException | None = None
        self._is_waiting = False  # the function's thread

    # The exchange's thread

    def run(self) -> None:
        """Read, or wait while the function reads, until the stream ends. Raise its error."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turns.reader is not Reader.FUNCTION)
                if self._turns.reader is Reader.OVER:
                    break
            if self._exchange_readable(_LISTEN_SECONDS):
                with self._changed:
                    if not self._turns.begin():
                        continue
                with self._receiving:
                    self._receive()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # The function's

    def ask(self) -> bool:
        """Return whether the function reads now."""
        with self._changed:
            return self._turns.ask()

    def give_back(self) -> None:
        """Let the exchange's thread read."""
        with self._changed:
            self._turns.give_back()
            self._changed.notify_all()

    def close(self) -> None:
        """Let the exchange's thread read from now on."""
        with self._changed:
            self._turns.close()
            self._changed.notify_all()

    def wait(self, seconds: float, check: Callable[[], object]) -> bool:
        """Receive a message. Return False if none begins to arrive for some seconds, or the function reads no more.

        `check` is called before: it must raise once `cancel` may have been called.
        """
        self._is_waiting = True
        try:
            check()
            if not self._function_readable(seconds):
                return False
            with self._receiving:
                if is_ours := self._turns.reader is Reader.FUNCTION:
                    self._receive()
            return is_ours
        finally:
            self._is_waiting = False

    def cancel(self) -> None:
        """Break the stream, if the function waits for it: it is to stop. Any thread may call this."""
        if self._is_waiting:
            self._call.cancel()

    def break_off(self) -> None:
        """Break the stream: what has begun to arrive does not go on."""
        self._call.cancel()

    def _receive(self) -> None:
        try:
            is_over = next(self._messages, _END) is _END
        except BaseException as error:
            self._error, is_over = error, True
        with self._changed:
            if is_over:
                self._turns.end()
                self._changed.notify_all()
            else:
                self._turns.received()
        if self._error is not None and not isinstance(self._error, grpc.RpcError):  # that one the mailbox knows
            raise self._error
