from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Identity(_message.Message):
    __slots__ = ("version", "role", "index", "incarnation", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: str
    role: str
    index: int
    incarnation: int
    name: str
    def __init__(self, version: _Optional[str] = ..., role: _Optional[str] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("identity", "state", "uptime_seconds", "coordinator", "variables", "variable_bytes", "functions_done", "functions_running", "detail")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_DONE_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    state: str
    uptime_seconds: float
    coordinator: str
    variables: int
    variable_bytes: int
    functions_done: int
    functions_running: int
    detail: str
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., state: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., coordinator: _Optional[str] = ..., variables: _Optional[int] = ..., variable_bytes: _Optional[int] = ..., functions_done: _Optional[int] = ..., functions_running: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("coordinator", "job", "num_workers", "seed")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    coordinator: Identity
    job: int
    num_workers: int
    seed: int
    def __init__(self, coordinator: _Optional[_Union[Identity, _Mapping]] = ..., job: _Optional[int] = ..., num_workers: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class AttachEvent(_message.Message):
    __slots__ = ("kind", "identity", "incarnation")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[AttachEvent.Kind]
        ATTACHED: _ClassVar[AttachEvent.Kind]
        LEAVING: _ClassVar[AttachEvent.Kind]
    KIND_UNSPECIFIED: AttachEvent.Kind
    ATTACHED: AttachEvent.Kind
    LEAVING: AttachEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    kind: AttachEvent.Kind
    identity: Identity
    incarnation: int
    def __init__(self, kind: _Optional[_Union[AttachEvent.Kind, str]] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class EndJobRequest(_message.Message):
    __slots__ = ("job", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: int
    reason: str
    def __init__(self, job: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class EndJobReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
