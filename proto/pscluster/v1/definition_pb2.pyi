from pscluster.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Definition(_message.Message):
    __slots__ = ("digest", "module", "qualname", "source_path", "source_digest", "folders", "assembly", "arrays", "pickle", "renamed")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    QUALNAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PATH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FOLDERS_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLY_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    RENAMED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    module: str
    qualname: str
    source_path: str
    source_digest: str
    folders: _containers.RepeatedScalarFieldContainer[str]
    assembly: Assembly
    arrays: bytes
    pickle: bytes
    renamed: _containers.RepeatedCompositeFieldContainer[Renamed]
    def __init__(self, digest: _Optional[str] = ..., module: _Optional[str] = ..., qualname: _Optional[str] = ..., source_path: _Optional[str] = ..., source_digest: _Optional[str] = ..., folders: _Optional[_Iterable[str]] = ..., assembly: _Optional[_Union[Assembly, _Mapping]] = ..., arrays: _Optional[bytes] = ..., pickle: _Optional[bytes] = ..., renamed: _Optional[_Iterable[_Union[Renamed, _Mapping]]] = ...) -> None: ...

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

class Assembly(_message.Message):
    __slots__ = ("files", "parts", "sizes")
    FILES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[SourceFile]
    parts: _containers.RepeatedCompositeFieldContainer[AssemblyPart]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, files: _Optional[_Iterable[_Union[SourceFile, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[AssemblyPart, _Mapping]]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class SourceFile(_message.Message):
    __slots__ = ("module", "path", "digest", "globals", "own_globals")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GLOBALS_FIELD_NUMBER: _ClassVar[int]
    OWN_GLOBALS_FIELD_NUMBER: _ClassVar[int]
    module: str
    path: str
    digest: str
    globals: _value_pb2.Value
    own_globals: _value_pb2.Value
    def __init__(self, module: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., globals: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., own_globals: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...

class AssemblyPart(_message.Message):
    __slots__ = ("kind", "file", "module", "name", "line", "ordinal", "value")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[AssemblyPart.Kind]
        NAMED: _ClassVar[AssemblyPart.Kind]
        CODE: _ClassVar[AssemblyPart.Kind]
        PARTIAL: _ClassVar[AssemblyPart.Kind]
        METHOD: _ClassVar[AssemblyPart.Kind]
        OBJECT: _ClassVar[AssemblyPart.Kind]
        MODULE: _ClassVar[AssemblyPart.Kind]
        PATH: _ClassVar[AssemblyPart.Kind]
        DTYPE: _ClassVar[AssemblyPart.Kind]
    KIND_UNSPECIFIED: AssemblyPart.Kind
    NAMED: AssemblyPart.Kind
    CODE: AssemblyPart.Kind
    PARTIAL: AssemblyPart.Kind
    METHOD: AssemblyPart.Kind
    OBJECT: AssemblyPart.Kind
    MODULE: AssemblyPart.Kind
    PATH: AssemblyPart.Kind
    DTYPE: AssemblyPart.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    kind: AssemblyPart.Kind
    file: int
    module: str
    name: str
    line: int
    ordinal: int
    value: _value_pb2.Value
    def __init__(self, kind: _Optional[_Union[AssemblyPart.Kind, str]] = ..., file: _Optional[int] = ..., module: _Optional[str] = ..., name: _Optional[str] = ..., line: _Optional[int] = ..., ordinal: _Optional[int] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...
