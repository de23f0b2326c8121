"""How two processes prove to each other that they know the cluster token. Pure: no connections, no clock.

`proto/pscluster/v1/authentication.proto` specifies the scheme byte by byte, with a test vector and its limits. The form
is that of TLS 1.3 with a pre-shared key (RFC 8446, 2.2), without a key exchange: a nonce of each side and what both
know of the connection determine the keys, one per direction.

A session of the server:

    --a request with a valid proof--> opened --a call with a proof, or the data plane's--> used
    opened, for `PENDING_SECONDS` ----> dropped
    used, no call open, for `IDLE_SECONDS` ----> dropped
    any --its token is no longer accepted----> dropped, and the owner of its open calls ends them

A repeated request, such as a recorded one, gets the first one's answer and creates nothing, and is refused once the
session is used: it opens only one session, and on the data plane one connection. The number of sessions that were
opened and never used is bounded; a new one replaces the oldest. So a request without a token makes the server compute
one HMAC, and remember nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pscluster.core.errors import AuthenticationError, ProtocolError, UnavailableError
from pscluster.core.limits import IDLE_SECONDS, MAX_ADDRESS, MAX_PENDING, MAX_SESSIONS, PENDING_SECONDS
from pscluster.v1 import authentication_pb2

VERSION = 1
NONCE_BYTES = 32
SESSION_BYTES = 16
WINDOW = 4096
"""How far below the highest counter received another one may be."""

_NAME = b"pscluster/1"
_SCHEME = "Pscluster1"
_HEADER = re.compile(rf"{_SCHEME} ([!-~]{{{2 * SESSION_BYTES}}}) ([0-9]{{1,18}}) ([!-~]{{64}})")


def fields(*values: bytes) -> bytes:
    """Join byte strings unambiguously: each after its length."""
    return b"".join(len(value).to_bytes(4, "big") + value for value in values)


def mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _derive(secret: bytes, salt: bytes, label: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256  # slow to import, and needed only with a token
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt or None, _NAME + b" " + label).derive(secret)


@dataclass(frozen=True, slots=True)
class Secret:
    """A token, and what is derived from it to prove it."""

    token: bytes = field(repr=False)
    token_id: bytes  # distinguishes the tokens of a file, and reveals nothing else about them
    request_key: bytes = field(repr=False)
    file: Path | None = field(default=None, compare=False)  # that holds the token

    @classmethod
    def of(cls, token: str) -> Secret:
        known = token.encode()
        token_id = mac(known, _NAME + b" token id")[:8]
        return cls(known, token_id, _derive(known, b"", b"request"), getattr(token, "file", None))


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys of a session, one per direction, and the proofs made with them."""

    client: bytes = field(repr=False)
    server: bytes = field(repr=False)

    @classmethod
    def of(
        cls, token: bytes, request: authentication_pb2.HandshakeRequest, reply: authentication_pb2.HandshakeReply
    ) -> SessionKeys:
        """Derive the keys from the token and the whole handshake."""
        transcript = fields(
            _NAME,
            reply.role.encode(),
            b"%d" % reply.index,
            request.address.encode(),
            reply.boot_id.to_bytes(8, "big"),
            request.client_nonce,
            reply.server_nonce,
            reply.session,
        )
        salt = hashlib.sha256(transcript).digest()
        return cls(_derive(token, salt, b"client"), _derive(token, salt, b"server"))

    def handshake_proof(self) -> bytes:
        """Return the server's proof in its reply."""
        return mac(self.server, b"handshake")

    def call_proof(self, path: str, counter: int) -> str:
        return mac(self.client, fields(b"call", path.encode(), b"%d" % counter)).hex()

    def answer_proof(self, path: str, counter: int) -> str:
        """Return the server's proof of the same call."""
        return mac(self.server, fields(b"answer", path.encode(), b"%d" % counter)).hex()

    def data_proof(self) -> bytes:
        """Return the client's proof on a data-plane connection."""
        return mac(self.client, b"data")


def make_request(
    secret: Secret, address: str, client_nonce: bytes | None = None
) -> authentication_pb2.HandshakeRequest:
    nonce = secrets.token_bytes(NONCE_BYTES) if client_nonce is None else client_nonce
    request = authentication_pb2.HandshakeRequest(
        version=VERSION, client_nonce=nonce, address=address[:MAX_ADDRESS], token_id=secret.token_id
    )
    request.request_proof = _request_proof(secret, request)
    return request


def _request_proof(secret: Secret, request: authentication_pb2.HandshakeRequest) -> bytes:
    label = _NAME + b" request"
    return mac(secret.request_key, fields(label, request.client_nonce, request.address.encode()))


def accept_reply(
    secret: Secret, request: authentication_pb2.HandshakeRequest, reply: authentication_pb2.HandshakeReply
) -> ClientSession:
    """Return the client's session. Raise UnavailableError if the server has not proved that it knows the token."""
    keys = SessionKeys.of(secret.token, request, reply)
    right = len(reply.server_nonce) == NONCE_BYTES and len(reply.session) == SESSION_BYTES
    if not (right and hmac.compare_digest(reply.server_proof, keys.handshake_proof())):
        raise UnavailableError(UNPROVEN)
    return ClientSession(keys, reply.session.hex())


UNPROVEN = "what answers there has not proved that it knows the cluster token: another program may have taken the port"


