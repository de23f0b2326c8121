"""How two processes prove to each other that they know the cluster token. Pure: no connections, no clock.

`proto/pscluster/v1/authentication.proto` has the scheme byte by byte, with a test vector, and what it does not promise.
The form is that of TLS 1.3 with a pre-shared key (RFC 8446, 2.2), without a key exchange: a nonce of each side and what
both know of the connection make the keys, one a direction.

A session of the server:

    --a request whose proof is right--> opened --a call with a proof, or the data plane's--> used
    opened, for `PENDING_SECONDS` ----> gone
    used, no call open, for `IDLE_SECONDS` ----> gone
    any --its token is accepted no more----> gone, and its open calls are ended by who holds them

A request that comes again, a copy of what somebody read on its way, gets the answer of the first and makes nothing, and
is refused once the session is used: of what it opens there is only one session, and on the data plane one connection.
Sessions that are opened and never used are few; a new one takes the place of the oldest. So somebody without a token
makes the server compute one HMAC for a request, and remember nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from pscluster.core.errors import AuthenticationError, ProtocolError, UnavailableError
from pscluster.v1 import authentication_pb2

VERSION = 1
NONCE_BYTES = 32
SESSION_BYTES = 16
MAX_ADDRESS = 512
"""Characters of the address that a client says it has dialled."""

MAX_PENDING = 1024
MAX_SESSIONS = 8192
PENDING_SECONDS = 60.0
IDLE_SECONDS = 300.0
WINDOW = 4096
"""How far behind the highest counter that has come another one may be."""

_NAME = b"pscluster/1"
_SCHEME = "Pscluster1"
_PROOF_DIGITS = 64


def fields(*parts: bytes) -> bytes:
    """Join byte strings so that no two lists of them give the same: each behind its length."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def mac(key: bytes, message: bytes) -> bytes:
    """Return HMAC-SHA-256."""
    return hmac.digest(key, message, "sha256")


def _derive(secret: bytes, salt: bytes, label: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256  # imported where there is a token: it takes a while
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt or None, _NAME + b" " + label).derive(secret)


@dataclass(frozen=True, slots=True)
class Secret:
    """One token, as it is proved.

    Attributes:
        token_id: tells the tokens of a file apart, and nothing else of them.
    """

    token: bytes = field(repr=False)
    token_id: bytes
    request_key: bytes = field(repr=False)

    @classmethod
    def of(cls, token: str) -> Secret:
        """Derive what does not depend on a handshake."""
        known = token.encode()
        return cls(known, mac(known, _NAME + b" token id")[:8], _derive(known, b"", b"request"))


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys of a session, one a direction, and the proofs that are made with them."""

    client: bytes = field(repr=False)
    server: bytes = field(repr=False)

    @classmethod
    def of(
        cls,
        token: bytes,
        request: authentication_pb2.HandshakeRequest,
        reply: authentication_pb2.HandshakeReply,
    ) -> SessionKeys:
        """Derive them from the token and the whole handshake."""
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
        """The server's, in its reply."""
        return mac(self.server, b"handshake")

    def call_proof(self, path: str, counter: int) -> str:
        """The client's, of a call."""
        return mac(self.client, fields(b"call", path.encode(), b"%d" % counter)).hex()

    def answer_proof(self, path: str, counter: int) -> str:
        """The server's, of the same call."""
        return mac(self.server, fields(b"answer", path.encode(), b"%d" % counter)).hex()

    def data_proof(self) -> bytes:
        """The client's, of a connection of the data plane."""
        return mac(self.client, b"data")


def make_request(
    secret: Secret, address: str, client_nonce: bytes | None = None
) -> authentication_pb2.HandshakeRequest:
    """What a client begins with."""
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
    secret: Secret,
    request: authentication_pb2.HandshakeRequest,
    reply: authentication_pb2.HandshakeReply,
) -> ClientSession:
    """Return the client's session, once the server has proved that it knows the token.

    Raises:
        UnavailableError: it has not: whoever it is, it is not the role that is looked for.
    """
    keys = SessionKeys.of(secret.token, request, reply)
    right = len(reply.server_nonce) == NONCE_BYTES and len(reply.session) == SESSION_BYTES
    if not (right and hmac.compare_digest(reply.server_proof, keys.handshake_proof())):
        raise UnavailableError(UNPROVEN)
    return ClientSession(keys, reply.session.hex())


UNPROVEN = "what answers there has not proved that it knows the cluster token: another program may have taken the port"


