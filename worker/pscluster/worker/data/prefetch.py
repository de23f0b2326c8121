"""Parts of distributed datasets on a worker: what a function gets for one, and the thread that reads ahead.

A part is a range of places of an epoch, bound to a function before it is sent: whoever runs it reads the same. Its
elements are read in order, by one thread at a time and by one for the whole worker, since sources and the user's
functions need not be thread-safe. Which thread, is a question of how long reading takes, smoothed, of each dataset:

    long       the reader's thread, which works for the parts in the order in which they came, each up to `ahead`
               elements before they are asked for, and for no more than the running one and `_PARTS` behind it
    not long   the function's own, when it asks: to hand an element over from thread to thread takes longer, since each
               of the two has to be woken and to wait for Python's lock. Not long is less than `_SHORT_SECONDS`, or less
               than `_SHORT_SHARE` of the time from one element to the next

States of a part, all under the reader's lock:

    WAITING --add--> READING --the last element was read--> READ --close--> CLOSED    whenever its function has ended

An element is read while the lock is free: what is read for a part that was closed meanwhile is dropped.
"""

from __future__ import annotations

import logging
import re
import resource
import threading
import time
from collections import deque
from typing import Any, Self

from pscluster.core.context import FunctionContext, current_function, running
from pscluster.core.errors import DatasetError, FunctionCancelled, MisuseError, ProtocolError
from pscluster.core.handles import Handle
from pscluster.worker.data.per_worker import EndOfIterator
from pscluster.worker.data.pipelines import Pipeline

logger = logging.getLogger(__name__)

_PARTS = 2
_SHORT_SECONDS = 0.00025
_SHORT_SHARE = 1 / 16
_PAUSE_SECONDS = 1.0  # whatever is longer was no step
_SMOOTHING = 1 / 32  # one slow element among many, such as the first of a split, counts for what it costs all of them
_PLACE = re.compile(r"([0-9]{1,20})/([0-9]{1,18})/([0-9]{1,18})/([0-9]{1,18})")
_OF_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # Linux has it
_CHECK_SECONDS = 0.1  # so often a function that waits for data looks whether it is to stop


class EndOfPart(EndOfIterator):
    """All elements of a part were given out."""

    ended = "the part of the dataset"
    advice = "loop over it with `for element in part`, or give each function more with parts()"


class Part(Handle):
    """What a step function gets for a part of a dataset: an iterator over its elements."""

    handle_kind = "part"

    def __init__(self, key: str, pipeline: Pipeline, reader: Reader, *, skips: bool = False) -> None:
        self._key = key
        self.pipeline = pipeline
        self._reader = reader
        self._skips = skips
        if (place := _PLACE.fullmatch(key)) is None:
            raise ProtocolError(f"{key[:80]!r} is no part of a dataset")
        self.dataset, *places = place.groups()
        self._epoch, self._start, self._stop = map(int, places)
        self._elements = pipeline.elements(self._epoch, self._start, self._stop)
        self._left = pipeline.count(self._start, self._stop)
        self.ready: deque[Any] = deque()
        self.read = self.closed = False
        self.given = 0
        self.waited = 0.0
        """Seconds for which its function waited."""
        self.skipped: list[DatasetError] = []
        self.pace = Pace()

    @property
    def handle_key(self) -> str:
        """The dataset's number, the epoch, the first place and the one behind the last."""
        return self._key

    @property
    def _what(self) -> str:
        return f"dataset {self.pipeline.name!r}, epoch {self._epoch}, from {self._start:,} to {self._stop - 1:,}"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        function = current_function()
        begin = time.perf_counter()
        while True:
            if function is not None:
                function.check()
            try:
                found, element = self._reader.next_of(self)
            finally:
                took = time.perf_counter() - begin
                self.waited += took
            begin = time.perf_counter()
            if not found:
                continue  # it takes long: is the function still wanted?
            if isinstance(element, _Fatal):  # what is behind it can't be read either: nothing to be skipped
                if isinstance(element.error, FunctionCancelled):
                    raise element.error
                said = f"{type(element.error).__name__}: {element.error}"
                raise DatasetError(f"{self._what} can't be read: {said}") from element.error
            if not isinstance(element, DatasetError):
                self.given += 1
                return element
            if not self._skips:
                raise element
            self.skipped.append(element)

    def read_one(self) -> None:
        """Not under the lock: the next element, or what went wrong with it, into `ready`."""
        try:
            element = next(self._elements)
        except StopIteration:
            self.read = True
        except BaseException as error:  # a sys.exit() of the user's function must not end the reader
            self.ready.append(_Fatal(error))
            self.read = True
        else:
            self.ready.append(element)
            if self._left is not None:
                self._left -= 1
                self.read = self._left == 0

    def skip_rest(self) -> None:
        """What is left of it is not wanted: it counts as visited."""
        self._reader.close(self)

    def check_read(self) -> None:
        """MisuseError if the function that had it has ended before its end: examples would be lost in silence."""
        if self.closed or (self.read and not self.ready):
            return
        try:
            next(self)
        except StopIteration:
            return
        raise MisuseError(
            f"the function read {self.given - 1} elements of its part ({self._what}), which has more: loop over it "
            "with `for element in part`, or call part.skip_rest() where the rest is not wanted"
        )


