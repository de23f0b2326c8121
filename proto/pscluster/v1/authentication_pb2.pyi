from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeRequest(_message.Message):
    __slots__ = ("version", "client_nonce", "address", "token_id", "request_proof")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NONCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PROOF_FIELD_NUMBER: _ClassVar[int]
    version: int
    client_nonce: bytes
    address: str
    token_id: bytes
    request_proof: bytes
    def __init__(self, version: _Optional[int] = ..., client_nonce: _Optional[bytes] = ..., address: _Optional[str] = ..., token_id: _Optional[bytes] = ..., request_proof: _Optional[bytes] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("version", "server_nonce", "session", "role", "index", "boot_id", "server_proof")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_NONCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_PROOF_FIELD_NUMBER: _ClassVar[int]
    version: int
    server_nonce: bytes
    session: bytes
    role: str
    index: int
    boot_id: int
    server_proof: bytes
    def __init__(self, version: _Optional[int] = ..., server_nonce: _Optional[bytes] = ..., session: _Optional[bytes] = ..., role: _Optional[str] = ..., index: _Optional[int] = ..., boot_id: _Optional[int] = ..., server_proof: _Optional[bytes] = ...) -> None: ...
