"""The files of a run, in a folder of this machine or at a URL of fsspec.

    run.json                    state, begin and end, configuration, what the members returned
    reports/000004.json         report number 4: the metrics, positions and files of each member
    checkpoints/000004/rank-0/  the files that rank 0 gave with it; in .variables those of the parameter servers
    metrics.jsonl               the reports' metrics once more, a line each, for other tools
    logs/worker-0.log           what that worker's process has printed; see `logs`

A report is committed once its file is there: it is written beside, synced, and moved to its name, after the files that
it names. So a process that is killed at any moment leaves all of a report, or none. Files of checkpoints that no report
names are removed when the run goes on. Where there is no move, as in object stores, a file appears as a whole anyway.

One process writes a run at a time; on this machine's file systems a lock holds others off.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import fsspec

from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.ids import VERSION
from pscluster.launch.checkpoint import VARIABLES, is_local
from pscluster.launch.session import Report

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
_REQUEST = "scale.json"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    number: int  # of the report that it came with
    path: str
    metrics: Mapping[str, Any]  # of rank 0
    name: str


class RunFolder:
    """The folder of one run."""

    def __init__(self, storage: str, name: str) -> None:
        """Name the folder of a run; nothing is read or written. CheckpointError if the storage makes no sense."""
        with _explained(storage, "can't be used"):
            storage = storage if "://" in storage else os.path.abspath(os.path.expanduser(storage))
            self._fs, root = fsspec.core.url_to_fs(storage)
        self.name, self.storage = name, storage.rstrip("/")
        self.path = f"{self.storage}/{name}"
        self._root = f"{root.rstrip('/')}/{name}"
        self._is_local = is_local(self._fs)
        self._reports: dict[int, dict[str, Any]] = {}
        self._run: dict[str, Any] = {}

    # Reading

    def read(self) -> Self:
        """Read what there is. CheckpointError if there is no such run, or it can't be read."""
        with _explained(self.path, "can't be read"):
            self._fs.invalidate_cache()
            try:
                self._run = self._read_json("run.json")
            except FileNotFoundError:
                raise CheckpointError(f"there is no run in {self.path}") from None
            self._reports = self._read_reports()
            if self._run.get("state") == "running" and not self._is_locked():
                self._run["state"] = "interrupted"
        return self

    def _read_reports(self) -> dict[int, dict[str, Any]]:
        folder = f"{self._root}/reports"
        try:
            names = [entry.rpartition("/")[2] for entry in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return {}
        numbers = sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{6,}\.json", name))
        reports: dict[int, dict[str, Any]] = {}
        for number in numbers:
            if number != len(reports) + 1:
                break  # one before it is missing: it was never acknowledged
            reports[number] = self._read_json(f"reports/{number:06d}.json")
        return reports

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return what is in a file. FileNotFoundError if there is none, CheckpointError if it is damaged."""
        try:
            record: dict[str, Any] = json.loads(self._fs.cat_file(f"{self._root}/{name}"))
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}/{name} is damaged ({error}): restore it, or move it away with all reports after it"
            ) from None
        return record

    def _is_locked(self) -> bool:
        if not self._is_local:
            return True  # unknown
        try:
            with open(f"{self._root}/.lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def run(self) -> Mapping[str, Any]:
        """What run.json says."""
        return self._run

    @property
    def committed(self) -> int:
        """The number of the last report."""
        return len(self._reports)

    def history(self) -> list[dict[str, Any]]:
        """Return the metrics of rank 0, or of the lowest rank that reported, by report."""
        return [_first(report["metrics"]) for report in self._reports.values()]

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that are kept, the newest last."""
        return [
            SavedCheckpoint(number, f"{self.path}/{report['checkpoint']}", _first(report["metrics"]), report["name"])
            for number, report in self._reports.items()
            if report["checkpoint"]
        ]

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint."""
        return max(self.checkpoints(), key=lambda saved: saved.number, default=None)

    def best(self, score: str | None, order: str) -> list[SavedCheckpoint]:
        """Return the checkpoints, the best first; the newest first if there is no score."""

        def value(saved: SavedCheckpoint) -> tuple[bool, float, int]:
            number = None if score is None else saved.metrics.get(score)
            if not isinstance(number, int | float) or number != number:
                return False, 0.0, saved.number
            return True, number if order == "max" else -number, saved.number

        return sorted(self.checkpoints(), key=value, reverse=True)

    def positions(self, number: int, rank: int) -> dict[str, list[int]]:
        """Return the positions in datasets that a member reported."""
        report = self._reports[number]
        if rows := report.get("rows"):  # of an elastic run: what is left of an epoch can't be cut as it was
            return {name: [state["epoch"], 0, 0] for name, state in rows.items()}
        positions: dict[str, list[int]] = report["positions"].get(str(rank), {})
        return positions

    def rows(self, number: int) -> dict[str, dict[str, Any]]:
        """Return which rows of each dataset the members had been given when they reported: see `rows.Rows.state`."""
        report = self._reports[number]
        if rows := report.get("rows"):
            return dict(rows)
        epochs: dict[str, int] = {}
        for of_rank in report["positions"].values():  # of a run that was not elastic: it goes on with a whole epoch
            for name, (epoch, *_) in of_rank.items():
                epochs[name] = min(epoch, epochs.get(name, epoch))
        return {name: {"epoch": epoch} for name, epoch in epochs.items()}

    def rows_again(self) -> int:
        """Return how many rows members have reported to have been given once more."""
        if not self._reports:
            return 0
        report = self._reports[self.committed]
        last: Mapping[str, Mapping[str, Sequence[int]]] = report["positions"]
        again: int = sum(state["again"] for state in report.get("rows", {}).values())
        return again + sum(position[2] for of_rank in last.values() for position in of_rank.values())

    @property
    def logs(self) -> str | None:
        """Return the directory for what the processes print, made if need be; None if it isn't on this machine."""
        if not self._is_local:
            return None
        path = f"{self._root}/logs"
        with _explained(path, "can't be made"):
            os.makedirs(path, exist_ok=True)
        return path

    def add_logs(self, path: str) -> None:
        """Add what is in these files to those of the run, where they could not be written directly. Log if that fails.

        Files are read and written as a whole: not all storages can add to one.
        """
        try:
            for file in sorted(Path(path).glob("*.log")):
                target = f"{self._root}/logs/{file.name}"
                before = self._fs.cat_file(target) if self._fs.exists(target) else b""
                self._fs.makedirs(f"{self._root}/logs", exist_ok=True)
                self._fs.pipe_file(target, before + file.read_bytes())
        except (OSError, ValueError, ImportError) as error:
            logger.warning("what the processes printed can't be kept in %s/logs: %s", self.path, error)

    # Writing

    @contextlib.contextmanager
    def writing(self, **facts: Any) -> Iterator[Self]:
        """Write the run within the block: a new one, or one that goes on. `facts` describe it, in run.json.

        Raises:
            MisuseError: another process writes it.
            CheckpointError: it can't be written.
        """
        with contextlib.ExitStack() as stack:
            with _explained(self.path, "can't be written"):
                self._fs.makedirs(f"{self._root}/reports", exist_ok=True)
                if self._is_local:
                    stack.enter_context(self._locked())
                with contextlib.suppress(FileNotFoundError):
                    self._run = self._read_json("run.json")
                self._reports = self._read_reports()
                self._remove_strays()
                began = self._run.get("began", _now())
                starts = self._run.get("starts", 0) + 1
                self._run = {
                    **_as_json(facts),
                    "name": self.name,
                    "state": "running",
                    "began": began,
                    "starts": starts,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "version": VERSION,
                }
                self._put("run.json", self._run)
                self._write_lines()
            yield self

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(f"{self._root}/.lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise MisuseError(
                    f"the run in {self.path} is being written by {file.read() or 'another process'}: wait until that "
                    "has ended, or give this run another name"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def _remove_strays(self) -> None:
        """Remove what no report names: parts of checkpoints that were not committed, or are not kept any more."""
        self._keep_only("checkpoints", {f"{saved.number:06d}" for saved in self.checkpoints()})

    def _keep_only(self, folder: str, names: Set[str]) -> None:
        """Remove what a folder has under other names; do nothing if there is no such folder."""
        try:
            paths = self._fs.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return
        for path in paths:
            if path.rstrip("/").rpartition("/")[2] not in names:
                self._fs.rm(path, recursive=True)

    def variables(self) -> str | None:
        """Return the path of the newest variables of parameter servers that are kept; None if there are none."""
        kept = [report for report in self._reports.values() if report["checkpoint"] and report.get("variables")]
        return f"{self.path}/{kept[-1]['checkpoint']}/{VARIABLES}" if kept else None

    def commit(
        self,
        number: int,
        reports: Mapping[int, Report],
        save_variables: Callable[[str], object] | None = None,
        rows: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Commit a report of all members; return the path of its checkpoint, if it has one.

        `save_variables` saves those of the parameter servers to a path, if a member has asked for that. `rows` has the
        positions in the datasets of an elastic run, in place of those of its members.

        After this has returned nothing loses it. CheckpointError if it can't be written: then it is not committed.
        """
        files = {rank: report.files for rank, report in reports.items() if report.files is not None}
        folder = None
        with_variables = save_variables is not None and any(report.with_variables for report in reports.values())
        if files or with_variables:
            folder = f"checkpoints/{number:06d}"
            if len(files) == 1:
                (rank,) = files
                folder = f"{folder}/{_folder_of(files[rank])}"
        record = {
            "number": number,
            "time": _now(),
            "name": next((report.name for report in reports.values() if report.name), ""),
            "metrics": {str(rank): dict(report.metrics) for rank, report in reports.items()},
            "positions": {} if rows else {str(rank): dict(report.positions) for rank, report in reports.items()},
            "rows": dict(rows or {}),
            "checkpoint": folder,
            "files": {str(rank): list(of) for rank, of in files.items()},
            "variables": with_variables,
        }
        with _explained(self.path, "can't be written"):
            for file in (file for of in files.values() for file in of if file["sha256"]):
                path = f"{self._root}/{file['path']}"
                if not self._fs.exists(path) or self._fs.size(path) != file["size"]:
                    raise CheckpointError(
                        f"{path}, which a worker has written, is not there: all machines need the same storage, such "
                        "as a network file system or an object store"
                    )
            if save_variables is not None and with_variables:
                with contextlib.suppress(FileNotFoundError):  # of an attempt that failed
                    self._fs.rm(f"{self._root}/{folder}/{VARIABLES}", recursive=True)
                save_variables(f"{self.path}/{folder}/{VARIABLES}")
                if self._is_local:
                    _sync_folders([f"{self._root}/{folder}"], self._root)
            self._put(f"reports/{number:06d}.json", record)
        self._reports[number] = record
        with contextlib.suppress(OSError):  # both are done anew when the run goes on
            self._add_line(record)
            # What attempts at this report have left that did not come to it.
            self._keep_only(f"checkpoints/{number:06d}", {VARIABLES, *(_folder_of(of) for of in files.values())})
        return None if folder is None else f"{self.path}/{folder}"

    def retain(self, num_to_keep: int | None, score: str | None, order: str) -> None:
        """Delete all checkpoints but the best, and the newest."""
        if num_to_keep is None or (newest := self.latest()) is None:
            return
        kept = {saved.number for saved in self.best(score, order)[:num_to_keep]} | {newest.number}
        for saved in self.checkpoints():
            if saved.number in kept:
                continue
            record = {**self._reports[saved.number], "checkpoint": None}
            with _explained(self.path, "can't be written"):
                self._put(f"reports/{saved.number:06d}.json", record)  # first: what is named is there
                self._reports[saved.number] = record
                self._fs.rm(f"{self._root}/checkpoints/{saved.number:06d}", recursive=True)

    def finish(self, state: str, *, return_values: Sequence[Any] | None = None, error: str = "") -> None:
        """Record how the run has ended."""
        self._run |= {"state": state, "ended": _now(), "error": error}
        if return_values is not None:
            self._run |= _as_json({"return_values": list(return_values)})
        with _explained(self.path, "can't be written"):
            self._put("run.json", self._run)

    # Requests of other processes

    def request_workers(self, workers: int) -> None:
        """Ask the process that writes this run for so many workers. The run has been read.

        Raises:
            MisuseError: the run is over, is at a URL, or can't have that many.
            CheckpointError: its folder can't be written.
        """
        limits = self._run.get("workers")
        if not self._is_local:
            raise MisuseError(f"{self.path} is a URL, where no requests are read: call Trainer.scale() in its process")
        if self._run.get("state") != "running":
            raise MisuseError(
                f"the run in {self.path} is over ({self._run.get('state')}), so its number of workers can't change"
            )
        if not isinstance(limits, list):
            raise MisuseError(f"the run in {self.path} has {limits} workers throughout: only elastic runs change")
        if not limits[0] <= workers <= limits[1]:
            raise MisuseError(f"the run in {self.path} has {limits[0]} to {limits[1]} workers, not {workers}")
        with _explained(self.path, "can't be written"):
            self._put(_REQUEST, {"workers": workers})

    def take_request(self) -> int | None:
        """Return for how many workers another process asks, once; None if none does."""
        if not self._is_local:
            return None
        try:
            workers = self._read_json(_REQUEST).get("workers")
            os.remove(f"{self._root}/{_REQUEST}")
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError) as error:
            logger.warning("a request can't be read: %s", error)
            return None
        return workers if isinstance(workers, int) else None

    # Files

    def _put(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a file as a whole, or not at all."""
        data = (json.dumps(record, indent=1, default=str) + "\n").encode()
        path = f"{self._root}/{name}"
        if not self._is_local:
            self._fs.pipe_file(path, data)
            return
        with open(f"{path}.new", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
        _sync_folder(Path(path).parent)

    def _add_line(self, record: Mapping[str, Any]) -> None:
        if self._is_local:
            with open(f"{self._root}/metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(_lines_of(record))

    def _write_lines(self) -> None:
        text = "".join(map(_lines_of, self._reports.values()))
        self._fs.pipe_file(f"{self._root}/metrics.jsonl", text.encode())


def upload(run_path: str, number: int, rank: int, attempt: int, directory: Path) -> list[dict[str, Any]]:
    """Copy a member's directory into the run's folder; return its files, with sizes and SHA-256.

    They become part of the run once the report with this number is committed. CheckpointError if they can't be written.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: give report() a Checkpoint of one that is still there")
    folder = f"checkpoints/{number:06d}/rank-{rank}" + (f".{attempt}" if attempt > 1 else "")
    files: list[dict[str, Any]] = []
    with _explained(run_path, "can't be written"):
        fs, root = fsspec.core.url_to_fs(run_path)
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
            _sync_folders(folders, root)
    return files or [{"path": f"{folder}/", "size": 0, "sha256": ""}]


def runs(storage: str) -> list[RunFolder]:
    """Return the runs of a storage, read, the oldest first. CheckpointError if it can't be read."""
    folder = RunFolder(storage, "any")
    found: list[RunFolder] = []
    with _explained(folder.storage, "can't be read"):
        fs, root = fsspec.core.url_to_fs(folder.storage)
        for entry in fs.ls(root, detail=False):
            name = entry.rstrip("/").rpartition("/")[2]
            if fs.exists(f"{root}/{name}/run.json"):
                found.append(RunFolder(folder.storage, name).read())
    return sorted(found, key=lambda run: str(run.run.get("began", "")))


def _first(by_rank: Mapping[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = by_rank[min(by_rank, key=int)] if by_rank else {}
    return metrics


def _folder_of(files: Sequence[Mapping[str, Any]]) -> str:
    folder: str = files[0]["path"].split("/")[2]
    return folder


def _lines_of(record: Mapping[str, Any]) -> str:
    return "".join(
        json.dumps({"report": record["number"], "time": record["time"], "rank": int(rank), **metrics}) + "\n"
        for rank, metrics in record["metrics"].items()
    )


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON can represent of these."""
    plain: dict[str, Any] = {}
    for name, value in facts.items():
        try:
            plain[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            plain[name] = None if name == "return_values" else repr(value)[:1000]
    return plain


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _sync_folders(folders: Iterable[str], root: str) -> None:
    """Sync these folders and those above them, up to the root."""
    places = {place for folder in map(Path, folders) for place in (folder, *folder.parents)}
    for place in sorted(places, reverse=True):
        if place.is_relative_to(root):
            _sync_folder(place)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: str, problem: str) -> Iterator[None]:
    """Turn errors of the file system in the block into CheckpointErrors."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        why = getattr(error, "strerror", None) or str(error)
        mend = ""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "; make room there, or give RunConfig(storage=) another place"
        elif isinstance(error, PermissionError):
            mend = "; give RunConfig(storage=) a folder that this user may write"
        elif isinstance(error, ImportError):
            mend = "; install what fsspec needs for that URL, on the workers, too"
        raise CheckpointError(f"{path} {problem}: {why}{mend}") from error
