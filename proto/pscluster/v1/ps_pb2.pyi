from pscluster.v1 import definition_pb2 as _definition_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WireDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_DTYPE_UNSPECIFIED: _ClassVar[WireDtype]
    WIRE_BFLOAT16: _ClassVar[WireDtype]
    WIRE_FLOAT16: _ClassVar[WireDtype]
    WIRE_INT8: _ClassVar[WireDtype]

class UpdateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_KIND_UNSPECIFIED: _ClassVar[UpdateKind]
    ASSIGN: _ClassVar[UpdateKind]
    ADD: _ClassVar[UpdateKind]
    SUB: _ClassVar[UpdateKind]
    MUL: _ClassVar[UpdateKind]
    DIV: _ClassVar[UpdateKind]
    MIN: _ClassVar[UpdateKind]
    MAX: _ClassVar[UpdateKind]
    APPLY_GRADIENT: _ClassVar[UpdateKind]
    PUT: _ClassVar[UpdateKind]
    APPLY_CHANGE: _ClassVar[UpdateKind]
WIRE_DTYPE_UNSPECIFIED: WireDtype
WIRE_BFLOAT16: WireDtype
WIRE_FLOAT16: WireDtype
WIRE_INT8: WireDtype
UPDATE_KIND_UNSPECIFIED: UpdateKind
ASSIGN: UpdateKind
ADD: UpdateKind
SUB: UpdateKind
MUL: UpdateKind
DIV: UpdateKind
MIN: UpdateKind
MAX: UpdateKind
APPLY_GRADIENT: UpdateKind
PUT: UpdateKind
APPLY_CHANGE: UpdateKind

class AxisSplit(_message.Message):
    __slots__ = ("ends",)
    ENDS_FIELD_NUMBER: _ClassVar[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ends: _Optional[_Iterable[int]] = ...) -> None: ...

class RowOrder(_message.Message):
    __slots__ = ("kind", "seed")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    seed: int
    def __init__(self, kind: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("dim", "initializer", "numbers", "max_bytes", "optimizer", "admission", "eviction", "id_bytes", "capacity")
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    dim: int
    initializer: str
    numbers: str
    max_bytes: int
    optimizer: str
    admission: TableAdmission
    eviction: TableEviction
    id_bytes: int
    capacity: int
    def __init__(self, dim: _Optional[int] = ..., initializer: _Optional[str] = ..., numbers: _Optional[str] = ..., max_bytes: _Optional[int] = ..., optimizer: _Optional[str] = ..., admission: _Optional[_Union[TableAdmission, _Mapping]] = ..., eviction: _Optional[_Union[TableEviction, _Mapping]] = ..., id_bytes: _Optional[int] = ..., capacity: _Optional[int] = ...) -> None: ...

class TableAdmission(_message.Message):
    __slots__ = ("seen", "probability", "seed")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    seen: int
    probability: float
    seed: int
    def __init__(self, seen: _Optional[int] = ..., probability: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class TableEviction(_message.Message):
    __slots__ = ("kind", "age", "norm")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[TableEviction.Kind]
        RECENCY: _ClassVar[TableEviction.Kind]
        FREQUENCY: _ClassVar[TableEviction.Kind]
        STEPS: _ClassVar[TableEviction.Kind]
        SECONDS: _ClassVar[TableEviction.Kind]
        NORM: _ClassVar[TableEviction.Kind]
    KIND_UNSPECIFIED: TableEviction.Kind
    RECENCY: TableEviction.Kind
    FREQUENCY: TableEviction.Kind
    STEPS: TableEviction.Kind
    SECONDS: TableEviction.Kind
    NORM: TableEviction.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    kind: TableEviction.Kind
    age: int
    norm: float
    def __init__(self, kind: _Optional[_Union[TableEviction.Kind, str]] = ..., age: _Optional[int] = ..., norm: _Optional[float] = ...) -> None: ...

class VariableSpec(_message.Message):
    __slots__ = ("id", "name", "dtype", "shape", "splits", "owners", "trainable", "evaluation", "asynchronous", "placement", "table", "wire_dtype", "push_top_k", "row_order", "origin")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PUSH_TOP_K_FIELD_NUMBER: _ClassVar[int]
    ROW_ORDER_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    splits: _containers.RepeatedCompositeFieldContainer[AxisSplit]
    owners: _containers.RepeatedScalarFieldContainer[int]
    trainable: bool
    evaluation: int
    asynchronous: bool
    placement: int
    table: TableSpec
    wire_dtype: WireDtype
    push_top_k: float
    row_order: RowOrder
    origin: int
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., splits: _Optional[_Iterable[_Union[AxisSplit, _Mapping]]] = ..., owners: _Optional[_Iterable[int]] = ..., trainable: bool = ..., evaluation: _Optional[int] = ..., asynchronous: bool = ..., placement: _Optional[int] = ..., table: _Optional[_Union[TableSpec, _Mapping]] = ..., wire_dtype: _Optional[_Union[WireDtype, str]] = ..., push_top_k: _Optional[float] = ..., row_order: _Optional[_Union[RowOrder, _Mapping]] = ..., origin: _Optional[int] = ...) -> None: ...

class HeldShard(_message.Message):
    __slots__ = ("variable", "shard", "server")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    server: int
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., server: _Optional[int] = ...) -> None: ...

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

