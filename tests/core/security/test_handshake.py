"""Proofs that both sides know the token: the scheme's test vector, sessions, counters."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.core.errors import AuthenticationError, ProtocolError, UnavailableError
from pscluster.core.limits import IDLE_SECONDS, MAX_PENDING, PENDING_SECONDS
from pscluster.core.security.handshake import (
    WINDOW,
    CallHeader,
    ClientSession,
    CounterWindow,
    Secret,
    SessionKeys,
    SessionTable,
    accept_reply,
    make_request,
)
from pscluster.v1 import authentication_pb2

TOKEN = "correct-horse-battery-staple-0123456789"
PATH = "/pscluster.v1.Node/Hello"
PROTO = Path(__file__).resolve().parents[3] / "proto/pscluster/v1/authentication.proto"
SECRET = Secret.of(TOKEN)


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()


def _hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for one block."""
    return _mac(_mac(salt or bytes(32), secret), info + b"\x01")


def _fields(*parts: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "big") + field for field in parts)


def test_the_test_vector() -> None:
    """The .proto file's test vector follows from its text alone, and is what this package computes."""
    token, address = TOKEN.encode(), b"ps0.example.com:2222"
    nonces, session, boot_id = (bytes(range(32)), bytes(range(32, 64))), bytes(range(64, 80)), 0x0123456789ABCDEF
    salt = hashlib.sha256(
        _fields(b"pscluster/1", b"ps", b"0", address, boot_id.to_bytes(8, "big"), *nonces, session)
    ).digest()
    request_key = _hkdf(token, b"", b"pscluster/1 request")
    client, server = _hkdf(token, salt, b"pscluster/1 client"), _hkdf(token, salt, b"pscluster/1 server")
    expected = {
        "token_id": _mac(token, b"pscluster/1 token id")[:8],
        "request key": request_key,
        "request_proof": _mac(request_key, _fields(b"pscluster/1 request", nonces[0], address)),
        "client key": client,
        "server key": server,
        "server_proof": _mac(server, b"handshake"),
        "PROOF of the call": _mac(client, _fields(b"call", PATH.encode(), b"1")),
        "of the answer": _mac(server, _fields(b"answer", PATH.encode(), b"1")),
        "of a data connection": _mac(client, b"data"),
    }
    text = PROTO.read_text()
    for name, value in expected.items():
        assert f"//   {name:20} {value.hex()}\n" in text, name
    request = make_request(SECRET, address.decode(), nonces[0])
    reply = authentication_pb2.HandshakeReply(
        version=1, server_nonce=nonces[1], session=session, role="ps", index=0, boot_id=boot_id
    )
    keys = SessionKeys.of(token, request, reply)
    reply.server_proof = keys.handshake_proof()
    assert (request.token_id, request.request_proof) == (expected["token_id"], expected["request_proof"])
    assert (keys.client, keys.server, keys.data_proof()) == (client, server, expected["of a data connection"])
    header, answer = accept_reply(SECRET, request, reply).next_call(PATH)
    assert header == f"Pscluster1 {session.hex()} 1 {expected['PROOF of the call'].hex()}"
    assert answer == expected["of the answer"].hex()


def shaken(table: SessionTable, address: str = "a:1", now: float = 0.0) -> ClientSession:
    """A client's session after a handshake."""
    request = make_request(SECRET, address)
    return accept_reply(SECRET, request, table.open([SECRET], request, now).reply)


def admitted(table: SessionTable, header: str, path: str = PATH, now: float = 0.0) -> bool:
    """Whether a call with this header is served."""
    parsed = CallHeader.parse(header)
    return parsed is not None and table.admit(parsed, path, now) is not None


def test_a_call_is_good_once_and_for_its_method() -> None:
    table = SessionTable("ps", 0, 7)
    session = shaken(table)
    header, _ = session.next_call(PATH)
    assert not admitted(table, header, "/pscluster.v1.Node/EndJob")
    assert admitted(table, header)
    assert not admitted(table, header), "a second time"
    later, latest = session.next_call(PATH)[0], session.next_call(PATH)[0]
    assert admitted(table, latest), "calls may overtake each other"
    assert admitted(table, later)
    changed = latest.rsplit(" ", 1)[0] + " " + "0" * 64
    assert not admitted(table, changed)
    assert not admitted(SessionTable("ps", 0, 7), session.next_call(PATH)[0]), "of a process before"


def test_sessions_differ_in_all_that_is_said() -> None:
    """Another role, index, address, boot or nonce gives other keys: a proof for one is not valid for the other."""
    request = make_request(SECRET, "a:1", bytes(32))
    same = authentication_pb2.HandshakeReply(server_nonce=bytes(32), session=bytes(16), role="ps", index=1, boot_id=5)
    keys = {SessionKeys.of(SECRET.token, request, same)}
    for name, value in {
        "server_nonce": b"x" * 32,
        "session": b"x" * 16,
        "role": "worker",
        "index": 2,
        "boot_id": 6,
    }.items():
        other = authentication_pb2.HandshakeReply()
        other.CopyFrom(same)
        setattr(other, name, value)
        keys.add(SessionKeys.of(SECRET.token, request, other))
    keys.add(SessionKeys.of(SECRET.token, make_request(SECRET, "a:2", bytes(32)), same))
    keys.add(SessionKeys.of(SECRET.token, make_request(SECRET, "a:1", b"x" * 32), same))
    keys.add(SessionKeys.of(b"y" * 32, request, same))
    assert len(keys) == 9
    assert len({key for pair in keys for key in (pair.client, pair.server)}) == 18


