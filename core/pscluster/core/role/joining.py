"""A role that joins a running cluster: `pscluster worker --join HOST:PORT`, and `pscluster ps --join`.

A worker asks the coordinator for a task, and serves under the index that it gets; the coordinator then dials it.
A parameter server knows which one it is, by the shards that it holds. It serves under that index from the start, and
registers where it is: the coordinator looks what it holds before it answers.

    REGISTERING --the coordinator answers---------> SERVING   under its index; the coordinator dials
                --a coordinator attaches----------> ATTACHED  one that knows it already
                --it is unreachable, or not ready-> REGISTERING, after a moment, for ever
                --the task is taken, or it is full> REGISTERING, for --connect-timeout seconds; then the process ends
                --it refuses for another reason---> the process ends; if it has served before, as for the next line
    SERVING     --attached------------------------> ATTACHED
                --AWAIT_SECONDS pass--------------> REGISTERING
    ATTACHED    --its stream ends-----------------> SERVING   the coordinator may dial again, or be gone for good
    any         --SIGTERM-------------------------> it leaves in order, see `Serving.close`

While it lives a worker keeps its index: it asks for it again, and proves with a secret that it is the same process. One
that is given its index by --task serves under it before it has registered. If another worker has the index by then, as
it may after a restart of the coordinator, it serves under another one; nothing of its state is lost by that, since a
coordinator that attaches sends everything anew. A server's index never changes.

What may be lost: nothing but time. A function that runs is the coordinator's to run again, as for any other worker, and
what a server holds is on its disk, as for any other server.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import grpc
import tenacity

from pscluster.core.cluster.addresses import is_on_this_machine, join_address, parse_address, split_address
from pscluster.core.errors import BusyError, ConfigurationError, PsClusterError, UnavailableError, from_rpc
from pscluster.core.ids import make_identity
from pscluster.core.role.join_options import EVERYWHERE, LOOPBACK, JoinOptions, dialled_at
from pscluster.core.role.lifecycle import StopRequest
from pscluster.core.role.listening import everywhere, listen_address
from pscluster.core.role.options import RoleOptions, choose_serialization, log_serialization, with_user_token
from pscluster.core.role.process import bind_log, configure_logging
from pscluster.core.role.server import RoleServer
from pscluster.core.security.tls import check_plain
from pscluster.core.transport.channels import PeerAddress, explain, open_peer_channel, why_untrusted
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.retry import until
from pscluster.core.transport.unix_sockets import path_of
from pscluster.v1 import coordinator_pb2, node_pb2

logger = logging.getLogger(__name__)

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]

REGISTER_SECONDS = 10.0
AWAIT_SECONDS = 5.0
"""A role that serves, but is attached to no coordinator, registers again after this long."""

_CHECK_SECONDS = 0.5
_SECRET_BYTES = 32


class Serving(Protocol):
    """A role of this process that serves."""

    @property
    def server(self) -> RoleServer:
        """Return its server."""

    def close(self) -> None:
        """Leave in order, and stop serving."""


@dataclass(frozen=True, slots=True)
class Joiner:
    """What joins."""

    role: str
    noun: str  # for people
    start: Callable[[node_pb2.Identity, str, RoleOptions, StopRequest, str], Serving]
    """Begins to serve. Takes the identity, where to listen, the options, and the address at which it is dialled."""

    def named(self, index: int) -> str:
        """Return the name of the one with this index."""
        return f"{self.noun} {index}"


def serve_joining(
    joiner: Joiner, join: JoinOptions, options: RoleOptions
) -> Callable[[StopRequest], Callable[[], None]]:
    """Return a function for `run_role` that registers a role, and starts it."""

    def serve(stop: StopRequest) -> Callable[[], None]:
        joining = Joining(joiner, join, options, stop)
        joining.begin()
        return joining.close

    return serve


def with_index(identity: node_pb2.Identity, index: int) -> node_pb2.Identity:
    """Return the identity of the same process under another index."""
    mine = node_pb2.Identity()
    mine.CopyFrom(identity)
    mine.index = index
    mine.name = identity.name.replace(f"{identity.role} {identity.index} (", f"{identity.role} {index} (", 1)
    return mine


class Joining:
    """A role that registers, serves, and registers again when it has lost its coordinator."""

    def __init__(self, joiner: Joiner, join: JoinOptions, options: RoleOptions, stop: StopRequest) -> None:
        """Choose where to listen. Raise ConfigurationError if an option is wrong."""
        self._joiner, self._join, self._stop = joiner, join, stop
        self._identity = make_identity(joiner.role, 0)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._reserved: socket.socket | None = None
        address = self._free_address(options)
        if path_of(address) is None:
            options = replace(options, share_port=options.share_port or self._reserved is not None)
        self._address = listen_address(None, replace(options, bind=address))
        self._options = options = with_user_token(options, (self._address, join.coordinator))
        check_plain("the coordinator", join.coordinator, options.token, options.tls, insecure=options.insecure)
        choose_serialization(self._address, options, is_worker=joiner.role == "worker")
        self._peer = PeerAddress("chief", 0, join.coordinator, options.tls, options.token)
        self._serving: Serving | None = None
        self._index: int | None = None
        self._thread = threading.Thread(target=self._stay, name="joining", daemon=True)
        self._said = self._joined = ""

    def _free_address(self, options: RoleOptions) -> str:
        """Return where to listen: --bind, or a free port, on loopback if the coordinator is there."""
        if options.bind is not None and not options.bind.endswith(":0"):
            parse_address(options.bind, "--bind")
            return options.bind
        if options.bind is None and path_of(self._join.coordinator) is not None:
            raise ConfigurationError(
                f"a {self._joiner.noun} that joins over a Unix socket needs one of its own: give --bind unix:PATH, in "
                "the folder of the coordinator's"
            )
        near = is_on_this_machine(self._join.coordinator)
        if options.bind is not None:
            host = options.bind.removesuffix(":0")
        else:
            host = LOOPBACK[0] if near else everywhere(self._join.coordinator)
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
            # It stays bound for the life of this process, and never listens: nobody else gets the port.
            self._reserved = socket.socket(family, kind, protocol)
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._reserved.bind(where)
        except OSError as error:
            raise ConfigurationError(f"can't listen on {host} ({error.strerror}); give another --bind") from None
        return join_address(host.strip("[]"), self._reserved.getsockname()[1])

    def begin(self) -> None:
        """Register and serve, or stop if that was asked meanwhile. Raise the coordinator's refusal."""
        known = path_of(self._address) is not None or split_address(self._address)[0] not in EVERYWHERE
        # A server is looked at before it is answered; where it is dialled it learns from the answer.
        if self._join.task.isdecimal() and (known or self._joiner.role == "ps"):
            self._serve_as(int(self._join.task), self._address)
        try:
            self._serve(self._register(retry_refusals=False))
        except tenacity.RetryError as given_up:
            if not self._is_attached() and not self._stop.event.is_set():
                self.close()
                raise given_up.last_attempt.exception() or given_up from None
        except PsClusterError:
            self.close()
            raise
        self._thread.start()

    def _is_attached(self) -> bool:
        return self._serving is not None and not self._serving.server.node.not_ready()

    def close(self) -> None:
        """Leave in order."""
        if self._thread.is_alive():
            self._thread.join(REGISTER_SECONDS)
        if self._serving is not None:
            self._serving.close()
        if self._reserved is not None:
            self._reserved.close()

    # Registering

    def _register(self, *, retry_refusals: bool) -> coordinator_pb2.RegisterReply:
        """Register, however long the coordinator is unreachable. Raise its refusal unless `retry_refusals`.

        Raise tenacity.RetryError if this process is to stop, or a coordinator has attached meanwhile, or the task stays
        taken for --connect-timeout seconds.
        """
        began, busy = time.monotonic(), False

        def once() -> coordinator_pb2.RegisterReply:
            nonlocal busy
            try:
                reply = self._ask()
            except PsClusterError as error:
                busy = isinstance(error, BusyError)
                if busy and self._serving is not None and time.monotonic() - began < AWAIT_SECONDS:
                    raise  # a coordinator that lists this worker may be about to attach
                if retry_refusals or isinstance(error, BusyError | UnavailableError):
                    self._say(error)
                raise
            return reply

        def over() -> bool:
            late = time.monotonic() - began >= self._options.connect_timeout
            return self._stop.event.is_set() or self._is_attached() or (busy and late and not retry_refusals)

        also = PsClusterError if retry_refusals else BusyError
        retrying = tenacity.Retrying(**until(also, over=over), sleep=tenacity.sleep_using_event(self._stop.event))
        return retrying(once)

    def _ask(self) -> coordinator_pb2.RegisterReply:
        """Register once. Raise one of our errors."""
        host, port = self._join.advertised
        path = path_of(self._address)
        if not host and path is None and (own := split_address(self._address)[0]) in LOOPBACK:
            host = own  # the call may come from the other one
        if self._serving is not None and path is None and not self._joined:
            # Clients may ask for its data plane before the answer is here, and it must know where they have dialled it.
            self._serving.server.set_address(dialled_at(self._address, self._join))
        request = coordinator_pb2.RegisterRequest(
            identity=self._identity,
            host=host,
            port=0 if path is not None else port or split_address(self._address)[1],
            path=path or "",
            task=self._join.task,
            secret=self._secret,
            job_name=self._join.job_name,
            last_index=self._index or 0,
            had_index=self._index is not None,
        )
        with open_peer_channel(self._peer) as channel:
            try:
                reply: coordinator_pb2.RegisterReply = Stub(channel, SERVICE).register(
                    request, timeout=REGISTER_SECONDS
                )
            except grpc.RpcError as error:
                raise from_rpc(error, f"the coordinator at {self._peer.address}") from None
        return reply

    def _say(self, error: PsClusterError) -> None:
        """Log why registering failed, once for each reason. Raise the reason if certificates are at fault."""
        text, level = str(error), logging.WARNING
        if isinstance(error, UnavailableError):
            if self._serving is None and (untrusted := why_untrusted(self._peer)) is not None:
                raise untrusted from None
            level = logging.INFO
            if "can't be reached" in text:
                text = explain(self._peer.address, self._peer.tls)
        if text != self._said:
            self._said = text
            logger.log(level, "waiting for the coordinator at %s: %s", self._peer.address, text)

    # Serving

    def _serve(self, reply: coordinator_pb2.RegisterReply) -> None:
        """Serve under the index that the coordinator has given."""
        name = self._joiner.named(reply.index)
        if self._index != reply.index:
            if self._serving is not None:
                logger.warning("another worker now has index %d; continuing as %s", self._index, name)
                self._serving.close()
            self._serve_as(reply.index, reply.address)
        assert self._serving is not None
        self._serving.server.set_address(reply.address)
        joined = f"joined {reply.coordinator} as {name}, at {reply.address}"
        if reply.waits:
            joined = f"waiting at {reply.address} for {reply.coordinator} to add {name}: strategy.add_server()"
        if joined != self._joined:
            logger.info("%s", joined)
            self._joined = joined
        elif not reply.waits and not self._is_attached():
            self._say(UnavailableError(f"it has not reached this {self._joiner.noun} at {reply.address} so far"))

    def _serve_as(self, index: int, own: str) -> None:
        """Serve under this index. `own` is the address at which it is dialled: there its data plane is reached, too."""
        self._index = index
        role = self._joiner.role
        configure_logging(f"{role}/{index}", self._options.log_level, self._options.log_format)
        bind_log(index=index)
        identity = with_index(self._identity, index)
        self._serving = self._joiner.start(identity, self._address, self._options, self._stop, own)
        self._serving.server.ready()
        logger.info("%s serving on %s", self._joiner.named(index), self._address)
        log_serialization()

    def _stay(self) -> None:
        """Register again whenever no coordinator has been attached for a while."""
        while not self._stop.event.is_set():
            try:
                if not self._is_lost():
                    continue
                self._serve(self._register(retry_refusals=True))
            except tenacity.RetryError:  # it stops, or a coordinator has attached
                continue
            except PsClusterError as error:
                logger.error("%s", error)
                self._stop.ask(f"it can't serve again: {error}")
            except Exception:
                logger.exception("can't join; trying again")
                self._stop.event.wait(_CHECK_SECONDS)

    def _is_lost(self) -> bool:
        """Return whether no coordinator is attached for AWAIT_SECONDS."""
        assert self._serving is not None
        waited = 0.0
        while self._serving.server.node.not_ready():
            if waited >= AWAIT_SECONDS:
                return True
            if self._stop.event.wait(_CHECK_SECONDS):
                return False
            waited += _CHECK_SECONDS
        self._said = ""
        self._stop.event.wait(_CHECK_SECONDS)
        return False
