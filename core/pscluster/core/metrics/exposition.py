"""Metrics over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for whoever watches processes.

One small server a role. Each request has a connection of its own, which ends with its answer. A connection has
`_SECONDS` in all, whatever it does or does not send; of more than `_CONNECTIONS` the one that has kept us waiting
longest is closed for the new one. So who is slow, or comes in thousands, costs only itself.

    open --the request is whole--> answered --> closed
         --too long, or too many--------------> closed
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.metrics.registry import Telemetry, Value
from pscluster.core.security.http_access import CertificateFiles, Visitors

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

_SECONDS = 10.0
_CONNECTIONS = 32
_LOOK_SECONDS = 0.5
_HEALTH_PATHS = ("/healthz", "/readyz")
_PATHS = ("/metrics", *_HEALTH_PATHS)


class MetricsCollector:
    """Reads a role's metrics when a collector asks for them."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client wants them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        found = self._telemetry.snapshot()
        for metric in self._telemetry.described():
            name = f"pscluster_{self._telemetry.role}_{metric.name}"
            value = found[metric.name]
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
                for labels, leaf in _leaves(value, len(metric.labels)):
                    buckets: Any = leaf["buckets"]
                    histogram.add_metric(labels, list(buckets.items()), leaf["sum"])
                yield histogram
                continue
            family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                name, metric.help, labels=metric.labels
            )
            for labels, leaf in _leaves(value, len(metric.labels)):
                family.add_metric(labels, leaf)
            yield family


