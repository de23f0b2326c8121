"""TLS and mutual TLS: which callers are accepted, what a certificate opens, renewal, and errors that say what to do."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import shutil
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from grpc.experimental.session_cache import ssl_session_cache_lru
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tests.conftest import grpc_server
from tests.fakes import FakeCall
from tests.roles.processes import (
    DONE,
    HELD,
    IDLE,
    JOB,
    Process,
    Roles,
    free_addresses,
    make_cluster,
    run,
    run_all,
    tf_config,
)
from tests.roles.test_token import ALL_METHODS, call
from tests.roles.wire import SECONDS, SERVICES, with_token
from tests.waiting import until

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable
from pscluster.coordinator.cli.health import is_healthy
from pscluster.coordinator.local.environment import child_environ
from pscluster.coordinator.observability import timeline
from pscluster.coordinator.scheduling.connections import lifecycle
from pscluster.core.errors import ConfigurationError, NotPermittedError, UnavailableError
from pscluster.core.ids import make_identity
from pscluster.core.security import access
from pscluster.core.security.certificates import make_certificates, renew_certificates
from pscluster.core.security.tls import Tls, load_tls
from pscluster.core.transport.base import StreamEndedError
from pscluster.core.transport.channels import NODE_SERVICE, PeerAddress
from pscluster.core.transport.frames import pack, unpack
from pscluster.core.transport.methods import Method, Stub, methods
from pscluster.core.transport.tcp.client import DataPort, Where
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.stream import DataStream
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.spec import SERVICE as PS_SERVICE
from pscluster.v1 import node_pb2, ps_pb2

TOKEN = "correct-horse-battery-staple"
OPEN_TO_OTHERS = {
    "Check": {"ps", "worker", "tool"},
    "Watch": {"ps", "worker", "tool"},
    "Hello": {"ps", "worker", "tool"},
    "Status": {"ps", "worker", "tool"},
    "Session": {"worker"},
    "Pull": {"worker"},
    "Push": {"worker"},
    "Describe": {"worker"},
    "Exchange": {"worker"},
    "Register": {"ps", "worker"},
}
"""Beside the coordinator. What is new is the coordinator's, until somebody thinks about it and writes it here."""


def channel_of(address: str, ours: Path, authorities: Path | None = None, more: Any = ()) -> grpc.Channel:
    """A channel with the certificate in a folder, even a bad one, which `Tls` would refuse."""
    pair = [(ours / name).read_bytes() if (ours / name).exists() else None for name in ("tls.key", "tls.crt")]
    credentials = grpc.ssl_channel_credentials(((authorities or ours) / "ca.crt").read_bytes(), *pair)
    return grpc.secure_channel(address, credentials, options=[("grpc.use_local_subchannel_pool", 1), *more])


