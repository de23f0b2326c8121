"""The data that examples/digits.py trains on, and how it splits them."""

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLES / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_file_is_the_one_its_readme_describes() -> None:
    """The SHA-256 in examples/data/README.md is that of the file."""
    digest = hashlib.sha256((EXAMPLES / "data" / "digits.npz").read_bytes()).hexdigest()
    assert digest in (EXAMPLES / "data" / "README.md").read_text()


def test_file_holds_all_digits() -> None:
    """1,797 images of 64 pixels from 0 to 16, of every class between 174 and 183."""
    with np.load(EXAMPLES / "data" / "digits.npz", allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    assert images.shape == (1797, 64)
    assert images.dtype == np.uint8
    assert images.max() == 16
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_split_is_stratified_and_whole(digits: ModuleType) -> None:
    """A fifth of every class is for testing, and both parts together are the whole set, each row once."""
    x_train, y_train, x_test, y_test = digits.load()
    with np.load(EXAMPLES / "data" / "digits.npz") as file:
        images, labels = file["images"], file["labels"]
    assert np.bincount(y_test).tolist() == [round(n / 5) for n in np.bincount(labels)]
    pixels = np.concatenate([x_train, x_test]) * 16 + 8
    rows = np.column_stack([pixels, np.concatenate([y_train, y_test])])
    whole = np.column_stack([images, labels])
    assert sorted(rows.astype(np.uint8).tolist()) == sorted(whole.tolist())


def test_split_is_always_the_same(digits: ModuleType) -> None:
    """Two calls give the same rows in the same order."""
    for first, second in zip(digits.load(), digits.load(), strict=True):
        np.testing.assert_array_equal(first, second)
