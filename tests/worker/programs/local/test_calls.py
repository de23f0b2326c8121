"""Calls that wait for each other, in one task to six: the same values and bits, and errors in all tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.worker.collectives.memory_links import MemoryLinks, on_each
from tests.worker.programs.support import InMemory, grid

from pscluster.core.errors import MemberUnavailableError, MisuseError
from pscluster.worker.programs.exchange import gather_bytes
from pscluster.worker.programs.local import collectives, transfer
from pscluster.worker.programs.local.calls import LocalCalls, current_call
from pscluster.worker.programs.local.rounds import Ended

TASKS = [1, 2, 3, 6]
RANDOM = np.random.default_rng(5)
SMALL = RANDOM.random((6, 3, 4))
LARGE = RANDOM.random((6, 70, 200)).astype(np.float32)


def called(tasks: int, fn: Callable[[int], Any]) -> dict[int, Any]:
    """What a function returns for each device of a 3x2 mesh; or the error that its task raises."""
    mesh = grid(tasks)

    def on_task(links: MemoryLinks) -> dict[int, Any]:
        returned: dict[int, Any] = {}

        def run(device: int) -> Ended:
            returned[device] = fn(device)
            return Ended()

        try:
            LocalCalls(mesh, InMemory(links), "a test").run(mesh.devices_of(links.rank), run)
        except Exception as error:
            return dict.fromkeys(mesh.devices_of(links.rank), error)
        assert current_call() is None
        return returned

    return {device: value for task in on_each(tasks, on_task) for device, value in task.items()}


@pytest.mark.parametrize("tasks", TASKS)
def test_collectives(tasks: int) -> None:
    """Of small and large arrays, nested, of numbers and bools; over one dimension, and over both."""
    assert LARGE[0].nbytes // 2 < transfer.CUT_BYTES < LARGE[0].nbytes * 2

    def fn(device: int) -> Any:
        x, y = collectives.axis_index("x"), collectives.axis_index("y")
        assert (x, y) == (device // 2, device % 2)
        assert (collectives.axis_size("x"), collectives.axis_size(["y", "x"])) == (3, 6)
        column, all_devices = [d for d in range(6) if d % 2 == y], list(range(6))
        total = collectives.psum({"a": SMALL[device], "b": (x, device > 3)}, "x")
        np.testing.assert_allclose(total["a"], SMALL[column].sum(axis=0))
        assert total["b"] == (3, int(y + 4 > 3))
        large = collectives.psum([LARGE[device], np.float64(device)], ("y", "x"))
        np.testing.assert_allclose(large[0], LARGE.sum(axis=0), rtol=1e-5)
        assert (large[0].dtype, large[1]) == (np.float32, 15)
        np.testing.assert_array_equal(collectives.pmax(SMALL[device], "x"), SMALL[column].max(axis=0))
        np.testing.assert_array_equal(collectives.pmin(LARGE[device], "y"), LARGE[2 * x : 2 * x + 2].min(axis=0))
        assert collectives.pmean(device, "x") == np.mean(column)
        np.testing.assert_allclose(collectives.pmean(SMALL[device], ("x", "y")), SMALL.mean(axis=0))
        rows = collectives.all_gather(SMALL[device][: x + 1], "x")
        np.testing.assert_array_equal(rows, np.concatenate([SMALL[d][: d // 2 + 1] for d in column]))
        columns = collectives.all_gather([LARGE[device], SMALL[device][0]], "y")
        np.testing.assert_array_equal(columns[0], np.concatenate(LARGE[2 * x : 2 * x + 2]))
        assert collectives.all_gather(device, ("x", "y")).tolist() == all_devices
        empty = collectives.psum(np.zeros((0, 3)), "x")
        assert empty.shape == (0, 3)
        large[0] += 1  # the results are each device's own
        return large[0].tobytes() + collectives.psum(SMALL[device], ("x", "y")).tobytes()

    results = called(tasks, fn)
    for error in results.values():
        if isinstance(error, Exception):
            raise error
    assert len(set(results.values())) == 1
    assert results == called(1, fn)  # to the bit


@pytest.mark.parametrize("tasks", TASKS)
def test_a_call_that_fails(tasks: int) -> None:
    """Its task raises its error; the others one that names the device, those that wait in a collective, too."""

    def fn(device: int) -> None:
        collectives.psum(1, "y")
        if device == 3:
            raise ZeroDivisionError("here")
        collectives.psum(1, "x")

    task_of = grid(tasks).task_of
    for device, error in called(tasks, fn).items():
        if task_of[device] == task_of[3]:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert isinstance(error, MemberUnavailableError)
            assert "the call of device 3 " in str(error)
            assert "ZeroDivisionError: here" in str(error)


@pytest.mark.parametrize("tasks", TASKS)
def test_a_call_that_returns_too_early(tasks: int) -> None:
    """All tasks raise the same error, which names both devices, also where a call hides it."""

    def fn(device: int) -> None:
        if device == 2:
            return
        try:
            collectives.psum(1, "x")
        except MisuseError:
            if device == 0:
                raise RuntimeError("another one") from None
        if device == 4:
            collectives.psum(1, "x")  # raises the same error again

    results = called(tasks, fn)
    texts = {str(error) for error in results.values()}
    assert len(texts) == 1
    assert all(isinstance(error, MisuseError) for error in results.values())
    assert "the call of device 0 " in (text := texts.pop())
    assert "for device 2 " in text
    assert "test_calls.py:" in text


def test_what_is_refused() -> None:
    """Collectives outside of a call, over other dimensions, of what are no arrays."""
    for outside in (lambda: collectives.psum(1, "x"), lambda: collectives.axis_index("x")):
        with pytest.raises(MisuseError, match="is for functions that local_map calls"):
            outside()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: collectives.psum(1, "z"), "psum over 'z': the mesh has the dimensions x, y"),
        (lambda: collectives.pmax(1, ()), "the mesh has the dimensions"),
        (lambda: collectives.pmin(1, ("x", "x")), "the mesh has the dimensions"),
        (lambda: collectives.psum("a", "x"), "psum takes arrays of numbers, not a str"),
        (lambda: collectives.psum([[1], np.array([None])], "x"), "psum takes arrays of numbers"),
        (lambda: collectives.all_gather(np.ones(2), "x", axis=1), "all_gather along axis 1 of an array with 1 axes"),
        (lambda: collectives.all_gather([np.ones(2), np.ones((2, 2))], "x", axis=-1), "of different ranks"),
    ]
    for call, message in wrong:
        for error in called(2, lambda _, call=call: call()).values():  # type: ignore[misc]
            assert message in str(error)


@pytest.mark.parametrize("lengths", [[3, 0, 5], [1016, 1017, 10], [5000, 2, 3000]])
def test_bytes_of_any_length_are_gathered(lengths: list[int]) -> None:
    """Also those that do not fit into what is sent first."""
    sent = [bytes([task + 1]) * length for task, length in enumerate(lengths)]

    def on_task(links: MemoryLinks) -> list[bytes]:
        return gather_bytes(InMemory(links), 3, sent[links.rank], "a test")

    assert on_each(3, on_task) == [sent] * 3
