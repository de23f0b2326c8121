"""The live page over HTTP: admission of callers (`pscluster.core.security.http_access`), and the responses.

Where a token is required it is given once, as `?token=`; then a cookie with a session id replaces it. Nothing can be
changed here. The page loads only files that are served here, and may load no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pscluster.coordinator.dashboard.watch import Watch
from pscluster.core.security.http_access import CertificateFiles, Visitors

MAX_CONNECTIONS = 128
"""To admit one more, the oldest unauthenticated connection is closed; if there is none, the oldest of all if no token
is required, else the new one. So a caller that holds all slots keeps no one out; closed pages reconnect by
themselves."""

ADMISSION_SECONDS = 10.0
"""A connection that has made no permitted request by then is closed; the TLS handshake is included."""

MAX_SESSIONS = 1000

_ASSETS = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/uplot.js": ("uPlot.iife.min.js", "text/javascript"),
    "/uplot.css": ("uPlot.min.css", "text/css"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address may hold the token
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOGIN = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>pscluster</title><link rel="stylesheet" href="/page.css">
<main><h1>pscluster</h1><p>{}</p>
<form method="get" action="/"><label>Cluster token <input name="token" type="password" autocomplete="off"></label>
<button>Show</button></form></main></html>
"""


def _is_ours(record: logging.LogRecord) -> bool:
    """Keep only our own failures. Invalid HTTP and lost connections are not logged: any caller could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


_log = logging.getLogger(f"{__name__}.http")
_log.addFilter(_is_ours)


class _Sessions:
    """The sessions of callers that have shown the token. For the loop's thread only."""

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors
        self._began_with: dict[str, str] = {}  # the token that began each session

    def may_view(self, authorization: str, session: str) -> bool:
        """Return whether the caller has a session, or sends the token itself in the header that calls use."""
        if not self._visitors.need_token or self._visitors.have_token(authorization):
            return True
        began_with = self._began_with.get(session)
        return began_with is not None and self._visitors.is_token(began_with)  # it may have been removed since

    def begin(self, token: str) -> str | None:
        """Begin a session and return its id; None if the token is wrong."""
        if not self._visitors.is_token(token):
            return None
        while len(self._began_with) >= MAX_SESSIONS:
            del self._began_with[next(iter(self._began_with))]
        name = secrets.token_urlsafe(32)
        self._began_with[name] = token
        return name


@dataclass(frozen=True, slots=True)
class _Guest:
    connection: socket.socket
    admitted: asyncio.Event  # set at the first permitted request
    task: asyncio.Task[None]  # admits it; closes it when cancelled before