def _leaves(value: Value, levels: int, labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not levels:
        yield labels, value
        return
    assert isinstance(value, Mapping)  # one level a label
    for label, inner in value.items():
        yield from _leaves(inner, levels - 1, (*labels, label))


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version, sys_version = "pscluster", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        self.server.heard(self.connection)
        path = self.path.partition("?")[0]
        refusal = self.server.refusal(self.headers)
        is_open = self.server.open_health and refusal is not None and refusal[0] == HTTPStatus.UNAUTHORIZED
        if refusal is not None and not (is_open and path in _HEALTH_PATHS):
            self._answer(*refusal)
        elif path == "/healthz":
            self._answer(HTTPStatus.OK, "the process lives\n")
        elif path == "/readyz":
            why = self.server.telemetry.not_ready()
            said = (
                "not ready" if why and is_open else why or "ready"
            )  # which tasks are missing is not told without a token
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, f"{said}\n")
        elif path == "/metrics":
            body, kind = self.server.exposition(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, body, kind)
        else:
            self._answer(HTTPStatus.NOT_FOUND, f"there is {', '.join(_PATHS)}\n")

    do_HEAD = do_GET  # noqa: N815  (the base finds it by this name)

    def _answer(self, status: HTTPStatus, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base's name)
        logger.debug(format, *args)


class MetricsServer(HTTPServer):
    """Serves the metrics of a role, on a thread of its own, from its making to `close`.

    Args:
        telemetry: of the role.
        host: a name or address of this machine.
        port: 0: any free one.
        token: which callers must show as `Authorization: Bearer TOKEN` where `host` is not loopback.
        files: the certificate that the server shows; it asks for none. None: plain text.
        open_health: /healthz and /readyz ask for no token.

    Raises:
        ConfigurationError: the host is none of this machine's, or the port is in use.
    """

    request_queue_size = 128
    timeout = 0  # of `handle_request`, which is called where there is a connection

    def __init__(
        self,
        telemetry: Telemetry,
        host: str,
        port: int,
        token: str | None = None,
        files: CertificateFiles | None = None,
        *,
        open_health: bool = False,
    ) -> None:
        self.telemetry = telemetry
        self.open_health = open_health
        self._visitors = Visitors(host, token)
        self._files = files
        self._open: dict[socket.socket, float] = {}  # with when it came
        self._waiting: dict[socket.socket, None] = {}  # those whose request is not whole
        self._registry: CollectorRegistry | None = None
        self._lock = threading.Lock()
        self._asked = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"can't serve metrics on {host}:{port}: {error.strerror or error}; give another --metrics-port (0: any "
                "free one), --metrics-host, or --metrics-port off"
            ) from None
        self.address = f"[{host}]:{self.server_port}" if ":" in host else f"{host}:{self.server_port}"
        # Not `serve_forever`: its end takes as long as one of its looks around.
        self._over, self._ending = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._over, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(_LOOK_SECONDS if self._open else None)]
                if self._over in ready:
                    return
                if ready:
                    self.handle_request()
                self._cut_late()

    def server_bind(self) -> None:
        """Without the base's look-up of the host's full name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setblocking(False)  # to take a connection that has gone meanwhile is not to wait for the next
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def close(self) -> None:
        """End all connections, and the thread."""
        self._ending.close()
        self._thread.join()
        self._over.close()
        self.server_close()
        with self._lock:
            for connection in self._open:
                _cut(connection)

    def tell(self) -> None:
        """Log where it is. Not at its start: a role that can't be used is to say why, in one line."""
        logger.info("metrics on %s://%s/metrics", "http" if self._files is None else "https", self.address)

    def _shaken(self, connection: socket.socket) -> socket.socket:
        """The connection, encrypted where that is asked for. OSError if its client can't."""
        if self._files is None:
            return connection
        connection.settimeout(_SECONDS)
        with self._lock:
            wrapped = self._files.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            self._open[wrapped] = self._open.pop(connection, time.monotonic())
            if connection in self._waiting:
                del self._waiting[connection]
                self._waiting[wrapped] = None
        return wrapped

    # What the handlers ask

    def refusal(self, headers: Any) -> tuple[HTTPStatus, str] | None:
        """How to answer who may not see this, if so."""
        if not self._visitors.is_known_host(headers.get("Host", "localhost")):
            return HTTPStatus.FORBIDDEN, "ask for localhost or 127.0.0.1\n"
        if self._visitors.need_token and not self._visitors.have_token(str(headers.get("Authorization", ""))):
            return HTTPStatus.UNAUTHORIZED, "show the cluster token: Authorization: Bearer TOKEN\n"
        return None

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text, and its type: as the caller likes it. One at a time: a flood takes one core at most."""
        # Not imported before somebody asks: it takes a role 50 ms of its start.
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        with self._asked:
            if self._registry is None:
                self._registry = CollectorRegistry()
                self._registry.register(MetricsCollector(self.telemetry))
            encode, kind = choose_encoder(accept)
            return encode(self._registry), kind

    # Connections

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. Where there are no descriptors left this is called again and again: slowly, then."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own."""
        with self._lock:
            if len(self._open) >= _CONNECTIONS and (oldest := next(iter(self._waiting), None)) is not None:
                _cut(oldest)
                del self._waiting[oldest]
            full = len(self._open) >= 2 * _CONNECTIONS  # those that were cut have not all noticed it yet
            if not full:
                self._open[request] = time.monotonic()
                self._waiting[request] = None
        if full:
            self.shutdown_request(request)
            return
        threading.Thread(
            target=self._serve, args=(request, client_address), name="metrics-request", daemon=True
        ).start()

    def heard(self, connection: socket.socket) -> None:
        """Its request is whole."""
        with self._lock:
            self._waiting.pop(connection, None)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            request = self._shaken(request)
            if isinstance(request, ssl.SSLSocket):
                request.do_handshake()
            self.finish_request(request, client_address)
        except (OSError, ValueError) as error:
            logger.debug("a request for metrics was aborted: %s", error)
        except PsClusterError as error:
            logger.warning("a request for metrics failed: %s", error)
        except Exception:
            logger.exception("a request for metrics failed")
        finally:
            with self._lock:
                self._open.pop(request, None)
                self._waiting.pop(request, None)
            self.shutdown_request(request)

    def _cut_late(self) -> None:
        """Now and then: cut off who takes too long."""
        late = time.monotonic() - _SECONDS
        with self._lock:
            for connection, since in self._open.items():
                if since <= late:
                    _cut(connection)
                    self._waiting.pop(connection, None)


def _cut(connection: socket.socket) -> None:
    """End it; its thread sees that, and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
