"""The metrics server: who may ask, what is answered, and that a slow or hostile client harms only itself."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.core.metrics.scraping import SECONDS, Scraped, get, scrape
from tests.core.metrics.test_metrics import OneRole
from tests.waiting import until

from pscluster.core.errors import ConfigurationError
from pscluster.core.metrics import exposition
from pscluster.core.metrics.exposition import MetricsServer
from pscluster.core.role.options import RoleOptions, metrics_port_of, options_of_environ
from pscluster.core.role.server import serve_metrics
from pscluster.core.security.certificates import make_certificates
from pscluster.core.security.tls import load_tls

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def telemetry() -> OneRole:
    """A role's telemetry."""
    return OneRole()


def threads() -> list[threading.Thread]:
    """The threads of metrics servers."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("metrics")]


@pytest.fixture
def server(telemetry: OneRole) -> Iterator[MetricsServer]:
    """A metrics server on loopback; nothing is left of it at its end."""
    server = MetricsServer(telemetry, "127.0.0.1", 0, TOKEN)
    yield server
    server.close()
    until(lambda: not threads(), "its threads have ended")
    with pytest.raises(ConnectionRefusedError):
        get(server.address, "/healthz")


def test_what_is_served(server: MetricsServer, telemetry: OneRole) -> None:
    """It serves metrics under their full names with any text as a label, health, readiness with its reason, nothing
    else."""
    scraped = scrape(server.address)
    assert scraped.value("pscluster_one_things_total", kind="a") == 1
    assert scraped.labels("pscluster_one_things_total", "kind") == {"a", 'quote " and \\ and\nline'}
    assert scraped.kinds["pscluster_one_memory_bytes"] == "gauge"
    assert get(server.address, "/healthz") == (200, "alive\n")
    assert get(server.address, "/readyz") == (503, "it is starting\n")
    telemetry.why_not_ready = lambda: ""
    assert get(server.address, "/readyz?verbose") == (200, "ready\n")
    assert get(server.address, "/healthz", method="HEAD") == (200, "")
    assert get(server.address, "/")[0] == 404
    assert get(server.address, "/metrics", method="POST")[0] == 501
    for path in ("/../../etc/passwd", "/metrics/" + "x" * 60_000):
        assert get(server.address, path)[0] == 404


def test_open_metrics(server: MetricsServer) -> None:
    """Prometheus asks for that format first."""
    status, text = get(server.address, "/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
    assert status == 200
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # the parser has no types
    assert "pscluster_one_things" in {family.name for family in families}


def test_another_sites_page_reads_nothing(server: MetricsServer) -> None:
    """On loopback a browser that was led here under another name is refused."""
    port = server.server_port
    for host, status in ((f"localhost:{port}", 200), ("127.0.0.1", 200), (f"[::1]:{port}", 200), ("evil.test", 403)):
        assert get(server.address, "/metrics", {"Host": host})[0] == status


def test_off_loopback_the_token_is_asked_for(telemetry: OneRole) -> None:
    """Everything but the token, as a Bearer, is refused, without revealing any of it."""
    server = MetricsServer(telemetry, "0.0.0.0", 0, TOKEN)
    try:
        address = f"127.0.0.1:{server.server_port}"
        wrong = ["", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ", TOKEN.upper()]
        for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
            for given in wrong:
                status, text = get(address, path, {"Authorization": given} if given else {})
                assert status == 401, given
                assert TOKEN not in text
        for scheme in ("Bearer", "bearer"):
            assert get(address, "/metrics", {"Authorization": f"{scheme} {TOKEN}"})[0] == 200
        assert get(address, "/metrics", {"Authorization": "Bearer \xe9"})[0] == 401
    finally:
        server.close()


def test_health_alone_may_be_opened(telemetry: OneRole) -> None:
    """Off loopback a probe without a token learns that the process is live and ready, not what it waits for."""
    server = MetricsServer(telemetry, "0.0.0.0", 0, TOKEN, open_health=True)
    try:
        address = f"127.0.0.1:{server.server_port}"
        with_token = {"Authorization": f"Bearer {TOKEN}"}
        assert get(address, "/healthz") == (200, "alive\n")
        telemetry.why_not_ready = lambda: "it waits for worker 1"
        assert get(address, "/readyz") == (503, "not ready\n")
        assert get(address, "/readyz", with_token) == (503, "it waits for worker 1\n")
        telemetry.why_not_ready = lambda: ""
        assert get(address, "/readyz") == (200, "ready\n")
        assert get(address, "/metrics")[0] == 401
        assert get(address, "/metrics", with_token)[0] == 200
    finally:
        server.close()


def test_off_loopback_with_certificates(telemetry: OneRole, tmp_path: Path) -> None:
    """It is served over TLS with the role's certificate; plain text, and clients that never shake hands, get
    nowhere."""
    make_certificates(tmp_path)
    options = RoleOptions(metrics_host="0.0.0.0", token=TOKEN, tls=load_tls("ps", tmp_path))
    server = serve_metrics(telemetry, options)
    assert server is not None
    address = "127.0.0.1", server.server_port
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    try:
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, timeout=SECONDS))
            connection = http.client.HTTPSConnection(*address, timeout=SECONDS, context=trust)
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            assert answer.status == 200
            assert Scraped(answer.read().decode()).value("pscluster_one_things_total", kind="a") == 1
            connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            get("{}:{}".format(*address), "/metrics", {"Authorization": f"Bearer {TOKEN}"})
        with pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(socket.create_connection(address), server_hostname="127.0.0.1")
    finally:
        server.close()


def test_refusals_to_serve(telemetry: OneRole, server: MetricsServer) -> None:
    """For a port in use, a host of another machine, and every interface without a token the error says what to do."""
    cases = [
        (RoleOptions(metrics_port=server.server_port), "can't serve metrics on 127.0.0.1:.*in use.*--metrics-port"),
        (
            RoleOptions(metrics_host="192.0.2.1", token=TOKEN, insecure=True),
            "can't serve metrics on 192.0.2.1:0: .*--metrics-host",
        ),
        (RoleOptions(metrics_host="0.0.0.0"), "refusing to serve metrics on 0.0.0.0 without a cluster token"),
        (RoleOptions(metrics_host="0.0.0.0", token=TOKEN), "refusing to serve metrics on 0.0.0.0 in plain text"),
    ]
    for options, words in cases:
        with pytest.raises(ConfigurationError, match=words):
            serve_metrics(telemetry, options)
    assert serve_metrics(telemetry, RoleOptions(metrics_port=None)) is None


def test_ports() -> None:
    """A port is a number or off; anything else is named. Processes without a command line use the environment."""
    assert metrics_port_of("off") is None
    assert (metrics_port_of("0"), metrics_port_of("65535")) == (0, 65535)
    for wrong in ("", "-1", "65536", "on", "80a", "\u0663"):
        with pytest.raises(ConfigurationError, match=r"the port for metrics is .*give one from 1 to 65535, 0"):
            metrics_port_of(wrong)
    options = options_of_environ({"PSCLUSTER_METRICS_PORT": "9100", "PSCLUSTER_METRICS_HOST": "::1"})
    assert (options.metrics_port, options.metrics_host, options.token) == (9100, "::1", None)
    assert options_of_environ({}).metrics_port == 0


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: "])
def test_many_that_say_nothing_keep_no_caller_out(server: MetricsServer, sent: bytes) -> None:
    """With hundreds of connections that never end their request an orderly client is still answered."""
    with ExitStack() as stack:
        for index in range(300):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=SECONDS))
            with suppress(OSError):
                idle.sendall(sent)
            if index % 50 == 0:
                assert get(server.address, "/healthz")[0] == 200
                assert len(threads()) <= 3 * exposition._CONNECTIONS
        assert scrape(server.address).value("pscluster_one_things_total", kind="a") == 1


def test_a_slow_client_is_cut_off(telemetry: OneRole, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that keeps sending single bytes gets no more time in all than any other."""
    monkeypatch.setattr(exposition, "_SECONDS", 1.0)
    server = MetricsServer(telemetry, "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=0.05) as slow:

            def is_cut() -> bool:
                try:
                    slow.sendall(b"G")
                    return not slow.recv(1)
                except TimeoutError:
                    return False
                except OSError:
                    return True

            until(is_cut, "it is cut off")
        assert get(server.address, "/healthz")[0] == 200
    finally:
        server.close()


@pytest.mark.parametrize(
    "rubbish", [b"\x16\x03\x01\x02\x00" * 100, b"\0" * 70_000, b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"]
)
def test_rubbish(server: MetricsServer, rubbish: bytes) -> None:
    """Something other than a request costs its sender the connection, and others nothing."""
    address = "127.0.0.1", server.server_port
    with socket.create_connection(address, timeout=SECONDS) as caller, suppress(OSError):
        caller.sendall(rubbish)
        caller.shutdown(socket.SHUT_WR)
        while caller.recv(1 << 16):
            pass
    assert get(server.address, "/healthz")[0] == 200
