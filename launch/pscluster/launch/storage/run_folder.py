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
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import fsspec

from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.ids import VERSION
from pscluster.launch.answers.session import Report
from pscluster.launch.storage.checkpoint import FOLDER, VARIABLES
from pscluster.launch.storage.run_files import explained, sync_folder, sync_folders
from pscluster.launch.storage.saved_run import SavedRun

logger = logging.getLogger(__name__)

_REQUEST = "scale.json"


class RunFolder(SavedRun):
    """The folder of one run, to be read or written."""

    @contextlib.contextmanager
    def writing(self, **facts: Any) -> Iterator[Self]:
        """Write the run within the block: a new one, or one that goes on. `facts` describe it, in run.json.

        Raises:
            MisuseError: another process writes it.
            CheckpointError: it can't be written.
        """
        with contextlib.ExitStack() as stack:
            with explained(self.path, "can't be written"):
                self._fs.makedirs(f"{self._root}/reports", exist_ok=True)
                if self._is_local:
                    stack.enter_context(self._locked())
                with contextlib.suppress(FileNotFoundError):
                    self._run = self._read_json("run.json")
                self._reports = self._read_reports()
                self._remove_leftovers()
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

    def _remove_leftovers(self) -> None:
        """Remove what no report names: parts of checkpoints that were not committed, or are not kept any more."""
        self._keep_only("checkpoints", {f"{saved.number:06d}" for saved in self.checkpoints()})

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
        with explained(self.path, "can't be written"):
            files = {rank: self._put_in_place(of) for rank, of in files.items()}
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
            "workers": self._run.get("workers"),
            "name": next((report.name for report in reports.values() if report.name), ""),
            "metrics": {str(rank): dict(report.metrics) for rank, report in reports.items()},
            "positions": {} if rows else {str(rank): dict(report.positions) for rank, report in reports.items()},
            "rows": dict(rows or {}),
            "checkpoint": folder,
            "files": {str(rank): list(of) for rank, of in files.items()},
            "variables": with_variables,
        }
        with explained(self.path, "can't be written"):
            if save_variables is not None and with_variables:
                with contextlib.suppress(FileNotFoundError):  # of an attempt that failed
                    self._fs.rm(f"{self._root}/{folder}/{VARIABLES}", recursive=True)
                save_variables(f"{self.path}/{folder}/{VARIABLES}")
                if self._is_local:
                    sync_folders([f"{self._root}/{folder}"], self._root)
            self._put(f"reports/{number:06d}.json", record)
        self._reports[number] = record
        with contextlib.suppress(OSError):  # both are done anew when the run goes on
            self._add_line(record)
            # What attempts at this report have left that did not come to it.
            self._keep_only(f"checkpoints/{number:06d}", {VARIABLES, *(_folder_of(of) for of in files.values())})
        return None if folder is None else f"{self.path}/{folder}"

    def _put_in_place(self, files: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Move what one attempt of a member has copied to the folder of its rank, if the storage can move files.

        Return the files, with their new paths. CheckpointError if one is missing.
        """
        for file in files:
            path = f"{self._root}/{file['path']}"
            if file["sha256"] and (not self._fs.exists(path) or self._fs.size(path) != file["size"]):
                raise CheckpointError(
                    f"{path}, which a worker has written, is not there: all machines need the same storage, such as a "
                    "network file system or an object store"
                )
        if not self._is_local:
            return files
        folder = Path(files[0]["path"]).parents[-3]  # checkpoints/000004
        before, after = folder / (name := _folder_of(files)), folder / FOLDER.sub(r"\1", name)
        shutil.rmtree(Path(self._root, after), ignore_errors=True)  # of a report that could not be committed
        os.rename(Path(self._root, before), Path(self._root, after))
        sync_folder(Path(self._root, folder))
        return [{**file, "path": file["path"].replace(str(before), str(after), 1)} for file in files]

    def retain(self, num_to_keep: int | None, score: str | None, order: str) -> None:
        """Delete all checkpoints but the best, and the newest."""
        if num_to_keep is None or (newest := self.latest()) is None:
            return
        kept = {saved.number for saved in self.best(score, order)[:num_to_keep]} | {newest.number}
        for saved in self.checkpoints():
            if saved.number in kept:
                continue
            record = {**self._reports[saved.number], "checkpoint": None}
            with explained(self.path, "can't be written"):
                self._put(f"reports/{saved.number:06d}.json", record)  # first: what is named is there
                self._reports[saved.number] = record
                self._fs.rm(f"{self._root}/checkpoints/{saved.number:06d}", recursive=True)

    def finish(self, state: str, *, return_values: Sequence[Any] | None = None, error: str = "") -> None:
        """Record how the run has ended."""
        self._run |= {"state": state, "ended": _now(), "error": error}
        if return_values is not None:
            self._run |= _as_json({"return_values": list(return_values)})
        with explained(self.path, "can't be written"):
            self._put("run.json", self._run)

    @property
    def logs(self) -> str | None:
        """Return the directory for what the processes print, made if need be; None if it isn't on this machine."""
        if not self._is_local:
            return None
        path = f"{self._root}/logs"
        with explained(path, "can't be made"):
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

    # Requests of other processes

    def request_workers(self, workers: int) -> None:
        """Ask the process that writes this run for this number of workers. The run has been read.

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
        with explained(self.path, "can't be written"):
            self._put(_REQUEST, {"workers": workers})

    def take_request(self) -> int | None:
        """Return for how many workers another process asks, once; None if none does.

        A file that makes no sense is removed, and logged.
        """
        if not self._is_local:
            return None
        workers, path = None, f"{self._root}/{_REQUEST}"
        try:
            os.replace(path, f"{path}.taken")  # a file that can't be removed is not read: it would be again and again
        except OSError:
            return None
        try:
            workers = self._read_json(f"{_REQUEST}.taken").get("workers")
        except (OSError, CheckpointError) as error:
            logger.warning("can't read a request for another number of workers: %s", error)
        with contextlib.suppress(OSError):
            os.remove(f"{path}.taken")
        return workers if type(workers) is int else None

    # Metrics once more

    def _add_line(self, record: Mapping[str, Any]) -> None:
        if self._is_local:
            with open(f"{self._root}/metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(_lines_of(record))

    def _write_lines(self) -> None:
        text = "".join(map(_lines_of, self._reports.values()))
        self._fs.pipe_file(f"{self._root}/metrics.jsonl", text.encode())


def runs(storage: str) -> list[RunFolder]:
    """Return the runs of a storage, read, the oldest first. CheckpointError if it can't be read."""
    folder = RunFolder(storage, "any")
    found: list[RunFolder] = []
    with explained(folder.storage, "can't be read"):
        fs, root = fsspec.core.url_to_fs(folder.storage)
        for entry in fs.ls(root, detail=False):
            name = entry.rstrip("/").rpartition("/")[2]
            if fs.exists(f"{root}/{name}/run.json"):
                found.append(RunFolder(folder.storage, name).read())
    return sorted(found, key=lambda run: str(run.run.get("began", "")))


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
