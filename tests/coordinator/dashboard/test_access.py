"""Who may see the live page; unauthenticated callers can do nothing to it, and least of all to the job."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.waiting import until

from pscluster.coordinator import ClusterCoordinator, Dashboard, LocalCluster, ParameterServerStrategy
from pscluster.coordinator.dashboard import pages
from pscluster.coordinator.dashboard import watch as watch_module
from pscluster.coordinator.dashboard.watch import SHARE, Watch
from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError
from pscluster.core.security import tokens
from pscluster.core.security.tokens import load_token, new_token

PATHS = ["/", "/page.js", "/page.css", "/uplot.js", "/uplot.css", "/state.json", "/events"]


def ask(
    page: Dashboard, path: str = "/", headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and body; of /events the first line only."""
    url = urlsplit(page.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        streams = response.headers.get_content_type() == "text/event-stream"
        body = response.readline() if streams else response.read()
        return response.status, response.headers, body.decode()


def test_on_loopback(coordinator: ClusterCoordinator) -> None:
    """A request under a name of this machine is answered, under a strict policy; nothing can be changed."""
    with Dashboard(coordinator, "127.0.0.1:0") as page:
        for path in PATHS:
            status, headers, body = ask(page, path)
            assert status == 200, path
            assert body
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
        state = json.loads(ask(page, "/state.json")[2])
        assert [row["task"] for row in state["workers"]] == ["worker 0", "worker 1"]
        assert {row["state"] for row in state["servers"]} == {"serving"}
        coordinator.context.event_log.record("worker 0", "error", "it failed", "a traceback: \u00e9")
        errors: list[Any] = []

        def shows_error() -> bool:
            errors[:] = json.loads(ask(page, "/state.json")[2])["errors"]
            return bool(errors)

        until(shows_error, "the page has the error")
        (error,) = errors
        assert ask(page, f"/error/{error['number']}")[2] == "a traceback: \u00e9\n"
        assert error["detail"] not in ask(page, "/events")[2]
        assert ask(page, "/error/999999")[0] == ask(page, "/error/x")[0] == 404
        for name in ("localhost", "localhost:9000", "127.0.0.1", "127.1.2.3:1", "[::1]:80", "LOCALHOST"):
            assert ask(page, headers={"Host": name})[0] == 200, name
        for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]", "10.0.0.1", ""):
            for path in PATHS:
                assert ask(page, path, {"Host": name})[0] == 421, (name, path)
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert ask(page, "/state.json", method=method)[0] == 405
        for path in ("/../server.py", "/%2e%2e/server.py", "/assets/", "/page.js/../../server.py", "/etc/passwd"):
            assert ask(page, path)[0] == 404
    with pytest.raises(OSError, match="refused"):
        ask(page)


