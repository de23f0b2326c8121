"""The log: one line per event, for people or as JSON, with the process that it comes from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.roles.processes import DONE, JOB, Roles, environ, make_cluster, run


def test_json_of_a_whole_job(tmp_path: Path) -> None:
    """With `--log-format json` every line of every role is an object that names the role; printed text is not."""
    cluster = make_cluster(ps=1, workers=1)
    options = ("--log-format", "json", "--until-done")
    with Roles(cluster, tmp_path) as roles:
        server, worker = roles.ps(0, *options), roles.worker(0, *options)
        coordinator = roles.coordinator(JOB, options=("--log-format", "json"))
        assert [process.wait() for process in (coordinator, worker, server)] == [0, 0, 0]
        boot_ids = {}
        for name, process in (("ps", server), ("worker", worker)):
            lines = [json.loads(line) for line in process.output.splitlines()]
            bound = [line for line in lines if "boot_id" in line]
            assert {(line["role"], line["index"], line["pid"]) for line in bound} == {(name, 0, process.pid)}
            (boot_ids[name],) = {line["boot_id"] for line in bound}
            assert {line["who"] for line in lines} == {f"{name}/0"}
            assert {"time", "level", "logger", "message"} <= lines[0].keys()
            assert any("working for" in line["message"] for line in bound)
    assert boot_ids["ps"] != boot_ids["worker"]
    others = [line for line in coordinator.output.splitlines() if not line.startswith("{")]
    assert len(others) == 1, others
    assert DONE.replace("\\", "") in others[0]


def test_run_hands_the_options_on(tmp_path: Path) -> None:
    """`pscluster run --log-format json --log-level info --no-dashboard` applies to the roles and the coordinator."""
    script = tmp_path / "script.py"
    script.write_text(JOB)
    code, output = run("run", "--log-format", "json", "--log-level", "info", "--no-dashboard", str(script))
    assert code == 0, output
    who = {json.loads(line)["who"] for line in output.splitlines() if line.startswith("{")}
    assert {"ps/0", "worker/0"} <= who
    assert "live page" not in output


def test_the_environment_says_it_too(tmp_path: Path) -> None:
    """$PSCLUSTER_LOG_FORMAT and $PSCLUSTER_LOG_LEVEL replace the options."""
    cluster = make_cluster(chief=False)
    with Roles(cluster, tmp_path, {"PSCLUSTER_LOG_FORMAT": "json", "PSCLUSTER_LOG_LEVEL": "debug"}) as roles:
        assert json.loads(roles.ps().wait_for("serving on"))["level"] == "INFO"


def test_a_line_an_event() -> None:
    """A line has its date; names chosen by peers start no new one; with JSON a traceback is within its line."""
    program = (
        "import logging, sys\n"
        "from pscluster.core.role.process import bind_log, configure_logging\n"
        "configure_logging('ps/0', 'INFO', sys.argv[1])\n"
        "bind_log(role='ps')\n"
        "logging.getLogger('x').info('a variable %s', 'w\\n12:00:00 ps/0 ERROR all is lost')\n"
        "try:\n"
        "    1 / 0\n"
        "except ZeroDivisionError:\n"
        "    logging.getLogger('x').exception('it failed')\n"
    )

    def said(form: str) -> list[str]:
        command = [sys.executable, "-c", program, form]
        done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60, check=True)
        return done.stderr.splitlines()

    text, (first, second) = said("text"), said("json")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ps/0 INFO a variable", text[0])
    assert text[0].endswith("ps/0 INFO a variable w | 12:00:00 ps/0 ERROR all is lost")
    assert text[1].endswith("ps/0 ERROR it failed")
    assert text[-1] == "ZeroDivisionError: division by zero"
    assert json.loads(first)["message"] == "a variable w\n12:00:00 ps/0 ERROR all is lost"
    line = json.loads(second)
    assert (line["level"], line["message"], line["role"]) == ("ERROR", "it failed", "ps")
    assert line["traceback"].endswith("ZeroDivisionError: division by zero")


def test_a_wait_is_said_once(tmp_path: Path) -> None:
    """While a wait and what is seen stay the same, nothing more is logged."""
    patched = tmp_path / "impatient.py"
    patched.write_text(
        "from pscluster.core.transport import channels\n"
        "channels._REMIND_SECONDS = 0.2\n"
        "from pscluster.worker.main import main\n"
        "main()\n"
    )
    cluster = make_cluster(chief=False)
    with Roles(cluster, tmp_path) as roles:
        worker = roles.start(str(patched), "--connect-timeout", "2", role="worker", command=(sys.executable,))
        assert worker.wait() == 1
        lines = worker.output.splitlines()
    assert len([line for line in lines if "waiting for ps 0" in line]) == 1, lines
    assert len([line for line in lines if "still waiting" in line]) == 1, lines
