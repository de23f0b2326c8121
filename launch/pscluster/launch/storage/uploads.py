"""Copies the directories that members report into the run's folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import fsspec

from pscluster.core.errors import CheckpointError
from pscluster.launch.storage.checkpoint import is_local
from pscluster.launch.storage.run_files import explained, sync_folders

_COPY_BYTES = 1 << 20


def upload(run_path: str, number: int, rank: int, attempt: int, directory: Path) -> list[dict[str, Any]]:
    """Copy a member's directory into the run's folder; return its files, with sizes and SHA-256.

    They become part of the run once the report with this number is committed. Each attempt has a folder of its own, so
    that a frozen one that goes on later writes into no other's: `RunFolder.commit` and `Checkpoint.to_directory` name
    it by the rank alone. CheckpointError if they can't be written.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: give report() a Checkpoint of one that is still there")
    folder = f"checkpoints/{number:06d}/rank-{rank}"
    files: list[dict[str, Any]] = []
    with explained(run_path, "can't be written"):
        fs, root = fsspec.core.url_to_fs(run_path)
        if attempt > 1 or is_local(fs):  # elsewhere nothing is moved: the first attempt has the final name
            folder += f".{attempt}"
        target = f"{root}/{folder}"
        if fs.exists(target):  # of a report that failed, and is made again
            fs.rm(target, recursive=True)
        fs.makedirs(target, exist_ok=True)
        folders = {target}
        for source in sorted(path for path in directory.rglob("*") if path.is_file()):
            name = source.relative_to(directory).as_posix()
            path = f"{target}/{name}"
            if (parent := path.rpartition("/")[0]) not in folders:
                fs.makedirs(parent, exist_ok=True)
                folders.add(parent)
            digest, size = hashlib.sha256(), 0
            with source.open("rb") as read, fs.open(path, "wb") as written:
                while data := read.read(_COPY_BYTES):
                    written.write(data)
                    digest.update(data)
                    size += len(data)
                if is_local(fs):
                    written.flush()
                    os.fsync(written.fileno())
            files.append({"path": f"{folder}/{name}", "size": size, "sha256": digest.hexdigest()})
        if is_local(fs):
            sync_folders(folders, root)
    return files or [{"path": f"{folder}/", "size": 0, "sha256": ""}]
