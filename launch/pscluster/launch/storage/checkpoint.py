"""Checkpoint: a directory that a training function saved, wherever it is, perhaps with variables of the servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pscluster.core.checks import type_of
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import CheckpointError

_METADATA = ".metadata.json"
VARIABLES = ".variables"
"""In its directory: a checkpoint of the parameter servers, as `pscluster.coordinator.Checkpoint` reads it."""

FOLDER = re.compile(r"(rank-\d+)\.?(\d*)(?=/|$)")
"""Of a member, in a report's folder: its rank and its attempt, which is 1 if there is none."""

_OF_SEVERAL = re.compile(r"(^|/)checkpoints/\d{6,}/?$")
"""A report's folder, with those of its members. In any other checkpoint all names are the user's."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with what a training function saved. What is in it is the function's own business.

    Args:
        path: of the directory: a path, or a URL of fsspec.
        with_variables: save all variables on the parameter servers with it when it is reported.
    """

    path: str
    with_variables: bool = field(default=False, repr=False)  # what a saved one has, `has_variables` says

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not (os.fspath(self.path) or self.with_variables):
            raise TypeError(f"the path of a checkpoint is {type_of(self.path)}; give a path or a URL")
        object.__setattr__(self, "path", str(os.fspath(self.path)).rstrip("/"))

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Return a checkpoint of a directory on this machine. CheckpointError if there is none."""
        if not Path(path).is_dir():
            raise CheckpointError(f"{os.fspath(path)} is not a directory: write the checkpoint's files into one first")
        return cls(os.path.abspath(path))

    @classmethod
    def from_variables(cls, path: str | os.PathLike[str] | None = None) -> Checkpoint:
        """Return a checkpoint for `report` of all variables on the parameter servers, with their optimizers' slots.

        The servers write them, each its own shards, as they are once all members have reported. `fit` restores them
        when the run goes on, or another one is resumed from this checkpoint.

        Args:
            path: a directory on this machine whose files belong to it, too. CheckpointError if there is none.
        """
        return cls("" if path is None else cls.from_directory(path).path, with_variables=True)

    def _located(self) -> tuple[Any, str]:
        """Return the file system and the path in it."""
        import fsspec  # in a tenth of a second: not every function has a checkpoint

        located: tuple[Any, str] = fsspec.core.url_to_fs(self.path)
        return located

    @property
    def has_variables(self) -> bool:
        """Whether variables of parameter servers were saved with it. CheckpointError if that can't be found out."""
        try:
            fs, path = self._located()
            return bool(fs.exists(f"{path}/{VARIABLES}"))
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(f"the checkpoint {self.path} can't be read: {error}") from error

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield a directory on this machine with its files: its own, or a copy that is deleted afterwards.

            with checkpoint.as_directory() as folder:
                model.load_state_dict(torch.load(f"{folder}/model.pt"))

        Raises:
            CheckpointError: it is gone, or its files can't be read.
        """
        fs, path = self._located()
        if is_local(fs):
            if not Path(path).is_dir():
                raise CheckpointError(f"the checkpoint {self.path} is gone, or is not on this machine")
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="pscluster-checkpoint-") as folder:
            yield self.to_directory(folder)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy its files into a directory on this machine, a new one by default; return its path.

        CheckpointError if they can't be read, or written there, or one has a name that leads out of the directory, as
        an object store's keys may.
        """
        target = tempfile.mkdtemp(prefix="pscluster-checkpoint-") if path is None else os.fspath(path)
        try:
            fs, source = self._located()
            if is_local(fs):
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                names = [os.path.relpath(name, source) for name in fs.find(source)]
                if outside := [name for name in names if name.split(os.sep)[0] == os.pardir]:
                    raise CheckpointError(
                        f"the checkpoint {self.path} has a file that would be written outside {target}, "
                        f"{shown(outside[0])}: someone else may have put it there; remove it"
                    )
                copies = _by_rank(names) if _OF_SEVERAL.search(source) else {name: name for name in names}
                for name, own in copies.items():
                    inner = Path(target, own)
                    inner.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(f"{source}/{name}", str(inner))
        except (OSError, shutil.Error, ValueError, ImportError) as error:
            raise CheckpointError(f"the checkpoint {self.path} can't be copied to {target}: {error}") from error
        return target

    def get_metadata(self) -> dict[str, Any]:
        """Return what `set_metadata` has stored with it; an empty dict if it was not called."""
        fs, path = self._located()
        try:
            metadata: dict[str, Any] = json.loads(fs.cat_file(f"{path}/{_METADATA}"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise CheckpointError(f"{self.path}/{_METADATA} is damaged: {error}") from error
        return metadata

    metadata = property(get_metadata, doc="What `set_metadata` has stored with it.")

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store data beside its files, as JSON, in place of what there was.

        Raises:
            TypeError: it is not JSON.
            OSError: it can't be written there.
        """
        text = json.dumps(dict(metadata))
        fs, path = self._located()
        fs.pipe_file(f"{path}/{_METADATA}", text.encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store more data beside its files; names that are there already get new values. Raises as `set_metadata`."""
        self.set_metadata({**self.get_metadata(), **metadata})


def _by_rank(names: Iterable[str]) -> dict[str, str]:
    """Return as what files are known: those of members by rank, without the attempt, of which the last one counts."""
    known: dict[str, dict[int, dict[str, str]]] = {}  # by rank, and by attempt
    for name in names:
        found = FOLDER.match(name)
        rank, attempt, rest = (found[1], int(found[2] or 1), name[found.end() :]) if found else ("", 0, name)
        known.setdefault(rank, {}).setdefault(attempt, {})[name] = rank + rest
    return {name: own for attempts in known.values() for name, own in attempts[max(attempts)].items()}


def is_local(fs: Any) -> bool:
    """Return whether a file system of fsspec is this machine's own."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,))