class Site:
    def __init__(self, watch: Watch, visitors: Visitors, port: int, files: CertificateFiles | None) -> None:
        self._watch = watch
        self._visitors = visitors
        self._files = files
        self._sessions = _Sessions(visitors)
        self._cookie = f"pscluster_{port}"  # cookies are a host's, whatever the port
        self._guests: dict[asyncio.BaseProtocol, _Guest] = {}  # their sockets may be open; the oldest first

    async def serve(self, listener: socket.socket, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Call `ready` once the site is set up."""
        loop = asyncio.get_running_loop()
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/events", self._events)
        app.router.add_get("/state.json", self._state)
        app.router.add_get(r"/error/{number:\d{1,15}}", self._error)
        for path, (name, kind) in _ASSETS.items():
            app.router.add_get(path, _asset(name, kind))
        options: dict[str, Any] = {"access_log": None, "keepalive_timeout": 30.0, "logger": _log}
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.5, **options)
        await runner.setup()
        assert runner.server is not None  # set up
        listener.setblocking(False)
        self._listen(listener, runner.server)
        watching = asyncio.create_task(self._watch.run())
        ready()
        try:
            await stop.wait()
            await self._watch.end()
        finally:
            loop.remove_reader(listener)
            listener.close()
            for _ in range(2):
                await asyncio.sleep(0)  # so that new connections have transports that can be closed
            tasks = [watching, *(guest.task for guest in self._guests.values())]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._watch.close()
            await runner.cleanup()
            await loop.shutdown_default_executor()

    def _listen(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, make)

    def _accept(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """Admit a connection if there is room. It counts from here on, since asyncio does not count handshakes."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no more descriptors, for example
            loop.remove_reader(listener)
            loop.call_later(1.0, self._listen, listener, make)
            return
        if not self._is_room():
            connection.close()
            return
        protocol, admitted = make(), asyncio.Event()
        task = loop.create_task(self._admit(connection, protocol, admitted))
        self._guests[protocol] = _Guest(connection, admitted, task)

    def _is_room(self) -> bool:
        """Return whether there is room for one more, after closing another if necessary."""
        for protocol in [protocol for protocol, guest in self._guests.items() if guest.connection.fileno() < 0]:
            self._guests.pop(protocol).task.cancel()
        if len(self._guests) >= MAX_CONNECTIONS:
            closing = [protocol for protocol, guest in self._guests.items() if not guest.admitted.is_set()]
            if not closing and not self._visitors.need_token:  # with a token, all that are left have shown it
                closing = list(self._guests)
            for protocol in closing[:1]:
                guest = self._guests.pop(protocol)
                guest.task.cancel()
                if guest.admitted.is_set():
                    with contextlib.suppress(OSError):
                        guest.connection.shutdown(socket.SHUT_RDWR)  # its transport reads the end, and closes it
        return len(self._guests) < MAX_CONNECTIONS

    async def _admit(self, connection: socket.socket, protocol: asyncio.Protocol, admitted: asyncio.Event) -> None:
        """Serve a connection; close it if it makes no permitted request in time."""
        context, transport = None if self._files is None else self._files.context(), None
        with contextlib.suppress(OSError):  # a failed handshake, for example, or the timeout
            try:
                async with asyncio.timeout(ADMISSION_SECONDS):
                    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                        lambda: protocol,
                        connection,
                        ssl=context,
                        ssl_handshake_timeout=None if context is None else ADMISSION_SECONDS,
                    )
                    await admitted.wait()
            finally:
                if transport is not None and not admitted.is_set():
                    transport.abort()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._visitors.is_known_host(request.host):
            return _plain(421, "This page answers only to names of its own machine: use 127.0.0.1 or localhost.")
        may_view = self._sessions.may_view(
            request.headers.get("Authorization", ""), request.cookies.get(self._cookie, "")
        )
        if "token" in request.query and request.path == "/":
            session = self._sessions.begin(request.query["token"])
            response: web.StreamResponse
            if session is None and not may_view:
                return _login("That is not the token of this cluster.")
            response = web.Response(status=303, headers={**_HEADERS, "Location": "/"})  # the token leaves the address
            if session is not None:
                response.set_cookie(
                    self._cookie, session, httponly=True, samesite="Strict", path="/", secure=self._files is not None
                )
            return response
        if not may_view:
            return _login("This cluster requires its token.")
        if (guest := self._guests.get(request.protocol)) is not None:
            guest.admitted.set()
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _plain(error.status, error.reason)

    async def _state(self, _request: web.Request) -> web.StreamResponse:
        text = await self._watch.state()
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)

    async def _error(self, request: web.Request) -> web.StreamResponse:
        """Send an error's traceback, which the updates do not repeat."""
        detail = self._watch.detail(int(request.match_info["number"]))
        return _plain(404, "That error is no longer recorded.") if detail is None else _plain(200, detail)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the state of the job, again at every change."""
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        with self._watch.watching(), contextlib.suppress(ConnectionError):
            async for text in self._watch.updates():
                await response.write(f"data: {text}\n\n".encode())
        return response


def _asset(name: str, kind: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    data = resources.files("pscluster.coordinator.dashboard").joinpath("assets", name).read_bytes()

    async def send(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=data, content_type=kind, charset="utf-8", headers=_HEADERS)

    return send


def _plain(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n", headers=_HEADERS)


def _login(sentence: str) -> web.Response:
    return web.Response(status=401, text=_LOGIN.format(sentence), content_type="text/html", headers=_HEADERS)
