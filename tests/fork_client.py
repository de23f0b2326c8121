"""Quick starts of the project's processes: they are forked from one that has imported everything already.

A role's imports take longer than most tests. After `install`, `subprocess.Popen` recognizes these commands:

    python -m pscluster.ROLE ...        .venv/bin/pscluster ...

and lets `fork_server` fork their processes. Each has, as always, this process as its parent, which waits for it and
learns how it ended, and its own arguments, environment, working directory, session, descriptors, limits and signals.
Only its command line and first environment in /proc are the server's. Other commands, and what only a new interpreter
can have, start as usual; so does everything in tests marked `plain_starts`, whose subject is a process itself.

One request is under way at a time, under a lock, and only then does this process adopt what is orphaned below it. The
server ends early only if a module of ours can't be imported: then none of these commands starts, as none could anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import fork_server
from tests.fork_server import ANSWER, LENGTH, Request

enabled = True
"""Whether the test that runs wants quick starts."""

_PSCLUSTER = str(Path(sys.executable).with_name("pscluster"))
_MODULES = ("pscluster.ps", "pscluster.worker", "pscluster.coordinator")
# What an interpreter and the libraries read once, at their start; and what a forked process is told all the same.
_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "GRPC_", "OMP_", "OPENBLAS_", "MKL_", "NPY_")
_LATE = ("PYTHONPATH", "PYTHONUNBUFFERED")
_PLAIN: dict[str, Any] = {
    "executable": None,
    "preexec_fn": None,
    "close_fds": True,
    "pass_fds": (),
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_PR_SET_CHILD_SUBREAPER = 36


class _Server:
    """The server, and requests to it. Any thread may make one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        self._socket, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, fork_server.__file__, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in environ.items() if name not in _LATE},
                pass_fds=[its.fileno()],
            )
        atexit.register(self._close)

    def start(self, request: Request, streams: Sequence[int]) -> int:
        """Start a process, and return its pid. OSError if the server or the process has failed."""
        text, answer = request.encode(), b""
        with self._lock:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [LENGTH.pack(len(text))], streams)
                self._socket.sendall(text)
                answer = self._socket.recv(ANSWER.size, socket.MSG_WAITALL)
            except ConnectionError:
                pass  # the server has ended
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0)
        pid: int = ANSWER.unpack(answer)[0] if answer else 0
        if not pid:
            what = "the process" if answer else "tests/fork_server.py"
            raise OSError(f"{what} has failed, with an error on standard error; try --plain-starts")
        return pid

    def _close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # forks of this process may hold it, too
        self._socket.close()
        self._process.wait()


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_EARLY) and name not in _LATE}


def _ignored() -> list[int]:
    return [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]


@contextlib.contextmanager
def plain_starts() -> Iterator[None]:
    """Start the processes of a fixture as usual, like those of a test with this mark."""
    global enabled
    before, enabled = enabled, False
    try:
        yield
    finally:
        enabled = before


def install() -> None:
    """Let `subprocess.Popen` start the commands of this module's docstring through a server, begun at the first.

    Nothing changes where processes can't be adopted, which is everywhere but on Linux.
    """
    if sys.platform != "linux":
        return
    plain: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    names = list(inspect.signature(plain).parameters)[1:]
    lock = threading.Lock()
    server: _Server | None = None
    parent, environ, early, ignored = os.getpid(), dict(os.environ), _early(os.environ), _ignored()

    def server_for(wanted: Mapping[str, Any]) -> _Server | None:
        nonlocal server
        if not enabled or os.getpid() != parent or not _is_ours(wanted["args"]):
            return None
        if any(wanted.get(name, usual) != usual for name, usual in _PLAIN.items()):
            return None
        if wanted["cwd"] is not None and not os.path.isdir(wanted["cwd"]):
            return None
        if _early(_environ(wanted)) != early or _ignored() != ignored:  # it would inherit others
            return None
        with lock:
            if server is None:
                server = _Server(environ)
        return server

    def execute_child(process: Any, *given: Any) -> None:
        wanted = dict(zip(names, given, strict=True))
        if (quick := server_for(wanted)) is None:
            plain(process, *given)
            return
        own = (wanted["p2cread"], wanted["c2pwrite"], wanted["errwrite"])
        streams = [number if descriptor == -1 else descriptor for number, descriptor in enumerate(own)]
        request = Request(
            command=list(map(os.fspath, wanted["args"])),
            environ=_environ(wanted),
            cwd=os.path.abspath(wanted["cwd"] or "."),
            umask=_umask(),
            new_session=wanted["start_new_session"],
            limits=[(kind, *resource.getrlimit(kind)) for kind in _LIMITS],
        )
        process.pid = quick.start(request, streams)
        process._child_created = True
        process._close_pipe_fds(*(wanted[f"{pipe}{end}"] for pipe, end in _PIPES))

    with contextlib.suppress(AttributeError):
        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


_PIPES = (("p2c", "read"), ("p2c", "write"), ("c2p", "read"), ("c2p", "write"), ("err", "read"), ("err", "write"))


def _is_ours(command: object) -> bool:
    if not isinstance(command, list | tuple):
        return False
    first, *rest = command
    return first == _PSCLUSTER or (first == sys.executable and rest[:1] == ["-m"] and rest[1] in _MODULES)


def _environ(wanted: Mapping[str, Any]) -> dict[str, str]:
    return dict(os.environ if wanted["env"] is None else wanted["env"])


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise OSError("/proc/self/status has no Umask")