def test_callers_in_a_loop_share_contents(coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As anyone on this machine may be: of a large cluster, contents take a while to make."""
    now, made = [0.0], list[bool]()

    def contents(*, details: bool = False) -> str:
        now[0] += 1.0
        made.append(details)
        return f"{len(made)}"

    watch = Watch(coordinator.context)
    monkeypatch.setattr(watch, "_contents", contents)
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def ask_again(times: int) -> set[str]:
        return {await watch.state() for _ in range(times)} | {await anext(watch.updates()) for _ in range(times)}

    async def ask_later() -> set[str]:
        now[0] += 1 / SHARE
        return await ask_again(3)

    monkeypatch.setattr(watch, "_ask_once", lambda: asyncio.sleep(0))
    assert asyncio.run(ask_again(50)) == {"1", "2"}
    assert asyncio.run(ask_later()) == {"3", "4"}
    assert made == [True, False] * 2


def test_no_asset_is_elsewhere() -> None:
    """What the page loads, it loads from itself; and what it is made of names no other place."""
    folder = resources.files("pscluster.coordinator.dashboard").joinpath("assets")
    for name in ("index.html", "page.js", "page.css"):
        text = folder.joinpath(name).read_text()
        assert not re.search(r"https?://|//[a-z]+\.", text), name
    assert "innerHTML" not in folder.joinpath("page.js").read_text()
    assert "MIT License" in folder.joinpath("uPlot.LICENSE").read_text()


def test_off_loopback_it_refuses(coordinator: ClusterCoordinator) -> None:
    """There all of it would go over the network in plain text: only with --insecure."""
    with pytest.raises(ConfigurationError, match=r"refusing to serve the live page on 0\.0\.0\.0:1234.*--insecure"):
        Dashboard(coordinator, "0.0.0.0:1234")
    with pytest.raises(ConfigurationError, match="no port"):
        Dashboard(coordinator, "127.0.0.1")


def certificate(folder: Path, name: str) -> Path:
    """One of its own, for localhost, with its key in one file."""
    paths = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", paths[0], "-out", paths[1]], check=True, capture_output=True)
    path = folder / f"{name}.pem"
    path.write_bytes(b"".join(source.read_bytes() for source in paths))
    return path


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl, which makes the certificates")
def test_over_https(coordinator: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate and the token it listens anywhere; a renewed certificate is shown to the next caller."""
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 0.05)
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")
    token = coordinator.strategy.token

    def subject(page: Dashboard) -> str:
        url = urlsplit(page.url)
        context = ssl.create_default_context()
        for known in (tmp_path / "first.crt", tmp_path / "second.crt"):
            context.load_verify_locations(known)
        with (
            socket.create_connection((url.hostname or "", url.port or 0)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(f"GET /?token={token} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
            head = connection.makefile().read()
            assert head.startswith("HTTP/1.1 303 ")
            assert "Secure" in head
            shown: dict[str, Any] = dict(connection.getpeercert() or {})
            return str(shown["subject"][0][0][1])

    with Dashboard(coordinator, "0.0.0.0:0", certificate=first) as page:
        assert page.url.startswith("https://127.0.0.1:")
        assert subject(page) == "first"
        os.replace(second, first)
        until(lambda: subject(page) == "second", "the renewed certificate is shown")
    with pytest.raises(ConfigurationError, match=r"certificate of the live page can't be used: .*nowhere"):
        Dashboard(coordinator, "127.0.0.1:0", certificate=tmp_path / "nowhere")


def test_a_port_that_is_taken(coordinator: ClusterCoordinator) -> None:
    """A port that was asked for is an error; the default one gives way to another."""
    with Dashboard(coordinator, "127.0.0.1:0") as first:
        address = urlsplit(first.url).netloc
        with pytest.raises(PsClusterError, match=f"can't be shown on {address}: .*in use"):
            Dashboard(coordinator, address)
        with Dashboard(coordinator) as second, Dashboard(coordinator) as third:
            assert len({first.url, second.url, third.url}) == 3
            assert ask(third)[0] == 200


def test_of_a_job_that_is_over(coordinator: ClusterCoordinator) -> None:
    """There is nothing to show, and nothing stays behind."""
    coordinator.strategy.close()
    with pytest.raises(MisuseError, match="the job is over"):
        Dashboard(coordinator, "127.0.0.1:0")
    assert [thread for thread in threading.enumerate() if thread.name == "dashboard"] == []


def test_behind_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Elsewhere than on loopback: the token once, in the address, then a cookie; or the header that calls have."""
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 0.0)
    token, next_one = new_token(), new_token()
    file = tmp_path / "token"
    file.write_text(token + "\n")
    with (
        LocalCluster(1, 1, log_level="ERROR", token=token) as cluster,
        ParameterServerStrategy(cluster, token=load_token(file)) as strategy,
        Dashboard(strategy, "0.0.0.0:0", insecure=True) as page,
    ):
        for path in (*PATHS, "/?token=", f"/?token={next_one}", "/state.json?token=" + token, "/?token=%ff%00"):
            status, headers, body = ask(page, path)
            assert status == 401, path
            assert token not in body
            assert headers["Set-Cookie"] is None
        assert ask(page, headers={"Authorization": f"Bearer {next_one}"})[0] == 401
        assert ask(page, headers={"Authorization": "Bearer \xff"})[0] == 401
        assert [record for record in caplog.records if record.exc_info] == []
        assert ask(page, "/state.json", {"Authorization": f"Bearer {token}"})[0] == 200
        status, headers, _ = ask(page, f"/?token={token}")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert token not in cookie
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        mine = {"Cookie": cookie.partition(";")[0]}
        for path in PATHS:
            assert ask(page, path, mine)[0] == 200, path
            assert ask(page, path, {"Cookie": mine["Cookie"][:-1]})[0] == 401
        # Another token takes its place: sessions that began with the old one are over.
        (draft := tmp_path / "draft").write_text(next_one + "\n")
        os.replace(draft, file)
        assert ask(page, headers=mine)[0] == 401
        assert ask(page, f"/?token={next_one}")[0] == 303


def test_unauthenticated_callers_cost_the_job_nothing(
    coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """Hundreds of connections, halves of requests, rubbish, and watchers who do not read: functions go on, and the log
    says nothing of what is no HTTP."""
    with Dashboard(coordinator, "127.0.0.1:0") as page, contextlib.ExitStack() as stack:
        url = urlsplit(page.url)
        for index in range(400):
            client = stack.enter_context(socket.create_connection((url.hostname or "", url.port or 0)))
            words = (
                b"",
                b"GET /ev",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nx" + os.urandom(200),
                b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n",
            )
            with contextlib.suppress(ConnectionError):
                client.sendall(words[index % len(words)])
        values = [coordinator.schedule(int, args=("7",)) for _ in range(200)]
        assert set(coordinator.fetch(values, timeout=60)) == {7}
        stack.close()

        def answers() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return ask(page, "/state.json")[0] == 200
            return False

        until(answers, "the page answers again")
        assert "handling request" not in caplog.text


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_silent_make_room(
    coordinator: ClusterCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    encrypted: bool,
) -> None:
    """However many connect and say nothing, no handshake either: the oldest go first, and after a while all."""
    if encrypted and not shutil.which("openssl"):
        pytest.skip("no openssl, which makes the certificates")
    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 4)
    mine = certificate(tmp_path, "mine") if encrypted else None
    with Dashboard(coordinator, "127.0.0.1:0", certificate=mine) as page, contextlib.ExitStack() as stack:
        url = urlsplit(page.url)

        def silent() -> socket.socket:
            return stack.enter_context(socket.create_connection((url.hostname or "", url.port or 0), timeout=60))

        def status() -> int:
            context = ssl._create_unverified_context() if encrypted else None
            with urllib.request.urlopen(page.url + "state.json", timeout=60, context=context) as response:
                return int(response.status)

        first = [silent() for _ in range(6)]
        assert [client.recv(1) for client in first[:2]] == [b"", b""]
        assert status() == 200
        assert first[2].recv(1) == b""
        monkeypatch.setattr(pages, "ADMISSION_SECONDS", 0.01)
        second = [silent() for _ in range(6)]
        assert {client.recv(1) for client in (*first[2:], *second)} == {b""}
        monkeypatch.setattr(pages, "ADMISSION_SECONDS", 600.0)
        assert status() == 200
        for _ in range(3):
            silent()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_held_pages_keep_no_caller_out(coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are held in all places, and not read: the oldest is closed for the next caller."""
    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 4)
    with Dashboard(coordinator, "127.0.0.1:0") as page, contextlib.ExitStack() as stack:
        url = urlsplit(page.url)
        held = []
        for _ in range(4):
            client = stack.enter_context(socket.create_connection((url.hostname or "", url.port or 0), timeout=60))
            client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1)
            held.append(client)
        for _ in range(3):
            assert ask(page, "/state.json")[0] == 200

        def ended() -> bool:
            return not held[0].recv(1 << 16)

        until(ended, "the oldest is closed")
