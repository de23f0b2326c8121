"""Encodings of float32 on the wire: what comes back, within the bounds that are stated, and what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pscluster.core.errors import ProtocolError
from pscluster.ps.wire_dtypes import (
    BLOCK,
    CODES,
    UnencodableError,
    check_scales,
    decode,
    encode,
    encode_stream,
    encoded_bytes,
    largest,
    name_of,
)

SHAPES = st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 2, 31, 32, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 700]))
ENCODED = ["bfloat16", "float16", "int8"]


def values_of(limit: float) -> st.SearchStrategy[Any]:
    """Rows of numbers up to a limit."""
    return SHAPES.flatmap(
        lambda shape: arrays.arrays(
            np.float32, shape, elements=st.floats(-limit, limit, width=32), fill=st.just(np.float32(0.5))
        )
    )


def round_trip(name: str, values: Any) -> Any:
    data = encode(CODES[name], values)
    assert data.dtype == np.uint8
    assert len(data) == encoded_bytes(CODES[name], *values.shape)
    result = decode(CODES[name], bytes(data), *values.shape)
    assert result.dtype == np.float32
    assert result.shape == values.shape
    return result


@given(values_of(2.0**127))
def test_bfloat16_is_within_its_bound(values: Any) -> None:
    """Each element is within 2**-8 of its value, and is a bfloat16."""
    result = round_trip("bfloat16", values)
    wide = values.astype(np.float64)
    assert (np.abs(result - wide) <= np.maximum(np.abs(wide) * 2**-8, 4.6e-41)).all()
    assert not (result.view(np.uint32) & 0xFFFF).any()
    assert np.array_equal(round_trip("bfloat16", result), result)


@given(values_of(65504))
def test_float16_is_within_its_bound(values: Any) -> None:
    """Each element is within 2**-11 of its value, or of the smallest that is not subnormal."""
    result = round_trip("float16", values)
    wide = values.astype(np.float64)
    assert (np.abs(result - wide) <= np.maximum(np.abs(wide) * 2**-11, 3.0e-8)).all()


@given(values_of(float(np.finfo(np.float32).max)))
def test_int8_is_within_its_bound(values: Any) -> None:
    """Each element is within half a scale of its value; the scale is that of its own block in its own row."""
    result = round_trip("int8", values)
    assert np.isfinite(result).all()
    for row, back in zip(values.astype(np.float64), result.astype(np.float64), strict=True):
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK]
            bound = np.abs(block).max() / 254 * (1 + 1e-5) + 1.5e-36
            assert (np.abs(back[start : start + BLOCK] - block) <= bound).all()


@pytest.mark.skipif(importlib.util.find_spec("ml_dtypes") is None, reason="ml_dtypes is optional")
def test_float16_is_numpys() -> None:
    """All numbers that it has, and float32 between and around them: the same bits as from NumPy, and back."""
    bits = np.arange(1 << 16, dtype="<u2")
    exact = bits.view("<f2").astype(np.float32)
    back = decode(CODES["float16"], bits.tobytes(), 1, len(bits))[0]
    assert np.array_equal(back.view(np.uint32), exact.view(np.uint32))
    numbers = np.sort(exact[np.isfinite(exact)])
    between = (numbers[:-1] + numbers[1:]) / 2
    around = [np.nextafter(between, np.float32(to)) for to in (-np.inf, np.inf)]
    cases: list[Any] = [numbers, between, *around, numbers[np.abs(numbers) >= 2**-14]]
    for values in cases:
        encoded = encode(CODES["float16"], values.reshape(1, -1))
        assert encoded.tobytes() == values.astype("<f2").tobytes()


def test_bfloat16_rounds_to_nearest_even() -> None:
    """The bits are those of ml_dtypes, for ties, subnormal numbers, zeros, infinities and a million others."""
    import ml_dtypes

    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 1 << 20, np.uint32)
    bits[: 1 << 19] = bits[: 1 << 19] & 0xFFFF0000 | 0x8000  # ties
    values = bits.view(np.float32).reshape(1, -1)
    values = values[:, ~(np.isfinite(values[0]) & (np.abs(values[0]) >= 3.39e38))]
    own = encode(CODES["bfloat16"], np.ascontiguousarray(values)).view(np.uint16)
    with np.errstate(invalid="ignore"):
        theirs = values.reshape(-1).astype(ml_dtypes.bfloat16)
    nan = np.isnan(values[0])
    assert np.array_equal(own[~nan], theirs[~nan].view(np.uint16))
    assert np.isnan(own[nan].view(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_infinities_and_nan_pass(name: str) -> None:
    """They are what they were, whatever the NaN."""
    values = np.array([[np.inf, -np.inf, np.nan, 1.5]], np.float32)
    values = np.concatenate([values, np.array([[0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0]], np.uint32).view(np.float32)])
    np.testing.assert_array_equal(round_trip(name, values), values)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("float16", 65520.0, "65520, which float16 can't hold: it holds numbers below 65520"),
        ("float16", -1e30, "-1e+30, which float16 can't hold"),
        ("bfloat16", 3.4e38, "3.4e+38, which bfloat16 can't hold"),
        ("int8", np.nan, "nan, which int8 can't hold: it holds only finite numbers"),
        ("int8", -np.inf, "-inf, which int8 can't hold"),
    ],
)
def test_what_a_type_cannot_hold(name: str, value: float, shown: str) -> None:
    """The error says which value it is, and where; also beside an infinity that passes."""
    values = np.zeros((3, 300), np.float32)
    if name != "int8":
        values[0, 0] = np.inf
    values[1, 270] = value
    with pytest.raises(UnencodableError) as raised:
        encode(CODES[name], values)
    assert (raised.value.row, raised.value.column) == (1, 270)
    assert str(raised.value).startswith(shown)


@pytest.mark.parametrize("name", ENCODED)
@given(values=arrays.arrays(np.float32, st.integers(0, 1500), elements=st.floats(-8, 8, width=32)), data=st.data())
def test_a_stream_is_the_same_in_any_chunks(name: str, values: Any, data: Any) -> None:
    """The bytes of an array do not depend on the chunks in which it comes."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    chunks = [bytes(chunk) for chunk in np.split(values, cuts)]
    whole = encode(CODES[name], values.reshape(1, -1))
    assert b"".join(map(bytes, encode_stream(CODES[name], chunks))) == bytes(whole)


