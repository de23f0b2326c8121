"""The collectives' algorithms against NumPy, over links in memory: any number of members, sizes and types."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.waiting import TIMEOUT
from tests.worker.collectives.memory_links import MemoryLinks, on_each

from pscluster.core.geometry.partition import even_ends
from pscluster.core.transport.frames import view
from pscluster.worker.collectives import algorithms

Array = npt.NDArray[Any]
TYPES = ("float16", "float32", "float64", "int8", "int64", "uint16", "complex64", "bool", "bfloat16")
COMBINE: dict[str, Any] = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}

members, lengths, seeds = st.integers(1, 8), st.integers(0, 70), st.integers(0, 1000)
few = settings(max_examples=40)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Make rings, trees and pieces of arrays that are small enough for many examples."""
    with mock.patch.multiple(algorithms, PIECE_BYTES=24, SMALL_BYTES=64):
        yield


def dtype_of(name: str) -> np.dtype[Any]:
    """The type of that name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def arrays_of(size: int, length: int, name: str, seed: int) -> list[Array]:
    """An array of small whole numbers for each member, so that sums are exact in any order."""
    numbers = np.random.default_rng(seed).integers(0, 8, (size, length))
    return [row.astype(dtype_of(name)) for row in numbers]


def bits(array: Array) -> bytes:
    """Its bytes."""
    return array.tobytes()


@few
@given(members, lengths, st.sampled_from(TYPES), st.sampled_from(sorted(COMBINE)), seeds)
@example(8, 61, "float32", "add", 1)
@example(7, 5, "float16", "add", 1)
@example(3, 0, "float64", "add", 1)
def test_all_reduce(size: int, length: int, name: str, op: str, seed: int) -> None:
    """Every member gets what NumPy computes from all arrays, and no array is changed."""
    arrays = arrays_of(size, length, name, seed)
    before = list(map(bits, arrays))
    results = on_each(size, lambda links: algorithms.all_reduce(links, COMBINE[op], arrays[links.rank]))
    expected = functools.reduce(COMBINE[op], arrays)
    assert all(result.dtype == expected.dtype for result in results)
    assert [bits(result) for result in results] == [bits(expected)] * size
    assert list(map(bits, arrays)) == before


def rounded(op: np.ufunc, arrays: list[Array], links: MemoryLinks) -> bytes:
    """The bits of a member's result."""
    return bits(algorithms.all_reduce(links, op, arrays[links.rank]))


@few
@given(members, lengths, st.sampled_from(("float16", "float32", "float64")), seeds)
def test_rounding_is_the_same_everywhere(size: int, length: int, name: str, seed: int) -> None:
    """Sums that depend on the order, NaNs and signed zeros: all members get the same bits, and so does a second run."""
    random = np.random.default_rng(seed)
    arrays = list(random.standard_normal((size, length)).astype(name))
    for array in arrays:
        array[random.random(length) < 0.1] = np.nan
        array[random.random(length) < 0.1] = -0.0
        array[random.random(length) < 0.1] = 0.0
    for op in (np.add, np.minimum):
        reduce = functools.partial(rounded, op, arrays)
        runs = [on_each(size, reduce) for _ in range(2)]
        assert len({result for run in runs for result in run}) == 1


@few
@given(members, lengths, seeds)
def test_a_mean_is_divided_once(size: int, length: int, seed: int) -> None:
    """What finishes a result is done once to each element, on both ways."""
    arrays = arrays_of(size, length, "float32", seed)

    def mean(links: MemoryLinks) -> Array:
        return algorithms.all_reduce(links, np.add, arrays[links.rank], lambda part: np.divide(part, size, out=part))

    for result in on_each(size, mean):
        np.testing.assert_allclose(result, np.mean(arrays, axis=0), rtol=1e-6)


