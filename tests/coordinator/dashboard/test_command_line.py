"""The live page by the command line: on by itself under `pscluster run`, off elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest
from tests.coordinator.dashboard.browser import browser, complaints, needs_browser
from tests.roles.processes import IDLE, PSCLUSTER, Process, Roles, environ, make_cluster
from tests.waiting import until

from pscluster.core.security.certificates import make_certificates
from pscluster.core.security.tokens import new_token


def state_of(line: str) -> dict[str, object]:
    """What is shown at the address in the line."""
    match = re.search(r"the live page is at (http://127\.0\.0\.1:\d+/)$", line.strip())
    assert match, line
    with urllib.request.urlopen(f"{match[1]}state.json", timeout=60) as response:
        state: dict[str, object] = json.load(response)
    return state


def test_run_shows_it(tmp_path: Path) -> None:
    """`pscluster run` says where it is before the script has connected; the job is named by its script.

    What became of a worker that is killed is said as the launcher knows it, once.
    """
    script, gate = tmp_path / "train.py", tmp_path / "gate"
    script.write_text(IDLE)
    with Process([*PSCLUSTER, "run", str(script), str(gate)], environ()) as process:
        line = process.wait_for("the live page is at")
        process.wait_for("^connected")
        state = state_of(line)
        assert state["job"] == str(script)
        assert isinstance(state["queue"], dict)
        assert state["queue"]["done"] == 1

        def worker() -> dict[str, Any]:
            (row,) = cast("list[dict[str, Any]]", state_of(line)["workers"])
            return row

        pid = int(re.findall(r"pid (\d+)", worker()["name"])[0])
        os.kill(pid, signal.SIGKILL)
        said = re.compile(rf"\(pid {pid}\) was killed by SIGKILL; restarted as pid \d+")
        until(lambda: [entry for entry in worker()["story"] if said.match(entry["text"])], "the launcher's words")
        until(lambda: worker()["state"] != "" and worker()["good"] == "ok", "it is back", lambda: str(worker()))
        assert [entry["kind"] for entry in worker()["story"]] == ["up", "down", "up"]
        gate.touch()
        assert process.wait() == 0


def test_the_coordinator_when_it_is_asked(tmp_path: Path) -> None:
    """`pscluster coordinator` shows it with `--dashboard`, while it waits for its tasks, too; no port, no page."""
    cluster = make_cluster()
    with Roles(cluster, tmp_path) as roles:
        gate = tmp_path / "gate"
        coordinator = roles.coordinator(IDLE, str(gate), options=("--dashboard", "--dashboard-address", "127.0.0.1:0"))
        health = state_of(coordinator.wait_for("the live page is at"))["health"]
        assert isinstance(health, dict)
        assert health["text"] == "Waiting for the cluster's tasks"
        assert any(problem.startswith("worker 0 does not answer") for problem in health["problems"])
        roles.ps()
        roles.worker()
        coordinator.wait_for("connected")
        gate.touch()
        assert coordinator.wait() == 0
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            without = roles.coordinator(IDLE, str(gate), options=("--dashboard", "--dashboard-address", address))
            assert without.wait() == 0
            assert f"the live page can't be shown on {address}" in without.output
        refused = roles.coordinator(IDLE, options=("--dashboard", "--dashboard-address", "0.0.0.0:8477"))
        assert refused.wait() == 2
        assert "refusing to serve the live page on 0.0.0.0:8477" in refused.output


@needs_browser
@pytest.mark.timeout(240)
def test_off_loopback_with_the_roles_certificates(tmp_path: Path) -> None:
    """With `--tls DIR` and the token the page is on all addresses, over HTTPS, by the coordinator's certificate."""
    certificates, gate, token = tmp_path / "certificates", tmp_path / "gate", new_token()
    make_certificates(certificates)
    with Roles(make_cluster(), tmp_path, {"PSCLUSTER_TOKEN": token}) as roles:
        roles.ps(0, "--tls", str(certificates / "ps"))
        roles.worker(0, "--tls", str(certificates / "worker"))
        options = ("--tls", str(certificates / "coordinator"), "--dashboard", "--dashboard-address", "0.0.0.0:0")
        coordinator = roles.coordinator(IDLE, str(gate), options=options)
        line = coordinator.wait_for("the live page is at")
        match = re.search(r"at (https://127\.0\.0\.1:\d+/)$", line.strip())
        assert match, line
        coordinator.wait_for("^connected")
        ours = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        state = urllib.request.Request(f"{match[1]}state.json", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(state, timeout=60, context=ours) as response:
            assert json.load(response)["queue"]["done"] == 1
        with browser(tmp_path / "profile") as driver:
            driver.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": True})  # it does not know the CA
            driver.get(f"{match[1]}?token={token}")
            verdict = "return document.querySelector('#verdict')?.textContent"
            until(lambda: driver.execute_script(verdict) == "Healthy; nothing is scheduled", "the page is live")
            assert driver.current_url == match[1], "the token has left the address"
            assert complaints(driver) == []
        gate.touch()
        assert coordinator.wait() == 0