class SavedClient(_message.Message):
    __slots__ = ("incarnation", "settled")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    settled: int
    def __init__(self, incarnation: _Optional[int] = ..., settled: _Optional[int] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("id", "name", "rule", "numbers", "flags", "iterations", "schedule", "ema_momentum", "options")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class FlagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: bool = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    EMA_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    rule: str
    numbers: _containers.ScalarMap[str, float]
    flags: _containers.ScalarMap[str, bool]
    iterations: int
    schedule: str
    ema_momentum: float
    options: str
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., rule: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ..., flags: _Optional[_Mapping[str, bool]] = ..., iterations: _Optional[int] = ..., schedule: _Optional[str] = ..., ema_momentum: _Optional[float] = ..., options: _Optional[str] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("all", "slices", "ids", "version", "gradients", "in_use", "leading", "id_bytes", "must_exist")
    ALL_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    MUST_EXIST_FIELD_NUMBER: _ClassVar[int]
    all: bool
    slices: Slices
    ids: int
    version: bool
    gradients: bool
    in_use: bool
    leading: int
    id_bytes: int
    must_exist: bool
    def __init__(self, all: bool = ..., slices: _Optional[_Union[Slices, _Mapping]] = ..., ids: _Optional[int] = ..., version: bool = ..., gradients: bool = ..., in_use: bool = ..., leading: _Optional[int] = ..., id_bytes: _Optional[int] = ..., must_exist: bool = ...) -> None: ...

class AxisSlice(_message.Message):
    __slots__ = ("start", "step", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    step: int
    count: int
    def __init__(self, start: _Optional[int] = ..., step: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Slices(_message.Message):
    __slots__ = ("axes",)
    AXES_FIELD_NUMBER: _ClassVar[int]
    axes: _containers.RepeatedCompositeFieldContainer[AxisSlice]
    def __init__(self, axes: _Optional[_Iterable[_Union[AxisSlice, _Mapping]]] = ...) -> None: ...

class ReadItem(_message.Message):
    __slots__ = ("variable", "shard", "rows", "optimizer", "slot", "wire_dtype")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    rows: Rows
    optimizer: int
    slot: str
    wire_dtype: WireDtype
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., optimizer: _Optional[int] = ..., slot: _Optional[str] = ..., wire_dtype: _Optional[_Union[WireDtype, str]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("job", "items", "whole")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    job: int
    items: _containers.RepeatedCompositeFieldContainer[ReadItem]
    whole: bytes
    def __init__(self, job: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ReadItem, _Mapping]]] = ..., whole: _Optional[bytes] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateItem(_message.Message):
    __slots__ = ("variable", "shard", "kind", "rows", "optimizer", "nth", "value_bytes", "scalar", "seen", "boot_id", "name", "text", "weight", "offset", "gradients", "slot", "wire_dtype", "elements")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NTH_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    kind: UpdateKind
    rows: Rows
    optimizer: int
    nth: int
    value_bytes: int
    scalar: bool
    seen: int
    boot_id: int
    name: str
    text: str
    weight: float
    offset: int
    gradients: int
    slot: str
    wire_dtype: WireDtype
    elements: int
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., kind: _Optional[_Union[UpdateKind, str]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., optimizer: _Optional[int] = ..., nth: _Optional[int] = ..., value_bytes: _Optional[int] = ..., scalar: bool = ..., seen: _Optional[int] = ..., boot_id: _Optional[int] = ..., name: _Optional[str] = ..., text: _Optional[str] = ..., weight: _Optional[float] = ..., offset: _Optional[int] = ..., gradients: _Optional[int] = ..., slot: _Optional[str] = ..., wire_dtype: _Optional[_Union[WireDtype, str]] = ..., elements: _Optional[int] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("job", "incarnation", "function", "sequence", "settled", "items", "key", "term", "contribution")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    job: int
    incarnation: int
    function: int
    sequence: int
    settled: int
    items: _containers.RepeatedCompositeFieldContainer[UpdateItem]
    key: int
    term: int
    contribution: Contribution
    def __init__(self, job: _Optional[int] = ..., incarnation: _Optional[int] = ..., function: _Optional[int] = ..., sequence: _Optional[int] = ..., settled: _Optional[int] = ..., items: _Optional[_Iterable[_Union[UpdateItem, _Mapping]]] = ..., key: _Optional[int] = ..., term: _Optional[int] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ...) -> None: ...

class StepCount(_message.Message):
    __slots__ = ("run", "step", "epoch", "pad")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    run: int
    step: int
    epoch: int
    pad: bytes
    def __init__(self, run: _Optional[int] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., pad: _Optional[bytes] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("run", "step", "epoch", "replica", "replicas", "kind", "ended", "updated", "positions", "after", "until", "before", "first", "backup", "begins", "reduced", "wait", "together", "calls", "last_call")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Contribution.Kind]
        STAGE: _ClassVar[Contribution.Kind]
        COMMIT: _ClassVar[Contribution.Kind]
        WAIT: _ClassVar[Contribution.Kind]
        OPEN: _ClassVar[Contribution.Kind]
        TICK: _ClassVar[Contribution.Kind]
        REDUCE: _ClassVar[Contribution.Kind]
        READY: _ClassVar[Contribution.Kind]
    KIND_UNSPECIFIED: Contribution.Kind
    STAGE: Contribution.Kind
    COMMIT: Contribution.Kind
    WAIT: Contribution.Kind
    OPEN: Contribution.Kind
    TICK: Contribution.Kind
    REDUCE: Contribution.Kind
    READY: Contribution.Kind
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class BeforeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_FIELD_NUMBER: _ClassVar[int]
    run: int
    step: int
    epoch: int
    replica: int
    replicas: int
    kind: Contribution.Kind
    ended: bool
    updated: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.ScalarMap[int, int]
    after: int
    until: int
    before: _containers.ScalarMap[int, int]
    first: int
    backup: int
    begins: bool
    reduced: int
    wait: bool
    together: int
    calls: int
    last_call: str
    def __init__(self, run: _Optional[int] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., replica: _Optional[int] = ..., replicas: _Optional[int] = ..., kind: _Optional[_Union[Contribution.Kind, str]] = ..., ended: bool = ..., updated: _Optional[_Iterable[int]] = ..., positions: _Optional[_Mapping[int, int]] = ..., after: _Optional[int] = ..., until: _Optional[int] = ..., before: _Optional[_Mapping[int, int]] = ..., first: _Optional[int] = ..., backup: _Optional[int] = ..., begins: bool = ..., reduced: _Optional[int] = ..., wait: bool = ..., together: _Optional[int] = ..., calls: _Optional[int] = ..., last_call: _Optional[str] = ...) -> None: ...

class StepState(_message.Message):
    __slots__ = ("committed", "epoch", "missing", "ended", "ending", "unknown", "place", "before", "after", "own")
    class Place(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PLACE_UNSPECIFIED: _ClassVar[StepState.Place]
        ADMITTED: _ClassVar[StepState.Place]
        LATE: _ClassVar[StepState.Place]
        EARLY: _ClassVar[StepState.Place]
    PLACE_UNSPECIFIED: StepState.Place
    ADMITTED: StepState.Place
    LATE: StepState.Place
    EARLY: StepState.Place
    class BeforeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class AfterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    committed: int
    epoch: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    ending: bool
    unknown: bool
    place: StepState.Place
    before: _containers.ScalarMap[int, int]
    after: _containers.ScalarMap[int, int]
    own: int
    def __init__(self, committed: _Optional[int] = ..., epoch: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ..., ended: bool = ..., ending: bool = ..., unknown: bool = ..., place: _Optional[_Union[StepState.Place, str]] = ..., before: _Optional[_Mapping[int, int]] = ..., after: _Optional[_Mapping[int, int]] = ..., own: _Optional[int] = ...) -> None: ...

class UpdateReply(_message.Message):
    __slots__ = ("applied", "repeated_", "updates", "boot_id", "state")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REPEATED__FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    applied: int
    repeated_: int
    updates: _containers.RepeatedScalarFieldContainer[int]
    boot_id: int
    state: StepState
    def __init__(self, applied: _Optional[int] = ..., repeated_: _Optional[int] = ..., updates: _Optional[_Iterable[int]] = ..., boot_id: _Optional[int] = ..., state: _Optional[_Union[StepState, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "read", "update", "create", "restore", "move", "total_bytes", "last", "after", "pad", "payload")
    ID_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    id: int
    read: ReadRequest
    update: UpdateRequest
    create: CreateRequest
    restore: bool
    move: MoveRequest
    total_bytes: int
    last: bool
    after: StepCount
    pad: bytes
    payload: bytes
    def __init__(self, id: _Optional[int] = ..., read: _Optional[_Union[ReadRequest, _Mapping]] = ..., update: _Optional[_Union[UpdateRequest, _Mapping]] = ..., create: _Optional[_Union[CreateRequest, _Mapping]] = ..., restore: bool = ..., move: _Optional[_Union[MoveRequest, _Mapping]] = ..., total_bytes: _Optional[int] = ..., last: bool = ..., after: _Optional[_Union[StepCount, _Mapping]] = ..., pad: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "read", "update", "refusal", "create", "total_bytes", "last", "again", "pad", "payload")
    ID_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    id: int
    read: ReadReply
    update: UpdateReply
    refusal: Refusal
    create: CreateReply
    total_bytes: int
    last: bool
    again: bool
    pad: bytes
    payload: bytes
    def __init__(self, id: _Optional[int] = ..., read: _Optional[_Union[ReadReply, _Mapping]] = ..., update: _Optional[_Union[UpdateReply, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., create: _Optional[_Union[CreateReply, _Mapping]] = ..., total_bytes: _Optional[int] = ..., last: bool = ..., again: bool = ..., pad: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Initializer(_message.Message):
    __slots__ = ("name", "numbers", "function")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    numbers: str
    function: _definition_pb2.Definition
    def __init__(self, name: _Optional[str] = ..., numbers: _Optional[str] = ..., function: _Optional[_Union[_definition_pb2.Definition, _Mapping]] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("job", "variable", "optimizer", "initializer", "rule")
    JOB_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    job: int
    variable: VariableSpec
    optimizer: OptimizerSpec
    initializer: Initializer
    rule: _definition_pb2.Definition
    def __init__(self, job: _Optional[int] = ..., variable: _Optional[_Union[VariableSpec, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., initializer: _Optional[_Union[Initializer, _Mapping]] = ..., rule: _Optional[_Union[_definition_pb2.Definition, _Mapping]] = ...) -> None: ...

class CreateReply(_message.Message):
    __slots__ = ("unresolved",)
    UNRESOLVED_FIELD_NUMBER: _ClassVar[int]
    unresolved: str
    def __init__(self, unresolved: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("job", "name", "id", "evaluation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    job: int
    name: str
    id: int
    evaluation: int
    def __init__(self, job: _Optional[int] = ..., name: _Optional[str] = ..., id: _Optional[int] = ..., evaluation: _Optional[int] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("job", "all", "variables", "optimizers", "saved", "moved", "metadata", "seen")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    job: int
    all: bool
    variables: _containers.RepeatedScalarFieldContainer[str]
    optimizers: _containers.RepeatedScalarFieldContainer[str]
    saved: bool
    moved: bool
    metadata: bool
    seen: _containers.RepeatedCompositeFieldContainer[SeenUpdates]
    def __init__(self, job: _Optional[int] = ..., all: bool = ..., variables: _Optional[_Iterable[str]] = ..., optimizers: _Optional[_Iterable[str]] = ..., saved: bool = ..., moved: bool = ..., metadata: bool = ..., seen: _Optional[_Iterable[_Union[SeenUpdates, _Mapping]]] = ...) -> None: ...

class SeenUpdates(_message.Message):
    __slots__ = ("variable", "shard", "updates", "boot_id")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    updates: int
    boot_id: int
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., updates: _Optional[int] = ..., boot_id: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("variables", "optimizers", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedCompositeFieldContainer[VariableSpec]
    optimizers: _containers.RepeatedCompositeFieldContainer[OptimizerSpec]
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, variables: _Optional[_Iterable[_Union[VariableSpec, _Mapping]]] = ..., optimizers: _Optional[_Iterable[_Union[OptimizerSpec, _Mapping]]] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CloseIncarnationRequest(_message.Message):
    __slots__ = ("job", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: int
    incarnation: int
    def __init__(self, job: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CloseIncarnationReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishFunctionsRequest(_message.Message):
    __slots__ = ("job", "starts", "stops", "keys", "shut_out")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHUT_OUT_FIELD_NUMBER: _ClassVar[int]
    job: int
    starts: _containers.RepeatedScalarFieldContainer[int]
    stops: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    shut_out: bool
    def __init__(self, job: _Optional[int] = ..., starts: _Optional[_Iterable[int]] = ..., stops: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[int]] = ..., shut_out: bool = ...) -> None: ...

class FinishFunctionsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("job", "action", "id", "directory", "file")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[CheckpointRequest.Action]
        MARK: _ClassVar[CheckpointRequest.Action]
        WRITE: _ClassVar[CheckpointRequest.Action]
        DROP: _ClassVar[CheckpointRequest.Action]
    ACTION_UNSPECIFIED: CheckpointRequest.Action
    MARK: CheckpointRequest.Action
    WRITE: CheckpointRequest.Action
    DROP: CheckpointRequest.Action
    JOB_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    job: int
    action: CheckpointRequest.Action
    id: int
    directory: str
    file: str
    def __init__(self, job: _Optional[int] = ..., action: _Optional[_Union[CheckpointRequest.Action, str]] = ..., id: _Optional[int] = ..., directory: _Optional[str] = ..., file: _Optional[str] = ...) -> None: ...

class SavedTensor(_message.Message):
    __slots__ = ("array", "tensor", "dtype", "shape", "offset", "bytes", "checksum", "file")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    array: str
    tensor: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    bytes: int
    checksum: str
    file: str
    def __init__(self, array: _Optional[str] = ..., tensor: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[str] = ..., file: _Optional[str] = ...) -> None: ...

class NamedUpdates(_message.Message):
    __slots__ = ("nth", "keys")
    NTH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    nth: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nth: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckpointShard(_message.Message):
    __slots__ = ("variable", "shard", "updates", "steps", "tensors", "named")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    updates: int
    steps: _containers.ScalarMap[str, int]
    tensors: _containers.RepeatedCompositeFieldContainer[SavedTensor]
    named: _containers.RepeatedCompositeFieldContainer[NamedUpdates]
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., updates: _Optional[int] = ..., steps: _Optional[_Mapping[str, int]] = ..., tensors: _Optional[_Iterable[_Union[SavedTensor, _Mapping]]] = ..., named: _Optional[_Iterable[_Union[NamedUpdates, _Mapping]]] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("shards", "header_checksum", "header_bytes", "bytes", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    HEADER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[CheckpointShard]
    header_checksum: str
    header_bytes: int
    bytes: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, shards: _Optional[_Iterable[_Union[CheckpointShard, _Mapping]]] = ..., header_checksum: _Optional[str] = ..., header_bytes: _Optional[int] = ..., bytes: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SavedRows(_message.Message):
    __slots__ = ("split", "order", "piece")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    split: AxisSplit
    order: RowOrder
    piece: int
    def __init__(self, split: _Optional[_Union[AxisSplit, _Mapping]] = ..., order: _Optional[_Union[RowOrder, _Mapping]] = ..., piece: _Optional[int] = ...) -> None: ...

class RestoreSource(_message.Message):
    __slots__ = ("tensor", "to", "count", "rows")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    tensor: SavedTensor
    to: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    rows: SavedRows
    def __init__(self, tensor: _Optional[_Union[SavedTensor, _Mapping]] = ..., to: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., rows: _Optional[_Union[SavedRows, _Mapping]] = ..., **kwargs) -> None: ...

class RestoreArray(_message.Message):
    __slots__ = ("array", "sources")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    array: str
    sources: _containers.RepeatedCompositeFieldContainer[RestoreSource]
    def __init__(self, array: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[RestoreSource, _Mapping]]] = ...) -> None: ...

class RestoreShard(_message.Message):
    __slots__ = ("variable", "shard", "steps", "arrays", "named")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    variable: int
    shard: int
    steps: _containers.ScalarMap[str, int]
    arrays: _containers.RepeatedCompositeFieldContainer[RestoreArray]
    named: _containers.RepeatedCompositeFieldContainer[NamedUpdates]
    def __init__(self, variable: _Optional[int] = ..., shard: _Optional[int] = ..., steps: _Optional[_Mapping[str, int]] = ..., arrays: _Optional[_Iterable[_Union[RestoreArray, _Mapping]]] = ..., named: _Optional[_Iterable[_Union[NamedUpdates, _Mapping]]] = ...) -> None: ...

class Metadata(_message.Message):
    __slots__ = ("texts",)
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.ScalarMap[str, str]
    def __init__(self, texts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("job", "id", "directory", "shards", "commit", "drop", "term", "ahead", "metadata")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    job: int
    id: int
    directory: str
    shards: _containers.RepeatedCompositeFieldContainer[RestoreShard]
    commit: bool
    drop: bool
    term: int
    ahead: bool
    metadata: Metadata
    def __init__(self, job: _Optional[int] = ..., id: _Optional[int] = ..., directory: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[RestoreShard, _Mapping]]] = ..., commit: bool = ..., drop: bool = ..., term: _Optional[int] = ..., ahead: bool = ..., metadata: _Optional[_Union[Metadata, _Mapping]] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardState(_message.Message):
    __slots__ = ("arrays", "updates", "steps", "keys", "closed", "finished_starts", "finished_stops", "clients", "term", "traffic", "rows", "seen")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STOPS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedScalarFieldContainer[str]
    updates: int
    steps: _containers.ScalarMap[int, int]
    keys: _containers.RepeatedCompositeFieldContainer[SavedKeys]
    closed: _containers.RepeatedScalarFieldContainer[int]
    finished_starts: _containers.RepeatedScalarFieldContainer[int]
    finished_stops: _containers.RepeatedScalarFieldContainer[int]
    clients: _containers.RepeatedCompositeFieldContainer[SavedClient]
    term: int
    traffic: float
    rows: int
    seen: int
    def __init__(self, arrays: _Optional[_Iterable[str]] = ..., updates: _Optional[int] = ..., steps: _Optional[_Mapping[int, int]] = ..., keys: _Optional[_Iterable[_Union[SavedKeys, _Mapping]]] = ..., closed: _Optional[_Iterable[int]] = ..., finished_starts: _Optional[_Iterable[int]] = ..., finished_stops: _Optional[_Iterable[int]] = ..., clients: _Optional[_Iterable[_Union[SavedClient, _Mapping]]] = ..., term: _Optional[int] = ..., traffic: _Optional[float] = ..., rows: _Optional[int] = ..., seen: _Optional[int] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("job", "id", "action", "variable", "shard", "pages", "arrays", "state", "spec", "saved", "round", "num_servers", "start", "named", "num_shards", "page_elements", "rows")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[MoveRequest.Action]
        TRACK: _ClassVar[MoveRequest.Action]
        CHANGED: _ClassVar[MoveRequest.Action]
        FREEZE: _ClassVar[MoveRequest.Action]
        READ: _ClassVar[MoveRequest.Action]
        RELEASE: _ClassVar[MoveRequest.Action]
        STAGE: _ClassVar[MoveRequest.Action]
        WRITE: _ClassVar[MoveRequest.Action]
        COMMIT: _ClassVar[MoveRequest.Action]
        WITHDRAW: _ClassVar[MoveRequest.Action]
        PLACE: _ClassVar[MoveRequest.Action]
        SERVE: _ClassVar[MoveRequest.Action]
        RESIZE: _ClassVar[MoveRequest.Action]
        MAKE: _ClassVar[MoveRequest.Action]
        CAPTURE: _ClassVar[MoveRequest.Action]
        FILL: _ClassVar[MoveRequest.Action]
        SETTLE: _ClassVar[MoveRequest.Action]
        SEAL: _ClassVar[MoveRequest.Action]
        ADOPT: _ClassVar[MoveRequest.Action]
        ABANDON: _ClassVar[MoveRequest.Action]
        COUNT: _ClassVar[MoveRequest.Action]
        TAKE: _ClassVar[MoveRequest.Action]
    ACTION_UNSPECIFIED: MoveRequest.Action
    TRACK: MoveRequest.Action
    CHANGED: MoveRequest.Action
    FREEZE: MoveRequest.Action
    READ: MoveRequest.Action
    RELEASE: MoveRequest.Action
    STAGE: MoveRequest.Action
    WRITE: MoveRequest.Action
    COMMIT: MoveRequest.Action
    WITHDRAW: MoveRequest.Action
    PLACE: MoveRequest.Action
    SERVE: MoveRequest.Action
    RESIZE: MoveRequest.Action
    MAKE: MoveRequest.Action
    CAPTURE: MoveRequest.Action
    FILL: MoveRequest.Action
    SETTLE: MoveRequest.Action
    SEAL: MoveRequest.Action
    ADOPT: MoveRequest.Action
    ABANDON: MoveRequest.Action
    COUNT: MoveRequest.Action
    TAKE: MoveRequest.Action
    JOB_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    job: int
    id: int
    action: MoveRequest.Action
    variable: int
    shard: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    arrays: _containers.RepeatedScalarFieldContainer[str]
    state: ShardState
    spec: VariableSpec
    saved: bool
    round: int
    num_servers: int
    start: int
    named: _containers.RepeatedCompositeFieldContainer[NamedUpdates]
    num_shards: int
    page_elements: int
    rows: bytes
    def __init__(self, job: _Optional[int] = ..., id: _Optional[int] = ..., action: _Optional[_Union[MoveRequest.Action, str]] = ..., variable: _Optional[int] = ..., shard: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., arrays: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[ShardState, _Mapping]] = ..., spec: _Optional[_Union[VariableSpec, _Mapping]] = ..., saved: bool = ..., round: _Optional[int] = ..., num_servers: _Optional[int] = ..., start: _Optional[int] = ..., named: _Optional[_Iterable[_Union[NamedUpdates, _Mapping]]] = ..., num_shards: _Optional[int] = ..., page_elements: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class MoveReply(_message.Message):
    __slots__ = ("state", "changed", "committed", "named", "rows")
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    state: ShardState
    changed: bytes
    committed: bool
    named: _containers.RepeatedCompositeFieldContainer[NamedUpdates]
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, state: _Optional[_Union[ShardState, _Mapping]] = ..., changed: _Optional[bytes] = ..., committed: bool = ..., named: _Optional[_Iterable[_Union[NamedUpdates, _Mapping]]] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...
