"""Metrics over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for process supervisors.

Each role has one small server. Each request has its own connection, which closes after the answer. A connection has
`_SECONDS` in total, whatever it sends; if there are more than `_CONNECTIONS`, a new one closes the one whose request
has been incomplete for longest. So clients that are slow, or come in thousands, harm only themselves.

    open --the request is complete--> answered --> closed
         --too slow, or too many-----------------> closed
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

from pscluster.core.cluster.addresses import join_address
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.metrics.registry import Telemetry, Value
from pscluster.core.security.http_access import CertificateFiles, Visitors

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

_SECONDS = 10.0
_CONNECTIONS = 32
_CHECK_SECONDS = 0.5
_HEALTH_PATHS = ("/healthz", "/readyz")


def _leaves(value: Value, levels: int, labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not levels:
        yield labels, value
        return
    assert isinstance(value, Mapping)  # one level per label
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
            self._answer(HTTPStatus.OK, "alive\n")
        elif path == "/readyz":
            why = self.server.telemetry.not_ready()
            # The reason names tasks, so it is not shown without a token.
            text = "not ready" if why and is_open else why or "ready"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, f"{text}\n")
        elif path == "/metrics":
            body, kind = self.server.exposition(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, body, kind)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "not found; try /metrics, /healthz or /readyz\n")

    do_HEAD = do_GET  # noqa: N815  (the base looks it up by this name)

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
    """Serves the metrics of a role, on its own thread, from construction to `close`.

    Port 0 is any free one. A `token` is required as `Authorization: Bearer TOKEN` if `host` is not loopback, except for
    /healthz and /readyz with `open_health`. Without `files`, it is plain text; clients need no certificate. Raises
    ConfigurationError if the host is not this machine's, or the port is in use.
    """

    request_queue_size = 128
    timeout = 0  # of `handle_request`, which is called only when there is a connection

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
        self._open: dict[socket.socket, float] = {}  # with their start
        self._waiting: dict[socket.socket, None] = {}  # those whose request is incomplete
        self._registry: CollectorRegistry | None = None
        self._lock = threading.Lock()
        self._exposing = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"can't serve metrics on {host}:{port}: {error.strerror or error}; give another --metrics-port (0: any "
                "free one), --metrics-host, or --metrics-port off"
            ) from None
        self.address = join_address(host, self.server_port)
        # Not `serve_forever`: ending it would take one of its poll intervals.
        self._over, self._ending = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._over, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(_CHECK_SECONDS if self._open else None)]
                if self._over in ready:
                    return
                if ready:
                    self.handle_request()
                self._cut_late()

    def server_bind(self) -> None:
        """Bind without the base's lookup of the host's full name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setblocking(False)  # accepting a connection that is gone must not wait for the next one
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

    def wake(self) -> None:
        """Log the address. Not at construction: a role that fails to start should log only the reason."""
        logger.info("metrics on %s://%s/metrics", "http" if self._files is None else "https", self.address)

    # Called by the handlers

    def refusal(self, headers: Any) -> tuple[HTTPStatus, str] | None:
        """Return the answer to a client that may not see this; None if it may."""
        if not self._visitors.is_known_host(headers.get("Host", "localhost")):
            return HTTPStatus.FORBIDDEN, "use localhost or 127.0.0.1\n"
        if self._visitors.need_token and not self._visitors.have_token(str(headers.get("Authorization", ""))):
            return HTTPStatus.UNAUTHORIZED, "send the cluster token: Authorization: Bearer TOKEN\n"
        return None

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics as text of an accepted type, and that type. One call at a time, so at most one core."""
        # Imported only here: it would add 50 ms to a role's start.
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        with self._exposing:
            if self._registry is None:
                self._registry = CollectorRegistry()
                self._registry.register(self)  # it calls `collect` for each exposition
            encode, kind = choose_encoder(accept)
            return encode(self._registry), kind

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as prometheus_client expects them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        kinds["histogram"] = HistogramMetricFamily
        snapshot = self.telemetry.snapshot()
        for metric in self.telemetry.described():
            name = f"pscluster_{self.telemetry.role}_{metric.name}"
            family = kinds[metric.kind](name, metric.help, labels=metric.labels)
            for labels, leaf in _leaves(snapshot[metric.name], len(metric.labels)):
                values = [list(leaf["buckets"].items()), leaf["sum"]] if metric.kind == "histogram" else [leaf]
                family.add_metric(labels, *values)
            yield family

    # Connections

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().get_request()
        except OSError:
            time.sleep(0.1)  # with no descriptors left, this is called in a loop
            raise
        if self._files is not None:  # the handshake runs on the connection's own thread
            connection.settimeout(_SECONDS)
            context = self._files.context()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _CONNECTIONS and (oldest := next(iter(self._waiting), None)) is not None:
                _cut(oldest)
                del self._waiting[oldest]
            full = len(self._open) >= 2 * _CONNECTIONS  # the threads of cut connections have not all ended yet
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
        """Note that a connection's request is complete."""
        with self._lock:
            self._waiting.pop(connection, None)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
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
        with self._lock:
            for connection, since in self._open.items():
                if since <= time.monotonic() - _SECONDS:
                    _cut(connection)
                    self._waiting.pop(connection, None)


def _cut(connection: socket.socket) -> None:
    """End a connection; its thread notices and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