def test_peers_that_do_not_know_the_token() -> None:
    """A server refuses such a client, and a client such a server, whatever else they say."""
    table, other = SessionTable("ps", 0, 7), Secret.of(TOKEN[::-1])
    for request in (make_request(other, "a:1"), make_request(SECRET, "a:1"), make_request(SECRET, "a:1")):
        if request.token_id == SECRET.token_id:
            request.address = "elsewhere:1"
        with pytest.raises(AuthenticationError):
            table.open([SECRET], request, 0.0)
    lying = make_request(other, "a:1")
    lying.token_id = SECRET.token_id
    with pytest.raises(AuthenticationError):
        table.open([SECRET], lying, 0.0)
    assert not len(table)
    request = make_request(SECRET, "a:1")
    thief = SessionTable("ps", 0, 7).open([other], make_request(other, "a:1"), 0.0).reply
    for reply in (
        thief,
        authentication_pb2.HandshakeReply(),
        SessionTable("ps", 0, 7).open([SECRET], make_request(SECRET, "a:1"), 0.0).reply,
    ):
        with pytest.raises(UnavailableError, match="has not proved that it knows the cluster token"):
            accept_reply(SECRET, request, reply)


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"client_nonce": b"short"}, {"client_nonce": bytes(1000)}, {"address": "a" * 513}]
)
def test_a_request_that_is_none(change: dict[str, object]) -> None:
    request = make_request(SECRET, "a:1")
    for name, value in change.items():
        setattr(request, name, value)
    table = SessionTable("ps", 0, 7)
    with pytest.raises(ProtocolError):
        table.open([SECRET], request, 0.0)
    assert not len(table)


def test_a_copy_of_a_request_opens_nothing_more() -> None:
    """A recorded handshake, sent again, gets the same answer until its session is used, and then none."""
    table, request = SessionTable("ps", 0, 7), make_request(SECRET, "a:1")
    reply = table.open([SECRET], request, 0.0).reply
    for _ in range(3):
        assert table.open([SECRET], request, 1.0).reply == reply
        assert len(table) == 1
    assert admitted(table, accept_reply(SECRET, request, reply).next_call(PATH)[0])
    with pytest.raises(AuthenticationError):
        table.open([SECRET], request, 2.0)
    assert len(table) == 1


def test_sessions_end() -> None:
    """An unused session ends soon, an idle one later, one with an open call never; if there are too many, the oldest
    pending one."""
    table = SessionTable("ps", 0, 7)
    used, busy = shaken(table), shaken(table)
    shaken(table)
    assert admitted(table, used.next_call(PATH)[0])
    header = CallHeader.parse(busy.next_call(PATH)[0])
    assert header is not None
    session = table.admit(header, PATH, 0.0)
    assert session is not None
    session.open_calls += 1
    table.expire(PENDING_SECONDS + 1)
    assert len(table) == 2
    table.expire(IDLE_SECONDS + 1)
    assert len(table) == 1
    assert admitted(table, busy.next_call(PATH)[0])
    assert not admitted(table, used.next_call(PATH)[0])
    first = shaken(table)
    for _ in range(MAX_PENDING):
        shaken(table)
    assert len(table) == MAX_PENDING + 1
    assert not admitted(table, first.next_call(PATH)[0])
    table.drop_tokens(frozenset())
    assert not len(table)
    assert not admitted(table, busy.next_call(PATH)[0])


@given(st.lists(st.one_of(st.integers(-3, 60), st.integers(WINDOW - 3, 2 * WINDOW + 3))))
def test_the_window(counters: list[int]) -> None:
    """A counter is accepted once; one within the window below the highest is always accepted the first time."""
    window, seen = CounterWindow(), set[int]()
    for counter in counters:
        highest = max(seen, default=0)
        expected = counter > 0 and counter not in seen and counter > highest - WINDOW
        assert window.take(counter) == expected
        if expected:
            seen.add(counter)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Bearer x",
        f"Pscluster1 {'0' * 32} 1",
        f"Pscluster1 {'0' * 32} 1 {'0' * 63}",
        f"Pscluster1 {'0' * 31} 1 {'0' * 64}",
        f"Pscluster1 {'0' * 32} -1 {'0' * 64}",
        f"Pscluster1 {'0' * 32} {'9' * 19} {'0' * 64}",
        f"Pscluster1 {'0' * 32} \u0661 {'0' * 64}",
        f"Pscluster1 {'0' * 32} 1 {'ü' * 64}",
        f"pscluster1 {'0' * 32} 1 {'0' * 64}",
    ],
)
def test_a_header_that_is_none(text: str) -> None:
    assert CallHeader.parse(text) is None


def test_nothing_secret_is_shown() -> None:
    """The repr of an object never shows its secret."""
    table = SessionTable("ps", 0, 7)
    session = table.open([SECRET], make_request(SECRET, "a:1"), 0.0)
    shown = repr(SECRET) + repr(session) + repr(session.keys)
    for secret in (TOKEN, SECRET.request_key.hex(), repr(SECRET.request_key), repr(session.keys.client)):
        assert secret not in shown
