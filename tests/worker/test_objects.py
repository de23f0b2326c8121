"""Objects of a worker: made once, however many threads ask; made again after an error; forgotten when dropped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.waiting import TIMEOUT

from pscluster.core.errors import MisuseError
from pscluster.worker.objects import WorkerObject


class Model:
    """Something to make."""


def object_of(make: Callable[[], Any]) -> WorkerObject:
    """An object of worker 0."""
    return WorkerObject("1", "per-worker object 'model' on worker:0", make)


def test_made_once_by_whoever_asks_first() -> None:
    """Threads that ask while it is made wait for it, and get the same one; None is an object as any other."""
    made, gate, asked = list[object](), threading.Event(), threading.Barrier(4)

    def make() -> Model:
        made.append(threading.current_thread())
        assert gate.wait(TIMEOUT)
        return Model()

    item = object_of(make)

    def ask(_: int) -> Model:
        asked.wait(TIMEOUT)
        return item.get()  # type: ignore[no-any-return]

    with ThreadPoolExecutor(3) as pool:
        results = pool.map(ask, range(3))
        asked.wait(TIMEOUT)
        gate.set()
        assert len(set(results)) == 1
    assert len(made) == 1
    calls = list[int]()
    nothing = object_of(lambda: calls.append(1))
    assert nothing.get() is nothing.get() is None
    assert calls == [1]


def test_an_error_is_not_kept() -> None:
    """It names the object and the worker, also for sys.exit, and the next one that asks makes it."""
    answers: Iterator[Any] = iter([LookupError("no weights"), SystemExit("no GPU"), Model()])

    def make() -> Any:
        if isinstance(answer := next(answers), BaseException):
            raise answer
        return answer

    item = object_of(make)
    for error in (LookupError, SystemExit):
        with pytest.raises(error) as caught:
            item.get()
        assert caught.value.__notes__ == ["raised by the function that makes per-worker object 'model' on worker:0"]
    assert isinstance(item.get(), Model)
    assert repr(item) == "<per-worker object 'model' on worker:0>"


def test_an_object_that_asks_for_itself() -> None:
    """It fails, and does not wait for itself."""
    item: WorkerObject = object_of(lambda: item.get())
    with pytest.raises(RecursionError):
        item.get()


def test_dropped() -> None:
    """What was made is freed, though functions still name the handle; to ask again is an error."""
    item = object_of(Model)
    made = weakref.ref(item.get())
    item.drop()
    assert made() is None
    with pytest.raises(MisuseError, match=r"per-worker object 'model' on worker:0 is gone: its handle was dropped"):
        item.get()


def test_dropped_while_it_is_made() -> None:
    """The one that has asked gets it, and it is not kept."""

    def make() -> Model:
        item.drop()
        return Model()

    item = object_of(make)
    made = weakref.ref(item.get())
    assert made() is None
    with pytest.raises(MisuseError, match="is gone"):
        item.get()
