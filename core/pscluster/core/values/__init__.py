"""Values: nested Python data to and from `pscluster.v1.Value`, without pickle.

What can be sent: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set, frozenset,
NumPy arrays and scalars, whatever else offers `__array__` (a PyTorch CPU tensor and a JAX array arrive as
NumPy arrays), dataclass instances, named tuples, and handles. Anything else is refused, by its path in the
structure.

What changes on the way: a bytearray and a memoryview arrive as bytes; an instance of a subclass of the types
above, such as an OrderedDict or a `torch.Size`, as one of the plain type; an array in C order, native byte
order and memory of its own. An object that occurs twice arrives as two.

Large arrays travel beside the message, as attachments. They are views of the sender's memory, so whoever
sends them must have copied or written them out before the caller may change the array.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from pscluster.core.errors import ProtocolError
from pscluster.core.values.arrays import Buffer
from pscluster.core.values.decoding import HandleResolver, RecordResolver, decode, decode_call
from pscluster.core.values.encoding import (
    INLINE_LIMIT,
    MAX_DEPTH,
    ClassDefiner,
    RemoteEncoder,
    children,
    describe,
    encode,
    encode_call,
    nesting,
)
from pscluster.core.values.records import UnsendableRecordError, imported_class, is_record_class, layout_of, module_of
from pscluster.v1 import value_pb2

__all__ = [
    "INLINE_LIMIT",
    "MAX_DEPTH",
    "Buffer",
    "ClassDefiner",
    "HandleResolver",
    "RecordResolver",
    "RemoteEncoder",
    "children",
    "decode",
    "decode_call",
    "describe",
    "encode",
    "encode_call",
    "imported_class",
    "map_structure",
    "module_of",
    "nesting",
    "splice",
]


def splice(
    value: value_pb2.Value,
    attachments: Sequence[Buffer],
    into: list[memoryview] | None,
    *,
    define: ClassDefiner | None = None,
) -> value_pb2.Value:
    """A copy of `value` for another message: its attachments are appended to `into` and numbered anew.

    Without such a list they are moved into the value. `define` as in `encode`, for records that came without
    a definition: who receives the other message may not have met their classes yet.

    Raises:
        ProtocolError: the value is nested too deep, or names an attachment that is not there.
    """
    if nesting(value) > MAX_DEPTH:
        raise ProtocolError(f"a value nested more than {MAX_DEPTH} levels deep")
    spliced = value_pb2.Value()
    spliced.CopyFrom(value)
    offset = 0 if into is None else len(into)
    todo = [spliced]
    while todo:
        part = todo.pop()
        kind = part.WhichOneof("kind")
        if kind == "array" and part.array.attachment:
            array, number = part.array, part.array.attachment
            if number > len(attachments):
                raise ProtocolError(f"an array is in attachment {number} of {len(attachments)}")
            if into is None:
                array.data, array.attachment = bytes(attachments[number - 1]), 0
            else:
                array.attachment = offset + number
        elif kind == "record" and define is not None and not part.record.definition:
            part.record.definition = _definition_of(part.record, define)
        todo.extend(children(part, kind))
    if into is not None:
        into.extend(memoryview(attachment) for attachment in attachments)
    return spliced


def _definition_of(record: value_pb2.Record, define: ClassDefiner) -> str:
    try:
        return define(imported_class("", record.module, record.qualname))
    except ProtocolError:  # a class that is not known here may be known there
        return ""


def map_structure(fn: Callable[[Any], Any], structure: Any, leaves: tuple[type, ...] = ()) -> Any:
    """The same structure with `fn(leaf)` in the place of every leaf.

    Lists, tuples, dicts, named tuples and dataclass instances are structure; everything else, None and sets
    included, is a leaf, and so are instances of `leaves`.

    Raises:
        TypeError: the structure is too deep, or a dataclass instance can't be made from its fields.
    """
    return _map(fn, structure, leaves, 0)


def _map(fn: Callable[[Any], Any], structure: Any, leaves: tuple[type, ...], depth: int) -> Any:
    cls = type(structure)
    is_record = is_record_class(cls) and not isinstance(structure, leaves)
    if not (is_record or isinstance(structure, list | tuple | dict)):
        return fn(structure)
    if depth >= MAX_DEPTH:
        raise TypeError(f"a structure nested more than {MAX_DEPTH} levels deep: does it contain itself?")
    if is_record:
        try:
            layout = layout_of(cls)
            values = [_map(fn, item, leaves, depth + 1) for item in layout.values(structure)]
            return layout.build(layout.fields, values)
        except (UnsendableRecordError, ProtocolError) as error:
            raise TypeError(f"{describe(structure)} {error}") from None
    if isinstance(structure, dict):
        mapped = copy.copy(structure)  # keeps what a subclass adds, such as the factory of a defaultdict
        for key, item in structure.items():
            mapped[key] = _map(fn, item, leaves, depth + 1)
        return mapped
    items = [_map(fn, item, leaves, depth + 1) for item in structure]
    return tuple(items) if isinstance(structure, tuple) else items
