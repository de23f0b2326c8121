"""The live page: its address, and the thread that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from typing import Self

from pscluster.coordinator.dashboard.watch import Watch
from pscluster.coordinator.job.context import HasJob
from pscluster.core.checks import type_of
from pscluster.core.cluster.addresses import split_address
from pscluster.core.errors import MisuseError, PsClusterError
from pscluster.core.security.http_access import CertificateFiles, Visitors, check_exposure

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:8477"

_CLOSE_SECONDS = 3.0


class Dashboard:
    """The live page of a job, until `close`; a context manager. `pscluster run` makes one by itself.

    Args:
        coordinator: the job to show; or the strategy, before there is a coordinator.
        address: HOST:PORT to listen on; port 0: any free port. Default: 127.0.0.1:8477, or another port of 127.0.0.1
            if that one is taken.
        certificate, key: PEM files for HTTPS; renewed files are reloaded.
        insecure: allow an address off loopback without a token, or in plain text, which reveals the token, if there is
            one, to anyone who can read the network's traffic.

    Raises:
        ConfigurationError: the address is not on loopback, there is no token or no certificate, and `insecure` is not
            given; the address is malformed; the certificate or key can't be used.
        PsClusterError: it can't listen on the address.
        MisuseError: the job is over.
    """

    def __init__(
        self,
        coordinator: HasJob,
        address: str | None = None,
        *,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        if not hasattr(coordinator, "context"):
            raise TypeError(f"coordinator is {type_of(coordinator)}; give a ClusterCoordinator, or the strategy")
        context = coordinator.context
        host, _ = _endpoint(address or DEFAULT_ADDRESS)
        token = context.options.token
        files = None if certificate is None else CertificateFiles("the live page", certificate, key)
        check_exposure(
            "the live page",
            address or DEFAULT_ADDRESS,
            host,
            token,
            encrypted=files is not None,
            insecure=insecure,
            hint="show it on 127.0.0.1 and use a tunnel (ssh -L)",
        )
        self._socket = _listen(address)
        port = self._socket.getsockname()[1]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (it is compared with)  # nosec B104
        scheme = "http" if files is None else "https"
        self.url = f"{scheme}://[{shown}]:{port}/" if ":" in shown else f"{scheme}://{shown}:{port}/"
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        arguments = Watch(context), Visitors(host, token), port, files
        self._thread = threading.Thread(target=self._run, args=arguments, name="dashboard", daemon=True)
        self._thread.start()
        try:
            context.show_until_closed(self.close)
        except MisuseError:
            self.close()
            raise

    def close(self) -> None:
        """Send open pages the last state, then stop serving. Idempotent."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._ready.wait(_CLOSE_SECONDS)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread

    def _run(self, watch: Watch, visitors: Visitors, port: int, files: CertificateFiles | None) -> None:
        try:
            from pscluster.coordinator.dashboard.pages import Site  # slow to import

            site = Site(watch, visitors, port, files)
            self._loop.run_until_complete(site.serve(self._socket, self._ready.set, self._stop))
        except Exception:  # the job continues without it
            logger.exception("the live page failed")
        finally:
            self._ready.set()
            self._socket.close()
            self._loop.close()


def _endpoint(address: str) -> tuple[str, int]:
    """Return host and port; 0 stands for any free port."""
    if address.endswith(":0"):
        return split_address(f"{address[:-1]}1")[0], 0
    return split_address(address)


def _listen(address: str | None) -> socket.socket:
    """Open a socket at the address; without one, at the default address, or any port there if that one is taken."""
    host, port = _endpoint(address or DEFAULT_ADDRESS)
    for candidate in (port,) if address else (port, 0):
        try:
            family = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, candidate), family=family, backlog=64)
        except OSError as error:
            why = error.strerror or str(error)
    raise PsClusterError(
        f"the live page can't be shown on {address or DEFAULT_ADDRESS}: {why}; give another --dashboard-address"
    )
