"""Values taken into another message, with their attachments. Others import this from `pscluster.core.values`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_DEPTH
from pscluster.core.values.arrays import Buffer
from pscluster.core.values.encoding import ClassDefiner
from pscluster.core.values.nesting import children, nesting
from pscluster.core.values.records import imported_class
from pscluster.v1 import value_pb2


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
