from pscluster.v1 import definition_pb2 as _definition_pb2
from pscluster.v1 import ps_pb2 as _ps_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SavedArray(_message.Message):
    __slots__ = ("name", "file", "offset", "bytes", "dtype", "shape", "crc32")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    name: str
    file: str
    offset: int
    bytes: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    crc32: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., crc32: _Optional[_Iterable[int]] = ...) -> None: ...

class SavedKeys(_message.Message):
    __slots__ = ("function", "incarnation", "sequence", "nth", "key")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NTH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    function: int
    incarnation: int
    sequence: int
    nth: _containers.RepeatedScalarFieldContainer[int]
    key: int
    def __init__(self, function: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., nth: _Optional[_Iterable[int]] = ..., key: _Optional[int] = ...) -> None: ...

class SavedShard(_message.Message):
    __slots__ = ("variable", "shard", "updates", "steps", "arrays", "keys")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    updates: int
    steps: _containers.ScalarMap[int, int]
    arrays: _containers.RepeatedCompositeFieldContainer[SavedArray]
    keys: _containers.RepeatedCompositeFieldContainer[SavedKeys]
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., updates: _Optional[int] = ..., steps: _Optional[_Mapping[int, int]] = ..., arrays: _Optional[_Iterable[_Union[SavedArray, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[SavedKeys, _Mapping]]] = ...) -> None: ...

class SavedOptimizer(_message.Message):
    __slots__ = ("spec", "rule", "by_value")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    BY_VALUE_FIELD_NUMBER: _ClassVar[int]
    spec: _ps_pb2.OptimizerSpec
    rule: _definition_pb2.Definition
    by_value: bool
    def __init__(self, spec: _Optional[_Union[_ps_pb2.OptimizerSpec, _Mapping]] = ..., rule: _Optional[_Union[_definition_pb2.Definition, _Mapping]] = ..., by_value: bool = ...) -> None: ...

class SavedClient(_message.Message):
    __slots__ = ("incarnation", "settled")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    settled: int
    def __init__(self, incarnation: _Optional[int] = ..., settled: _Optional[int] = ...) -> None: ...

class SavedLoss(_message.Message):
    __slots__ = ("variable", "shard", "updates", "since")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    updates: int
    since: int
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., updates: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class SavedLosses(_message.Message):
    __slots__ = ("holding", "lost", "life")
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    holding: int
    lost: _containers.RepeatedCompositeFieldContainer[SavedLoss]
    life: int
    def __init__(self, holding: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[SavedLoss, _Mapping]]] = ..., life: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("server", "job", "holding", "generation", "saved_at", "variables", "optimizers", "shards", "closed", "finished_starts", "finished_stops", "clients", "lineage", "epoch", "logged", "job_name", "term", "lives")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STOPS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LIVES_FIELD_NUMBER: _ClassVar[int]
    server: int
    job: int
    holding: int
    generation: int
    saved_at: float
    variables: _containers.RepeatedCompositeFieldContainer[_ps_pb2.VariableSpec]
    optimizers: _containers.RepeatedCompositeFieldContainer[SavedOptimizer]
    shards: _containers.RepeatedCompositeFieldContainer[SavedShard]
    closed: _containers.RepeatedScalarFieldContainer[int]
    finished_starts: _containers.RepeatedScalarFieldContainer[int]
    finished_stops: _containers.RepeatedScalarFieldContainer[int]
    clients: _containers.RepeatedCompositeFieldContainer[SavedClient]
    lineage: int
    epoch: int
    logged: bool
    job_name: str
    term: int
    lives: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, server: _Optional[int] = ..., job: _Optional[int] = ..., holding: _Optional[int] = ..., generation: _Optional[int] = ..., saved_at: _Optional[float] = ..., variables: _Optional[_Iterable[_Union[_ps_pb2.VariableSpec, _Mapping]]] = ..., optimizers: _Optional[_Iterable[_Union[SavedOptimizer, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[SavedShard, _Mapping]]] = ..., closed: _Optional[_Iterable[int]] = ..., finished_starts: _Optional[_Iterable[int]] = ..., finished_stops: _Optional[_Iterable[int]] = ..., clients: _Optional[_Iterable[_Union[SavedClient, _Mapping]]] = ..., lineage: _Optional[int] = ..., epoch: _Optional[int] = ..., logged: bool = ..., job_name: _Optional[str] = ..., term: _Optional[int] = ..., lives: _Optional[_Iterable[int]] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("update", "updates", "total_bytes", "last", "holding", "optimizers", "epoch", "pad", "payload")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    update: _ps_pb2.UpdateRequest
    updates: _containers.RepeatedScalarFieldContainer[int]
    total_bytes: int
    last: bool
    holding: int
    optimizers: _containers.RepeatedCompositeFieldContainer[SavedOptimizer]
    epoch: int
    pad: bytes
    payload: bytes
    def __init__(self, update: _Optional[_Union[_ps_pb2.UpdateRequest, _Mapping]] = ..., updates: _Optional[_Iterable[int]] = ..., total_bytes: _Optional[int] = ..., last: bool = ..., holding: _Optional[int] = ..., optimizers: _Optional[_Iterable[_Union[SavedOptimizer, _Mapping]]] = ..., epoch: _Optional[int] = ..., pad: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