class ClientSession:
    """A client's side of a session. Any thread may request proofs."""

    def __init__(self, keys: SessionKeys, name: str) -> None:
        self.keys, self._name = keys, name
        self._counters = itertools.count(1)

    def next_call(self, path: str) -> tuple[str, str]:
        """Return the header of a new call, and the proof that the server must answer."""
        counter = next(self._counters)
        header = f"{_SCHEME} {self._name} {counter} {self.keys.call_proof(path, counter)}"
        return header, self.keys.answer_proof(path, counter)


class CounterWindow:
    """The counters received in a session: each is valid once, unless it is too far below the highest."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 1  # bit n: highest - n was received; 0 is never valid

    def take(self, counter: int) -> bool:
        """Return whether the counter is valid, and invalidate it."""
        ahead = counter - self._highest
        if ahead > 0:
            self._seen = (self._seen << ahead if ahead < WINDOW else 0) & ((1 << WINDOW) - 1) | 1
            self._highest = counter
            return True
        bit = 1 << -ahead
        if -ahead >= WINDOW or counter < 1 or self._seen & bit:
            return False
        self._seen |= bit
        return True


@dataclass(slots=True, eq=False)
class ServerSession:
    """A server's side of a session; guarded by the owner's lock."""

    name: str
    token_id: bytes
    client_nonce: bytes
    keys: SessionKeys = field(repr=False)
    reply: authentication_pb2.HandshakeReply
    last_use: float
    used: bool = False
    open_calls: int = 0
    window: CounterWindow = field(default_factory=CounterWindow)


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The header of a call."""

    session: str
    counter: int
    proof: str

    @classmethod
    def parse(cls, text: str) -> CallHeader | None:
        if (match := _HEADER.fullmatch(text)) is None:
            return None
        session, counter, proof = match.groups()
        return cls(session, int(counter), proof)


class SessionTable:
    """The sessions of a server, whose clients know a token. Guarded by its owner's lock."""

    def __init__(self, role: str, index: int, boot_id: int) -> None:
        self._role, self._index, self._boot_id = role, index, boot_id
        self._by_name: dict[str, ServerSession] = {}
        self._by_nonce: dict[bytes, ServerSession] = {}
        self._pending: dict[str, ServerSession] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._by_name)

    def open(
        self, secrets_: Iterable[Secret], request: authentication_pb2.HandshakeRequest, now: float
    ) -> ServerSession:
        """Answer a client. AuthenticationError if it proves none of the secrets, ProtocolError if malformed."""
        if request.version != VERSION:
            raise ProtocolError(f"a handshake of version {request.version}; this role speaks {VERSION}")
        if len(request.client_nonce) != NONCE_BYTES or len(request.address) > MAX_ADDRESS:
            raise ProtocolError(
                f"a handshake with a nonce of {len(request.client_nonce)} bytes and an address of "
                f"{len(request.address)} characters; they have {NONCE_BYTES}, and at most {MAX_ADDRESS}"
            )
        secret = next((known for known in secrets_ if known.token_id == request.token_id), None)
        if secret is None or not hmac.compare_digest(request.request_proof, _request_proof(secret, request)):
            raise AuthenticationError("another token")
        if (known := self._by_nonce.get(request.client_nonce)) is not None:
            if known.used:
                raise AuthenticationError("a replayed handshake, whose session is already in use")
            return known
        reply = authentication_pb2.HandshakeReply(
            version=VERSION,
            server_nonce=secrets.token_bytes(NONCE_BYTES),
            session=secrets.token_bytes(SESSION_BYTES),
            role=self._role,
            index=self._index,
            boot_id=self._boot_id,
        )
        keys = SessionKeys.of(secret.token, request, reply)
        reply.server_proof = keys.handshake_proof()
        session = ServerSession(reply.session.hex(), secret.token_id, request.client_nonce, keys, reply, now)
        if len(self._pending) >= MAX_PENDING:
            self.drop(next(iter(self._pending.values())))
        if len(self._by_name) >= MAX_SESSIONS:
            idle = (session for session in self._by_name.values() if not session.open_calls)
            if (longest := min(idle, key=lambda session: session.last_use, default=None)) is None:
                raise AuthenticationError(f"there are {MAX_SESSIONS:,} sessions with open calls; more are not accepted")
            self.drop(longest)
        self._by_name[session.name] = self._by_nonce[session.client_nonce] = self._pending[session.name] = session
        return session

    def admit(self, header: CallHeader, path: str, now: float) -> ServerSession | None:
        """Return the session of a call, or None if there is none or the call's proof is wrong or reused."""
        session = self._by_name.get(header.session)
        if session is None or not hmac.compare_digest(header.proof, session.keys.call_proof(path, header.counter)):
            return None
        if not session.window.take(header.counter):
            return None
        self.use(session, now)
        return session

    def knows(self, name: str) -> bool:
        return name in self._by_name

    def use(self, session: ServerSession, now: float) -> None:
        """Note that the session's client has proved itself."""
        session.used, session.last_use = True, now
        self._pending.pop(session.name, None)

    def drop(self, session: ServerSession) -> None:
        self._by_name.pop(session.name, None)
        self._pending.pop(session.name, None)
        self._by_nonce.pop(session.client_nonce, None)

    def expire(self, now: float) -> None:
        for session in list(self._by_name.values()):
            limit = IDLE_SECONDS if session.used else PENDING_SECONDS
            if not session.open_calls and now - session.last_use > limit:
                self.drop(session)

    def drop_tokens(self, accepted: frozenset[bytes]) -> None:
        for session in list(self._by_name.values()):
            if session.token_id not in accepted:
                self.drop(session)
