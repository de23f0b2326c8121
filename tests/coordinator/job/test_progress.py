"""The progress of a job as texts of its metadata: whatever fits comes back, and the rest is refused in plain words."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any, cast

import pytest

from pscluster.coordinator.data.file_lists import MOST, FileList
from pscluster.coordinator.job.progress import POSITIONS, PROGRESS, decoded, load, save
from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.limits import MAX_TEXT_BYTES
from pscluster.ps.client.client import PsClient
from pscluster.worker.data.sources import Listed


class FakeClient:
    """Holds the texts that it is given, within the servers' limit."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put_metadata(self, name: str, text: str) -> None:
        """Store a text."""
        assert len(text.encode()) <= MAX_TEXT_BYTES
        self.texts[name] = text

    def metadata(self) -> dict[str, str]:
        """Return all texts."""
        return self.texts


@pytest.fixture
def client() -> PsClient:
    """A client without servers."""
    return cast(PsClient, FakeClient())


def position(length: int, **more: Any) -> dict[str, Any]:
    """Return a position as it is saved."""
    return {"length": length, "epoch": 1, "visited": {"1": [[0, length // 2]]}, **more}


def digest(number: int) -> str:
    """Return what a dataset of files has as a digest of one."""
    return hashlib.blake2b(bytes([number % 256, number // 256]), digest_size=16).hexdigest()


def test_positions_of_many_datasets(client: PsClient) -> None:
    """A job that makes a dataset of what has come in the last minutes does so for weeks."""
    positions = {f"data-{number}": position(100_000 + number) for number in range(1, 5001)}
    save(client, POSITIONS, positions)
    assert load(client, POSITIONS) == positions


def test_the_position_of_a_dataset_of_many_files(client: PsClient) -> None:
    """With the names, sizes and digests of as many files as are saved by name."""
    files = [Listed(f"/data/train/part-{n:05}-of-01000.npy", 10**9 + 7919 * n, 1, digest(n)) for n in range(MOST)]
    positions = {"data-1": position(MOST, files=FileList(files).state())}
    save(client, POSITIONS, positions)
    assert load(client, POSITIONS) == positions
    FileList(files).check(load(client, POSITIONS)["data-1"]["files"])


def test_what_does_not_fit_is_refused(client: PsClient) -> None:
    """The error says what takes the room, and what is there stays."""
    save(client, POSITIONS, {"data-1": position(10)})
    with pytest.raises(
        MisuseError, match=r"the positions of 3,000 datasets take .* at most 4,194,304, compressed 65,536"
    ):
        save(
            client,
            POSITIONS,
            {f"data-{n}": position(10, files=[[digest(n), n, 1, digest(n + 1)]]) for n in range(3000)},
        )
    with pytest.raises(MisuseError, match="at most 65,536 fit: save less, or use a variable"):
        save(client, PROGRESS, {"much": "x" * MAX_TEXT_BYTES})
    assert load(client, POSITIONS) == {"data-1": position(10)}


@pytest.mark.parametrize(
    "data",
    [b"", b"no zlib", zlib.compress(b'{"data-1": {}}')[:-1], zlib.compress(b"[]"), zlib.compress(bytes(1 << 24))],
    ids=["nothing", "garbage", "cut off", "no object", "too large"],
)
def test_a_compressed_text_that_is_none(data: bytes) -> None:
    """It is refused as any other text that is no progress, and takes no memory."""
    with pytest.raises(CheckpointError, match="the metadata 'positions' is not progress"):
        decoded(POSITIONS, {POSITIONS: "zlib:" + base64.b85encode(data).decode()})
    with pytest.raises(CheckpointError, match="the metadata 'positions' is not progress"):
        decoded(POSITIONS, {POSITIONS: "zlib:é"})