@few
@given(members, lengths, st.sampled_from(TYPES), seeds)
def test_reduce_scatter(size: int, length: int, name: str, seed: int) -> None:
    """Member n gets the n-th of numpy.array_split's parts of the sum, also in the memory of its array."""
    arrays, ends = arrays_of(size, length, name, seed), even_ends(length, size)
    expected = np.array_split(functools.reduce(np.add, arrays), size)
    for in_place in (False, True):

        def scatter(links: MemoryLinks) -> Array:
            return algorithms.reduce_scatter(links, np.add, arrays[links.rank], ends, in_place=in_place)  # noqa: B023

        results = on_each(size, scatter)
        assert list(map(bits, results)) == list(map(bits, expected))


@few
@given(st.lists(lengths, min_size=1, max_size=8), seeds)
@example([70, 0, 70], 1)
@example([0, 0, 0], 1)
def test_all_gather(sizes: list[int], seed: int) -> None:
    """Every member gets all arrays, however much they differ in size."""
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 100, size, np.int16) for size in sizes]
    ends = list(map(int, np.cumsum(sizes)))
    results = on_each(len(sizes), lambda links: algorithms.all_gather(links, arrays[links.rank], ends))
    assert [bits(result) for result in results] == [bits(np.concatenate(arrays))] * len(sizes)


@few
@given(members, st.data())
def test_all_to_all(size: int, data: st.DataObject) -> None:
    """Member a gets from member b what b has for a."""
    buffers = [[data.draw(st.binary(max_size=60)) for _ in range(size)] for _ in range(size)]

    def exchange(links: MemoryLinks) -> list[bytes]:
        incoming = [bytearray(len(row[links.rank])) for row in buffers]
        outgoing = [memoryview(buffer) for buffer in buffers[links.rank]]
        algorithms.all_to_all(links, outgoing, [memoryview(buffer) for buffer in incoming])
        return list(map(bytes, incoming))

    assert on_each(size, exchange) == [[row[rank] for row in buffers] for rank in range(size)]


def test_something_else_is_done_before_messages_are_awaited() -> None:
    """Here the other member sends only once it has been done."""
    done = threading.Event()

    def exchange(links: MemoryLinks) -> bytes:
        memory = bytearray(1)

        def messages() -> Iterator[list[memoryview]]:
            assert links.rank == 0 or done.wait(TIMEOUT)
            yield [memoryview(bytes([links.rank]))]

        other = 1 - links.rank
        algorithms.exchange(
            links, {other: messages()}, {other: [memoryview(memory)]}, done.set if links.rank == 0 else lambda: None
        )
        return bytes(memory)

    assert on_each(2, exchange) == [b"\1", b"\0"]


@few
@given(members, st.integers(0, 7), lengths)
def test_broadcast(size: int, source: int, length: int) -> None:
    """Every member gets the source's bytes, from any source."""
    source %= size
    data = bytes(range(length)) * 3

    def receive(links: MemoryLinks) -> bytes:
        memory = bytearray(data if links.rank == source else bytes(len(data)))
        algorithms.broadcast(links, memoryview(memory), source)
        return bytes(memory)

    assert on_each(size, receive) == [data] * size


@pytest.mark.parametrize("size", range(1, 9))
def test_a_barrier_waits_for_all(size: int) -> None:
    """Nobody passes before the last one has come."""
    come: list[int] = []

    def pass_through(links: MemoryLinks) -> int:
        come.append(links.rank)
        algorithms.barrier(links)
        return len(come)

    assert on_each(size, pass_through) == [size] * size


def test_a_ring_sends_the_least_that_is_possible() -> None:
    """Each member sends 2 (size - 1) / size of a large array, and no more."""
    network_sent: dict[int, int] = {}
    arrays = arrays_of(4, 4000, "float32", 1)

    def reduce(links: MemoryLinks) -> None:
        algorithms.all_reduce(links, np.add, arrays[links.rank])
        network_sent[links.rank] = links._network.sent[links.rank]

    on_each(4, reduce)
    assert set(network_sent.values()) == {4000 * 4 * 2 * 3 // 4}


def test_views_of_no_bytes_are_sent_too() -> None:
    """An empty array is a message like any other: that is how the members' calls are compared."""
    empty = np.empty(0, np.float32)
    assert not len(view(empty))
    results = on_each(3, lambda links: algorithms.all_reduce(links, np.add, empty))
    assert [result.size for result in results] == [0, 0, 0]
