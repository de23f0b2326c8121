"""Strings for tests of tables, among them different ones of the same hash."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from pscluster.core.numbers.splitmix import mixed
from pscluster.ps.row_ids import numbers_of


@functools.cache
def colliding(count: int = 4) -> tuple[str, ...]:
    """Return this many different strings of 16 characters whose hashes of 64 bits are the same.

    Of two words, the second makes good what the first has changed; one in some thousands is text.
    """
    rng = np.random.default_rng(1)
    firsts = rng.integers(ord("a"), ord("z") + 1, (100_000, 8), np.uint8)
    state = mixed(firsts.view("<u8")[:, 0])  # after the first word
    seconds = (state ^ state[0] ^ np.frombuffer(b"the same", "<u8")).view(np.uint8).reshape(-1, 8)
    printable = ((seconds >= ord(" ")) & (seconds <= ord("~"))).all(1)
    texts = [row.tobytes().decode() for row in np.concatenate([firsts, seconds], axis=1)[printable][:count]]
    hashes = numbers_of(np.array([text.encode() for text in texts]))
    assert len(set(texts)) == count
    assert len(set(hashes.tolist())) == 1
    return tuple(texts)


def text_of(number: int) -> str:
    """Return a string for a number: short and long ones, in several alphabets; those of 1 to 4 share a hash."""
    if 1 <= number <= 4:
        return colliding()[number - 1]
    return f"{number}" + "aé東\U0001f600"[number % 4] * (number % 9)


def texts_of(numbers: npt.ArrayLike) -> npt.NDArray[np.str_]:
    return np.array([text_of(int(number)) for number in np.asarray(numbers).reshape(-1)])
