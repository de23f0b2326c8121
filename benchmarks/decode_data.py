"""Compressed images, and their decode of about a millisecond: for `decode_costs` and the peer beside it."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

BATCH, WORKERS = 64, 4
_SHAPE = (224, 224, 3)


def images(count: int) -> list[bytes]:
    """That many images, of which a few are different."""
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 24, _SHAPE, dtype=np.uint8) for _ in range(8)]
    packed = [zlib.compress(image.tobytes(), 1) for image in made]
    return [packed[number % len(packed)] for number in range(count)]


def decode(image: bytes) -> Any:
    """The image as an array, mirrored."""
    return np.frombuffer(zlib.decompress(image), np.uint8).reshape(_SHAPE)[:, ::-1].copy()