def without_role(folder: Path, certificates: Path) -> Path:
    """A certificate of the CA that names no role."""
    authority = x509.load_pem_x509_certificate((certificates / "ca.crt").read_bytes())
    tool = x509.load_pem_x509_certificate((certificates / "tool" / "tls.crt").read_bytes())
    shutil.copytree(certificates / "tool", folder)
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = serialization.load_pem_private_key((certificates / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    public = tool.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    made = (
        x509.CertificateBuilder()
        .subject_name(tool.subject)
        .issuer_name(authority.subject)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(tool.not_valid_before_utc)
        .not_valid_after(tool.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return folder


@dataclass
class Guarded:
    """A working cluster, with mutual TLS and a token, and the folders of callers that must be kept out."""

    addresses: dict[str, str]
    processes: list[Process]
    certificates: Path
    untrusted: dict[str, Path]
    channels: dict[tuple[str, str], grpc.Channel] = field(default_factory=dict)
    data: dict[str, Where] = field(default_factory=dict)
    """Where data goes, by role."""

    def channel(self, role: str, ours: Path) -> grpc.Channel:
        """A channel to a role, one for each caller."""
        key = role, str(ours)
        if key not in self.channels:
            self.channels[key] = channel_of(self.addresses[role], ours, self.certificates)
        return self.channels[key]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server, a worker and a coordinator whose script has connected."""
    folder = tmp_path_factory.mktemp("guarded")
    certificates, old, other = folder / "certificates", folder / "old", folder / "other"
    assert make_certificates(certificates)
    shutil.copytree(certificates, old)
    renew_certificates(old, days=-1)
    make_certificates(other)
    (folder / "none").mkdir()
    untrusted = {
        "none": folder / "none",
        "expired": old / "coordinator",
        "another CA's": other / "coordinator",
    }
    cluster = make_cluster()
    with Roles(cluster, folder, {"PSCLUSTER_TOKEN": TOKEN, "PSCLUSTER_TLS": str(certificates)}) as roles:
        ps, worker = roles.ps(), roles.worker()
        coordinator = roles.coordinator(IDLE, str(folder / "gate"))
        coordinator.wait_for("connected")
        shared = Guarded({job: cluster[job][0] for job in SERVICES}, [ps, worker, coordinator], certificates, untrusted)
        for role in ("ps", "worker"):
            stub = Stub(with_token(shared.channel(role, certificates / "tool"), TOKEN), NODE_SERVICE)
            reply = stub.hello(node_pb2.HelloRequest(identity=make_identity("tool", 0)), timeout=SECONDS)
            shared.data[role] = "127.0.0.1", reply.data_port
        yield shared
        for channel in shared.channels.values():
            channel.close()


@pytest.mark.parametrize(("role", "method"), ALL_METHODS)
def test_every_method(role: str, method: Method, guarded: Guarded) -> None:
    """Each method of each role is open only to callers with a certificate for it and the token."""
    name = method.path.rsplit("/", 1)[1]
    for reason, ours in guarded.untrusted.items():
        error = call(with_token(guarded.channel(role, ours), TOKEN), method)
        assert error is not None, reason
        assert error.code() == grpc.StatusCode.UNAVAILABLE, reason
    for caller in access.ROLES:
        channel = guarded.channel(role, guarded.certificates / caller)
        error = call(with_token(channel, TOKEN), method)
        code = None if error is None else error.code()
        if caller == "coordinator" or caller in OPEN_TO_OTHERS.get(name, ()):
            assert code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), caller
        else:
            assert error is not None, caller
            assert code == grpc.StatusCode.PERMISSION_DENIED, caller
            sentence = f"a {caller}'s certificate does not allow {method.path}"
            assert sentence in (error.details() or "")
        for metadata in ((), (("authorization", f"Bearer {TOKEN[::-1]}"),)):
            error = call(channel, method, metadata)
            assert error is not None, caller
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED, caller


def data_stream(where: Where, folder: Path, path: str, token: str | None = TOKEN) -> DataStream | None:
    """A call on a data plane with the certificate in the folder; None if there is no trust."""
    port = DataPort("a role", token, Tls(folder))
    port.is_at(where)
    return port.connect(path, ())


def how_it_ended(stream: DataStream) -> StreamEndedError | None:
    """How a call with an empty message ended; None if it was answered."""
    with closing(stream):
        stream.send(b"", last=True)
        try:
            stream.receive()
        except StreamEndedError as end:
            return None if end.code() is grpc.StatusCode.OK else end
        return None


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_every_method_on_the_data_plane(role: str, guarded: Guarded) -> None:
    """A certificate with the token opens the same methods as over gRPC; without the token, or with another, none."""
    where, service = guarded.data[role], SERVICES[role][1]
    for method in methods(service):
        name = method.path.rsplit("/", 1)[1]
        for caller in access.ROLES:
            stream = data_stream(where, guarded.certificates / caller, method.path)
            assert stream is not None, caller
            error = how_it_ended(stream)
            if caller == "coordinator" or caller in OPEN_TO_OTHERS.get(name, ()):
                refused = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
                assert error is None or error.code() not in refused, caller
            else:
                assert error is not None, caller
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                sentence = f"a {caller}'s certificate does not allow {method.path}"
                assert error.details() == sentence + ": use the certificate of a role that it allows"
    coordinator = guarded.certificates / "coordinator"
    assert data_stream(where, coordinator, method.path, TOKEN[::-1]) is None
    stream = data_stream(where, coordinator, method.path, None)
    assert stream is not None
    error = how_it_ended(stream)
    assert error is not None
    assert "this cluster requires a token" in error.details()


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_untrusted_callers_on_the_data_plane(role: str, guarded: Guarded) -> None:
    """A caller that gRPC refuses is refused here, too, by TLS, before the token is checked; and so is plain text."""
    for name, ours in guarded.untrusted.items():
        context = ssl.create_default_context(cafile=str(guarded.certificates / "ca.crt"))
        if (ours / "tls.crt").exists():
            context.load_cert_chain(ours / "tls.crt", ours / "tls.key")
        with (
            socket.create_connection(cast("tuple[str, int]", guarded.data[role]), SECONDS) as plain,
            pytest.raises(ssl.SSLError, match=r"alert|ALERT"),
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            raise AssertionError(f"{name}: {connection.recv(1)!r} came")
    port = DataPort("a role", TOKEN)
    port.is_at(guarded.data[role])
    assert port.connect("/x", ()) is None


@pytest.mark.parametrize(("role", "method"), ALL_METHODS)
def test_what_is_refused_is_not_read(role: str, method: Method, guarded: Guarded) -> None:
    """A call that the certificate does not allow is refused before a message has come, and no thread waits for one."""
    name = method.path.rsplit("/", 1)[1]
    for caller in {"ps", "worker", "tool"} - OPEN_TO_OTHERS.get(name, set()):
        channel, over = with_token(guarded.channel(role, guarded.certificates / caller), TOKEN), Event()
        unary: Any = channel.stream_unary(method.path)
        pending = unary.future(nothing_until(over), timeout=SECONDS)
        assert pending.code() == grpc.StatusCode.PERMISSION_DENIED, caller
        over.set()


def nothing_until(over: Event) -> Iterator[bytes]:
    """The requests of a caller that sends none."""
    over.wait()
    yield from ()


def test_a_request_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits for it as long as the limit says, and no longer: one with one thread answers the next call."""
    make_certificates(tmp_path / "certificates")
    tool, over = tmp_path / "certificates" / "tool", Event()
    monkeypatch.setattr("pscluster.core.transport.methods._watchdog", StallWatchdog(0.3))
    with (
        serving(tmp_path / "certificates" / "ps", interceptors=[access.RoleInterceptor()]) as address,
        channel_of(address, tool) as channel,
    ):
        check: Any = channel.stream_unary("/grpc.health.v1.Health/Check")
        waiting = [check.future(nothing_until(over), timeout=SECONDS) for _ in range(2)]
        assert [call.code() for call in waiting] == [grpc.StatusCode.CANCELLED] * 2
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="without a request"):
            check(iter(()), timeout=SECONDS)
        over.set()


def test_plain_text_gets_nowhere(guarded: Guarded) -> None:
    """Without TLS no role answers, whatever the token."""
    for role, address in guarded.addresses.items():
        with grpc.insecure_channel(address) as channel:
            error = call(with_token(channel, TOKEN), next(iter(methods(SERVICES[role][0]))))
            assert error is not None
            assert error.code() == grpc.StatusCode.UNAVAILABLE


def test_a_certificate_without_a_role(guarded: Guarded, tmp_path: Path) -> None:
    """A certificate of the same CA without a role opens nothing, not even health, and the answer says what is
    missing."""
    ours = without_role(tmp_path / "roleless", guarded.certificates)
    for method in methods(SERVICES["ps"][2]):
        with channel_of(guarded.addresses["ps"], ours) as channel:
            error = call(with_token(channel, TOKEN), method)
        assert error is not None
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "names no role: give it the URI pscluster://role/ROLE" in (error.details() or "")


def test_workers_create_nothing(guarded: Guarded) -> None:
    """On the streams open to it a worker may read and update; only the coordinator declares variables and rules."""
    create = [
        ps_pb2.CreateRequest(variable=ps_pb2.VariableSpec(id=7, name="x", dtype="float32", shape=[1])),
        ps_pb2.CreateRequest(optimizer=ps_pb2.OptimizerSpec(id=1), rule={"module": "os", "qualname": "system"}),
        ps_pb2.CreateRequest(optimizer=ps_pb2.OptimizerSpec(id=2, name="another", rule="sgd")),
    ]
    refused = "does not allow the creation of variables"
    channel = with_token(guarded.channel("ps", guarded.certificates / "worker"), TOKEN)
    session: Any = channel.stream_stream(f"/{PS_SERVICE.full_name}/Session")
    push: Any = channel.stream_unary(f"/{PS_SERVICE.full_name}/Push")
    for request in create:
        data = pack(ps_pb2.Request(create=request, last=True))
        reply, _ = unpack(next(session(iter([data]), timeout=SECONDS)), ps_pb2.Reply)
        assert reply.refusal.kind == "not-permitted"
        assert refused in reply.refusal.message
        with pytest.raises(grpc.RpcError) as caught:
            push(iter([data]), timeout=SECONDS)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert refused in (caught.value.details() or "")
    with pytest.raises(grpc.RpcError, match="does not allow methods that write to the disk"):
        Stub(channel, PS_SERVICE).describe(ps_pb2.DescribeRequest(saved=True), timeout=SECONDS)


def test_workers_set_rates_and_no_rules() -> None:
    """A step may give an optimizer another rate, but neither another rule nor another name."""
    role = ParameterServerRole(0)
    role.job_began(node_pb2.AttachRequest(job=7))
    service = ParameterServerService(role)

    def create(context: FakeCall, **changed: Any) -> None:
        spec = ps_pb2.OptimizerSpec(
            **{"id": 1, "name": "o", "rule": "sgd", "numbers": {"learning_rate": 0.1}, **changed}
        )
        request = ps_pb2.Request(create=ps_pb2.CreateRequest(job=7, optimizer=spec), last=True)
        service.push(iter([pack(request)]), cast(grpc.ServicerContext, context))

    create(FakeCall())
    create(WorkersCall(), numbers={"learning_rate": 0.5})
    for changed in ({"id": 2}, {"name": "p"}, {"rule": "adam"}):
        with pytest.raises(NotPermittedError, match="does not allow the creation of variables and optimizers"):
            create(WorkersCall(), **changed)
    (held,) = role.store.describe([], ["o"]).optimizers
    assert (held.rule, held.numbers["learning_rate"]) == ("sgd", 0.5)


def test_workers_put_no_metadata() -> None:
    """Neither on a session nor as a large request: only coordinators have progress."""
    role = ParameterServerRole(0)
    role.job_began(node_pb2.AttachRequest(job=7))
    service, refused = ParameterServerService(role), "does not allow a job's metadata"

    def put(sequence: int) -> bytes:
        item = ps_pb2.UpdateItem(shard=1, kind=ps_pb2.PUT, nth=1, name="progress", text=f"{sequence}")
        update = ps_pb2.UpdateRequest(job=7, incarnation=9, sequence=sequence, items=[item])
        return pack(ps_pb2.Request(update=update, last=True))

    def session(context: FakeCall, data: bytes) -> ps_pb2.Reply:
        (reply,) = service.session(iter([data]), cast(grpc.ServicerContext, context))
        return unpack(b"".join(reply) if isinstance(reply, list) else reply, ps_pb2.Reply)[0]

    assert session(FakeCall(), put(1)).update.applied == 1
    assert refused in session(WorkersCall(), put(2)).refusal.message
    with pytest.raises(NotPermittedError, match=refused):
        service.push(iter([put(3)]), cast(grpc.ServicerContext, WorkersCall()))
    assert role.store.directory.metadata.texts == {"progress": "1"}
    service.push(iter([put(4)]), cast(grpc.ServicerContext, FakeCall()))
    assert role.store.directory.metadata.texts == {"progress": "4"}


class WorkersCall(FakeCall):
    """A call by a caller with a worker's certificate."""

    def auth_context(self) -> dict[str, list[bytes]]:
        """What gRPC found in the certificate."""
        return {"x509_pem_cert": [b""], "peer_uri": [b"pscluster://role/worker"]}


def test_the_table() -> None:
    """The table names existing methods, and exactly those that this test knows to be open to more than the
    coordinator."""
    there = {method.path for services in SERVICES.values() for service in services for method in methods(service)}
    assert set(access.CALLERS) <= there
    for path in there:
        others = {role for role in access.ROLES if role != "coordinator" and access.may_call(role, path)}
        assert others == OPEN_TO_OTHERS.get(path.rsplit("/", 1)[1], set()), path
        assert access.may_call("coordinator", path)
        assert not access.may_call("somebody", path)


def test_tools(guarded: Guarded) -> None:
    """`pscluster health` and `status` have a certificate that opens what they ask for, and no more."""
    env = {"PSCLUSTER_TOKEN": TOKEN, "PSCLUSTER_TLS": str(guarded.certificates)}
    config = tf_config({job: [address] for job, address in guarded.addresses.items()}, "ps")
    code, output = run("status", config=config, **env)
    assert code == 0, output
    assert output.count("serving") == 2
    tool = str(guarded.certificates / "tool")
    assert run("health", "--tls", tool, guarded.addresses["worker"], PSCLUSTER_TOKEN=TOKEN)[0] == 0
    for process in guarded.processes:
        assert process.is_running
        assert "Traceback" not in process.output
        assert "PRIVATE KEY" not in process.output


def test_a_worker_is_no_coordinator(tmp_path: Path) -> None:
    """A script with only a worker's key can't attach to the cluster, and says why in one line."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    with Roles(make_cluster(), tmp_path, {"PSCLUSTER_TLS": str(certificates)}) as roles:
        roles.ps()
        roles.worker()
        coordinator = roles.coordinator(JOB, options=["--tls", str(certificates / "worker")])
        assert coordinator.wait() == 1
        assert "a worker's certificate does not allow /pscluster.v1.Node/Attach" in coordinator.output
        assert "Traceback" not in coordinator.output


def test_server_only(tmp_path: Path) -> None:
    """--tls-server-only asks for no certificate: callers with the token that know the CA are accepted, others are
    not."""
    certificates, known = tmp_path / "certificates", tmp_path / "known"
    make_certificates(certificates)
    known.mkdir()
    shutil.copy(certificates / "ca.crt", known / "ca.crt")
    cluster = make_cluster()
    with Roles(cluster, tmp_path, {"PSCLUSTER_TLS": str(certificates), "PSCLUSTER_TOKEN": TOKEN}) as roles:
        ps = roles.ps(0, "--tls-server-only")
        roles.env["PSCLUSTER_TLS_SERVER_ONLY"] = "1"
        roles.worker()
        ps.wait_for("serving on")
        assert run("health", "--tls", str(known), cluster["ps"][0], PSCLUSTER_TOKEN=TOKEN)[0] == 0
        code, output = run("health", "--tls", str(known), cluster["ps"][0])
        assert code == 1
        assert output.startswith("this cluster requires a token")
        coordinator = roles.coordinator(JOB)
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0


def put(source: Path, target: Path) -> None:
    """Put each file in its place atomically, as an operator would."""
    for role in access.ROLES:
        for name in ("ca.crt", "tls.key", "tls.crt"):
            draft = target / role / f".{name}"
            shutil.copy(source / role / name, draft)
            draft.rename(target / role / name)


def test_renewal_under_a_running_job(tmp_path: Path) -> None:
    """All certificates change, the CA too: coordinator and worker find a restarted server."""
    used, new = tmp_path / "used", tmp_path / "new"
    make_certificates(used)
    make_certificates(new)
    gate, cluster = tmp_path / "gate", make_cluster(ps=2)
    env = {"PSCLUSTER_TLS": str(used), "PSCLUSTER_DURABILITY": "log", "PSCLUSTER_STATE_DIR": str(tmp_path / "state")}
    with Roles(cluster, tmp_path, env) as roles:
        first, second = roles.ps(0), roles.ps(1)
        worker = roles.worker()
        coordinator = roles.coordinator(HELD, str(gate))
        worker.wait_for("running on worker")
        put(new, used)
        # A server that is not restarted shows the new one at its next connection, and asks for one of the new CA.
        until(lambda: is_healthy(cluster["ps"][1], None, tls=Tls(new / "tool"))[0], "the new one is shown")
        second.wait_for(": its certificate is valid until")
        with first:
            pass  # it was killed
        roles.ps(0).wait_for("serving on")
        coordinator.wait_for("is reachable again|is back after")
        gate.touch()
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0


def _names(folder: Path) -> dict[str, str]:
    """The names by which a list may refer to the certificate in a folder."""
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    key = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return {
        "serial": f"serial={certificate.serial_number:040X}",
        "certificate": certificate.fingerprint(hashes.SHA256()).hex(":"),
        "key": hashlib.sha256(key).hexdigest(),
    }


@pytest.mark.parametrize("by", ["serial", "certificate", "key"])
def test_a_key_is_revoked(by: str, tmp_path: Path) -> None:
    """A revoked caller's open streams end and its calls are refused, whatever names it, without a restart; others
    continue. An invalid list is an error in the log, and the previous one stays in force."""
    certificates, cluster = tmp_path / "certificates", make_cluster()
    make_certificates(certificates)
    listed = certificates / "ps" / "revoked.txt"
    worker = certificates / "worker"
    with (
        Roles(cluster, tmp_path, {"PSCLUSTER_TLS": str(certificates)}) as roles,
        channel_of(cluster["ps"][0], worker) as lost,
        channel_of(cluster["ps"][0], certificates / "tool") as kept,
    ):
        ps = roles.ps()
        ps.wait_for("serving on")
        over, session = Event(), cast("Any", lost.stream_stream(f"/{PS_SERVICE.full_name}/Session"))
        stream = session(nothing_until(over))
        ask = health_pb2.HealthCheckRequest()
        watch: Any = health_pb2_grpc.HealthStub(lost).Watch(ask, timeout=SECONDS)
        next(watch)
        listed.with_suffix(".draft").write_text(f"# stolen\n{_names(worker)[by]}  # from a worker\n")
        listed.with_suffix(".draft").rename(listed)
        for call in (stream, watch):
            assert call.code() is grpc.StatusCode.CANCELLED
        over.set()
        with pytest.raises(grpc.RpcError, match="the caller's certificate was revoked"):
            health_pb2_grpc.HealthStub(lost).Check(ask, timeout=SECONDS)
        listed.write_text("everybody\n")
        ps.wait_for("keeping the current certificates: .*line 1: 'everybody' is neither a serial number")
        with pytest.raises(grpc.RpcError, match="the caller's certificate was revoked"):
            health_pb2_grpc.HealthStub(lost).Check(ask, timeout=SECONDS)
        assert health_pb2_grpc.HealthStub(kept).Check(ask, timeout=SECONDS).status
        renew_certificates(certificates)
        with channel_of(cluster["ps"][0], worker) as again:
            if by == "key":  # a new certificate keeps the key
                with pytest.raises(grpc.RpcError, match="the caller's certificate was revoked"):
                    health_pb2_grpc.HealthStub(again).Check(ask, timeout=SECONDS)
            else:
                assert health_pb2_grpc.HealthStub(again).Check(ask, timeout=SECONDS).status


def test_an_expired_certificate_on_a_resumed_session(tmp_path: Path) -> None:
    """TLS checks the date only in a session's first handshake: a caller that resumes it later is refused by us."""
    certificates, short, cluster = tmp_path / "certificates", tmp_path / "short", make_cluster()
    make_certificates(certificates)
    with Roles(cluster, tmp_path, {"PSCLUSTER_TLS": str(certificates)}) as roles:
        roles.ps().wait_for("serving on")
        shutil.copytree(certificates, short)
        renew_certificates(short, days=8 / 86_400)
        ends = x509.load_pem_x509_certificate((short / "tool" / "tls.crt").read_bytes()).not_valid_after_utc
        cache: Any = ("grpc.ssl_session_cache", ssl_session_cache_lru(4))  # type: ignore[no-untyped-call]
        address = cluster["ps"][0].replace("127.0.0.1", "localhost")  # sessions are stored by name

        def check() -> grpc.RpcError | None:
            with channel_of(address, short / "tool", more=(cache,)) as channel:
                try:
                    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
                except grpc.RpcError as error:
                    return error
                return None

        assert check() is None
        until(lambda: datetime.datetime.now(datetime.UTC) > ends, "the certificate has expired")
        error = check()
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "expired at" in (error.details() or "")
        assert "after its TLS session began" in (error.details() or "")


def test_a_bad_renewal(tmp_path: Path) -> None:
    """Unusable files are an error in the log, and the current certificates stay; good ones are used again."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    cluster, tool = make_cluster(), Tls(certificates / "tool")
    old = (certificates / "ps" / "tls.crt").read_bytes()
    cases = [
        (b"no certificate at all", "can't be used"),
        ((certificates / "worker" / "tls.crt").read_bytes(), "tls.key is not the key of"),
        (None, "holds tls.key, but no tls.crt"),
    ]
    with Roles(cluster, tmp_path, {"PSCLUSTER_TLS": str(certificates)}) as roles:
        ps = roles.ps()
        ps.wait_for("serving on")
        for data, why in cases:
            if data is None:
                (certificates / "ps" / "tls.crt").unlink()
            else:
                (certificates / "ps" / "tls.crt").write_bytes(data)

            def is_said(why: str = why) -> bool:
                assert is_healthy(cluster["ps"][0], None, tls=tool)[0], "that of before stays"
                lines = [line for line in ps.output.splitlines() if "keeping the current certificates" in line]
                return any(why in line for line in lines)

            until(is_said, why)
        (certificates / "ps" / "tls.crt").write_bytes(old)

        def is_back() -> bool:
            assert is_healthy(cluster["ps"][0], None, tls=tool)[0]
            return "reloaded" in ps.output

        until(is_back, "the good one is taken up")


@contextmanager
def serving(
    folder: Path | None,
    address: str = "127.0.0.1:0",
    mutual: bool = True,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> Iterator[str]:
    """A healthy gRPC server with the certificate in the folder, or in plain text if None; its address."""
    with grpc_server(1, interceptors=[*interceptors]) as server:
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        if folder is None:
            port = server.add_insecure_port(address)
        else:
            pair = ((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())
            root = (folder / "ca.crt").read_bytes() if mutual else None
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair], root, mutual))
        server.start()
        yield f"{address.rpartition(':')[0]}:{port}"


class Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Tomorrow:
        return super().now(tz) + datetime.timedelta(days=1)


def test_what_is_said_where_there_is_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another CA, an expired certificate, one of tomorrow, another host, plain text, none: named, with the remedy."""
    ours, other, old, early, bare = (tmp_path / name for name in ("ours", "other", "old", "early", "bare"))
    make_certificates(ours)
    make_certificates(other)
    shutil.copytree(ours, old)
    renew_certificates(old, days=-1)
    shutil.copytree(ours, early)
    with monkeypatch.context() as patch:
        patch.setattr(datetime, "datetime", Tomorrow)
        renew_certificates(early)
    bare.mkdir()
    shutil.copy(ours / "ca.crt", bare / "ca.crt")
    strict = {"PSCLUSTER_TLS": str(ours)}
    with ExitStack() as stack:
        good, foreign = stack.enter_context(serving(ours / "ps")), stack.enter_context(serving(other / "ps"))
        expired, plain = stack.enter_context(serving(old / "ps")), stack.enter_context(serving(None))
        elsewhere = stack.enter_context(serving(ours / "ps", "127.0.0.2:0"))
        suspicious = stack.enter_context(serving_ours_asking_others(ours, other, tmp_path))
        too_early = stack.enter_context(serving(early / "ps"))
        cases: list[tuple[str, dict[str, str], str]] = [
            (foreign, strict, f"its certificate is of none of the CAs in {ours}/tool/ca.crt: give both sides"),
            (expired, strict, "its certificate (or its CA's) has expired; `pscluster certs DIR --renew` makes"),
            (
                elsewhere,
                strict,
                "its certificate does not name 127.0.0.2; `pscluster certs DIR --renew --host 127.0.0.2`",
            ),
            (plain, strict, "it speaks no TLS, but this process was told to: start it with --tls or PSCLUSTER_TLS"),
            (good, {"PSCLUSTER_TLS": str(bare)}, f"it asks for a certificate, but {bare} holds no tls.crt and tls.key"),
            (
                suspicious,
                strict,
                f"it refused our certificate {ours}/tool/tls.crt: is its CA in the ca.crt there? Give both sides "
                "certificates of the same CA; if they have them, compare the clocks of both machines",
            ),
            (
                good,
                {},
                "it speaks TLS, but this process was given no certificates: use --tls DIR, or set PSCLUSTER_TLS",
            ),
            (
                too_early,
                strict,
                "its certificate (or its CA's) is not valid yet: compare the clocks of both machines\n",
            ),
        ]
        results = run_all([(["health", address], env) for address, env, _ in cases])
        for (code, output), (address, _, sentence) in zip(results, cases, strict=True):
            assert code == 1, output
            assert output.startswith(f"{address} does not answer: {sentence}"), output
        # A role that needs it does not wait for something that waiting does not cure.
        cluster = make_cluster()
        for address, env, sentence in (cases[0], cases[6]):
            config = tf_config({**cluster, "ps": [address]}, "worker")
            code, output = run("worker", config=config, **env)
            assert code == 1, output
            last = output.splitlines()[-1]
            assert last.startswith(
                f"pscluster: can't connect securely to ps 0 at {address}: {sentence}".replace("/tool/", "/worker/")
            )
            assert "Traceback" not in output


def test_a_key_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is found even without a folder for temporary files."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    make_certificates(ours)
    make_certificates(other)
    with serving_ours_asking_others(ours, other, tmp_path) as address:
        tls = Tls(ours / "worker")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        assert "it refused our certificate" in (tls.why_not(address) or "")


def test_why_is_not_asked_at_each_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost peer is dialled many times per second; why it is not trusted is checked only now and then."""
    make_certificates(tmp_path)
    looks, now = list[PeerAddress](), [100.0]
    monkeypatch.setattr(lifecycle, "why_untrusted", looks.append)
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    diagnosis = lifecycle.TlsDiagnosis(PeerAddress("ps", 0, "127.0.0.1:1", Tls(tmp_path / "worker")))
    for now[0] in (100.0, 100.1, 104.9, 105.1, 105.2):
        asyncio.run(diagnosis.diagnose(UnavailableError("gone")))
    assert len(looks) == 2


@contextmanager
def serving_ours_asking_others(ours: Path, other: Path, folder: Path) -> Iterator[str]:
    """A server with our certificate that trusts only another CA."""
    mixed = folder / "mixed"
    shutil.copytree(ours / "ps", mixed)
    shutil.copy(other / "ca.crt", mixed / "ca.crt")
    with serving(mixed) as address:
        yield address


# Of the kind 1.3.101.122, which does not exist; beside it is one that does.
UNKNOWN_KEY = b"""-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2V6BCIEIIQgchrkNZEeG6Y1Q4igwd85NCUmoHU4VNqU9B2Zx4yW
-----END PRIVATE KEY-----
"""


def test_unusable_files(tmp_path: Path) -> None:
    """Unusable files are refused at the start: exit code 2 and one line that names the file and the remedy."""
    good, old = tmp_path / "good", tmp_path / "old"
    make_certificates(good)
    shutil.copytree(good, old)
    renew_certificates(old, days=-1)

    def changed(name: str, **files: bytes | None) -> str:
        shutil.copytree(good / "ps", tmp_path / name)
        for kind, data in files.items():
            path = tmp_path / name / f"tls.{kind}" if kind != "ca" else tmp_path / name / "ca.crt"
            path.unlink()
            if data is not None:
                path.write_bytes(data)
        return str(tmp_path / name)

    (tmp_path / "empty").mkdir()
    other = (good / "worker" / "tls.key").read_bytes()
    cases = [
        (str(tmp_path / "nowhere"), "is not a folder"),
        (str(tmp_path / "empty"), "holds none of tls.crt, tls.key, ca.crt"),
        (str(old), "expired at"),
        (changed("keyless", key=None), "holds tls.crt, but no tls.key"),
        (changed("mixed", key=other), "tls.key is not the key of"),
        (changed("garbage", crt=b"\x00\xff" * 100), "tls.crt can't be used"),
        (
            changed("rubbish", key=b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
            "tls.key can't be used",
        ),
        (changed("unknown", key=UNKNOWN_KEY), "tls.key can't be used: Unknown key type"),
        (changed("no CA", ca=b"none"), "ca.crt can't be used"),
        (changed("ca only", crt=None, key=None), "holds no tls.crt and tls.key, and this role needs them to serve"),
    ]
    config = tf_config(make_cluster(), "ps")
    results = run_all([(["ps"], {"TF_CONFIG": config, "PSCLUSTER_TLS": folder}) for folder, _ in cases[:-1]])
    results.append(run("ps", config=config, PSCLUSTER_TLS=cases[-1][0]))  # found when it is about to serve
    for (code, output), (folder, sentence) in zip(results, cases, strict=True):
        assert code == 2, output
        assert output.startswith("pscluster: ")
        assert folder in output
        assert sentence in output
        assert "`pscluster certs DIR" in output
        assert len(output.splitlines()) == 1
    code, output = run("ps", "--tls-server-only", config=config)
    assert code == 2
    assert "there are no certificates: use --tls DIR" in output


def test_the_token_in_plain_text(tmp_path: Path) -> None:
    """Off loopback, a role neither listens nor dials in plain text with a token, unless told to; a message says so."""
    (tmp_path / "job.py").write_text(JOB)
    (address,) = free_addresses(1)
    port = address.partition(":")[2]
    far = {"ps": ["ps0.example.com:2222"], "worker": [address], "chief": [f"c.example.com:{port}"]}
    near = {**make_cluster(), "chief": far["chief"]}
    listening = (
        f"refusing to listen on 0.0.0.0:{port} in plain text, where anyone on the path could read and change everything"
    )
    sending = "refusing to talk to ps 0 at ps0.example.com:2222 in plain text"
    hint = ("--tls DIR", "PSCLUSTER_TLS", "`pscluster certs DIR` makes", "--insecure")
    cases: list[tuple[Sequence[str], str, str]] = [
        (["ps", "--bind", f"0.0.0.0:{port}"], tf_config(near, "ps"), listening),
        (["worker"], tf_config(far, "worker"), sending),
        (["status"], tf_config({"ps": far["ps"]}, "ps"), sending),
        (["health", "ps0.example.com:2222"], "", "refusing to talk to ps0.example.com:2222 in plain"),
    ]
    env = {"PSCLUSTER_TOKEN": TOKEN}
    results = run_all([(arguments, {"TF_CONFIG": config, **env}) for arguments, config, _ in cases])
    # found by the script, which makes the strategy
    results.append(run("coordinator", str(tmp_path / "job.py"), config=tf_config(far, "chief"), **env))
    cases.append(([], "", sending))
    for (code, output), (_, _, sentence) in zip(results, cases, strict=True):
        assert code == 2, output
        assert output.splitlines()[-1].startswith(f"pscluster: {sentence}"), output
        assert all(word in output for word in hint), output
        assert TOKEN not in output
    asking = ["health", "no-such-host.invalid:2222"]
    results = run_all(
        [
            ([*asking, "--insecure"], env),
            (asking, {**env, "PSCLUSTER_INSECURE": "1"}),
            (asking, {**env, "PSCLUSTER_INSECURE": "yes"}),
        ]
    )
    assert [code for code, _ in results] == [1, 1, 2]
    assert all("no-such-host.invalid:2222 does not answer" in output for _, output in results[:2])
    assert "PSCLUSTER_INSECURE is 'yes', but it is 1 or 0" in results[2][1]


def test_off_loopback(tmp_path: Path) -> None:
    """Mutual TLS opens other interfaces without a token; plain text must be requested, and is logged."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    addresses = free_addresses(2)
    for address, env in (
        (addresses[0], {"PSCLUSTER_TLS": str(certificates)}),
        (addresses[1], {"PSCLUSTER_TOKEN": TOKEN, "PSCLUSTER_INSECURE": "1"}),
    ):
        port = address.partition(":")[2]
        with Roles({"ps": [f"ps0.example.com:{port}"]}, tmp_path, env) as roles:
            ps = roles.ps()
            ps.wait_for(f"serving on 0.0.0.0:{port}")
            said = f"WARNING listening on 0.0.0.0:{port} in plain text (--insecure)" in ps.output
            assert said == ("PSCLUSTER_INSECURE" in env)
            assert run("health", address, **env)[0] == 0


def test_a_local_cluster_that_others_reach() -> None:
    """It makes its own certificates; steps, large arrays both ways and a worker's death work, and no key is left."""
    with LocalCluster(2, 2, host="0.0.0.0", log_level="ERROR") as cluster:
        assert cluster.tls is not None
        folder = Path(cluster.tls_folder)
        assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600
        with ParameterServerStrategy(cluster) as strategy:
            with strategy.scope():
                table = Variable(
                    np.zeros((3 << 20,), np.float32), name="table"
                )  # 12 MiB: in frames, on a separate channel
            coordinator = ClusterCoordinator(strategy)

            def step() -> None:
                table.assign_add(np.ones(table.shape, np.float32))

            for _ in range(6):
                coordinator.schedule(step)
            coordinator.join()
            recorded = timeline.collect(strategy.tasks)  # on separate channels
            assert [check.missing for check in recorded] == [""] * 4
            cluster.kill("worker", 0)
            for _ in range(6):
                coordinator.schedule(step)
            coordinator.join()
            assert np.unique(table.numpy()).tolist() == [12.0]
            server = strategy.client._servers[0]
            server.give_back(session := server.take_session())
            links = coordinator._dispatcher.state.workers
            until(lambda: all(link.connection and link.connection._stream for link in links), "all are connected")
            streams = [session.stream, *(link.connection._stream for link in links if link.connection)]
            assert {type(cast(DataStream, stream)._connection) for stream in streams} == {TlsConnection}
    assert not folder.exists()


@pytest.mark.parametrize("folder", ["", "its own"])
def test_a_local_cluster_hands_on_its_own(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates of another cluster in the environment reach neither its processes nor the script's."""
    monkeypatch.setenv("PSCLUSTER_TLS", "of another cluster")
    monkeypatch.setenv("PSCLUSTER_TLS_SERVER_ONLY", "1")
    environment = child_environ({}, "{}", TOKEN, folder)
    assert environment.get("PSCLUSTER_TLS", "") == folder
    assert "PSCLUSTER_TLS_SERVER_ONLY" not in environment


def names_in(path: Path) -> list[str]:
    """The names in a certificate."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_certs_command(tmp_path: Path) -> None:
    """It makes what it says, readable only by its owner, once; --renew keeps the CA, keys and hosts."""
    folder = tmp_path / "certificates"
    cluster = {"ps": ["ps-0:2222"], "worker": ["worker-0:2222", "10.0.0.7:2222"], "chief": ["[2001:db8::1]:2222"]}
    options = ("--host", "host.example.com", "--host", "192.0.2.1", "--days", "30")
    assert run("certs", str(folder), *options, config=tf_config(cluster, "ps")) == (0, "")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    own = [f"{role}/{name}" for role in access.ROLES for name in ("ca.crt", "tls.crt", "tls.key")]
    assert files == sorted(["ca.crt", "ca.key", *own])
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    local, hosts = ["localhost", "127.0.0.1", "::1"], ["host.example.com", "192.0.2.1"]
    assert names_in(folder / "tool" / "tls.crt") == [*local, "tool.pscluster", *hosts, "pscluster://role/tool"]
    assert names_in(folder / "ps" / "tls.crt") == [*local, "ps.pscluster", *hosts, "ps-0", "pscluster://role/ps"]
    assert set(names_in(folder / "worker" / "tls.crt")) == {
        *local,
        *hosts,
        "worker.pscluster",
        "worker-0",
        "10.0.0.7",
        "pscluster://role/worker",
    }
    assert "2001:db8::1" in names_in(folder / "coordinator" / "tls.crt")
    before = {name: (folder / name).read_bytes() for name in files}

    code, output = run("certs", str(folder))
    assert code == 2
    assert output.startswith(f"pscluster: {folder} already has certificates, and they were not changed: give --renew")
    assert {name: (folder / name).read_bytes() for name in files} == before

    assert run("certs", str(folder), "--renew", "--host", "another.example.com") == (0, "")
    changed = [name for name in files if (folder / name).read_bytes() != before[name]]
    assert changed == sorted(f"{role}/tls.crt" for role in access.ROLES)
    assert {"ps-0", "another.example.com"} < set(names_in(folder / "ps" / "tls.crt"))
    assert names_in(folder / "ps" / "tls.crt").count("pscluster://role/ps") == 1
    assert sorted(path.name for path in folder.rglob(".*")) == [], "no draft is left"

    for arguments, sentence in (
        (["certs", str(tmp_path / "none"), "--renew"], "can't renew the certificates in"),
        (["certs", str(tmp_path / "no" / "certificates")], "can't make the certificates' folder"),
        (["certs", str(tmp_path / "x"), "--host", "a/b"], "--host 'a/b' is neither a name nor an IP address"),
    ):
        code, output = run(*arguments)
        assert code == 2
        assert output.startswith(f"pscluster: {sentence}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificates"], "nothing is left of what failed"


def test_create_tls_race(tmp_path: Path) -> None:
    """Roles that all have to create certificates agree on one CA, and a job runs with them, without a token."""
    folder = tmp_path / "tls"
    with Roles(make_cluster(ps=2), tmp_path) as roles:
        roles.ps(0, "--create-tls", "--tls", str(folder))
        roles.ps(1, "--create-tls", "--tls", str(folder))
        roles.worker(0, "--create-tls", "--tls", str(folder))
        coordinator = roles.coordinator(JOB, options=["--create-tls", "--tls", str(folder)])
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["script.py", "tls"], "no draft is left"
    code, output = run("ps", "--create-tls", config=tf_config(make_cluster(), "ps"))
    assert (code, output) == (2, "pscluster: --create-tls needs --tls or PSCLUSTER_TLS to name the folder\n")


def test_who_loads_what(tmp_path: Path) -> None:
    """One folder serves all roles of a machine, or each role has one; the option takes precedence over the variable."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    assert load_tls("ps", environ={}) is None
    tls = load_tls("worker", environ={"PSCLUSTER_TLS": str(certificates)})
    assert tls is not None
    assert tls.folder == certificates / "worker"
    assert tls.is_mutual
    assert Tls(certificates / "ps").folder == certificates / "ps"
    tls = load_tls("worker", certificates / "ps", environ={"PSCLUSTER_TLS": str(tmp_path / "nowhere")})
    assert tls is not None
    assert tls.folder == certificates / "ps"
    with pytest.raises(ConfigurationError, match="PSCLUSTER_TLS_SERVER_ONLY is '2', but it is 1 or 0"):
        load_tls("ps", environ={"PSCLUSTER_TLS_SERVER_ONLY": "2"})
    assert ssl.OPENSSL_VERSION_NUMBER >= 0x10101000, "the probe of `why_not` needs ALPN and TLS 1.3"
