"""Initializers: their fixed streams, cut in every way, against their distributions."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from statistics import NormalDist
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.geometry.partition import Partition
from pscluster.core.numbers import random_blocks
from pscluster.ps import initializers
from pscluster.ps.initializers import (
    INITIALIZERS,
    Constant,
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    Initializer,
    Ones,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    Zeros,
    from_spec,
)

Array = npt.NDArray[Any]

RANDOM = [
    RandomUniform(seed=1),
    RandomNormal(seed=2),
    TruncatedNormal(seed=3),
    GlorotUniform(seed=4),
    GlorotNormal(seed=5),
    HeUniform(seed=6),
    HeNormal(seed=7),
]


def by_name(initializer: Initializer) -> str:
    return initializer.name


def half_dtypes() -> list[Any]:
    try:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return [np.float16]
    return [np.float16, ml_dtypes.bfloat16]


FLOATS = [*half_dtypes(), np.float32, np.float64]


def digest(values: Array) -> str:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(little.tobytes()).hexdigest()[:16]


# The streams

# A different value here changes the initial values of everybody's models, and shards no longer fit together in a
# cluster of mixed versions.
DIGESTS = {
    "random_uniform float16": "212465da5170e8ba",
    "random_uniform float32": "442ff4799b6ba25e",
    "random_uniform float64": "7f2ead9295d0d294",
    "random_normal float16": "35b0139001c2baad",
    "random_normal float32": "a5ca8737b60f0955",
    "random_normal float64": "8723d9b73ba5bf1c",
    "truncated_normal float16": "cb2968cffc34a374",
    "truncated_normal float32": "1ab1900f576336c0",
    "truncated_normal float64": "b5d44df46b031196",
    "glorot_uniform float16": "78aa32431c0b4def",
    "glorot_uniform float32": "65cca36b8a29141c",
    "glorot_uniform float64": "dbf1c190ead2ab10",
    "glorot_normal float16": "5aad6c909c53df4b",
    "glorot_normal float32": "d4e79f8ee8f56a8d",
    "glorot_normal float64": "d74b4804324e7404",
    "he_uniform float16": "110c5ddc7792506a",
    "he_uniform float32": "607351e9b50b9f9f",
    "he_uniform float64": "c103dffc95236e07",
    "he_normal float16": "d16d3b19784b2e70",
    "he_normal float32": "b811f5ed7cc551e7",
    "he_normal float64": "9231ea112e650c3d",
    "integers int8": "3b4bd2f4b16788ed",
    "integers uint16": "5efc5b80499e715e",
    "integers int32": "884a69781aa1c51f",
    "integers int64": "a9203be061e536c7",
    "integers wide": "b0281ccafcde02e9",
}


def digests() -> dict[str, str]:
    made = {
        f"{initializer.name} {np.dtype(dtype).name}": digest(initializer((20, 3, 500), dtype))
        for initializer in RANDOM
        for dtype in (np.float16, np.float32, np.float64)
    }
    for dtype in (np.int8, np.uint16, np.int32, np.int64):
        made[f"integers {np.dtype(dtype).name}"] = digest(RandomUniform(0, 100, seed=8)((30_000,), dtype))
    made["integers wide"] = digest(RandomUniform(-(1 << 62), 1 << 62, seed=9)((30_000,), np.int64))
    return made


def test_the_streams_are_pinned() -> None:
    """No value of any initializer has changed, whatever the version of NumPy."""
    assert digests() == DIGESTS


def test_the_first_values_of_some_streams() -> None:
    """If a stream has changed, these show how."""
    np.testing.assert_array_equal(
        RandomUniform(seed=1)((3,)),
        np.array([-0.00414656475186348, -0.019643200561404228, 0.022946249693632126], np.float32),
    )
    np.testing.assert_array_equal(
        RandomUniform(seed=1)((3,), np.float64), [-0.01964319656932414, 0.0348708749685777, -0.03438652219565269]
    )
    np.testing.assert_array_equal(
        RandomNormal(seed=2)((3,)),
        np.array([-0.016331519931554794, -0.009983387775719166, 0.08000042289495468], np.float32),
    )
    np.testing.assert_array_equal(
        TruncatedNormal(seed=3)((3,), np.float64), [0.0506146850874532, 0.03768483893765587, 0.002792572902043796]
    )
    assert RandomUniform(0, 100, seed=8)((8,), np.int64).tolist() == [31, 99, 93, 44, 48, 88, 71, 37]


def test_the_streams_are_philox_keyed_by_the_seed_tile_by_tile() -> None:
    """Each tile is NumPy's stream from a Philox with the seed as key and the tile's number in its counter."""
    size = random_blocks.TILE
    cases: list[tuple[Initializer, Any, Callable[[np.random.Generator], Array]]] = [
        (RandomUniform(0.0, 1.0, seed=12), np.float32, lambda g: g.random(size, np.float32)),
        (RandomUniform(0.0, 1.0, seed=12), np.float64, lambda g: g.random(size)),
        (RandomUniform(-3, 100, seed=12), np.int16, lambda g: g.integers(-3, 100, size, np.int16)),
        (RandomNormal(0.0, 1.0, seed=12), np.float64, lambda g: g.standard_normal(size)),
    ]
    for initializer, dtype, draw in cases:
        whole = initializer((3 * size,), dtype)
        for tile in range(3):
            bits = np.random.Philox(key=12, counter=tile << 64)
            np.testing.assert_array_equal(whole[tile * size :][:size], draw(np.random.Generator(bits)))


def test_the_values_are_the_same_on_a_lesser_processor() -> None:
    """With as many of NumPy's vector instructions disabled as possible, each stream is the same."""
    features = subprocess.run(
        [sys.executable, "-c", _FEATURES], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    if not features:
        pytest.skip("this build of NumPy has nothing to switch off here")
    script = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('streams', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps(module.digests()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"NPY_DISABLE_CPU_FEATURES": features},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(ended.stdout) == DIGESTS


_FEATURES = """
try:
    from numpy._core import _multiarray_umath as core
except ImportError:
    from numpy.core import _multiarray_umath as core
print(" ".join(name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]))
"""


def test_seeds_matter_wholly() -> None:
    """Neighbouring seeds, and seeds that differ in the highest bit only, give unrelated values."""
    values = [RandomNormal(0, 1, seed)((50_000,)) for seed in (0, 1, 2, 1 << 62, (1 << 63) - 1)]
    for a, b in itertools.combinations(values, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.025


def test_a_seed_not_given_is_drawn_once() -> None:
    """Without a seed two initializers differ, and each one gives the same values every time."""
    first, second = GlorotUniform(), GlorotUniform()
    assert isinstance(first.seed, int)
    assert first.seed != second.seed
    np.testing.assert_array_equal(first((9,)), first((9,)))
    assert not np.array_equal(first((9,)), second((9,)))


# Any cut


def initializers_and_dtypes() -> st.SearchStrategy[tuple[Initializer, Any]]:
    floats = st.tuples(st.sampled_from(RANDOM), st.sampled_from(FLOATS))
    integers = st.tuples(
        st.sampled_from([RandomUniform(0, 100, seed=1), RandomUniform(3, 5, seed=2)]),
        st.sampled_from([np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]),
    )
    return st.one_of(floats, integers)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    ends = [(*sorted(draw(st.lists(st.integers(0, length), max_size=3))), length) for length in shape]
    return Partition(shape, tuple(ends))


@given(
    partitions(), initializers_and_dtypes(), st.sampled_from([1, 3, 8, 1 << 10]), st.sampled_from([1, 5, 64, 1 << 16])
)
@settings(max_examples=300, deadline=None)
def test_blocks_are_slices_of_the_whole(
    partition: Partition, made: tuple[Initializer, Any], tile: int, piece: int
) -> None:
    """Any block of any cut along any axes is the slice of the whole, bit for bit, whatever the pieces."""
    with mock.patch.object(random_blocks, "TILE", tile):  # small, so that small arrays have several
        _try_blocks(partition, *made, piece)


def _try_blocks(partition: Partition, initializer: Initializer, dtype: Any, piece: int) -> None:
    whole = initializer(partition.shape, dtype)
    assert whole.shape == partition.shape
    assert whole.dtype == dtype
    with mock.patch.object(random_blocks, "_PIECE", piece):
        for shard in range(partition.num_shards):
            block = partition.block(shard)
            values = initializer(partition.shape, dtype, partition_shape=block.shape, partition_offset=block.start)
            assert values.dtype == dtype
            assert values.shape == block.shape
            assert values.tobytes() == whole[block.slices].tobytes()


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((300_001,), (4,)),
        ((7, 90_001), (2, 3)),
        ((5, 4, 30_000), (1, 3, 1)),
        ((100_000, 8), (3, 2)),
        ((1_000, 6_000), (1, 1_500)),
        ((70, 50, 3, 40), (3, 2, 1, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_blocks_are_slices_of_the_whole(shape: tuple[int, ...], parts: tuple[int, ...], dtype: Any) -> None:
    """The same holds with the real pieces: long runs, short runs near each other, short runs far apart."""
    initializer = RandomNormal(seed=11)
    partition = Partition.even(shape, parts)
    whole = initializer(shape, dtype)
    for shard in {0, 1, partition.num_shards // 2, partition.num_shards - 1}:
        block = partition.block(shard)
        values = initializer(shape, dtype, block.shape, block.start)
        assert values.tobytes() == whole[block.slices].tobytes()


def test_positions_may_be_far_beyond_what_a_machine_holds() -> None:
    """A block deep inside a table of 2**50 elements is made immediately and fits its neighbours."""
    shape = (1 << 30, 1 << 20)
    initializer = RandomUniform(seed=3)
    start = ((1 << 29) + 12_345, 77)
    block = initializer(shape, np.float32, (3, 40), start)
    row = initializer(shape, np.float32, (1, 1 << 20), (start[0] + 2, 0))
    np.testing.assert_array_equal(row[0, 77:117], block[2])
    assert len(np.unique(block)) == block.size


@pytest.mark.parametrize("initializer", RANDOM, ids=by_name)
@pytest.mark.parametrize("dtype", half_dtypes(), ids=lambda dtype: np.dtype(dtype).name)
def test_half_precision_is_rounded_float32(initializer: Initializer, dtype: Any) -> None:
    """float16 and bfloat16 elements are the float32 ones, rounded."""
    exact = initializer((50, 40), np.float32)
    half = initializer((50, 40), dtype).astype(np.float32)
    np.testing.assert_allclose(half, exact, rtol=2**-8, atol=1e-7)
    assert (half == exact.astype(dtype).astype(np.float32)).mean() > 0.999


def test_an_array_is_filled_in_place_with_little_memory() -> None:
    """Besides the array, whose pages are not counted, only a few small buffers are needed."""
    out = np.zeros((1 << 12, 1 << 11), np.float32)  # 32 MiB
    shape = (1 << 13, 1 << 12)
    for initializer, array in ((RandomNormal(seed=1), out), (RandomUniform(0, 9, seed=1), out.view(np.int32))):
        tracemalloc.start()
        try:
            initializer.generate(shape, (1 << 12, 1 << 11), array)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 << 20
        some = initializer(shape, array.dtype, (2, 1 << 11), (1 << 12, 1 << 11))
        np.testing.assert_array_equal(array[:2], some)


@pytest.mark.parametrize("initializer", [*RANDOM, Ones()], ids=by_name)
def test_an_array_of_any_layout_is_filled(initializer: Initializer) -> None:
    """Strides and the order of bytes change no value, and nothing beside the array is written."""
    for dtype in (np.dtype(np.float32), np.dtype(">f4"), np.dtype(">f2")):
        base = np.full((50, 2, 70), -7, dtype)
        out = base.T[:, 1, ::-1]
        initializer.generate((90, 60), (20, 5), out)
        np.testing.assert_array_equal(out, initializer((90, 60), dtype, out.shape, (20, 5)))
        assert (base[:, 0] == -7).all()


def test_scalars_and_empty_arrays() -> None:
    """Rank 0 has one element, and an array without elements is made of nothing."""
    scalar = RandomNormal(seed=1)(())
    assert scalar.shape == ()
    assert scalar == RandomNormal(seed=1)((1,))[0]
    assert HeNormal(seed=1)((), np.float64, (), ()).shape == ()
    for initializer in (*RANDOM, Zeros(), Ones(), Constant(2.0)):
        assert initializer((0, 3)).shape == (0, 3)
        assert initializer((4, 3), np.float32, (2, 0), (2, 3)).shape == (2, 0)


# The distributions. Seeds are fixed: a test that passes once always passes.

MANY = 400_000


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_uniform_values(dtype: Any) -> None:
    """Uniform values fill [minval, maxval) evenly, and never reach maxval."""
    values = RandomUniform(-1.0, 3.0, seed=5)((MANY,), dtype).astype(np.float64)
    assert values.min() >= -1.0
    assert values.max() < 3.0
    assert abs(values.mean() - 1.0) < 0.01
    assert abs(values.std() - 4 / math.sqrt(12)) < 0.01
    counts = np.histogram(values, 16, (-1.0, 3.0))[0]
    np.testing.assert_allclose(counts, MANY / 16, rtol=0.03)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_uniform_values_never_round_up_to_maxval(dtype: Any) -> None:
    """If a type has few numbers between the limits, most values are rounded, but none to maxval."""
    spacing = float(np.nextafter(np.asarray(1.0).astype(dtype), np.asarray(2.0).astype(dtype))) - 1.0
    values = RandomUniform(1.0, 1.0 + 4 * spacing, seed=5)((10_000,), dtype).astype(np.float64)
    assert set(values) == {1.0 + i * spacing for i in range(4)}


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_normal_values(dtype: Any) -> None:
    """Normal values have the requested mean, deviation and tails."""
    values = (RandomNormal(2.0, 0.5, seed=6)((MANY,), dtype).astype(np.float64) - 2.0) / 0.5
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    for quantile in (-3, -2, -1, -0.5, 0.5, 1, 2, 3):
        expected = NormalDist().cdf(quantile)
        assert abs((values < quantile).mean() - expected) < 0.005 + 0.01 * (np.dtype(dtype).name == "bfloat16")
    assert 4 < abs(values).max() < 6.5


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_truncated_normal_values(dtype: Any) -> None:
    """Truncated normal values stay within two deviations, and are normal there."""
    values = TruncatedNormal(-1.0, 0.25, seed=7)((MANY,), dtype).astype(np.float64)
    scaled = (values + 1.0) / 0.25
    assert -2.0 <= scaled.min() < -1.99
    assert 1.99 < scaled.max() <= 2.0
    assert abs(scaled.mean()) < 0.01
    assert abs(scaled.std() - 0.87962566) < 0.01
    share = NormalDist().cdf(2) - NormalDist().cdf(-2)
    expected = (NormalDist().cdf(1) - NormalDist().cdf(-1)) / share
    assert abs((abs(scaled) < 1).mean() - expected) < 0.01


def test_neighbours_are_independent() -> None:
    """Elements next to each other, in a row or in a column, are not correlated."""
    for initializer in (RandomUniform(seed=1), RandomNormal(seed=1)):
        values = initializer((512, 1024)).astype(np.float64)
        for a, b in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1]), (values[:, 8:], values[:, :-8])):
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.006


@pytest.mark.parametrize(
    ("minval", "maxval", "dtype"),
    [(0, 10, np.int64), (-3, 4, np.int8), (250, 256, np.uint8), (0.0, 7.0, np.uint32), (-128, 128, np.int8)],
)
def test_uniform_integers(minval: float, maxval: float, dtype: Any) -> None:
    """Integers from minval to below maxval are equally frequent."""
    values = RandomUniform(minval, maxval, seed=3)((MANY,), dtype)
    distinct, counts = np.unique(values, return_counts=True)
    assert distinct.tolist() == list(range(int(minval), int(maxval)))
    np.testing.assert_allclose(counts, MANY / (maxval - minval), rtol=0.12)


def test_wide_ranges_of_integers() -> None:
    """Ranges beyond 32 bits, up to all of 64, are filled evenly."""
    for minval, maxval in ((-5, (1 << 32) - 5), (7, (1 << 33) + 12_345), (-(1 << 63), (1 << 63) - 1)):
        values = RandomUniform(minval, maxval, seed=21)((20_000,), np.int64)
        assert minval <= values.min() <= values.max() < maxval
        shares = (values.astype(object) - minval) * 16 // (maxval - minval)
        np.testing.assert_allclose(np.bincount(shares.astype(int), minlength=16), 20_000 / 16, rtol=0.12)


# (fan in, fan out) as Keras 3's compute_fans has them.
FANS = {
    (): (1, 1),
    (7,): (7, 7),
    (3, 5): (3, 5),
    (2, 3, 5): (6, 10),
    (3, 3, 16, 32): (144, 288),
    (2, 2, 2, 4, 8): (32, 64),
    (0, 3): (0, 3),
    (4, 0): (4, 0),
}


def test_fans() -> None:
    """Fan in and fan out equal Keras' for any rank."""
    assert {shape: initializers._fans(shape) for shape in FANS} == FANS


@pytest.mark.parametrize("shape", [(300, 500), (3, 3, 64, 128), (40_000,)])
@pytest.mark.parametrize("initializer", RANDOM[3:], ids=by_name)
def test_scaled_values(initializer: Initializer, shape: tuple[int, ...]) -> None:
    """Glorot's and He's values have the variance of their papers, and the bounds of their distribution."""
    fan_in, fan_out = initializers._fans(shape)
    glorot = initializer.name.startswith("glorot")
    stddev = math.sqrt(2 / (fan_in + fan_out) if glorot else 2 / fan_in)
    bound = stddev * (math.sqrt(3) if initializer.name.endswith("uniform") else 2 / 0.87962566103423978)
    values = initializer(shape).astype(np.float64)
    assert abs(values.mean()) < 0.02 * stddev
    assert abs(values.std() / stddev - 1) < 0.02
    assert 0.99 * bound < abs(values).max() < bound * (1 + 1e-6)


def test_fans_are_those_of_the_whole() -> None:
    """A narrow block of a wide array has the bounds of the whole."""
    block = HeUniform(seed=1)((10_000, 4), np.float32, (100, 4), (5_000, 0))
    assert abs(block).max() < math.sqrt(6 / 10_000)


# The same everywhere


@pytest.mark.parametrize(
    "dtype", [*FLOATS, "complex64", "complex128", "int8", "int16", "int64", "uint8", "uint64", "bool"], ids=str
)
def test_constants(dtype: Any) -> None:
    """Zeros, ones and a constant that is one fill any type, in whole and in part."""
    for initializer, value in ((Zeros(), 0), (Ones(), 1), (Constant(1), 1), (Constant(1.0), 1)):
        values = initializer((3, 4), dtype, (2, 4), (1, 0))
        assert values.dtype == dtype
        assert (values == np.asarray(value).astype(dtype)).all()
        assert values.shape == (2, 4)


def test_constants_at_the_edge() -> None:
    """Integers up to 64 bits are exact, floats may be infinite, and float32 is the default type."""
    assert (Constant((1 << 62) + 1)((2,), np.int64) == (1 << 62) + 1).all()
    assert (Constant(-math.inf)((2,)) == -np.inf).all()
    assert np.isnan(Constant(math.nan)((2,), np.float16)).all()
    assert Constant(True)((), np.bool_).item() is True
    assert Zeros()((2,)).dtype == np.float32


# Refusals


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomUniform(1.0, 1.0), "minval is 1.0; it must be below maxval, which is 1.0"),
        (lambda: RandomUniform(math.nan, 1.0), "minval is nan; it must be a finite number"),
        (lambda: RandomUniform(0, 1 << 63), "maxval is 9223372036854775808; it must be a whole number, at least"),
        (lambda: RandomNormal(0.0, -1.0), "stddev is -1.0; it must be a number, 0 or more"),
        (lambda: RandomNormal("a"), "random_normal: mean is 'a'; it must be a finite number"),  # type: ignore[arg-type]
        (lambda: TruncatedNormal(stddev=math.inf), "truncated_normal: stddev is inf"),
        (lambda: GlorotNormal(-1), "glorot_normal: seed is -1; it must be a whole number, at least 0 and below 9,223,"),
        (lambda: HeNormal(1 << 63), "seed is 9223372036854775808"),
        (lambda: HeNormal(1.5), "seed is 1.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: HeNormal(True), "seed is True; it must be a whole number"),
        (lambda: Constant("x"), "value is 'x'; it must be a number"),  # type: ignore[arg-type]
        (lambda: Constant(1j), "value is 1j; it must be a number"),  # type: ignore[arg-type]
    ],
)
def test_parameters_out_of_their_limits_are_refused(make: Any, said: str) -> None:
    """A wrong parameter is refused when the initializer is made, with its name, value and limit."""
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


@pytest.mark.parametrize(
    ("initializer", "dtype", "said"),
    [
        (RandomNormal(seed=1), np.int32, "random_normal makes float16, bfloat16, float32, float64, not int32"),
        (GlorotUniform(1), np.complex64, "not complex64: choose one of these dtypes"),
        (RandomUniform(0, 2, seed=1), np.bool_, "not bool"),
        (
            RandomUniform(seed=1),
            np.int32,
            "minval is -0.05; it must be a whole number, at least -2,147,483,648 and at most",
        ),
        (RandomUniform(0, 257, seed=1), np.uint8, "at most 256, for elements of uint8"),
        (RandomUniform(-1, 9, seed=1), np.uint8, "minval is -1; it must be a whole number, at least 0"),
        (RandomUniform(0, 1e5, seed=1), np.float16, "values may be as large as 1e+05, which float16 can't hold"),
        (RandomUniform(-3e38, 3e38, seed=1), np.float32, "values may be as large as 6e+38, which float32 can't hold"),
        (RandomUniform(1.0, 1.0 + 1e-9, seed=1), np.float32, None),
        (RandomUniform(0.1, 0.1 + 1e-12, seed=1), np.float32, "no float32 lies in [0.1, 0.1000000000"),
        (RandomNormal(0, 1e4, seed=1), np.float16, "which float16 can't hold: give smaller parameters or a wider"),
        (Constant(1e5), np.float16, "constant: value is 100000.0, which float16 can't hold: give smaller parameters"),
        (Constant(0.5), np.int32, "value is 0.5; it must be a whole number, at least -2,147,483,648 and"),
        (Constant(math.nan), np.int32, "value is nan; it must be a whole number"),
        (Constant(math.inf), np.int32, "value is inf; it must be a whole number"),
        (
            Constant(256),
            np.uint8,
            "value is 256; it must be a whole number, at least 0 and at most 255, for elements of uint8",
        ),
        (
            Constant(2),
            np.bool_,
            "value is 2; it must be a whole number, at least 0 and at most 1, for elements of bool",
        ),
        (Zeros(), "U3", "zeros makes numbers and bools, not elements of type <U3"),
    ],
)
def test_types_that_make_no_sense_are_refused(initializer: Initializer, dtype: Any, said: str | None) -> None:
    """A type that can't hold the values is refused before anything is written, and `check` says the same."""
    if said is None:
        initializer.check((2,), dtype)
        assert initializer((2,), dtype).tolist() == [1.0, 1.0]
        return
    with pytest.raises(ValueError, match=re.escape(said)):
        initializer.check((2,), dtype)
    with pytest.raises(ValueError, match=re.escape(said)):
        initializer((2,), dtype)


def test_blocks_that_make_no_sense_are_refused() -> None:
    """A block outside the whole, or of another rank, is refused, and nothing is written."""
    ones = np.ones((4, 3), np.float32)
    zeros = Zeros()
    with pytest.raises(ValueError, match=r"a block of shape \(4, 3\) at offset \(2, 0\) is not inside shape \(5, 3\)"):
        zeros.generate((5, 3), (2, 0), ones)
    with pytest.raises(ValueError, match="is not inside shape"):
        zeros.generate((4, 3, 1), (0, 0), ones)
    with pytest.raises(ValueError, match=r"at offset \(0,\) is not inside"):
        zeros.generate((4, 3), (0,), ones)
    with pytest.raises(
        ValueError, match=r"zeros: partition_offset is \(-1, 0\); it must be integers, 0 or more, one for"
    ):
        zeros.generate((4, 3), (-1, 0), ones)
    with pytest.raises(ValueError, match=r"zeros: shape is \(4, 2.5\); it must be integers, 0 or more"):
        zeros((4, 2.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give both or none"):
        zeros((4, 3), np.float32, partition_shape=(2, 3))
    assert (ones == 1).all()


# On the wire

EVERY = [*RANDOM, Zeros(), Ones(), Constant(0.1), Constant(-(1 << 63)), RandomUniform(-7, 9, seed=(1 << 63) - 1)]


@pytest.mark.parametrize("initializer", EVERY, ids=repr)
def test_specs(initializer: Initializer) -> None:
    """An initializer comes back from its name and numbers, even through JSON, with its exact seed."""
    name, numbers = initializer.name, initializer.values_by_name()
    assert INITIALIZERS[name] is type(initializer)
    assert from_spec(name, numbers) == initializer
    again = from_spec(name, json.loads(json.dumps(numbers)))
    assert repr(again) == repr(initializer)
    assert all(type(value) in (int, float) for value in numbers.values())


def test_numpy_parameters_become_pythons() -> None:
    """NumPy parameters give the same initializer as Python's numbers."""
    made = RandomUniform(np.int8(-3), np.float32(4.0), seed=np.int64(9))  # type: ignore[arg-type]
    assert repr(made) == "RandomUniform(minval=-3, maxval=4.0, seed=9)"
    assert made == RandomUniform(-3, 4.0, seed=9)
    with pytest.raises(FrozenInstanceError):
        made.seed = 3  # type: ignore[misc]


def test_specs_that_make_no_sense_are_refused() -> None:
    """An unknown name or parameter is refused, and so is a missing seed, which every shard would draw differently."""
    with pytest.raises(ValueError, match="there is no initializer 'orthogonal'; choose one of zeros, ones"):
        from_spec("orthogonal", {})
    with pytest.raises(ValueError, match="random_normal has no parameter 'scale': it has mean, stddev, seed"):
        from_spec("random_normal", {"scale": 1, "seed": 1})
    with pytest.raises(ValueError, match="zeros has no parameter 'value': it has none"):
        from_spec("zeros", {"value": 1})
    with pytest.raises(ValueError, match="he_normal: the seed is missing"):
        from_spec("he_normal", {})


def test_names_are_keras() -> None:
    """The registry has the required initializers, by Keras' names."""
    assert list(INITIALIZERS) == [
        *("zeros", "ones", "constant", "random_uniform", "random_normal", "truncated_normal"),
        *("glorot_uniform", "glorot_normal", "he_uniform", "he_normal"),
    ]
