"""SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), as a hash of numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

GOLDEN = 0x9E37_79B9_7F4A_7C15
MULTIPLIERS = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
MASK = (1 << 64) - 1

_ADD = np.uint64(GOLDEN)
_FIRST, _SECOND = map(np.uint64, MULTIPLIERS)


def mixed(numbers: Hashes, key: np.uint64 = _ADD) -> Hashes:
    """Return a hash of each number, a permutation: what the generator draws first with this seed.

    Another key gives another permutation.
    """
    z = numbers + key
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z


def drawn(seed: int, count: int) -> Hashes:
    """Return the first numbers that the generator draws."""
    return mixed(np.array([(seed + nth * GOLDEN) & MASK for nth in range(count)], np.uint64))
