from pscluster.v1 import definition_pb2 as _definition_pb2
from pscluster.v1 import node_pb2 as _node_pb2
from pscluster.v1 import ps_pb2 as _ps_pb2
from pscluster.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Resource(_message.Message):
    __slots__ = ("id", "definition", "seed", "distributed", "iterable", "object", "name", "replicas", "replicas_per_worker", "first_replica", "unloadable")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTED_FIELD_NUMBER: _ClassVar[int]
    ITERABLE_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    FIRST_REPLICA_FIELD_NUMBER: _ClassVar[int]
    UNLOADABLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    definition: str
    seed: int
    distributed: bool
    iterable: bool
    object: bool
    name: str
    replicas: int
    replicas_per_worker: int
    first_replica: int
    unloadable: str
    def __init__(self, id: _Optional[int] = ..., definition: _Optional[str] = ..., seed: _Optional[int] = ..., distributed: bool = ..., iterable: bool = ..., object: bool = ..., name: _Optional[str] = ..., replicas: _Optional[int] = ..., replicas_per_worker: _Optional[int] = ..., first_replica: _Optional[int] = ..., unloadable: _Optional[str] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("incarnation", "definition", "resource", "attachments", "total_bytes", "last", "pad", "payload")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    definition: _definition_pb2.Definition
    resource: Resource
    attachments: Attachments
    total_bytes: int
    last: bool
    pad: bytes
    payload: bytes
    def __init__(self, incarnation: _Optional[int] = ..., definition: _Optional[_Union[_definition_pb2.Definition, _Mapping]] = ..., resource: _Optional[_Union[Resource, _Mapping]] = ..., attachments: _Optional[_Union[Attachments, _Mapping]] = ..., total_bytes: _Optional[int] = ..., last: bool = ..., pad: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Attachments(_message.Message):
    __slots__ = ("function", "sizes", "position")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    function: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    position: int
    def __init__(self, function: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("unresolved",)
    UNRESOLVED_FIELD_NUMBER: _ClassVar[int]
    unresolved: str
    def __init__(self, unresolved: _Optional[str] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("function", "definition", "attempt", "arguments", "want_result", "key", "parts", "term", "skips", "gang", "placements")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    WANT_RESULT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    GANG_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    function: int
    definition: str
    attempt: int
    arguments: _value_pb2.Value
    want_result: bool
    key: int
    parts: _containers.RepeatedScalarFieldContainer[str]
    term: int
    skips: bool
    gang: Gang
    placements: int
    def __init__(self, function: _Optional[int] = ..., definition: _Optional[str] = ..., attempt: _Optional[int] = ..., arguments: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., want_result: bool = ..., key: _Optional[int] = ..., parts: _Optional[_Iterable[str]] = ..., term: _Optional[int] = ..., skips: bool = ..., gang: _Optional[_Union[Gang, _Mapping]] = ..., placements: _Optional[int] = ...) -> None: ...

class Gang(_message.Message):
    __slots__ = ("id", "generation", "rank", "members", "secret", "timeout", "concurrent", "steps", "follows")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    rank: int
    members: _containers.RepeatedCompositeFieldContainer[GangMember]
    secret: bytes
    timeout: float
    concurrent: bool
    steps: SynchronousSteps
    follows: int
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., members: _Optional[_Iterable[_Union[GangMember, _Mapping]]] = ..., secret: _Optional[bytes] = ..., timeout: _Optional[float] = ..., concurrent: bool = ..., steps: _Optional[_Union[SynchronousSteps, _Mapping]] = ..., follows: _Optional[int] = ...) -> None: ...

class SynchronousSteps(_message.Message):
    __slots__ = ("run", "first", "count", "epoch", "collect", "open", "staleness", "backup", "requeue_dropped")
    class Collect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LAST: _ClassVar[SynchronousSteps.Collect]
        ALL: _ClassVar[SynchronousSteps.Collect]
        MEAN: _ClassVar[SynchronousSteps.Collect]
    LAST: SynchronousSteps.Collect
    ALL: SynchronousSteps.Collect
    MEAN: SynchronousSteps.Collect
    RUN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    REQUEUE_DROPPED_FIELD_NUMBER: _ClassVar[int]
    run: int
    first: int
    count: int
    epoch: int
    collect: SynchronousSteps.Collect
    open: bool
    staleness: float
    backup: int
    requeue_dropped: bool
    def __init__(self, run: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., epoch: _Optional[int] = ..., collect: _Optional[_Union[SynchronousSteps.Collect, str]] = ..., open: bool = ..., staleness: _Optional[float] = ..., backup: _Optional[int] = ..., requeue_dropped: bool = ...) -> None: ...

class GangMember(_message.Message):
    __slots__ = ("worker", "address", "incarnation", "tls_name")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TLS_NAME_FIELD_NUMBER: _ClassVar[int]
    worker: int
    address: str
    incarnation: int
    tls_name: str
    def __init__(self, worker: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., tls_name: _Optional[str] = ...) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ("incarnation", "position", "steps", "resharded")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RESHARDED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    position: int
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    resharded: _containers.RepeatedCompositeFieldContainer[_ps_pb2.VariableSpec]
    def __init__(self, incarnation: _Optional[int] = ..., position: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., resharded: _Optional[_Iterable[_Union[_ps_pb2.VariableSpec, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("module", "qualname", "message", "arguments", "traceback")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    QUALNAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    module: str
    qualname: str
    message: str
    arguments: _value_pb2.Value
    traceback: str
    def __init__(self, module: _Optional[str] = ..., qualname: _Optional[str] = ..., message: _Optional[str] = ..., arguments: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., traceback: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("function", "kind", "value", "failure", "attachments", "seconds", "waited", "skipped", "updated")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Outcome.Kind]
        DONE: _ClassVar[Outcome.Kind]
        FAILED: _ClassVar[Outcome.Kind]
        RETURNED: _ClassVar[Outcome.Kind]
        CANCELLED: _ClassVar[Outcome.Kind]
    KIND_UNSPECIFIED: Outcome.Kind
    DONE: Outcome.Kind
    FAILED: Outcome.Kind
    RETURNED: Outcome.Kind
    CANCELLED: Outcome.Kind
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    function: int
    kind: Outcome.Kind
    value: _value_pb2.Value
    failure: Failure
    attachments: Attachments
    seconds: float
    waited: float
    skipped: _containers.RepeatedCompositeFieldContainer[Skipped]
    updated: bool
    def __init__(self, function: _Optional[int] = ..., kind: _Optional[_Union[Outcome.Kind, str]] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., attachments: _Optional[_Union[Attachments, _Mapping]] = ..., seconds: _Optional[float] = ..., waited: _Optional[float] = ..., skipped: _Optional[_Iterable[_Union[Skipped, _Mapping]]] = ..., updated: bool = ...) -> None: ...

class Skipped(_message.Message):
    __slots__ = ("examples", "why", "part")
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    examples: int
    why: str
    part: int
    def __init__(self, examples: _Optional[int] = ..., why: _Optional[str] = ..., part: _Optional[int] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("function", "position", "number", "value", "progressed")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PROGRESSED_FIELD_NUMBER: _ClassVar[int]
    function: int
    position: int
    number: int
    value: _value_pb2.Value
    progressed: bool
    def __init__(self, function: _Optional[int] = ..., position: _Optional[int] = ..., number: _Optional[int] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., progressed: bool = ...) -> None: ...

class StepsReply(_message.Message):
    __slots__ = ("outcomes", "questions")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    questions: _containers.RepeatedCompositeFieldContainer[Question]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., questions: _Optional[_Iterable[_Union[Question, _Mapping]]] = ...) -> None: ...

class AnswerRequest(_message.Message):
    __slots__ = ("incarnation", "function", "position", "number", "value", "failure")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    function: int
    position: int
    number: int
    value: _value_pb2.Value
    failure: Failure
    def __init__(self, incarnation: _Optional[int] = ..., function: _Optional[int] = ..., position: _Optional[int] = ..., number: _Optional[int] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class AnswerReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecallRequest(_message.Message):
    __slots__ = ("incarnation", "functions", "positions", "cancel_running", "end_process")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_RUNNING_FIELD_NUMBER: _ClassVar[int]
    END_PROCESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    functions: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    cancel_running: bool
    end_process: bool
    def __init__(self, incarnation: _Optional[int] = ..., functions: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., cancel_running: bool = ..., end_process: bool = ...) -> None: ...

class RecallReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportSeenRequest(_message.Message):
    __slots__ = ("incarnation", "servers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    servers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[int] = ..., servers: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportSeenReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoveServersRequest(_message.Message):
    __slots__ = ("incarnation", "servers", "ps_addresses", "store_ids")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    PS_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STORE_IDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    servers: _containers.RepeatedCompositeFieldContainer[_node_pb2.ServerAddress]
    ps_addresses: _containers.RepeatedScalarFieldContainer[str]
    store_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[int] = ..., servers: _Optional[_Iterable[_Union[_node_pb2.ServerAddress, _Mapping]]] = ..., ps_addresses: _Optional[_Iterable[str]] = ..., store_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MoveServersReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("incarnation", "function")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    function: int
    def __init__(self, incarnation: _Optional[int] = ..., function: _Optional[int] = ...) -> None: ...

class DownloadReply(_message.Message):
    __slots__ = ("total_bytes", "last", "pad", "payload")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    last: bool
    pad: bytes
    payload: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., last: bool = ..., pad: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("incarnation", "resources", "definitions", "variables")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    resources: _containers.RepeatedScalarFieldContainer[int]
    definitions: _containers.RepeatedScalarFieldContainer[str]
    variables: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[int] = ..., resources: _Optional[_Iterable[int]] = ..., definitions: _Optional[_Iterable[str]] = ..., variables: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("opening", "sequence", "signature", "alone", "pad", "payload")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    sequence: int
    signature: Signature
    alone: bool
    pad: bytes
    payload: bytes
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., sequence: _Optional[int] = ..., signature: _Optional[_Union[Signature, _Mapping]] = ..., alone: bool = ..., pad: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("gang", "generation", "source", "target", "incarnation", "proof")
    GANG_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    gang: int
    generation: int
    source: int
    target: int
    incarnation: int
    proof: bytes
    def __init__(self, gang: _Optional[int] = ..., generation: _Optional[int] = ..., source: _Optional[int] = ..., target: _Optional[int] = ..., incarnation: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Signature(_message.Message):
    __slots__ = ("operation", "layout", "digest", "place")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    operation: str
    layout: str
    digest: int
    place: str
    def __init__(self, operation: _Optional[str] = ..., layout: _Optional[str] = ..., digest: _Optional[int] = ..., place: _Optional[str] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("kind", "reason", "messages")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ExchangeReply.Kind]
        RETURNED: _ClassVar[ExchangeReply.Kind]
        FAILED: _ClassVar[ExchangeReply.Kind]
        MISUSED: _ClassVar[ExchangeReply.Kind]
        STOPPED: _ClassVar[ExchangeReply.Kind]
    KIND_UNSPECIFIED: ExchangeReply.Kind
    RETURNED: ExchangeReply.Kind
    FAILED: ExchangeReply.Kind
    MISUSED: ExchangeReply.Kind
    STOPPED: ExchangeReply.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    kind: ExchangeReply.Kind
    reason: str
    messages: int
    def __init__(self, kind: _Optional[_Union[ExchangeReply.Kind, str]] = ..., reason: _Optional[str] = ..., messages: _Optional[int] = ...) -> None: ...
