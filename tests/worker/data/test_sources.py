"""Arrays in files that a peer names: files it may not read, and data past a file's end, are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.core.errors import ConfigurationError, MisuseError, ProtocolError
from pscluster.core.functions import policy
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.worker.data.sources import MappedArray


@pytest.fixture
def mapped(tmp_path: Path) -> MappedArray:
    """An array of 4 x 3 numbers in a file."""
    path = tmp_path / "own" / "numbers.npy"
    path.parent.mkdir()
    np.save(path, np.arange(12.0).reshape(4, 3))
    array = MappedArray.of(np.load(path, mmap_mode="r"))
    assert array is not None
    return array


@pytest.fixture
def worker(tmp_path: Path, mapped: MappedArray) -> Iterator[SerializationPolicy]:
    """A worker without pickles that was given the folder in which the array is."""
    before = policy.chosen_policy()
    chosen = policy.policy_of(False, "", [str(Path(mapped.path).parent)], {}, is_worker=True)
    policy.choose(chosen)
    yield chosen
    policy.choose(before)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": np.dtype("O")},
        {"dtype": np.dtype([("a", "O")])},
        {"dtype": "|O"},
        {"dtype": np.dtype("V0")},
        {"dtype": np.dtypes.StringDType()},
        {"shape": (5, 3)},
        {"shape": (1 << 62, 3)},
        {"shape": (-1, 3)},
        {"shape": "ab"},
        {"strides": (1 << 40, 8)},
        {"strides": (-48, 8)},
        {"offset": 1 << 62},
        {"offset": -128},
        {"offset": 129},
    ],
)
def test_bytes_are_only_numbers_of_the_file(mapped: MappedArray, changed: dict[str, Any]) -> None:
    """Elements that hold pointers, and arrays beyond the file's ends, are errors; with pickles, too."""
    assert mapped.open().tolist() == np.arange(12.0).reshape(4, 3).tolist()
    with pytest.raises(ProtocolError):
        replace(mapped, **changed).open()


def test_files_outside_are_not_read(mapped: MappedArray, worker: SerializationPolicy, tmp_path: Path) -> None:
    """Refused by path, dots or a link; folders of --data-from are inside, and roles other than workers read nothing."""
    assert mapped.open().shape == (4, 3)
    own = Path(mapped.path).parent
    elsewhere = tmp_path / "elsewhere.npy"
    elsewhere.write_bytes(Path(mapped.path).read_bytes())
    (own / "link.npy").symlink_to(elsewhere)
    for path in (str(elsewhere), str(own / ".." / "elsewhere.npy"), str(own / "link.npy"), "/etc/passwd"):
        with pytest.raises(MisuseError, match=r"lies outside the folders.*--data-from and its folder"):
            replace(mapped, path=path).open()
    for path in (str(own / "none"), "\0", "x" * 10_000):
        with pytest.raises(MisuseError, match=r"can't be read here"):
            replace(mapped, path=path).open()
    policy.choose(replace(worker, data=(tmp_path.resolve(),)))
    assert replace(mapped, path=str(own / "link.npy")).open().shape == (4, 3)
    policy.choose(replace(worker, is_worker=False))
    with pytest.raises(MisuseError, match=r"only workers read data files for peers"):
        mapped.open()


@pytest.mark.usefixtures("worker")
def test_what_is_no_file_is_not_opened_for_long(mapped: MappedArray) -> None:
    """A pipe without a writer does not block the worker."""
    pipe = Path(mapped.path).parent / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, pipe.parent):
        with pytest.raises(MisuseError, match=r"is not a file to map an array from"):
            replace(mapped, path=str(path)).open()


def test_the_folders_of_data(tmp_path: Path) -> None:
    """They come from the option or the environment; one that does not exist is an error."""
    environ = {"PSCLUSTER_DATA_FROM": str(tmp_path)}
    assert policy.policy_of(False, environ=environ).data == (tmp_path.resolve(),)
    assert policy.policy_of(False, environ=environ, data_from=["/"]).data == (Path("/"),)
    with pytest.raises(ConfigurationError, match=r"names '/not/there', which is not a folder here"):
        policy.policy_of(False, data_from=["/not/there"])
