"""Text from peers and files reaches no terminal raw: each place that shows it is tried with malicious text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.roles.processes import PSCLUSTER, environ, run
from tests.roles.wire import SECONDS

from pscluster.coordinator.checkpoints.index import Index, SavedTensor, SavedVariable
from pscluster.coordinator.cli.status import status_table
from pscluster.coordinator.cli.tables import rendered
from pscluster.core.display.sanitize import shown, shown_json
from pscluster.core.errors import from_kind
from pscluster.core.role.node import NodeService, Role
from pscluster.core.transport.channels import NODE_SERVICE, PeerAddress
from pscluster.core.transport.methods import generic_handler
from pscluster.launch.cli import runs
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.failures import rebuild_failure

EVIL = "w[/bold][red]\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e\u2028\x00\x7f[/]"


def is_harmless(text: str) -> bool:
    """Whether it holds nothing that a terminal obeys, except for line ends."""
    return not any(unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") for character in text.replace("\n", ""))


@given(st.text())
def test_nothing_harmful_is_left(text: str) -> None:
    """This holds for any text; harmless text is unchanged, and JSON says the same."""
    assert is_harmless(shown(text))
    assert "\n" not in shown(text)
    assert is_harmless(shown(text, lines=True).replace("\t", ""))
    assert json.loads(shown_json({"text": text}))["text"] == text
    assert is_harmless(shown_json([text]))
    assert shown(shown(text)) == shown(text)
    for character in text:
        if character.isprintable():
            assert shown(character) == character


IDENTITY = node_pb2.Identity(role="ps", index=0, boot_id=1, name=EVIL, version=EVIL)


class Evil(NodeService):
    """A role that gives malicious text for itself."""

    def status(self, _request: node_pb2.StatusRequest, _context: grpc.ServicerContext) -> node_pb2.StatusReply:
        """Answer with it."""
        load = node_pb2.VariableLoad(name=EVIL, bytes=8, reads=1, read_bytes=8)
        return node_pb2.StatusReply(identity=IDENTITY, state=EVIL, detail=EVIL, busiest=[load], metrics_address=EVIL)


class Refusing(Evil):
    """A role that refuses with such text."""

    def status(self, _request: node_pb2.StatusRequest, context: grpc.ServicerContext) -> node_pb2.StatusReply:
        """Refuse."""
        context.abort(grpc.StatusCode.PERMISSION_DENIED, EVIL.replace("\x00", ""))
        raise AssertionError("abort raises")


@pytest.fixture(params=[Evil, Refusing])
def config(request: pytest.FixtureRequest) -> Iterator[str]:
    """TF_CONFIG of a cluster whose one server is such a role."""
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([generic_handler(NODE_SERVICE, request.param(IDENTITY, Role(), lambda: None))])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield json.dumps({"cluster": {"ps": [f"127.0.0.1:{port}"]}, "task": {"type": "ps", "index": 0}})
    server.stop(None)


def test_what_a_role_says_of_itself(config: str) -> None:
    """`status`, as a table and as JSON, and `top` show it harmlessly."""
    for arguments in (["status"], ["status", "--json"], ["top", "--rounds", "1", "--every", "0.1"]):
        _code, output = run(*arguments, config=config, PSCLUSTER_INSECURE="1")
        assert "Traceback" not in output, output
        assert is_harmless(output), output
        assert re.search(r"owned|not up: ps 0", output), output


def test_addresses() -> None:
    """In the table of `status` brackets and colons are not markup; an address may come from the coordinator's reply."""
    addresses = ("[fd00::2]:2222", EVIL)
    table = rendered(status_table({PeerAddress("ps", at, text): "" for at, text in enumerate(addresses)}), width=200)
    assert "[fd00::2]:2222" in table
    assert shown(EVIL) in table
    assert is_harmless(table)


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    """`runs` shows what it reads in run.json, and the names of folders, harmlessly and with markup unchanged."""
    keep = {"score": EVIL, "order": "max"}
    facts = {"state": EVIL, "began": "2026-01-01T00:00:00", "checkpoint_config": keep}
    (tmp_path / "[red]run[blue]" / "reports").mkdir(parents=True)
    (tmp_path / "[red]run[blue]" / "run.json").write_text(json.dumps(facts))
    done = CliRunner(env={"COLUMNS": "500"}).invoke(runs, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert is_harmless(done.output), done.output
    assert "[red]run[blue]" in done.output
    assert shown(EVIL) in done.output


def test_what_a_checkpoint_says_of_itself(tmp_path: Path) -> None:
    """`checkpoint inspect` shows names, types and rules with markup unchanged, and errors in one line."""
    index = Index(3, EVIL, 0.25)
    index.optimizers[EVIL] = {"rule": EVIL}
    variable = SavedVariable(EVIL, (1,), "float32", True, ((1,),), {}, [1], [{}], [[]])
    variable.arrays["value"] = [SavedTensor(0, EVIL, EVIL, "float32", (1,), 64, 4, "0" * 64)]
    index.variables[EVIL] = variable
    (tmp_path / "index.json").write_bytes(index.to_json())
    for command in ("inspect", "verify"):
        done = subprocess.run(
            [*PSCLUSTER, "checkpoint", command, str(tmp_path)],
            env=environ(None),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        output = done.stdout + done.stderr
        assert "Traceback" not in output, output
        assert is_harmless(output), output
        assert (done.returncode, "[/bold]" in output) == (0, True) if command == "inspect" else done.returncode == 1


def test_what_fails_elsewhere() -> None:
    """Errors of peers, remote tracebacks with their lines, and a role's log are harmless."""
    assert is_harmless(str(from_kind("misuse", EVIL)))
    failure = worker_pb2.Failure(module="m", qualname=EVIL, message=EVIL, traceback=f"Traceback:\n  {EVIL}")
    error = rebuild_failure(failure, function="step", worker=0, attempts=1)
    assert is_harmless(str(error))
    assert is_harmless(error.remote_traceback)
    assert "Traceback:\n  w[/bold]" in str(error)
    program = (
        "import logging, sys; from pscluster.core.role.process import print_error, configure_logging\n"
        "configure_logging('ps/0', 'INFO', sys.argv[1])\n"
        "logging.getLogger('x').info('a peer %s', sys.argv[2])\n"
        "try:\n    raise ValueError(sys.argv[2])\n"
        "except ValueError as error:\n    logging.getLogger('x').exception('it failed'); print_error(error, 1)\n"
    )
    evil = EVIL.replace("\x00", "")
    for form in ("text", "json"):
        done = subprocess.run(
            [sys.executable, "-c", program, form, evil], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        assert is_harmless(done.stderr), done.stderr
        if form == "json":
            assert json.loads(done.stderr.splitlines()[0])["message"] == f"a peer {evil}"
