"""Armed faults: what they are, when they strike, and the interceptor that makes them strike at calls.

With the folder of this module in PYTHONPATH, every Python process arms what its environment names (`environment`):

    PSCLUSTER_FAULTS="ps.log.after=kill@3;worker/rpc:/pscluster.v1.Node/Attach=lose_response@1"

A fault is `[ROLE/]TARGET=ACTION[:SECONDS][@N]`; several are separated by semicolons.

    TARGET                      ACTION
    a point of `fault_points`   kill (SIGKILL of itself), stop (SIGSTOP), delay, abort (UnavailableError)
    rpc:/SERVICE/METHOD         one call: lose_request, lose_response, duplicate, delay, twice, at_once
    message:/SERVICE/METHOD     one message of a stream that lasts (a session, the stream of functions): the same

`@N`: the N-th time only, counted by each process. With PSCLUSTER_FAULTS_DIR such a fault strikes once among all
processes that share the directory, so that a restarted role does not die again: the process that first creates the file
of that name claims it. The directory also holds the file `armed`, with faults in addition to those of the environment;
it is read whenever a point is reached, so that a test can arm them one after the other in a running cluster. Each fault
that strikes leaves `struck-...`; one whose call continued leaves `ended-...`, which says how it ended.

Faults at calls happen on the server, where both of grpc's clients and our own streams come together:

    lose_request    the handler is never called; the caller sees UNAVAILABLE
    lose_response   the handler has run to its end; the caller sees UNAVAILABLE
    duplicate       the call is answered; later a copy of it arrives, from a caller that has gone
    twice           a copy runs to its end first
    at_once         a copy runs at the same time
    delay           it arrives late

Lasting streams do not end by themselves: for them the first message, or with `message:` the N-th, stands for the call,
and is lost together with the stream.

PSCLUSTER_FAULTS_SECONDS, a JSON object, gives constants of the project's modules other values, so that tests need not
wait for seconds whose number is not their subject: {"pscluster.core.role.joining.AWAIT_SECONDS": 0.5}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2

from pscluster.core import fault_points
from pscluster.core.errors import ConfigurationError, UnavailableError
from pscluster.core.fault_points import POINTS
from pscluster.core.transport.base import server_call
from pscluster.core.transport.tcp.server import DataServer
from pscluster.v1 import coordinator_pb2, node_pb2, ps_pb2, worker_pb2

logger = logging.getLogger(__name__)

VARIABLE = "PSCLUSTER_FAULTS"
FOLDER_VARIABLE = "PSCLUSTER_FAULTS_DIR"
SECONDS_VARIABLE = "PSCLUSTER_FAULTS_SECONDS"

POINT_ACTIONS = ("kill", "stop", "delay", "abort")
CALL_KINDS = ("lose_request", "lose_response", "duplicate", "delay", "twice", "at_once")

_FAULT = re.compile(
    r"(?:(ps|worker|chief)/)?([^=/]+|(?:rpc|message):/[^=]+)=([a-z_]+)(?::([0-9.]+))?(?:@([1-9][0-9]*))?"
)
_SECONDS = 0.05  # of a delay, and before a duplicate
_ARMED = "armed"

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (coordinator_pb2, node_pb2, ps_pb2, worker_pb2, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Watch"  # of the health check: grpc serves it without a thread, and none of ours calls it
}
LASTING = frozenset(
    {"/pscluster.v1.Node/Attach", "/pscluster.v1.ParameterServer/Session", "/pscluster.v1.Worker/Steps"}
)
"""Streams that are open as long as their caller lives."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is armed."""

    text: str
    role: str  # "": any role
    target: str
    action: str
    seconds: float
    nth: int  # 0: every time

    @property
    def name(self) -> str:
        """The name in the names of its files."""
        return re.sub(r"[^A-Za-z0-9_.@=-]+", "-", self.text)