def test_scales_that_no_client_makes() -> None:
    """Infinite, NaN and negative scales are found, in any block; and sizes and types that there are not."""
    values = np.ones((2, BLOCK + 10), np.float32)
    good = encode(CODES["int8"], values)
    assert check_scales(good, *values.shape)
    for at in (0, BLOCK + 4, len(good) // 2):
        for scale in (np.inf, np.nan, -1.0, 3e38):
            data = good.copy()
            data[at : at + 4] = np.array([scale], "<f4").view(np.uint8)
            assert not check_scales(data, *values.shape)
    with pytest.raises(ProtocolError, match="unknown wire type 9; known ones: float32, bfloat16, float16, int8"):
        name_of(9)
    with pytest.raises(ProtocolError, match="unknown wire type 9"):
        encoded_bytes(9, 1, 1)


def test_the_ratios_for_rows_of_32() -> None:
    """Half of the bytes, and 0.28."""
    exact = encoded_bytes(0, 100, 32)
    assert [encoded_bytes(CODES[name], 100, 32) / exact for name in ENCODED] == [0.5, 0.5, 36 / 128]


def test_the_largest_elements() -> None:
    """They are found by absolute value, in ascending order; NaN is among them."""
    values = np.array([0.0, -5, 3, np.nan, 4, -1], np.float32)
    assert largest(values, 3).tolist() == [1, 3, 4]
    assert largest(values, 9).tolist() == [0, 1, 2, 3, 4, 5]
