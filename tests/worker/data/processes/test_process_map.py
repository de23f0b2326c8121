"""Maps in real processes: the same elements as without, and what happens when the processes die, freeze or raise."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import until

from pscluster.core.errors import DatasetError, MisuseError
from pscluster.core.functions.definitions import capture
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.processes.process_map import ProcessMap
from pscluster.worker.data.sources import source_of

COLUMNS = {
    "number": np.arange(50),
    "row": np.arange(150.0).reshape(50, 3),
    "text": np.array([f"text {n}" for n in range(50)], object),
}


def as_sent(function: Callable[[Any], Any], workers: int = 2, timeout: float = 60.0) -> ProcessMap:
    """A map as a worker has it."""
    captured = capture(function)
    forms = [form.SerializeToString() for form in captured.forms()]
    sent: ProcessMap = pickle.loads(pickle.dumps(ProcessMap(function, captured.name, forms, workers, timeout)))
    assert not sent.is_here
    return sent


def larger(example: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An example of other arrays, some of them large, and texts."""
    number = int(example["number"])
    return np.full((40, 41), number, np.int16), {"row": example["row"] * 2, "text": example["text"].encode()}


def summed(element: Any) -> Any:
    """A batch, or an example, with a sum beside."""
    image, rest = element
    return image.sum(), image, rest["row"], rest["text"]


def raised_number(example: dict[str, Any]) -> dict[str, Any]:
    """An example with another number."""
    return {**example, "number": example["number"] + 1}


def assert_same(found: Any, wanted: Any) -> None:
    """Of the same structure, with equal arrays of the same type, in writable memory."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, tuple | list):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert found.flags.writeable
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("chain", ["examples", "in the middle", "batches", "no batches"])
def test_the_same_as_without_processes(chain: str) -> None:
    """In the same order, whatever comes before and after it."""
    mapped: Any = as_sent(raised_number if chain == "in the middle" else larger if chain != "batches" else summed)

    def pipeline(map_: Any) -> Pipeline:
        options: dict[str, dict[str, Any]] = {
            "examples": {"example_functions": (map_,), "batch": 16, "batch_functions": (summed,)},
            "in the middle": {"example_functions": (raised_number, map_, larger), "batch": 16},
            "batches": {"example_functions": (larger,), "batch": 16, "batch_functions": (map_, list)},
            "no batches": {"example_functions": (map_, summed)},
        }
        return Pipeline(source_of(COLUMNS), "data", seed=2, split=20, **options[chain])

    plain: Any = {"in the middle": raised_number, "batches": summed}.get(chain, larger)
    with closing(pipeline(mapped)) as processed:
        for start, stop in ((0, 16), (16, 50)):
            found, wanted = list(processed.elements(1, start, stop)), list(pipeline(plain).elements(1, start, stop))
            assert_same(found, wanted)


def test_what_fails_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error is the function's own; who dies or freezes is replaced, three times; other batches are whole."""

    def fragile(number: Any) -> Any:
        if number == 3:
            raise ZeroDivisionError("three")
        if number == 9 and not (tmp_path / "9").exists():
            (tmp_path / "9").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 17:
            os._exit(5)
        if number == 26:
            os.kill(os.getpid(), signal.SIGSTOP)
        if 32 <= number < 40:
            return object()
        return np.full(number // 44 + 1, number)

    numbers = source_of(np.arange(48))
    pipeline = Pipeline(numbers, "data", batch=8, example_functions=(as_sent(fragile, timeout=0.3),))
    with closing(pipeline):
        found = list(pipeline.elements(0, 0, 48))
    np.testing.assert_array_equal(found[1], np.arange(8, 16).reshape(8, 1))
    for index, why in {
        0: "ZeroDivisionError: three",
        2: "RuntimeError: process [0-9]+ ended with exit status 5 in fragile for number 1 of the examples; this was "
        "attempt 3, and the last",
        3: r"TimeoutError: process [0-9]+ made no progress for 0\.3 s, and was killed in fragile for number 2 of the "
        r"examples; this was attempt 3, and the last; map\(\.\.\., timeout=\) sets the limit",
        4: r"TypeError: what fragile returned\.items\[0\] is an object, which can't be sent",
        5: r"ValueError: an example of the batch has the shape \(2,\), and the first one \(1,\): pad them in the map",
    }.items():
        with pytest.raises(DatasetError, match=f"examples at {8 * index} to {8 * index + 7} of epoch 0, .* {why}"):
            raise found[index]
    cause = found[0].__cause__
    assert isinstance(cause, ZeroDivisionError)
    notes = "\n".join(cause.__notes__)
    assert 'raise ZeroDivisionError("three")' in notes
    assert "raised by fragile for number 3 of the examples" in notes
    assert "was killed by SIGKILL in fragile for number 1 of the examples" in caplog.text


def test_no_more_is_ahead_than_agreed() -> None:
    """Reading stops when enough is on its way; what is dropped holds nothing back; no process outlives its pool."""
    read: list[int] = []

    class Source:
        """Counts what is read."""

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    pipeline = Pipeline(source_of(Source()), "data", example_functions=(as_sent(abs, workers=1),))
    with closing(pipeline):
        elements: Any = pipeline.read(0, 0, 500)
        elements.prime()
        other: Any = pipeline.read(0, 500, 1000)
        other.prime()
        assert read == [0, 1, 2]
        assert next(elements) == 0
        assert next(other) == 500  # although the first one has all places
        assert len(read) < 12
        elements.close()
        assert [next(other) for _ in range(20)] == list(range(501, 521))
        (pid,) = pipeline.pool.pids
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(MisuseError, match="the dataset whose map calls abs is gone"):
        next(other)


def _unloadable(_state: Any) -> Callable[[Any], Any]:
    if os.environ["PSCLUSTER_TEST_LOADER"] == str(os.getpid()):
        return abs
    raise FileNotFoundError("no model here")


class Unloadable:
    """A function that only the process that made it can load."""

    def __call__(self, example: Any) -> Any:
        """Never called."""
        raise AssertionError(example)

    def __reduce__(self) -> Any:
        return _unloadable, (None,)


def test_a_function_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes are not started again and again: every element says why."""
    monkeypatch.setenv("PSCLUSTER_TEST_LOADER", str(os.getpid()))
    pipeline = Pipeline(source_of(np.arange(6)), "data", batch=2, example_functions=(as_sent(Unloadable()),))
    with closing(pipeline):
        found = list(pipeline.elements(0, 0, 6))
    assert len(found) == 3
    for element in found:
        assert isinstance(element, DatasetError)
        assert "FileNotFoundError: no model here" in str(element)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process with a map whose own process never ends a call."""
    script = (
        "import os, time\n"
        "from tests.worker.data.processes.test_process_map import *\n"
        "def forever(example):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(1000)\n"
        "mapped = Pipeline(source_of(np.arange(2)), 'data', example_functions=(as_sent(forever, 1),))\n"
        "list(mapped.elements(0, 0, 2))\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_the_worker_is_killed(holder: subprocess.Popen[str]) -> None:
    """Its process ends with it, also in the middle of a call."""
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    until(lambda: not _is_alive(pid), "it has ended", lambda: pid)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