def parse(text: str, source: str = VARIABLE) -> list[Fault]:
    """Parse the faults in a text. ConfigurationError if it holds anything else."""
    faults = []
    for entry in filter(None, map(str.strip, text.split(";"))):
        match = _FAULT.fullmatch(entry)
        if match is None:
            raise ConfigurationError(
                f"{source} has {entry!r}, which is no fault; write [ROLE/]TARGET=ACTION[:SECONDS][@N], such as "
                "ps.log.after=kill@3, or take the variable away"
            )
        role, target, action, seconds, nth = match.groups()
        kind, _, path = target.partition(":")
        if path and (
            path not in METHODS or (kind == "message" and path not in LASTING - {"/pscluster.v1.Node/Attach"})
        ):
            there = sorted(METHODS if kind == "rpc" else LASTING)
            raise ConfigurationError(f"{source} names the call {path!r}; there are {', '.join(there)}")
        if not path and target not in POINTS:
            raise ConfigurationError(
                f"{source} names the point {target!r}, which does not exist; pscluster.core.fault_points lists them"
            )
        actions = CALL_KINDS if path else POINT_ACTIONS
        if action not in actions:
            raise ConfigurationError(
                f"{source} has the action {action!r} at {target}; give one of {', '.join(actions)}"
            )
        try:
            wait = float(seconds or _SECONDS)
        except ValueError:
            raise ConfigurationError(f"{source} has {seconds!r} where seconds belong, in {entry!r}") from None
        faults.append(Fault(entry, role or "", target, action, wait, int(nth or 0)))
    return faults


