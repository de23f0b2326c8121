"""`pscluster.v1.Value` to Python data. See `pscluster.core.values`, which is what others import.

Nothing that comes is believed: whatever the bytes, the outcome is a value or a ProtocolError, and the memory
taken is a small multiple of what came.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from pscluster.core.errors import ProtocolError
from pscluster.core.handles import Handle
from pscluster.core.limits import MAX_RANK
from pscluster.core.values.arrays import Buffer, array_from, scalar_from
from pscluster.core.values.encoding import MAX_DEPTH
from pscluster.core.values.records import imported_class, layout_for
from pscluster.v1 import value_pb2

HandleResolver = Callable[[str, str], Any]
"""(kind, key) -> the handle, or what stands for it here."""

RecordResolver = Callable[[str, str, str], type]
"""(definition digest or "", module, qualname) -> the class. ProtocolError where there is none."""


def _no_handles(kind: str, key: str) -> Handle:
    raise ProtocolError(f"the {kind[:40]} {key[:80]!r} came where no handle can be")


class _Decoder:
    """What one call of `decode` goes by."""

    __slots__ = ("attachments", "resolve_handle", "resolve_record", "unused")

    def __init__(
        self,
        attachments: Sequence[Buffer],
        resolve_handle: HandleResolver,
        resolve_record: RecordResolver,
    ) -> None:
        self.attachments = attachments
        self.resolve_handle = resolve_handle
        self.resolve_record = resolve_record
        self.unused = set(range(1, len(attachments) + 1)) if attachments else None

    def data_of(self, array: value_pb2.Array) -> tuple[Buffer, bool]:
        """The array's bytes, and whether they are memory that it may keep."""
        number = array.attachment
        if number == 0:
            return array.data, False
        if self.unused is None or number not in self.unused:
            raise ProtocolError(
                f"an array is in attachment {number} of {len(self.attachments)}, or another one is there too"
            )
        self.unused.discard(number)
        return self.attachments[number - 1], True


def decode(
    value: value_pb2.Value,
    *,
    attachments: Sequence[Buffer] = (),
    resolve_handle: HandleResolver = _no_handles,
    resolve_record: RecordResolver = imported_class,
) -> Any:
    """The object that was encoded. Arrays are writable, and those of writable attachments use their memory.

    Handles are what `resolve_handle(kind, key)` returns. Classes of records are what
    `resolve_record(definition, module, qualname)` returns: by default, those of modules already imported.

    Raises:
        ProtocolError: the value makes no sense.
    """
    return _get(_Decoder(attachments, resolve_handle, resolve_record), value, 0)


def decode_call(
    value: value_pb2.Value,
    *,
    attachments: Sequence[Buffer] = (),
    resolve_handle: HandleResolver = _no_handles,
    resolve_record: RecordResolver = imported_class,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) that `encode_call` encoded.

    Raises:
        ProtocolError: the value makes no sense, or is something else than the arguments of a call.
    """
    call = _get(_Decoder(attachments, resolve_handle, resolve_record), value, 0)
    match call:
        case (tuple() as args, dict() as kwargs) if isinstance(call, tuple):
            if all(isinstance(name, str) for name in kwargs):
                return args, kwargs
    raise ProtocolError("what came as the arguments of a call is not a tuple (args, kwargs)")


def _get(decoder: _Decoder, value: value_pb2.Value, depth: int) -> Any:
    return _GET[value.WhichOneof("kind")](decoder, value, depth)


def _get_nothing(_decoder: _Decoder, _value: value_pb2.Value, _depth: int) -> None:
    raise ProtocolError("an empty value, or one of a kind that is not known here")


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
    if len(array.shape) > MAX_RANK:  # before there is a tuple of them
        raise ProtocolError(f"an array of {len(array.shape)} dimensions")
    return array_from(array.dtype, tuple(array.shape), data, own=own)


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


def _get_list(decoder: _Decoder, value: value_pb2.Value, depth: int) -> list[Any]:
    return _get_items(decoder, value.list.items, depth)


def _get_tuple(decoder: _Decoder, value: value_pb2.Value, depth: int) -> tuple[Any, ...]:
    return tuple(_get_items(decoder, value.tuple.items, depth))


def _get_set(decoder: _Decoder, value: value_pb2.Value, depth: int) -> set[Any]:
    items = _get_items(decoder, value.set.items, depth)
    try:
        return set(items)
    except Exception as error:  # hash and equality of a record are the user's code
        raise ProtocolError(f"an item of a set can't be one: {error}") from error


def _get_frozenset(decoder: _Decoder, value: value_pb2.Value, depth: int) -> frozenset[Any]:
    items = _get_items(decoder, value.frozenset.items, depth)
    try:
        return frozenset(items)
    except Exception as error:
        raise ProtocolError(f"an item of a frozenset can't be one: {error}") from error


def _get_dict(decoder: _Decoder, value: value_pb2.Value, depth: int) -> dict[Any, Any]:
    pairs = value.dict
    keys = _get_items(decoder, pairs.keys, depth)
    values = _get_items(decoder, pairs.values, depth)
    if len(keys) != len(values):
        raise ProtocolError(f"a dict with {len(keys)} keys and {len(values)} values")
    try:
        return dict(zip(keys, values, strict=True))
    except Exception as error:  # hash and equality of a record are the user's code
        raise ProtocolError(f"a key of a dict can't be one: {error}") from error


def _get_record(decoder: _Decoder, value: value_pb2.Value, depth: int) -> Any:
    record = value.record
    if len(record.fields) != len(record.values):
        raise ProtocolError(f"a record with {len(record.fields)} fields and {len(record.values)} values")
    layout = layout_for(decoder.resolve_record(record.definition, record.module, record.qualname))
    return layout.build(record.fields, _get_items(decoder, record.values, depth))


def _get_remote(decoder: _Decoder, value: value_pb2.Value, depth: int) -> Any:
    if depth >= MAX_DEPTH:
        raise ProtocolError(f"a value nested more than {MAX_DEPTH} levels deep")
    return _get(decoder, value.remote, depth + 1)


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
    "list": _get_list,
    "tuple": _get_tuple,
    "dict": _get_dict,
    "array": _get_array,
    "scalar": _get_scalar,
    "record": _get_record,
    "handle": lambda decoder, value, _depth: decoder.resolve_handle(value.handle.kind, value.handle.key),
    "set": _get_set,
    "frozenset": _get_frozenset,
    "remote": _get_remote,
}
