"""`pscluster.v1.Value` to Python data. Others import this from `pscluster.core.values`.

Nothing received is trusted: any bytes give a value or a ProtocolError, and take memory of a small multiple of their
number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pscluster.core.errors import ProtocolError
from pscluster.core.handles import Handle
from pscluster.core.limits import MAX_DEPTH
from pscluster.core.values.arrays import Buffer, array_from, scalar_from
from pscluster.core.values.records import imported_class, layout_for
from pscluster.v1 import value_pb2

_T = TypeVar("_T")
HandleResolver = Callable[[str, str], Any]
"""Takes (kind, key); returns the handle, or what stands for it here."""

RecordResolver = Callable[[str, str, str], type]
"""Takes (definition digest or "", module, qualname); returns the class. ProtocolError if there is none."""


def _no_handles(kind: str, key: str) -> Handle:
    raise ProtocolError(f"the {kind[:40]} {key[:80]!r} came where a handle is not allowed")


class _Decoder:
    """The parameters and state of one call of `decode`."""

    __slots__ = ("attachments", "resolve_handle", "resolve_record", "unused")

    def __init__(
        self, attachments: Sequence[Buffer], resolve_handle: HandleResolver, resolve_record: RecordResolver
    ) -> None:
        self.attachments = attachments
        self.resolve_handle = resolve_handle
        self.resolve_record = resolve_record
        self.unused = set(range(1, len(attachments) + 1)) if attachments else None

    def data_of(self, array: value_pb2.Array) -> tuple[Buffer, bool]:
        """Return an array's bytes, and whether it may keep their memory."""
        attachment = array.attachment
        if attachment == 0:
            return array.data, False
        if self.unused is None or attachment not in self.unused:
            raise ProtocolError(
                f"an array refers to attachment {attachment} of {len(self.attachments)}, missing or used before"
            )
        self.unused.discard(attachment)
        return self.attachments[attachment - 1], True


def decode(
    value: value_pb2.Value,
    *,
    attachments: Sequence[Buffer] = (),
    resolve_handle: HandleResolver = _no_handles,
    resolve_record: RecordResolver = imported_class,
) -> Any:
    """Return the encoded object. Its arrays are writable, and use the memory of writable attachments.

    Handles come from `resolve_handle`, classes of records from `resolve_record`: by default, only those of modules
    already imported. Raise ProtocolError if the value makes no sense.
    """
    return _GET[value.WhichOneof("kind")](_Decoder(attachments, resolve_handle, resolve_record), value, 0)


def decode_call(
    value: value_pb2.Value,
    *,
    attachments: Sequence[Buffer] = (),
    resolve_handle: HandleResolver = _no_handles,
    resolve_record: RecordResolver = imported_class,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the (args, kwargs) that `encode_call` encoded. Raises as `decode`."""
    call = decode(value, attachments=attachments, resolve_handle=resolve_handle, resolve_record=resolve_record)
    match call:
        case (tuple() as args, dict() as kwargs) if isinstance(call, tuple):
            if not kwargs or all(isinstance(name, str) for name in kwargs):
                return args, kwargs
    raise ProtocolError("the arguments of a call are not a tuple (args, kwargs)")


def _get_nothing(_decoder: _Decoder, _value: value_pb2.Value, _depth: int) -> None:
    raise ProtocolError("an empty value, or one of a kind that is unknown here")


def _get_complex(_decoder: _Decoder, value: value_pb2.Value, _depth: int) -> complex:
    try:
        return complex(*struct.unpack("<dd", value.complex.data))
    except struct.error:
        raise ProtocolError(f"a complex number came with {len(value.complex.data)} bytes") from None


def _get_array(decoder: _Decoder, value: value_pb2.Value, _depth: int) -> Any:
    array = value.array
    data, own = decoder.data_of(array)
    if array.dtype == "bytes":
        return bytes(data)
    if array.dtype == "str":
        try:
            return str(data, "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a text that is not in UTF-8: {error.reason}") from None
    return array_from(array.dtype, array.shape, data, own=own)


def _get_scalar(_decoder: _Decoder, value: value_pb2.Value, _depth: int) -> Any:
    array = value.scalar
    if array.attachment or array.shape:
        raise ProtocolError("a scalar with a shape or an attachment")
    return scalar_from(array.dtype, array.data)


def _get_items(decoder: _Decoder, items: Sequence[value_pb2.Value], depth: int) -> list[Any]:
    if depth >= MAX_DEPTH:
        raise ProtocolError(f"a value nested more than {MAX_DEPTH} levels deep")
    depth += 1
    return [_GET[item.WhichOneof("kind")](decoder, item, depth) for item in items]


def _get_dict(decoder: _Decoder, value: value_pb2.Value, depth: int) -> dict[Any, Any]:
    pairs = value.dict
    if depth < MAX_DEPTH and not pairs.keys and not pairs.values:
        return {}
    keys = _get_items(decoder, pairs.keys, depth)
    values = _get_items(decoder, pairs.values, depth)
    if len(keys) != len(values):
        raise ProtocolError(f"a dict with {len(keys)} keys and {len(values)} values")
    return _made(dict, zip(keys, values, strict=True))


def _made(kind: Callable[[Iterable[Any]], _T], items: Iterable[Any]) -> _T:
    try:
        return kind(items)
    except Exception as error:  # hash and equality of a record are the user's code
        raise ProtocolError(f"an item of a set, or a key of a dict, can't be one: {error}") from error


def _get_record(decoder: _Decoder, value: value_pb2.Value, depth: int) -> Any:
    record = value.record
    if len(record.fields) != len(record.values):
        raise ProtocolError(f"a record with {len(record.fields)} fields and {len(record.values)} values")
    layout = layout_for(decoder.resolve_record(record.definition, record.module, record.qualname))
    return layout.build(record.fields, _get_items(decoder, record.values, depth))


_GET: dict[str | None, Callable[[_Decoder, value_pb2.Value, int], Any]] = {
    None: _get_nothing,
    "none": lambda _decoder, _value, _depth: None,
    "boolean": lambda _decoder, value, _depth: value.boolean,
    "integer": lambda _decoder, value, _depth: value.integer,
    "big_integer": lambda _decoder, value, _depth: int.from_bytes(value.big_integer, "little", signed=True),
    "real": lambda _decoder, value, _depth: value.real,
    "complex": _get_complex,
    "text": lambda _decoder, value, _depth: value.text,
    "data": lambda _decoder, value, _depth: value.data,
    "list": lambda decoder, value, depth: _get_items(decoder, value.list.items, depth),
    "tuple": lambda decoder, value, depth: tuple(_get_items(decoder, value.tuple.items, depth)),
    "dict": _get_dict,
    "array": _get_array,
    "scalar": _get_scalar,
    "record": _get_record,
    "handle": lambda decoder, value, _depth: decoder.resolve_handle(value.handle.kind, value.handle.key),
    "set": lambda decoder, value, depth: _made(set, _get_items(decoder, value.set.items, depth)),
    "frozenset": lambda decoder, value, depth: _made(frozenset, _get_items(decoder, value.frozenset.items, depth)),
    "remote": lambda decoder, value, depth: _get_items(decoder, [value.remote], depth)[0],
}
