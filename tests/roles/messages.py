"""Messages of every kind with extreme values, made from their descriptors."""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from pscluster.core.ids import VERSION

_NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    16,
    2**20 + 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**45,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_BITS: dict[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
}
_TEXTS = (
    *("", "w", "sgd", "adam", "custom", "float32", "int64", "bfloat16", "object", "zeros", "random_normal", "average"),
    *(
        "{}",
        "[]",
        "null",
        '{"seed": 1}',
        '{"value": 1e400}',
        '{"name": "ExponentialDecay"}',
        "x" * 300,
        "\0",
        "os",
        "system",
    ),
)
_REALS = (0.0, -0.0, 1.0, -1.0, 0.1, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))


def _scalar(field: FieldDescriptor, job: int) -> st.SearchStrategy[Any]:
    if field.name in ("job", "incarnation"):
        return st.sampled_from([job, job, job, job, 0, job + 1])
    if field.name == "version":
        return st.sampled_from([VERSION, VERSION, "", "0"])
    if field.type in _BITS:
        low, high = _BITS[field.type]
        numbers = [number for number in _NUMBERS if number <= high]
        # Small numbers are valid more often, and so get further.
        return st.sampled_from([1, 1, 1, 0, 2, *numbers, *(-number for number in numbers if -number >= low)])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return st.sampled_from(_REALS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.integers(-1, 12)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(_TEXTS)
    assert field.type == FieldDescriptor.TYPE_BYTES, field.full_name
    return st.binary(max_size=40)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, job: int, depth: int = 6) -> Any:
    """A message of that kind; in most of those that name a job it is this one."""
    message: Any = message_factory.GetMessageClass(descriptor)()
    if depth == 0:
        return message
    chosen = {oneof.name: draw(st.sampled_from(list(oneof.fields))).name for oneof in descriptor.oneofs}
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if field.name in ("pad", "payload") and field.type == FieldDescriptor.TYPE_BYTES:
            continue  # filled in by the frame
        if oneof is not None and chosen[oneof.name] != field.name:
            continue
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            keys = draw(st.lists(st.sampled_from(["learning_rate", "momentum", "nesterov", "beta_1", "x"]), max_size=3))
            for key in keys:
                getattr(message, field.name)[key] = draw(_scalar(nested.fields_by_name["value"], job))
        elif field.is_repeated:
            for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
                if nested is not None:
                    getattr(message, field.name).append(draw(messages(nested, job, depth - 1)))
                else:
                    getattr(message, field.name).append(draw(_scalar(field, job)))
        elif field.name == "job" or oneof is not None or draw(st.integers(0, 3)):
            if nested is not None:
                getattr(message, field.name).CopyFrom(draw(messages(nested, job, depth - 1)))
            else:
                setattr(message, field.name, draw(_scalar(field, job)))
    return message
