from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Definition(_message.Message):
    __slots__ = ("digest", "module", "qualname", "source_path", "source_digest", "pickle")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    QUALNAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PATH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    module: str
    qualname: str
    source_path: str
    source_digest: str
    pickle: bytes
    def __init__(self, digest: _Optional[str] = ..., module: _Optional[str] = ..., qualname: _Optional[str] = ..., source_path: _Optional[str] = ..., source_digest: _Optional[str] = ..., pickle: _Optional[bytes] = ...) -> None: ...