class ClientSession:
    """A session as the client has it. Any thread may ask it for proofs."""

    def __init__(self, keys: SessionKeys, name: str) -> None:
        self._keys, self._name = keys, name
        self._counters = itertools.count(1)

    @property
    def keys(self) -> SessionKeys:
        """Its keys."""
        return self._keys

    def next_call(self, path: str) -> tuple[str, str]:
        """Return the header of a new call, and what the server has to answer."""
        counter = next(self._counters)
        header = f"{_SCHEME} {self._name} {counter} {self._keys.call_proof(path, counter)}"
        return header, self._keys.answer_proof(path, counter)


class CounterWindow:
    """Which counters of a session have come: each is good once, if it is not too far behind the highest."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 1  # bit n: highest - n has come; 0 is never good

    def take(self, counter: int) -> bool:
        """Is it good? It is not, from then on."""
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
    """A session as the server has it; guarded by the owner's lock."""

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
    """What a call says of itself."""

    session: str
    counter: int
    proof: str

    @classmethod
    def parse(cls, text: str) -> CallHeader | None:
        """None: it is none."""
        scheme, *rest = text.split(" ")
        if scheme != _SCHEME or len(rest) != 3:
            return None
        session, digits, proof = rest
        if len(session) != 2 * SESSION_BYTES or len(proof) != _PROOF_DIGITS or not text.isascii():
            return None
        if not (digits.isdecimal() and len(digits) <= 18):
            return None
        return cls(session, int(digits), proof)


class SessionTable:
    """The sessions of a server: who has shown that it knows a token. Guarded by its owner's lock."""

    def __init__(self, role: str, index: int, boot_id: int) -> None:
        self._role, self._index, self._boot_id = role, index, boot_id
        self._by_name: dict[str, ServerSession] = {}
        self._by_nonce: dict[bytes, ServerSession] = {}
        self._pending: dict[str, ServerSession] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._by_name)

    def open(
        self, secrets_: Iterable[Secret], request: authentication_pb2.HandshakeRequest, now: float
    ) -> ServerSession:
        """Answer a client that has proved that it knows one of these tokens.

        Raises:
            AuthenticationError: it has not.
            ProtocolError: what came is no request of this version.
        """
        if request.version != VERSION:
            raise ProtocolError(f"a handshake of version {request.version}, this role speaks {VERSION}")
        if len(request.client_nonce) != NONCE_BYTES or len(request.address) > MAX_ADDRESS:
            raise ProtocolError(
                f"a handshake with a nonce of {len(request.client_nonce)} bytes and an address of "
                f"{len(request.address)} characters; it has {NONCE_BYTES}, and {MAX_ADDRESS} at most"
            )
        secret = next((each for each in secrets_ if each.token_id == request.token_id), None)
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
            idle = (each for each in self._by_name.values() if not each.open_calls)
            if (longest := min(idle, key=lambda each: each.last_use, default=None)) is None:
                raise AuthenticationError(f"there are {MAX_SESSIONS:,} sessions with open calls, the limit")
            self.drop(longest)
        self._by_name[session.name] = self._by_nonce[session.client_nonce] = self._pending[session.name] = session
        return session

    def admit(self, header: CallHeader, path: str, now: float) -> ServerSession | None:
        """The session of a call whose proof is right and new; None: it is not, or there is no such session."""
        session = self._by_name.get(header.session)
        if session is None or not hmac.compare_digest(header.proof, session.keys.call_proof(path, header.counter)):
            return None
        if not session.window.take(header.counter):
            return None
        self.use(session, now)
        return session

    def knows(self, name: str) -> bool:
        """Is there a session of this name?"""
        return name in self._by_name

    def use(self, session: ServerSession, now: float) -> None:
        """Its client has proved itself."""
        session.used, session.last_use = True, now
        self._pending.pop(session.name, None)

    def drop(self, session: ServerSession) -> None:
        """Forget it."""
        for known, key in ((self._by_name, session.name), (self._pending, session.name)):
            known.pop(key, None)
        self._by_nonce.pop(session.client_nonce, None)

    def expire(self, now: float) -> None:
        """Forget those that nobody used for long."""
        for session in list(self._by_name.values()):
            limit = IDLE_SECONDS if session.used else PENDING_SECONDS
            if not session.open_calls and now - session.last_use > limit:
                self.drop(session)

    def drop_tokens(self, accepted: frozenset[bytes]) -> None:
        """Forget the sessions of tokens, by their ids, that are accepted no more."""
        for session in list(self._by_name.values()):
            if session.token_id not in accepted:
                self.drop(session)
