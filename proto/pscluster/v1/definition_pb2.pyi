from pscluster.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Definition(_message.Message):
    __slots__ = ("digest", "module", "qualname", "source_path", "source_digest", "folders", "arguments", "inner", "sizes", "arrays", "pickle", "renamed")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    QUALNAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PATH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FOLDERS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    RENAMED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    module: str
    qualname: str
    source_path: str
    source_digest: str
    folders: _containers.RepeatedScalarFieldContainer[str]
    arguments: _value_pb2.Value
    inner: _containers.RepeatedCompositeFieldContainer[Definition]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    arrays: bytes
    pickle: bytes
    renamed: _containers.RepeatedCompositeFieldContainer[Renamed]
    def __init__(self, digest: _Optional[str] = ..., module: _Optional[str] = ..., qualname: _Optional[str] = ..., source_path: _Optional[str] = ..., source_digest: _Optional[str] = ..., folders: _Optional[_Iterable[str]] = ..., arguments: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., inner: _Optional[_Iterable[_Union[Definition, _Mapping]]] = ..., sizes: _Optional[_Iterable[int]] = ..., arrays: _Optional[bytes] = ..., pickle: _Optional[bytes] = ..., renamed: _Optional[_Iterable[_Union[Renamed, _Mapping]]] = ...) -> None: ...

class Renamed(_message.Message):
    __slots__ = ("kind", "key", "new_kind", "new_key")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEW_KIND_FIELD_NUMBER: _ClassVar[int]
    NEW_KEY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    key: str
    new_kind: str
    new_key: str
    def __init__(self, kind: _Optional[str] = ..., key: _Optional[str] = ..., new_kind: _Optional[str] = ..., new_key: _Optional[str] = ...) -> None: ...
