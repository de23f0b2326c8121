from pscluster.v1 import ps_pb2 as _ps_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Identity(_message.Message):
    __slots__ = ("version", "role", "index", "boot_id", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: str
    role: str
    index: int
    boot_id: int
    name: str
    def __init__(self, version: _Optional[str] = ..., role: _Optional[str] = ..., index: _Optional[int] = ..., boot_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("identity", "num_ps")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUM_PS_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    num_ps: int
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., num_ps: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("identity", "store_id", "job_id", "coordinator_number", "job_name", "num_servers", "holder", "data_port", "address", "workers")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    store_id: int
    job_id: int
    coordinator_number: int
    job_name: str
    num_servers: int
    holder: str
    data_port: int
    address: str
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., store_id: _Optional[int] = ..., job_id: _Optional[int] = ..., coordinator_number: _Optional[int] = ..., job_name: _Optional[str] = ..., num_servers: _Optional[int] = ..., holder: _Optional[str] = ..., data_port: _Optional[int] = ..., address: _Optional[str] = ..., workers: _Optional[_Iterable[int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("busiest", "recorded", "shards")
    BUSIEST_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    busiest: int
    recorded: bool
    shards: bool
    def __init__(self, busiest: _Optional[int] = ..., recorded: bool = ..., shards: bool = ...) -> None: ...

class ShardLoad(_message.Message):
    __slots__ = ("shard", "bytes", "traffic")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    shard: int
    bytes: int
    traffic: float
    def __init__(self, shard: _Optional[int] = ..., bytes: _Optional[int] = ..., traffic: _Optional[float] = ...) -> None: ...

class TableLoad(_message.Message):
    __slots__ = ("rows", "capacity", "rows_read", "rows_found", "rows_made", "rows_evicted", "rows_not_admitted")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ROWS_READ_FIELD_NUMBER: _ClassVar[int]
    ROWS_FOUND_FIELD_NUMBER: _ClassVar[int]
    ROWS_MADE_FIELD_NUMBER: _ClassVar[int]
    ROWS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_NOT_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    rows: int
    capacity: int
    rows_read: int
    rows_found: int
    rows_made: int
    rows_evicted: int
    rows_not_admitted: int
    def __init__(self, rows: _Optional[int] = ..., capacity: _Optional[int] = ..., rows_read: _Optional[int] = ..., rows_found: _Optional[int] = ..., rows_made: _Optional[int] = ..., rows_evicted: _Optional[int] = ..., rows_not_admitted: _Optional[int] = ...) -> None: ...

class VariableLoad(_message.Message):
    __slots__ = ("name", "bytes", "reads", "read_bytes", "updates", "update_bytes", "rows", "shape", "shards", "row_order", "table")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ROW_ORDER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    reads: int
    read_bytes: int
    updates: int
    update_bytes: int
    rows: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardLoad]
    row_order: str
    table: TableLoad
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., reads: _Optional[int] = ..., read_bytes: _Optional[int] = ..., updates: _Optional[int] = ..., update_bytes: _Optional[int] = ..., rows: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., shards: _Optional[_Iterable[_Union[ShardLoad, _Mapping]]] = ..., row_order: _Optional[str] = ..., table: _Optional[_Union[TableLoad, _Mapping]] = ...) -> None: ...

class Recorded(_message.Message):
    __slots__ = ("run", "asked", "served")
    class Run(_message.Message):
        __slots__ = ("function", "attempt", "received", "begin", "ready", "end", "waited", "how", "thread")
        FUNCTION_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        RECEIVED_FIELD_NUMBER: _ClassVar[int]
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        READY_FIELD_NUMBER: _ClassVar[int]
        END_FIELD_NUMBER: _ClassVar[int]
        WAITED_FIELD_NUMBER: _ClassVar[int]
        HOW_FIELD_NUMBER: _ClassVar[int]
        THREAD_FIELD_NUMBER: _ClassVar[int]
        function: int
        attempt: int
        received: float
        begin: float
        ready: float
        end: float
        waited: float
        how: str
        thread: str
        def __init__(self, function: _Optional[int] = ..., attempt: _Optional[int] = ..., received: _Optional[float] = ..., begin: _Optional[float] = ..., ready: _Optional[float] = ..., end: _Optional[float] = ..., waited: _Optional[float] = ..., how: _Optional[str] = ..., thread: _Optional[str] = ...) -> None: ...
    class Asked(_message.Message):
        __slots__ = ("function", "what", "server", "session", "nth", "begin", "end", "sent", "received")
        FUNCTION_FIELD_NUMBER: _ClassVar[int]
        WHAT_FIELD_NUMBER: _ClassVar[int]
        SERVER_FIELD_NUMBER: _ClassVar[int]
        SESSION_FIELD_NUMBER: _ClassVar[int]
        NTH_FIELD_NUMBER: _ClassVar[int]
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        END_FIELD_NUMBER: _ClassVar[int]
        SENT_FIELD_NUMBER: _ClassVar[int]
        RECEIVED_FIELD_NUMBER: _ClassVar[int]
        function: int
        what: str
        server: int
        session: str
        nth: int
        begin: float
        end: float
        sent: int
        received: int
        def __init__(self, function: _Optional[int] = ..., what: _Optional[str] = ..., server: _Optional[int] = ..., session: _Optional[str] = ..., nth: _Optional[int] = ..., begin: _Optional[float] = ..., end: _Optional[float] = ..., sent: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...
    class Served(_message.Message):
        __slots__ = ("session", "nth", "what", "begin", "end")
        SESSION_FIELD_NUMBER: _ClassVar[int]
        NTH_FIELD_NUMBER: _ClassVar[int]
        WHAT_FIELD_NUMBER: _ClassVar[int]
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        END_FIELD_NUMBER: _ClassVar[int]
        session: str
        nth: int
        what: str
        begin: float
        end: float
        def __init__(self, session: _Optional[str] = ..., nth: _Optional[int] = ..., what: _Optional[str] = ..., begin: _Optional[float] = ..., end: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    run: Recorded.Run
    asked: Recorded.Asked
    served: Recorded.Served
    def __init__(self, run: _Optional[_Union[Recorded.Run, _Mapping]] = ..., asked: _Optional[_Union[Recorded.Asked, _Mapping]] = ..., served: _Optional[_Union[Recorded.Served, _Mapping]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("number", "staleness", "wait_seconds", "dropped")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    number: int
    staleness: int
    wait_seconds: float
    dropped: int
    def __init__(self, number: _Optional[int] = ..., staleness: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., dropped: _Optional[int] = ...) -> None: ...

class WorkerAddress(_message.Message):
    __slots__ = ("index", "address", "tls_name")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_NAME_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    tls_name: str
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., tls_name: _Optional[str] = ...) -> None: ...

class ServerAddress(_message.Message):
    __slots__ = ("index", "address", "tls_name")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_NAME_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    tls_name: str
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., tls_name: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("identity", "state", "uptime_seconds", "coordinator", "variables", "variable_bytes", "functions_done", "functions_running", "detail", "lost_updates", "unsaved", "memory_bytes", "requests", "bytes_in", "bytes_out", "busiest", "function_seconds", "waited_seconds", "replicas", "functions_waiting", "workers", "moved_servers", "num_servers", "metrics_address", "clock", "recorded")
    class LostUpdatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_DONE_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOST_UPDATES_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    BUSIEST_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_WAITING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MOVED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    state: str
    uptime_seconds: float
    coordinator: str
    variables: int
    variable_bytes: int
    functions_done: int
    functions_running: int
    detail: str
    lost_updates: _containers.ScalarMap[str, int]
    unsaved: str
    memory_bytes: int
    requests: int
    bytes_in: int
    bytes_out: int
    busiest: _containers.RepeatedCompositeFieldContainer[VariableLoad]
    function_seconds: float
    waited_seconds: float
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    functions_waiting: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAddress]
    moved_servers: _containers.RepeatedCompositeFieldContainer[ServerAddress]
    num_servers: int
    metrics_address: str
    clock: float
    recorded: _containers.RepeatedCompositeFieldContainer[Recorded]
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., state: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., coordinator: _Optional[str] = ..., variables: _Optional[int] = ..., variable_bytes: _Optional[int] = ..., functions_done: _Optional[int] = ..., functions_running: _Optional[int] = ..., detail: _Optional[str] = ..., lost_updates: _Optional[_Mapping[str, int]] = ..., unsaved: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., requests: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., busiest: _Optional[_Iterable[_Union[VariableLoad, _Mapping]]] = ..., function_seconds: _Optional[float] = ..., waited_seconds: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., functions_waiting: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerAddress, _Mapping]]] = ..., moved_servers: _Optional[_Iterable[_Union[ServerAddress, _Mapping]]] = ..., num_servers: _Optional[int] = ..., metrics_address: _Optional[str] = ..., clock: _Optional[float] = ..., recorded: _Optional[_Iterable[_Union[Recorded, _Mapping]]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("coordinator", "job", "num_workers", "seed", "job_id", "coordinator_number", "job_name", "take_over", "store_id", "closed", "finished_starts", "finished_stops", "store_ids", "ps_timeout", "term", "ps_addresses", "workers", "moved_servers", "placed", "frozen", "arriving", "resized")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STOPS_FIELD_NUMBER: _ClassVar[int]
    STORE_IDS_FIELD_NUMBER: _ClassVar[int]
    PS_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PS_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MOVED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    RESIZED_FIELD_NUMBER: _ClassVar[int]
    coordinator: Identity
    job: int
    num_workers: int
    seed: int
    job_id: int
    coordinator_number: int
    job_name: str
    take_over: bool
    store_id: int
    closed: _containers.RepeatedScalarFieldContainer[int]
    finished_starts: _containers.RepeatedScalarFieldContainer[int]
    finished_stops: _containers.RepeatedScalarFieldContainer[int]
    store_ids: _containers.RepeatedScalarFieldContainer[int]
    ps_timeout: float
    term: int
    ps_addresses: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedScalarFieldContainer[int]
    moved_servers: _containers.RepeatedCompositeFieldContainer[ServerAddress]
    placed: _containers.RepeatedCompositeFieldContainer[_ps_pb2.VariableSpec]
    frozen: _containers.RepeatedCompositeFieldContainer[_ps_pb2.HeldShard]
    arriving: _containers.RepeatedCompositeFieldContainer[_ps_pb2.HeldShard]
    resized: bool
    def __init__(self, coordinator: _Optional[_Union[Identity, _Mapping]] = ..., job: _Optional[int] = ..., num_workers: _Optional[int] = ..., seed: _Optional[int] = ..., job_id: _Optional[int] = ..., coordinator_number: _Optional[int] = ..., job_name: _Optional[str] = ..., take_over: bool = ..., store_id: _Optional[int] = ..., closed: _Optional[_Iterable[int]] = ..., finished_starts: _Optional[_Iterable[int]] = ..., finished_stops: _Optional[_Iterable[int]] = ..., store_ids: _Optional[_Iterable[int]] = ..., ps_timeout: _Optional[float] = ..., term: _Optional[int] = ..., ps_addresses: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[int]] = ..., moved_servers: _Optional[_Iterable[_Union[ServerAddress, _Mapping]]] = ..., placed: _Optional[_Iterable[_Union[_ps_pb2.VariableSpec, _Mapping]]] = ..., frozen: _Optional[_Iterable[_Union[_ps_pb2.HeldShard, _Mapping]]] = ..., arriving: _Optional[_Iterable[_Union[_ps_pb2.HeldShard, _Mapping]]] = ..., resized: bool = ...) -> None: ...

class AttachEvent(_message.Message):
    __slots__ = ("kind", "identity", "incarnation", "store_id", "restored", "missing_rules", "data_port", "address", "term")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[AttachEvent.Kind]
        ATTACHED: _ClassVar[AttachEvent.Kind]
        LEAVING: _ClassVar[AttachEvent.Kind]
        UNLISTED: _ClassVar[AttachEvent.Kind]
    KIND_UNSPECIFIED: AttachEvent.Kind
    ATTACHED: AttachEvent.Kind
    LEAVING: AttachEvent.Kind
    UNLISTED: AttachEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    MISSING_RULES_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    kind: AttachEvent.Kind
    identity: Identity
    incarnation: int
    store_id: int
    restored: str
    missing_rules: _containers.RepeatedScalarFieldContainer[int]
    data_port: int
    address: str
    term: int
    def __init__(self, kind: _Optional[_Union[AttachEvent.Kind, str]] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., incarnation: _Optional[int] = ..., store_id: _Optional[int] = ..., restored: _Optional[str] = ..., missing_rules: _Optional[_Iterable[int]] = ..., data_port: _Optional[int] = ..., address: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

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
