"""Parts of distributed datasets on a worker: what a function gets for one, and the thread that reads ahead.

A part is a range of positions of an epoch, bound to a function before that is sent: any worker that runs it reads the
same. Its elements are read in order, and by one thread at a time in the whole worker, since sources and the user's
functions need not be thread-safe. Which thread depends on how long reading takes, averaged for each dataset:

    slow   the reader's thread, for the parts in the order in which they came, each up to `ahead` elements in advance,
           and only for the running part and the `_PARTS` after it
    fast   the function's own, on demand: handing an element from thread to thread takes longer, since both must be
           woken and wait for Python's lock. Fast is less than `SHORT_SECONDS`, or less than `SHORT_SHARE` of the
           time from one element to the next

Batches that are cut out of one block are read at once, and handed over as one: what is said of elements here goes for
all of them together. Of blocks, one is read ahead of the one that its function uses, or waits for. A block must also be
arranged (shuffled, copied). That does the thread that has read it; but if the function waits for it, the function's
own, while the reader's reads the next one.

States of a part, all under the reader's lock:

    WAITING --add--> READING --the last element was read--> READ --close--> CLOSED    from any state, with its function

The lock is free while an element is read or arranged: what is read for a part that was closed in the meantime is
dropped. Only one thread at a time takes a part's elements: its function's, or the one that prepares it.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pscluster.core.context import FunctionContext, current_function, running
from pscluster.core.errors import DatasetError, FunctionCancelled, MisuseError, ProtocolError
from pscluster.core.handles import Handle
from pscluster.worker.data.batches import Batches
from pscluster.worker.data.look_ahead import look_ahead
from pscluster.worker.data.pace import Pace, Stopwatch
from pscluster.worker.data.per_worker import EndOfIterator
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.processes.process_map import ProcessedElements

logger = logging.getLogger(__name__)

_PARTS = 2
_PART_KEY = re.compile(r"([0-9]{1,20})/([0-9]{1,18})/([0-9]{1,18})/([0-9]{1,18})")
_CHECK_SECONDS = 0.1  # how often a function that waits for data checks whether it must stop


class EndOfPart(EndOfIterator):
    """All elements of a part have been returned."""

    ended = "the part of the dataset"
    advice = "loop over it with `for element in part`, or give each function more with parts()"


class Part(Handle):
    """An iterator over the elements of a part of a dataset, for a step function."""

    handle_kind = "part"

    def __init__(self, key: str, pipeline: Pipeline, reader: Reader, *, skips: bool = False) -> None:
        self._key = key
        self.pipeline = pipeline
        self._reader = reader
        self._skips = skips
        if (match := _PART_KEY.fullmatch(key)) is None:
            raise ProtocolError(f"{key[:80]!r} is not a part of a dataset")
        self.dataset, *positions = match.groups()
        self._epoch, self._start, self._stop = map(int, positions)
        self._found = pipeline.read(self._epoch, self._start, self._stop)
        # Those of a map in processes, which are given something to do before the elements are wanted.
        self._processed = self._found if isinstance(self._found, ProcessedElements) else None
        self._left = pipeline.count(self._start, self._stop)
        self.ready: deque[Any] = deque()  # elements, and `Batches` of several
        self.peeked: deque[Any] = deque()  # taken from `ready` before its function ran, and not given yet
        self.read = self.closed = False
        self.awaited = False  # its function waits for an element, or arranges a block
        self.given = 0
        self.waited = 0.0  # seconds, by its function
        self.skipped: list[DatasetError] = []
        self.pace = Pace(always_slow=self._processed is not None)

    @property
    def handle_key(self) -> str:
        """The dataset's id, the epoch, the first position and the one after the last."""
        return self._key

    @property
    def _subject(self) -> str:
        return f"dataset {self.pipeline.name!r}, epoch {self._epoch}, from {self._start:,} to {self._stop - 1:,}"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        function = current_function()
        overlap = None if function is None else function.overlap
        if overlap is not None and (ahead := look_ahead()) is not None:
            return ahead.next_of(self)
        begin = time.perf_counter()
        while True:
            if function is not None:
                function.check()
            try:
                arrived, element = (True, self.peeked.popleft()) if self.peeked else self._reader.next_of(self)
            except EndOfPart:
                if overlap is not None:
                    overlap.took(self)
                raise
            finally:
                took = time.perf_counter() - begin
                self.waited += took
            begin = time.perf_counter()
            if not arrived:
                continue  # reading takes long: check whether the function must stop
            if isinstance(element, _Fatal):  # the rest can't be read either, so it can't be skipped
                error = element.error
                if isinstance(error, FunctionCancelled):
                    raise error
                raise DatasetError(f"{self._subject} can't be read: {type(error).__name__}: {error}") from error
            if not isinstance(element, DatasetError):
                self.given += 1
                if overlap is not None:
                    overlap.took(self)
                return element
            if not self._skips:
                raise element
            self.skipped.append(element)

    def prime(self) -> None:
        """Give processes of a map something to do. Not under the lock."""
        if self._processed is not None and not self.closed:
            self._processed.prime()

    def drop(self) -> None:
        """Drop what is under way: the part is closed. Takes no lock."""
        if self._processed is not None:
            self._processed.close()

    def peek(self, ahead: int, check: Callable[[], object]) -> Any:
        """Return the element that is given after `ahead` others from now on, and keep it. See `look_ahead`."""
        while len(self.peeked) <= ahead:
            check()
            arrived, element = self._reader.next_of(self)
            if arrived:
                self.peeked.append(element)
        element = self.peeked[ahead]
        if isinstance(element, DatasetError):
            raise element
        if isinstance(element, _Fatal):
            raise element.error
        return element

    @property
    def is_given(self) -> bool:
        """Whether its function has taken all elements."""
        return self.read and not self.ready and not self.peeked

    @property
    def wants_more(self) -> bool:
        """Whether to read on ahead. Under the lock."""
        used = bool(self.ready) and self._is_used(self.ready[0])
        return not self.read and len(self.ready) - used < self.pipeline.ahead and self.pace.is_slow()

    @property
    def has_whole_block(self) -> bool:
        """Whether there is a block beside the one that its function uses, or is about to. Under the lock."""
        last = self.ready[-1] if self.ready else None
        return isinstance(last, Batches) and not (last is self.ready[0] and self._is_used(last))

    def _is_used(self, first: Any) -> bool:
        """Whether `first` of `ready` is a block of which its function has taken something, or waits for it."""
        return isinstance(first, Batches) and (first.begun or self.awaited)

    def take(self) -> tuple[Any, bool]:
        """Return the next element, which must be in `ready`, and whether there is room for more. Under the lock."""
        first = self.ready[0]
        if not isinstance(first, Batches):
            self.pace.given(time.perf_counter())
            return self.ready.popleft(), True
        if begins := not first.begun:
            self.pace.given(time.perf_counter())
        element = first.take()
        if not first:
            self.ready.popleft()
        return element, begins

    def read_one(self) -> None:
        """Read the next element, or its error, or several, into `ready`. Not under the lock."""
        try:
            found = next(self._found)
            if isinstance(found, Batches) and (self.ready or not self.awaited):
                try:
                    found.arrange()
                except DatasetError as error:
                    found = error
        except StopIteration:
            self.read = True
        except BaseException as error:  # a sys.exit() of the user's function must not end the reader
            self.ready.append(_Fatal(error))
            self.read = True
        else:
            self.ready.append(found)
            if self._left is not None:
                self._left -= len(found) if isinstance(found, Batches) else 1
                self.read = self._left == 0

    def skip_rest(self) -> None:
        """Skip the remaining elements: they count as visited."""
        if look_ahead() is not None:
            raise MisuseError("lookups must not skip the rest of a part: it only names rows")
        self.peeked.clear()
        self._reader.close(self)

    def check_read(self) -> None:
        """Raise MisuseError if its function returned without reading all of it: examples would be lost silently."""
        if self.closed or self.is_given:
            return
        try:
            next(self)
        except StopIteration:
            return
        raise MisuseError(
            f"the function read {self.given - 1} elements of its part ({self._subject}), which has more: loop over it "
            "with `for element in part`, or call part.skip_rest() where the rest is not wanted"
        )


