"""Quick starts of processes, by which the other tests save half of their work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import fork_client
from tests.roles.processes import PSCLUSTER, environ, make_cluster, tf_config

PROBE = """
import json, os, resource, signal, sys, threading

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
streams = (sys.stdin, sys.stdout, sys.stderr)
found = {
    "arguments": sys.argv,
    "variables": dict(os.environ),
    "folder": os.getcwd(),
    "path": sys.path,
    "parent": os.getppid(),
    "leads its session": os.getsid(0) == os.getpid(),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "limits": [resource.getrlimit(kind) for kind in range(10)],
    "threads": threading.active_count(),
    "of the kernel": [status[name] for name in ("Umask", "SigBlk", "SigIgn", "SigCgt", "Groups", "NoNewPrivs")],
    "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()) for s in streams],
    "read": sys.stdin.read(),
}
print(json.dumps(found), flush=True)
"""
ENDS = """
import os, signal, sys
print("ends", file=sys.stderr)
{}
"""


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of a coordinator whose cluster is never asked for."""
    return environ(tf_config(make_cluster(), "chief"), MINE="ü")


def probe(command: Sequence[str], folder: Path, env: dict[str, str]) -> tuple[dict[str, Any], bool]:
    """What a process finds itself to be, and whether it was started quickly."""
    options: dict[str, Any] = {"env": env, "cwd": folder, "text": True, "start_new_session": True}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        quick = b"fork_server" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        found = json.loads(process.communicate("some text")[0])
    assert process.returncode == 0
    assert found["parent"] == os.getpid()
    return found, quick


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [PSCLUSTER, (sys.executable, "-m", "pscluster.coordinator")])
def test_a_process_is_what_it_would_be(
    command: Sequence[str],
    unbuffered: str,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A process that is started quickly finds what it would find in a new interpreter."""
    (tmp_path / "probe.py").write_text(PROBE)
    environment = {**environment, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(tmp_path / "more")}
    whole = [*command, *(["coordinator"] if command is PSCLUSTER else []), "probe.py", "--one", "two"]
    found, quick = probe(whole, tmp_path, environment)
    assert quick or request.config.getoption("plain_starts")
    monkeypatch.setattr(fork_client, "enabled", False)
    usual, quick = probe(whole, tmp_path, environment)
    assert not quick
    assert found == usual


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGUSR1); signal.pause()", -signal.SIGUSR1),
    ],
)
def test_its_end_is_learned(last: str, code: int, tmp_path: Path, environment: dict[str, str]) -> None:
    """This process learns how one ended that was started quickly, before it reaps it and after, and all of its
    output."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS.format(last))
    with subprocess.Popen(
        [*PSCLUSTER, "coordinator", str(script)], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "ends" in process.stderr.read()
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert ended.si_status == abs(code)
        assert process.wait() == code


def test_what_needs_a_new_interpreter_gets_one(tmp_path: Path, environment: dict[str, str]) -> None:
    """A process with variables that the interpreter or a library reads at its start begins as usual."""
    (tmp_path / "probe.py").write_text(PROBE)
    for name in ("PYTHONHASHSEED", "MALLOC_ARENA_MAX", "OPENBLAS_NUM_THREADS"):
        found, quick = probe([*PSCLUSTER, "coordinator", "probe.py"], tmp_path, {**environment, name: "2"})
        assert not quick
        assert found["variables"][name] == "2"