class Faults:
    """The faults armed in this process. Thread-safe."""

    def __init__(self, role: str, text: str, folder: str) -> None:
        self._role = role
        self._lock = threading.Lock()
        self._fixed = parse(text)
        self._counts: Counter[Fault] = Counter()
        self._struck: set[Fault] = set()
        self._folder = Path(folder) if folder else None
        self._file_is: tuple[int, int] | None = None
        self._of_file: list[Fault] = []
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigurationError(f"PSCLUSTER_FAULTS_DIR is {folder!r}, which is not a directory: make it first")

    def _all(self) -> list[Fault]:
        """All faults; call under the lock."""
        if self._folder is not None:
            path = self._folder / _ARMED
            try:
                stat = path.stat()
                if (is_now := (stat.st_mtime_ns, stat.st_ino)) != self._file_is:
                    self._file_is, self._of_file = is_now, parse(path.read_text(), str(path))
                    self._counts.clear()
                    self._struck.clear()
            except FileNotFoundError:
                self._file_is, self._of_file = None, []
        return [*self._fixed, *self._of_file]

    def due(self, target: str) -> Fault | None:
        """Return the fault that strikes here and now; the call is counted."""
        with self._lock:
            striking = None
            for fault in self._all():
                if fault.target != target or fault.role not in ("", self._role):
                    continue
                self._counts[fault] += 1
                if striking is None and (not fault.nth or (fault.nth <= self._counts[fault] and self._is_first(fault))):
                    striking = fault
            if striking is not None:
                logger.warning("FAULT: %s", striking.text)
            return striking

    def _is_first(self, fault: Fault) -> bool:
        """Whether no process has claimed it before; call under the lock."""
        if fault in self._struck or (self._folder is None and self._counts[fault] > fault.nth):
            return False
        self._struck.add(fault)
        return self._folder is None or self._leave(f"struck-{fault.name}", f"{self._role} {os.getpid()}")

    def _leave(self, name: str, text: str) -> bool:
        assert self._folder is not None
        try:
            descriptor = os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError:  # it exists; or the directory was removed with its test
            return False
        os.write(descriptor, text.encode())
        os.close(descriptor)
        return True

    def ended(self, fault: Fault, how: str) -> None:
        """Record that everything the fault causes has happened."""
        logger.warning("FAULT: %s has ended: %s", fault.text, how)
        if self._folder is not None:
            self._leave(f"ended-{fault.name}", how)

    def reach(self, point: str) -> None:
        """Strike at a point, see `fault_points.on_reach`. UnavailableError if that is the fault."""
        assert point in POINTS, f"the fault point {point!r} is not in the table"
        fault = self.due(point)
        if fault is None:
            return
        if fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "abort":
            raise UnavailableError(f"a fault was armed at {point}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
            if fault.action == "kill":
                signal.pause()  # the signal arrives at the end of the system call, or a moment later


def environment(
    folder: Path | None = None, text: str = "", seconds: Mapping[str, float] | None = None
) -> dict[str, str]:
    """Return the environment variables that arm these faults in a process: those in the text and in a file in the
    folder; and that give these constants other values."""
    here = Path(__file__).resolve().parent
    path = [str(here), str(here.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {VARIABLE: text, FOLDER_VARIABLE: str(folder or ""), "PYTHONPATH": os.pathsep.join(path)}
    return variables if seconds is None else {**variables, SECONDS_VARIABLE: json.dumps(dict(seconds))}


def _set_seconds(text: str) -> None:
    for name, value in json.loads(text).items():
        module, _, constant = name.rpartition(".")
        owner = importlib.import_module(module)
        assert isinstance(getattr(owner, constant), float), name
        setattr(owner, constant, value)


def arm(environ: Mapping[str, str] = os.environ) -> None:
    """Arm in this process, whose role is in TF_CONFIG, the faults that the environment names, if any.

    Raises:
        ConfigurationError: it holds something that is not a fault, or names a point or a call that does not exist.
    """
    if VARIABLE not in environ and FOLDER_VARIABLE not in environ:
        return
    _set_seconds(environ.get(SECONDS_VARIABLE, "{}"))
    task = json.loads(environ.get("TF_CONFIG") or "{}").get("task") or {}
    faults = Faults(task.get("type", "chief"), environ.get(VARIABLE, ""), environ.get(FOLDER_VARIABLE, ""))
    fault_points.on_reach = faults.reach
    # Last on every server that is made: it loses requests that reached the method, not ones that were refused.
    make: Any = grpc.server
    begin = DataServer.__init__

    def server(*args: Any, interceptors: Sequence[grpc.ServerInterceptor] = (), **named: Any) -> grpc.Server:
        made: grpc.Server = make(*args, interceptors=[*interceptors, FaultInterceptor(faults)], **named)
        return made

    def data_server(
        self: DataServer, listener: Any, handlers: Any, interceptors: Sequence[Any], *rest: Any, **named: Any
    ) -> None:
        begin(self, listener, handlers, [*interceptors, FaultInterceptor(faults)], *rest, **named)

    grpc.server = server  # type: ignore[assignment]
    DataServer.__init__ = data_server  # type: ignore[method-assign]


class _AbortedError(Exception):
    """How a copy was answered."""


class _GoneCaller:
    """The context of a copy, from a caller that no answer reaches."""

    def __init__(self, of: grpc.ServicerContext) -> None:
        self._of = of
        self._active = True
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def is_active(self) -> bool:
        return self._active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._lock:
            if self._active:
                self._callbacks.append(callback)
            return self._active

    def end(self) -> None:
        with self._lock:
            self._active = False
        for callback in self._callbacks:
            callback()

    def send(self, _message: bytes) -> bool:
        return False

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _AbortedError(f"{code.name}: {details}")

    def __getattr__(self, name: str) -> Any:  # metadata, peer and the like; values that are set are never read
        return getattr(self._of, name) if not name.startswith("set_") else lambda *_: None


def _lost(context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNAVAILABLE, "lost: a fault was armed")
    raise AssertionError("abort raises")


def _deliver_copy(
    faults: Faults, fault: Fault, context: grpc.ServicerContext, deliver: Callable[[_GoneCaller], None]
) -> None:
    """Deliver a copy from a caller that has gone, and record how it was answered."""
    gone, how = _GoneCaller(context), "answered"
    try:
        deliver(gone)
    except Exception as error:
        how = str(error) or repr(error)
    finally:
        gone.end()
    faults.ended(fault, how)


class FaultInterceptor(grpc.ServerInterceptor):
    """Makes armed faults strike at calls."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler unchanged, unless a fault strikes, or may strike within the stream."""
        served = continuation(details)
        if served is None:
            return None
        handler: Any = served
        path = details.method
        fault = self._faults.due(f"rpc:{path}")
        if handler.request_streaming and handler.response_streaming:
            behaviour: Any = _Messages(self._faults, path, handler.stream_stream, fault).serve
        elif fault is None:
            return served
        else:
            behaviour = _Struck(self._faults, path, handler, fault).serve
        word = {False: "unary", True: "stream"}
        make = getattr(grpc, f"{word[handler.request_streaming]}_{word[handler.response_streaming]}_rpc_method_handler")
        made: grpc.RpcMethodHandler[Any, Any] = make(
            behaviour, handler.request_deserializer, handler.response_serializer
        )
        return made


class _Struck:
    """One call that a fault strikes; of every arity but bidirectional streams."""

    def __init__(self, faults: Faults, path: str, handler: Any, fault: Fault) -> None:
        self._faults, self._fault = faults, fault
        self._lasting = path in LASTING
        self._streams = handler.response_streaming
        self._frames = handler.request_streaming
        self._call = handler.unary_unary or handler.unary_stream or handler.stream_unary
        self.serve = self._stream if self._streams else self._unary

    def _begin(self, request: Any, context: grpc.ServicerContext) -> tuple[Callable[[], Any], Callable[[], None]]:
        """Return a function that yields the request repeatedly, and one to call once it was answered."""
        kind, copy = self._fault.action, None
        if kind == "lose_request":
            self._faults.ended(self._fault, "not delivered")
            _lost(context)
        if self._frames:
            request = list(request)

        def give() -> Any:
            return iter(request) if self._frames else request

        if kind == "delay":
            time.sleep(self._fault.seconds)
        elif kind == "twice":
            self._copy(give, context)
        elif kind == "at_once":
            copy = threading.Thread(target=self._copy, args=(give, context), daemon=True)
            copy.start()

        def answered() -> None:
            if kind == "duplicate":
                later = threading.Timer(self._fault.seconds, self._copy, (give, context))
                later.daemon = True
                later.start()
            elif kind in ("delay", "lose_response"):
                self._faults.ended(self._fault, "delivered")

        return give, answered

    def _copy(self, give: Callable[[], Any], context: grpc.ServicerContext) -> None:
        """Send the request once more, and discard the answer."""

        def deliver(gone: Any) -> None:
            answer = self._call(give(), gone)
            if self._lasting:
                next(answer, None)
                gone.end()
                answer.close()
            elif self._streams:
                for _ in answer:
                    pass

        _deliver_copy(self._faults, self._fault, context, deliver)

    def _unary(self, request: Any, context: grpc.ServicerContext) -> Any:
        give, answered = self._begin(request, context)
        try:
            answer = self._call(give(), context)
        except BaseException as error:  # of an attachment that is over, because of another fault
            self._faults.ended(self._fault, f"the call itself was refused: {error!r}")
            raise
        answered()
        if self._fault.action == "lose_response":
            _lost(context)
        return answer

    def _stream(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        give, answered = self._begin(request, context)
        answers = self._call(give(), context)
        if self._fault.action == "lose_response":
            for _ in answers:
                if self._lasting:
                    break
            answers.close()
            answered()
            _lost(context)
        if self._lasting:
            yield next(answers)
            answered()
            yield from answers
        else:
            yield from answers
            answered()


class _Messages:
    """A bidirectional stream of messages, one of which a fault may strike."""

    def __init__(self, faults: Faults, path: str, call: Callable[..., Any], first: Fault | None) -> None:
        self._faults, self._path, self._call = faults, path, call
        self._first = first  # the fault that strikes the first message
        self._broken = False
        self._dropping = 0  # answers to be dropped
        self._losing: Fault | None = None  # the stream is lost with the next answer
        self._over = False  # a handler's thread still reads requests that came before
        self._in_turn = path.endswith("/Session")  # each request has one answer, in order

    def serve(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Run the handler with the fault applied."""
        if (send := server_call(context).sender()) is not None:
            past: Any = context
            past.send = lambda message: not (self._broken or self._losing or self._dropping) and send(message)
        try:
            with contextlib.closing(self._call(self._requests(requests, context), context)) as answers:
                for answer in answers:
                    if self._broken:
                        break
                    if self._losing is not None:
                        self._faults.ended(self._losing, "delivered")
                        self._broken = True
                        break
                    if self._dropping:
                        self._dropping -= 1
                        continue
                    yield answer
        finally:
            self._over = True
            self._lose_none()
        if self._broken:
            _lost(context)

    def _lose_none(self) -> None:
        """No answer is left to lose."""
        if self._losing is not None and not self._broken:
            self._faults.ended(self._losing, "the stream ended, and no answer came before")

    def _requests(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            fault, self._first = self._first or self._faults.due(f"message:{self._path}"), None
            if fault is not None:
                kind = fault.action
                if kind == "lose_request":
                    self._faults.ended(fault, "not delivered")
                    self._broken = True
                    return
                if kind == "lose_response":
                    self._losing = fault
                    if self._over:  # checked after that, as `serve` does the reverse: one of them sees it
                        self._lose_none()
                elif kind == "delay":
                    time.sleep(fault.seconds)
                    self._faults.ended(fault, "delivered")
                elif kind == "twice":
                    self._dropping += self._in_turn
                    yield request
                    self._faults.ended(fault, "delivered")
                else:
                    wait = fault.seconds if kind == "duplicate" else 0.0
                    copy = threading.Timer(wait, self._copy, (fault, request, context))
                    copy.daemon = True
                    copy.start()
            yield request

    def _copy(self, fault: Fault, request: Any, context: grpc.ServicerContext) -> None:
        """Send the message once more, on a separate stream."""

        def deliver(gone: Any) -> None:
            with contextlib.closing(self._call(iter([request]), gone)) as answers:
                for _ in answers:
                    pass

        _deliver_copy(self._faults, fault, context, deliver)
