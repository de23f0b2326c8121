from pscluster.v1 import node_pb2 as _node_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("identity", "port", "host", "path", "task", "secret", "job_name", "last_index", "had_index")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_INDEX_FIELD_NUMBER: _ClassVar[int]
    HAD_INDEX_FIELD_NUMBER: _ClassVar[int]
    identity: _node_pb2.Identity
    port: int
    host: str
    path: str
    task: str
    secret: bytes
    job_name: str
    last_index: int
    had_index: bool
    def __init__(self, identity: _Optional[_Union[_node_pb2.Identity, _Mapping]] = ..., port: _Optional[int] = ..., host: _Optional[str] = ..., path: _Optional[str] = ..., task: _Optional[str] = ..., secret: _Optional[bytes] = ..., job_name: _Optional[str] = ..., last_index: _Optional[int] = ..., had_index: bool = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("index", "address", "coordinator", "job_name", "waits")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    coordinator: str
    job_name: str
    waits: bool
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., coordinator: _Optional[str] = ..., job_name: _Optional[str] = ..., waits: bool = ...) -> None: ...