class _Fatal:
    """What ended the reading of a part."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Stopwatch:
    """How long this thread takes for something, without what passes while others have its processor.

    Where all cores have work a thread that was just woken is soon put off again, for milliseconds: that tells nothing
    of reading. One that has not slept meanwhile, for its data or for Python's lock, takes its processor time.
    """

    def __init__(self) -> None:
        self._slept, self._cpu, self._begin = _times_slept(), time.thread_time(), time.perf_counter()

    def seconds(self) -> float:
        if self._slept == _times_slept():
            return time.thread_time() - self._cpu
        return time.perf_counter() - self._begin


def _times_slept() -> float:
    """This thread; where the system does not say, another number each time."""
    return time.perf_counter() if _OF_THREAD is None else resource.getrusage(_OF_THREAD).ru_nvcsw


class Pace:
    """How long reading takes, and how long it is from one element to the next; smoothed. Under the reader's lock."""

    def __init__(self) -> None:
        self._reading = self._between = 0.0
        self._last: float | None = None

    def read(self, seconds: float) -> None:
        """An element was read."""
        self._reading += _SMOOTHING * (seconds - self._reading)

    def given(self, now: float) -> None:
        """A function has got one."""
        if self._last is not None:
            self._between += _SMOOTHING * (min(now - self._last, _PAUSE_SECONDS) - self._between)
        self._last = now

    def is_slow(self) -> bool:
        """Does it pay to read ahead?"""
        return self._reading > max(_SHORT_SECONDS, _SHORT_SHARE * self._between)


class Reader:
    """Reads ahead, where that pays; see the module's docstring."""

    def __init__(self, context: FunctionContext) -> None:
        """`context`: what the user's functions run in."""
        self._context = context
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for functions: an element was read
        self._wanted = threading.Condition(self._lock)  # for the thread: there may be something to read
        self._parts: list[Part] = []  # in the order in which they came
        self._paces: dict[str, Pace] = {}  # by dataset
        self._reading = False
        self.is_slow = False  # is any dataset?
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, part: Part) -> None:
        """It is to be read."""
        with self._lock:
            part.pace = self._paces.setdefault(part.dataset, part.pace)
            self._parts.append(part)
            self._wake()

    def close(self, part: Part) -> None:
        """Its function has ended, or gone elsewhere."""
        with self._lock:
            part.closed = True
            part.ready.clear()
            if part in self._parts:
                self._parts.remove(part)
            self._wake()  # another one may be among the first now
            self._changed.notify_all()

    def forget(self, dataset: str) -> None:
        """It is in no use any more."""
        with self._lock:
            self._paces.pop(dataset, None)

    def end(self) -> None:
        """The job is over."""
        with self._lock:
            self._closed = True
            self._parts.clear()
            self._wanted.notify()
            self._changed.notify_all()

    def next_of(self, part: Part) -> tuple[bool, Any]:
        """(True, the next element), or (False, None) after a while without one. EndOfPart behind the last one."""
        with self._lock:
            until = time.monotonic() + _CHECK_SECONDS
            while not (part.ready or part.read or part.closed) and self._reading:
                if not self._changed.wait(until - time.monotonic()):
                    return False, None
            if not (part.ready or part.read or part.closed):
                self._read(part)
            if part.closed or not part.ready:
                raise EndOfPart(part.given)
            element = part.ready.popleft()
            part.pace.given(time.perf_counter())
            self._wake()  # there is room for another one
            return True, element

    def _read(self, part: Part) -> None:
        """Under the lock, which is free meanwhile."""
        self._reading = True
        self._lock.release()
        reading = _Stopwatch()
        try:
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
            self._wake()
            self._changed.notify_all()

    def _run(self) -> None:
        with running(self._context), self._lock:
            while not self._closed:
                if (part := self._next_wanted()) is None:
                    self._wanted.wait()
                else:
                    self._read(part)

    def _wake(self) -> None:
        """The thread, if there is something for it to do. Under the lock."""
        if not self.is_slow or self._closed or self._next_wanted() is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="data", daemon=True)
            self._thread.start()
        self._wanted.notify()

    def _next_wanted(self) -> Part | None:
        """What is to be read ahead now, if anything. Under the lock."""
        if not self._reading:
            for part in self._parts[: 1 + _PARTS]:
                if not part.read and len(part.ready) < part.pipeline.ahead and part.pace.is_slow():
                    return part
        return None
