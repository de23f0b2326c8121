"""What runs in a task's actor: the process of its role, on the node on which Ray has placed the actor.

The role is a process of its own, so that signals, threads and a crash are its own, as everywhere. It ends with the
actor: it sees the end of its standard input, and what is left of its group is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pscluster.coordinator.local.addresses import bound_socket
from pscluster.coordinator.local.environment import child_environ
from pscluster.coordinator.local.processes import block_until_dead
from pscluster.core.functions.policy import FUNCTIONS_VARIABLE
from pscluster.core.ids import VERSION
from pscluster.core.transport.unix_sockets import why_unsafe
from pscluster.ps.storage.options import STATE_VARIABLE

_POLL_SECONDS = 0.1


class RoleActor:
    """One task of a cluster, as an actor of Ray. Its methods are called at the same time."""

    def __init__(self, name: str, version: str) -> None:
        """Name the task. RuntimeError if the coordinator has another version."""
        self._name = name
        if version != VERSION:
            raise RuntimeError(
                f"this node has pscluster {VERSION}, and the coordinator {version}: install the same on all nodes"
            )
        self._reserved: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._signalling = threading.Lock()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before each line of the role's log

    def reserve(self, port: int, seconds: float) -> tuple[str, int]:
        """Reserve a port of this node, and return the node's address and the port.

        It is `port`, unless that is 0, or in use for `seconds`: by the role's last process, which may still be
        saving its state.
        """
        host = importlib.import_module("ray").util.get_node_ip_address()
        until = time.monotonic() + seconds
        while port and not _is_free(host, port):
            if time.monotonic() >= until:
                port = 0
            time.sleep(_POLL_SECONDS)
        self._reserved = bound_socket(host, port)
        return host, self._reserved.getsockname()[1]

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        tf_config: str,
        token: str,
        certificates: Mapping[str, bytes],
        folder: str,
    ) -> int:
        """Start `python -m COMMAND`, and return its pid. RuntimeError if others could change the task's files.

        `certificates` are the files of its TLS folder, if there is TLS. `folder` names one for the task's files, beside
        other temporary files: certificates, and a server's state, unless `env` says where that is.
        """
        own, tls = _make_folder(folder), ""
        for name, data in certificates.items():
            tls = str(own)
            (own / name).touch(mode=0o600)
            (own / name).write_bytes(data)
        env = {STATE_VARIABLE: str(own / "state"), **env}
        env[FUNCTIONS_VARIABLE] = known_here(env.get(FUNCTIONS_VARIABLE, ""))
        self._process = subprocess.Popen(  # noqa: S603  (our own command line)
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,  # nothing is written: its end tells the role that this actor has died
            bufsize=0,
            env=child_environ(env, tf_config, token, tls),
            start_new_session=True,
        )
        return self._process.pid

    def wait(self) -> int | None:
        """Return the exit code of the role's process when it has ended; None if it is unknown."""
        process = self._process
        assert process is not None
        has_status = block_until_dead(process)
        with self._signalling:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and did not end
            code = process.wait()
        return code if has_status else None

    def signal(self, number: int) -> None:
        """Send the role's process a signal, unless it has ended."""
        with self._signalling:
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)

    def clean(self, folder: str) -> None:
        """Remove the task's folder on this node."""
        own = _own_folder(folder)
        shutil.rmtree(own, ignore_errors=True)
        with contextlib.suppress(OSError):
            own.parent.rmdir()  # unless other tasks of the cluster are here


def _own_folder(folder: str) -> Path:
    return Path(tempfile.gettempdir(), folder)


def _make_folder(folder: str) -> Path:
    """Make the task's folder, unless it is there, and return it. RuntimeError if it is, or could be, another user's."""
    own = _own_folder(folder)
    for path in (own.parent, own):
        path.mkdir(mode=0o700, exist_ok=True)
    if why := why_unsafe(str(own)):
        raise RuntimeError(f"the task's files, among them keys, can't be kept in {own}: {why}; or set TMPDIR for Ray")
    return own


def known_here(functions_from: str) -> str:
    """Return the entries of PSCLUSTER_FUNCTIONS_FROM that exist on this node; "." is the actor's own folder."""
    entries = [os.getcwd() if entry == os.curdir else entry for entry in functions_from.split(os.pathsep) if entry]
    return os.pathsep.join(entry for entry in entries if not os.path.isabs(entry) or os.path.isdir(entry))


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
