"""Values: nested Python data to and from `pscluster.v1.Value`, without pickle.

Supported: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set, frozenset, NumPy arrays and
scalars, anything else with `__array__` (a PyTorch CPU tensor or a JAX array arrives as a NumPy array), dataclass
instances, named tuples, and handles. Anything else is refused; the error gives its path in the structure.

Some things change on the way: a bytearray or memoryview arrives as bytes; an instance of a subclass of the types above,
such as an OrderedDict or a `torch.Size`, as one of the plain type; an array in C order, in native byte order and in
memory of its own. An object that occurs twice arrives as two.

Large arrays travel beside the message, as attachments. They are views of the sender's memory, so the sender must copy
them or write them out before the caller may change the array.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_DEPTH
from pscluster.core.values.arrays import Buffer
from pscluster.core.values.decoding import HandleResolver, decode, decode_call
from pscluster.core.values.encoding import ClassDefiner, children, describe, encode, encode_call, nesting
from pscluster.core.values.records import UnsendableRecordError, imported_class, is_record_class, layout_of
from pscluster.v1 import value_pb2

__all__ = ["HandleResolver", "decode", "decode_call", "describe", "encode", "encode_call", "map_structure", "splice"]


def splice(
    value: value_pb2.Value,
    attachments: Sequence[Buffer],
    into: list[memoryview] | None,
    *,
    define: ClassDefiner | None = None,
) -> value_pb2.Value:
    """Return a copy of `value` for another message, with its attachments appended to `into` and renumbered.

    Without such a list they are moved into the value. `define` is as in `encode`, for records without a definition: the
    receiver of the other message may not know their classes yet. Raise ProtocolError if the value is nested too deep,
    or names a missing attachment.
    """
    if nesting(value) > MAX_DEPTH:
        raise ProtocolError(f"a value nested more than {MAX_DEPTH} levels deep")
    spliced = value_pb2.Value()
    spliced.CopyFrom(value)
    offset = 0 if into is None else len(into)
    todo = [spliced]
    while todo:
        item = todo.pop()
        kind = item.WhichOneof("kind")
        if kind == "array" and item.array.attachment:
            array, position = item.array, item.array.attachment
            if position > len(attachments):
                raise ProtocolError(f"an array refers to attachment {position}, but there are {len(attachments)}")
            if into is None:
                array.data, array.attachment = bytes(attachments[position - 1]), 0
            else:
                array.attachment = offset + position
        elif kind == "record" and define is not None and not item.record.definition:
            with suppress(ProtocolError):  # a class that is unknown here may be known there
                item.record.definition = define(imported_class("", item.record.module, item.record.qualname))
        todo.extend(children(item, kind))
    if into is not None:
        into.extend(memoryview(attachment) for attachment in attachments)
    return spliced


def map_structure(fn: Callable[[Any], Any], structure: Any, leaves: tuple[type, ...] = (), depth: int = 0) -> Any:
    """Return the same structure with every leaf replaced by `fn(leaf)`.

    Lists, tuples, dicts, named tuples and dataclass instances are structure; everything else, None and sets included,
    is a leaf, and so are instances of `leaves`. `depth` counts the structures around this one. Raise TypeError if the
    structure is too deep, or a dataclass instance can't be made from its fields.
    """
    cls: type = type(structure)
    is_record = is_record_class(cls) and not isinstance(structure, leaves)
    if not (is_record or isinstance(structure, list | tuple | dict)):
        return fn(structure)
    if depth >= MAX_DEPTH:
        raise TypeError(f"a structure nested more than {MAX_DEPTH} levels deep: does it contain itself?")
    if is_record:
        try:
            layout = layout_of(cls)
            values = [map_structure(fn, item, leaves, depth + 1) for item in layout.values(structure)]
            return layout.build(layout.fields, values)
        except (UnsendableRecordError, ProtocolError) as error:
            raise TypeError(f"{describe(structure)} {error}") from None
    if isinstance(structure, dict):
        mapped = copy.copy(structure)  # keeps what a subclass adds, such as the factory of a defaultdict
        for key, item in structure.items():
            mapped[key] = map_structure(fn, item, leaves, depth + 1)
        return mapped
    items = [map_structure(fn, item, leaves, depth + 1) for item in structure]
    return tuple(items) if isinstance(structure, tuple) else items
