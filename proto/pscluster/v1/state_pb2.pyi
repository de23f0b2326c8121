from pscluster.v1 import definition_pb2 as _definition_pb2
from pscluster.v1 import ps_pb2 as _ps_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SavedShard(_message.Message):
    __slots__ = ("variable", "shard", "updates", "steps", "arrays", "keys", "texts")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    updates: int
    steps: _containers.ScalarMap[int, int]
    arrays: _containers.RepeatedCompositeFieldContainer[_ps_pb2.SavedTensor]
    keys: _containers.RepeatedCompositeFieldContainer[_ps_pb2.SavedKeys]
    texts: _containers.ScalarMap[str, str]
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., updates: _Optional[int] = ..., steps: _Optional[_Mapping[int, int]] = ..., arrays: _Optional[_Iterable[_Union[_ps_pb2.SavedTensor, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[_ps_pb2.SavedKeys, _Mapping]]] = ..., texts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SavedOptimizer(_message.Message):
    __slots__ = ("spec", "rule", "by_value")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    BY_VALUE_FIELD_NUMBER: _ClassVar[int]
    spec: _ps_pb2.OptimizerSpec
    rule: _definition_pb2.Definition
    by_value: bool
    def __init__(self, spec: _Optional[_Union[_ps_pb2.OptimizerSpec, _Mapping]] = ..., rule: _Optional[_Union[_definition_pb2.Definition, _Mapping]] = ..., by_value: bool = ...) -> None: ...

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
    __slots__ = ("store_id", "lost", "boot_id")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    store_id: int
    lost: _containers.RepeatedCompositeFieldContainer[SavedLoss]
    boot_id: int
    def __init__(self, store_id: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[SavedLoss, _Mapping]]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("server", "job", "store_id", "generation", "saved_at", "variables", "optimizers", "shards", "closed", "finished_starts", "finished_stops", "clients", "job_id", "coordinator_number", "logged", "log_generation", "job_name", "num_servers", "metadata", "term", "boot_ids")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STOPS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    LOG_GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BOOT_IDS_FIELD_NUMBER: _ClassVar[int]
    server: int
    job: int
    store_id: int
    generation: int
    saved_at: float
    variables: _containers.RepeatedCompositeFieldContainer[_ps_pb2.VariableSpec]
    optimizers: _containers.RepeatedCompositeFieldContainer[SavedOptimizer]
    shards: _containers.RepeatedCompositeFieldContainer[SavedShard]
    closed: _containers.RepeatedScalarFieldContainer[int]
    finished_starts: _containers.RepeatedScalarFieldContainer[int]
    finished_stops: _containers.RepeatedScalarFieldContainer[int]
    clients: _containers.RepeatedCompositeFieldContainer[_ps_pb2.SavedClient]
    job_id: int
    coordinator_number: int
    logged: bool
    log_generation: int
    job_name: str
    num_servers: int
    metadata: SavedShard
    term: int
    boot_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, server: _Optional[int] = ..., job: _Optional[int] = ..., store_id: _Optional[int] = ..., generation: _Optional[int] = ..., saved_at: _Optional[float] = ..., variables: _Optional[_Iterable[_Union[_ps_pb2.VariableSpec, _Mapping]]] = ..., optimizers: _Optional[_Iterable[_Union[SavedOptimizer, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[SavedShard, _Mapping]]] = ..., closed: _Optional[_Iterable[int]] = ..., finished_starts: _Optional[_Iterable[int]] = ..., finished_stops: _Optional[_Iterable[int]] = ..., clients: _Optional[_Iterable[_Union[_ps_pb2.SavedClient, _Mapping]]] = ..., job_id: _Optional[int] = ..., coordinator_number: _Optional[int] = ..., logged: bool = ..., log_generation: _Optional[int] = ..., job_name: _Optional[str] = ..., num_servers: _Optional[int] = ..., metadata: _Optional[_Union[SavedShard, _Mapping]] = ..., term: _Optional[int] = ..., boot_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TableChange(_message.Message):
    __slots__ = ("item", "evicted", "made", "now")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    item: int
    evicted: bytes
    made: bytes
    now: int
    def __init__(self, item: _Optional[int] = ..., evicted: _Optional[bytes] = ..., made: _Optional[bytes] = ..., now: _Optional[int] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("update", "updates", "total_bytes", "last", "store_id", "optimizers", "coordinator_number", "tables", "pad", "payload")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    update: _ps_pb2.UpdateRequest
    updates: _containers.RepeatedScalarFieldContainer[int]
    total_bytes: int
    last: bool
    store_id: int
    optimizers: _containers.RepeatedCompositeFieldContainer[SavedOptimizer]
    coordinator_number: int
    tables: _containers.RepeatedCompositeFieldContainer[TableChange]
    pad: bytes
    payload: bytes
    def __init__(self, update: _Optional[_Union[_ps_pb2.UpdateRequest, _Mapping]] = ..., updates: _Optional[_Iterable[int]] = ..., total_bytes: _Optional[int] = ..., last: bool = ..., store_id: _Optional[int] = ..., optimizers: _Optional[_Iterable[_Union[SavedOptimizer, _Mapping]]] = ..., coordinator_number: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableChange, _Mapping]]] = ..., pad: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
