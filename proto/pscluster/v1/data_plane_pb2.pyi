from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataMetadata(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class DataCall(_message.Message):
    __slots__ = ("path", "metadata")
    PATH_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    path: str
    metadata: _containers.RepeatedCompositeFieldContainer[DataMetadata]
    def __init__(self, path: _Optional[str] = ..., metadata: _Optional[_Iterable[_Union[DataMetadata, _Mapping]]] = ...) -> None: ...

class DataStatus(_message.Message):
    __slots__ = ("code", "details", "trailing")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    TRAILING_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    trailing: _containers.RepeatedCompositeFieldContainer[DataMetadata]
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., trailing: _Optional[_Iterable[_Union[DataMetadata, _Mapping]]] = ...) -> None: ...