@dataclass
class _Fatal:
    """The error that ended the reading of a part."""

    error: BaseException


class Reader:
    """Reads ahead, if that pays off; see the module's docstring. The user's functions run in `context`."""

    def __init__(self, context: FunctionContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for functions: an element was read
        self._wanted = threading.Condition(self._lock)  # for the thread: there may be something to read
        self._parts: list[Part] = []  # in the order in which they came
        self._paces: dict[str, Pace] = {}  # by dataset
        self._reading = False
        self.is_slow = False  # any dataset is
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, part: Part) -> None:
        """Read the part from now on."""
        with self._lock:
            part.pace = self._paces.setdefault(part.dataset, part.pace)
            self._parts.append(part)
            self._wake()

    def close(self, part: Part) -> None:
        """Close a part whose function has ended, or gone to another worker."""
        with self._lock:
            part.closed = True
            part.ready.clear()
            part.drop()
            if part in self._parts:
                self._parts.remove(part)
            self._wake()  # the next part may be read now
            self._changed.notify_all()

    def forget(self, dataset: str) -> None:
        with self._lock:
            self._paces.pop(dataset, None)

    def end(self) -> None:
        """End the reading: the job is over."""
        with self._lock:
            self._closed = True
            self._parts.clear()
            self._wanted.notify()
            self._changed.notify_all()

    def next_of(self, part: Part) -> tuple[bool, Any]:
        """Return (True, the next element), or (False, None) after `_CHECK_SECONDS`. Raise EndOfPart after the last."""
        with self._lock:
            if not part.ready and not self._await(part):
                return False, None
            if part.ready and isinstance(block := part.ready[0], Batches) and not block.is_arranged:
                self._arrange(part, block)
            if part.closed or not part.ready:
                raise EndOfPart(part.given)
            element, makes_room = part.take()
            if makes_room:
                self._wake()
            return True, element

    def _await(self, part: Part) -> bool:
        """Wait for the next element, or read it. Return False after `_CHECK_SECONDS`. Under the lock."""
        until = time.monotonic() + _CHECK_SECONDS
        part.awaited = True
        try:
            while not (part.ready or part.read or part.closed) and (self._reading or self._is_left(part)):
                if self._changed.wait(until - time.monotonic()):
                    continue
                if self._reading:
                    return False
                break  # the thread does not come
        finally:
            part.awaited = False
        if not (part.ready or part.read or part.closed):
            self._read(part)
        return True

    def _is_left(self, part: Part) -> bool:
        """Whether reading is left to the reader's thread, which is woken. Under the lock.

        If the function's thread read the block itself, the other could not begin the next one until this one is used:
        to wake up, it needs Python's lock.
        """
        self._wake()
        return self.is_slow and self._next_wanted() is part

    def _arrange(self, part: Part, block: Batches) -> None:
        """Arrange the part's next block, for its function. Under the lock, which is free meanwhile."""
        failure = None
        part.awaited = True  # still: the next block is read meanwhile
        self._wake()
        self._lock.release()
        try:
            block.arrange()
        except DatasetError as error:
            failure = error
        finally:
            self._lock.acquire()
            part.awaited = False
        if failure is not None and not part.closed:
            part.ready[0] = failure

    def _read(self, part: Part, following: Sequence[Part] = ()) -> None:
        """Read an element, and prime these parts. Under the lock, which is free during the reading."""
        self._reading = True
        self._lock.release()
        reading = Stopwatch()
        try:
            for other in following:
                other.prime()
            part.read_one()
        finally:
            took = reading.seconds()
            self._lock.acquire()
            part.pace.read(took)
            self.is_slow = part.pace.is_slow() or (
                len(self._paces) > 1 and any(map(Pace.is_slow, self._paces.values()))
            )
            self._reading = False
            if part.closed:
                part.ready.clear()
                part.drop()  # what it has given out meanwhile
            self._wake()
            self._changed.notify_all()

    def _run(self) -> None:
        with running(self._context), self._lock:
            while not self._closed:
                if (part := self._next_wanted()) is None:
                    self._wanted.wait()
                else:
                    self._read(part, self._parts[: 1 + _PARTS])

    def _wake(self) -> None:
        """Wake the thread, or start it, if there is something to read. Under the lock."""
        if not self.is_slow or self._closed or self._next_wanted() is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="data", daemon=True)
            self._thread.start()
        self._wanted.notify()

    def _next_wanted(self) -> Part | None:
        """Return the part to read ahead now, if any. Under the lock."""
        if not self._reading:
            for part in self._parts[: 1 + _PARTS]:
                if part.has_whole_block:
                    return None
                if part.wants_more:
                    return part
        return None
