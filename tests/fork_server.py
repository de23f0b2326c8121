"""The process from which others are forked, so that they need not import everything again; see `fork_client`.

    python tests/fork_server.py DESCRIPTOR      of a socket; its end ends the server

It has one thread and never makes a channel: a fork of a process with live gRPC hangs. For each request:

    server                          middle                      process
    fork  --------------------->    fork  ----------------->    wait
    reap the middle             <-- exit                        (adopted by the client, which is a subreaper)
    tell the process  --------------------------------------->  become what was asked for
    answer with its pid  <------------------------------------  tell the server; run the command

A process that fails before its command runs is answered with pid 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import runpy
import signal
import site
import socket
import struct
import sys
import types
from dataclasses import asdict, dataclass
from pathlib import Path

PRELOADED = (
    "cryptography.hazmat.primitives.kdf.hkdf",  # these four are imported where a role first needs them
    "grpc._channel",
    "grpc._interceptor",
    "grpc._server",
    "pscluster.coordinator.api",
    "pscluster.coordinator.cli.health",
    "pscluster.coordinator.cli.main",
    "pscluster.coordinator.cli.run",
    "pscluster.coordinator.cli.script",
    "pscluster.coordinator.cli.status",
    "pscluster.launch",
    "pscluster.ps.server.main",
    "pscluster.worker.main",
)
LENGTH = struct.Struct("!Q")
ANSWER = struct.Struct("!q")
STREAMS = 3
"""Descriptors that come with each request: of standard input, output and error."""

_ABOVE = 100  # where descriptors are kept while those below are given their numbers


@dataclass(frozen=True)
class Request:
    """A process to start. `limits` are those of resources: the kind, soft and hard."""

    command: list[str]
    environ: dict[str, str]
    cwd: str
    umask: int
    new_session: bool
    limits: list[tuple[int, int, int]]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> Request:
        return cls(**json.loads(text))


def main() -> None:
    """Serve; in a process that was forked, run its command."""
    sys.path.pop(0)  # this file's folder, which Python has put there
    path = list(sys.path)
    before = dict(os.environ)
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        gc.enable()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(request, path, added)


def _serve(client: socket.socket) -> Request | None:
    """Answer requests until the client has ended; return the request in each process that is to run one."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(client, LENGTH.size, STREAMS)
        if len(head) < LENGTH.size:
            return None
        request = Request.decode(_receive(client, LENGTH.unpack(head)[0]))
        ours, its = socket.socketpair()
        middle = os.fork()
        if not middle:
            if process := os.fork():
                its.send(ANSWER.pack(process))
                os._exit(0)
            ours.close()
            client.detach()
            _set_up(request, descriptors, its)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        its.close()
        os.waitpid(middle, 0)
        answer = ANSWER.pack(0)
        with ours, contextlib.suppress(ConnectionError):  # the process or the middle has died
            pid = ours.recv(ANSWER.size)
            ours.send(b"\n")
            answer = pid if ours.recv(1) else answer
        client.sendall(answer)


def _receive(client: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = client.recv(length - len(received))
        if not part:
            break
        received += part
    return bytes(received)


def _set_up(request: Request, descriptors: list[int], server: socket.socket) -> None:
    """Become the process that was asked for, as `subprocess` and the interpreter's start would have made it."""
    server.recv(1)  # from here on the client is its parent
    if request.new_session:
        os.setsid()
    os.umask(request.umask)
    for kind, soft, hard in request.limits:
        if resource.getrlimit(kind) != (soft, hard):
            resource.setrlimit(kind, (soft, hard))
    os.chdir(request.cwd)
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for descriptor in (*descriptors, server.fileno())]
    server.detach()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if STREAMS <= descriptor < _ABOVE:
            with contextlib.suppress(OSError):  # the list's own
                os.close(descriptor)
    for number, descriptor in enumerate(kept[:STREAMS]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.write(kept[-1], b"\n")
    os.close(kept[-1])


def _run(request: Request, path: list[str], added: dict[str, str]) -> None:
    """Run the command.

    Args:
        request: of this process.
        path: where every interpreter looks for modules.
        added: what imports have added to the environment.
    """
    os.environ.clear()
    os.environ.update(request.environ)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, value in added.items():
        os.environ.setdefault(name, value)
    _open_streams(unbuffered)
    if random := sys.modules.get("numpy.random"):
        random.seed()
    is_module = request.command[1:2] == ["-m"]
    first = request.cwd if is_module else str(Path(request.command[0]).resolve().parent)
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *map(os.path.abspath, others), *path]
    sys.modules["__main__"] = types.ModuleType("__main__")
    site.execsitecustomize()
    if is_module:
        sys.argv = request.command[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request.command
        runpy.run_path(sys.argv[0], run_name="__main__")


def _open_streams(unbuffered: bool) -> None:
    """Make the standard streams, as the interpreter does at its start."""
    old: io.TextIOWrapper
    for number, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
        old = getattr(sys, name)
        raw = open(number, mode, 0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115  (as long as the process)
        stream = io.TextIOWrapper(
            raw,
            old.encoding,
            old.errors,
            line_buffering=not unbuffered and (number == 2 or raw.isatty()),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    main()
