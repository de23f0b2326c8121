"""Python data to `pscluster.v1.Value`. Others import this from `pscluster.core.values`."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pscluster.core.dtypes import array_of, is_masked_array
from pscluster.core.handles import Handle, StaysHere
from pscluster.core.limits import MAX_DEPTH
from pscluster.core.values.arrays import UnsendableArrayError, plain_name, scalar_form, wire_bytes, wire_form
from pscluster.core.values.nesting import nesting
from pscluster.core.values.records import UnsendableRecordError, is_record_class, layout_of
from pscluster.v1 import value_pb2

INLINE_LIMIT = 64 << 10  # bytes above which an array travels as an attachment, if attachments are collected
_INLINE_TOTAL = 1 << 20
_CROWDED_LIMIT = 1 << 10
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep: does the structure contain itself?"

RemoteEncoder = Callable[[Any, list[memoryview] | None], value_pb2.Value | None]
"""Called for every object that is not of a plain type. Returns the value to send in its place (with its attachments
appended to the list, see `splice`), or None for an object like any other."""

ClassDefiner = Callable[[type], str]
"""Returns the digest under which a class of records was registered with the receiver, or "" to send it by name."""


class UnsendableError(Exception):
    """Unwinds to the call, collecting the path on the way. A `RemoteEncoder` may also raise it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trail: list[str] = []

    def path(self, start: str) -> str:
        steps = self.trail[::-1]
        return start + ("".join(steps) if len(steps) <= 12 else "".join(steps[:6]) + "...")


class _Encoder:
    """The parameters and state of one call of `encode`."""

    __slots__ = ("attachments", "define", "handles", "limit", "remote", "room")

    def __init__(
        self,
        attachments: list[memoryview] | None,
        limit: int,
        remote: RemoteEncoder | None,
        define: ClassDefiner | None,
    ) -> None:
        self.attachments = attachments
        self.limit = limit
        self.remote = remote
        self.define = define
        self.handles: list[Handle] = []
        self.room = _INLINE_TOTAL

    def beside(self, size: int) -> bool:
        """Return whether `size` bytes should travel as an attachment. Many small arrays also make a large message."""
        if self.attachments is None:
            return False
        if size > self.limit:
            return True
        self.room -= size
        if self.room < 0:
            self.limit = min(self.limit, _CROWDED_LIMIT)
        return False

    def attach(self, array: value_pb2.Array, data: memoryview) -> None:
        assert self.attachments is not None
        self.attachments.append(data)
        array.attachment = len(self.attachments)


_Put = Callable[[_Encoder, Any, value_pb2.Value, int], None]


def encode(
    obj: Any,
    *,
    path: str = "value",
    attachments: list[memoryview] | None = None,
    inline_limit: int = INLINE_LIMIT,
    remote: RemoteEncoder | None = None,
    define: ClassDefiner | None = None,
    into: value_pb2.Value | None = None,
) -> value_pb2.Value:
    """Encode `obj`, into `into` if given, and return the value.

    Arrays above `inline_limit` bytes are appended to `attachments`, as views of their memory; without such a list
    everything is in the value. Raise TypeError, with its path starting at `path`, if something in it can't be sent.
    """
    value = value_pb2.Value() if into is None else into
    encoder = _Encoder(attachments, inline_limit, remote, define)
    try:
        (_PUT.get(type(obj)) or _put_other)(encoder, obj, value, 0)
    except UnsendableError as error:
        raise TypeError(f"{error.path(path)} {error.reason}") from None
    return value


def encode_call(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    attachments: list[memoryview] | None = None,
    inline_limit: int = INLINE_LIMIT,
    remote: RemoteEncoder | None = None,
    define: ClassDefiner | None = None,
    into: value_pb2.Value | None = None,
    handles: list[Handle] | None = None,
) -> value_pb2.Value:
    """Encode the arguments of a call, as in `pscluster.v1.Step`: the tuple (args, kwargs).

    Otherwise as `encode`, but the handles among them are appended to `handles`. Errors name what can't be sent by paths
    such as `args[0]['model'].layers[2]`.
    """
    value = value_pb2.Value() if into is None else into
    encoder = _Encoder(attachments, inline_limit, remote, define)
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"kwargs has the key {name!r:.40}: names of arguments must be strings")
    add = value.tuple.items.add
    path = "args"
    try:
        _put_tuple(encoder, args, add(), 1)
        path = "kwargs"
        _put_dict(encoder, kwargs, add(), 1)
    except UnsendableError as error:
        raise TypeError(f"{error.path(path)} {error.reason}") from None
    if handles is not None:
        handles += encoder.handles
    return value


def describe(obj: Any) -> str:
    """Return the type of an object, with its article, for messages: "a threading.Event"."""
    if obj is None:
        return "None"
    cls = type(obj)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _put_none(_encoder: _Encoder, _obj: None, value: value_pb2.Value, _depth: int) -> None:
    value.none = True


def _put_bool(_encoder: _Encoder, obj: bool, value: value_pb2.Value, _depth: int) -> None:
    value.boolean = obj


def _put_int(_encoder: _Encoder, obj: int, value: value_pb2.Value, _depth: int) -> None:
    try:
        value.integer = obj
    except ValueError:
        value.big_integer = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)


def _put_float(_encoder: _Encoder, obj: float, value: value_pb2.Value, _depth: int) -> None:
    value.real = obj


def _put_complex(_encoder: _Encoder, obj: complex, value: value_pb2.Value, _depth: int) -> None:
    value.complex.dtype = "complex128"
    value.complex.data = struct.pack("<dd", obj.real, obj.imag)


def _put_text(encoder: _Encoder, obj: str, value: value_pb2.Value, _depth: int) -> None:
    if len(obj) <= encoder.limit:
        try:
            value.text = obj
            return
        except UnicodeEncodeError:
            pass
    _put_blob(encoder, "str", obj.encode("utf-8", "surrogatepass"), value)


def _put_bytes(encoder: _Encoder, obj: bytes, value: value_pb2.Value, _depth: int) -> None:
    if len(obj) <= encoder.limit:
        encoder.room -= len(obj)
        value.data = obj
    else:
        _put_blob(encoder, "bytes", obj, value)


def _put_buffer(encoder: _Encoder, obj: bytearray | memoryview, value: value_pb2.Value, depth: int) -> None:
    _put_bytes(encoder, bytes(obj), value, depth)


def _put_blob(encoder: _Encoder, kind: str, data: bytes, value: value_pb2.Value) -> None:
    array = value.array
    array.dtype = kind
    array.shape.append(len(data))
    if encoder.beside(len(data)):
        encoder.attach(array, memoryview(data))
    else:
        array.data = data


def _put_list(encoder: _Encoder, obj: Sequence[Any], value: value_pb2.Value, depth: int) -> None:
    value.list.SetInParent()
    _put_items(encoder, obj, value.list, depth)


def _put_tuple(encoder: _Encoder, obj: Sequence[Any], value: value_pb2.Value, depth: int) -> None:
    value.tuple.SetInParent()
    _put_items(encoder, obj, value.tuple, depth)


def _put_set(encoder: _Encoder, obj: Any, value: value_pb2.Value, depth: int) -> None:
    sequence = value.set if isinstance(obj, set) else value.frozenset
    sequence.SetInParent()
    try:
        _put_items(encoder, obj, sequence, depth)
    except UnsendableError as error:
        if error.trail:
            error.trail[-1] = "{...}"
        raise


def _put_items(encoder: _Encoder, obj: Any, sequence: value_pb2.Sequence, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise UnsendableError(_TOO_DEEP)
    items = sequence.items
    add = items.add
    get = _PUT.get
    try:
        for item in obj:
            (get(type(item)) or _put_other)(encoder, item, add(), depth + 1)
    except UnsendableError as error:
        error.trail.append(f"[{len(items) - 1}]")
        raise


def _put_dict(encoder: _Encoder, obj: dict[Any, Any], value: value_pb2.Value, depth: int) -> None:
    value.dict.SetInParent()
    if depth >= MAX_DEPTH:
        raise UnsendableError(_TOO_DEEP)
    if not obj:  # as nearly all named arguments of functions
        return
    add_key, add_value = value.dict.keys.add, value.dict.values.add
    get = _PUT.get
    for key, item in obj.items():
        try:
            (get(type(key)) or _put_other)(encoder, key, add_key(), depth + 1)
        except UnsendableError as error:
            error.trail.append(".keys()")
            raise
        try:
            (get(type(item)) or _put_other)(encoder, item, add_value(), depth + 1)
        except UnsendableError as error:
            error.trail.append(f"[{key!r:.40}]" if isinstance(key, str | int) else f"[{describe(key)}]")
            raise


def _put_array(encoder: _Encoder, obj: np.ndarray[Any, Any], value: value_pb2.Value, _depth: int) -> None:
    array = value.array
    name = plain_name(obj.dtype)
    if name is None:
        try:
            name, obj = wire_form(obj)
        except UnsendableArrayError as error:
            raise UnsendableError(f"is {error}") from None
    array.dtype = name
    if shape := obj.shape:
        array.shape.extend(shape)
    if encoder.beside(obj.nbytes):
        encoder.attach(array, wire_bytes(obj))
    else:
        array.data = obj.tobytes()


def _put_scalar(_encoder: _Encoder, obj: np.generic, value: value_pb2.Value, _depth: int) -> None:
    try:
        value.scalar.dtype, value.scalar.data = scalar_form(obj)
    except UnsendableArrayError as error:
        raise UnsendableError(f"is {error}".replace("an array", "a scalar")) from None


def _put_handle(encoder: _Encoder, obj: Handle, value: value_pb2.Value, _depth: int) -> None:
    obj = obj.as_sent()
    encoder.handles.append(obj)
    handle = value.handle
    handle.kind = obj.handle_kind
    handle.key = obj.handle_key


def _put_record(encoder: _Encoder, obj: Any, value: value_pb2.Value, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise UnsendableError(_TOO_DEEP)
    cls: type = type(obj)
    try:
        layout = layout_of(cls)
        values = layout.values(obj)
    except UnsendableRecordError as error:
        raise UnsendableError(f"is {describe(obj)}, which {error}") from None
    record = value.record
    record.module = layout.module
    record.qualname = layout.qualname
    record.fields.extend(layout.fields)
    if encoder.define is not None:
        record.definition = encoder.define(cls)
    if "<locals>" in layout.qualname and not record.definition:
        raise UnsendableError(
            f"is {describe(obj)}, a class inside a function, where the receiver can't find it: "
            f"define the class at the top of its module"
        )
    add = record.values.add
    get = _PUT.get
    for name, item in zip(layout.fields, values, strict=True):
        try:
            (get(type(item)) or _put_other)(encoder, item, add(), depth + 1)
        except UnsendableError as error:
            error.trail.append(f".{name}")
            raise


def _put_array_like(encoder: _Encoder, obj: Any, value: value_pb2.Value, depth: int) -> None:
    if is_masked_array(obj):
        raise UnsendableError("is a masked array, which can't be sent: pass its data and its mask")
    try:
        array = array_of(obj)
    except Exception as error:
        raise UnsendableError(f"is {describe(obj)}, which gives no array: {error}") from None
    _put_array(encoder, array, value, depth)


_PUT: dict[type, _Put] = {
    type(None): _put_none,
    bool: _put_bool,
    int: _put_int,
    float: _put_float,
    complex: _put_complex,
    str: _put_text,
    bytes: _put_bytes,
    bytearray: _put_buffer,
    memoryview: _put_buffer,
    list: _put_list,
    tuple: _put_tuple,
    dict: _put_dict,
    set: _put_set,
    frozenset: _put_set,
    np.ndarray: _put_array,
}
"""By exact type. Handle, record and scalar classes are added on first use."""

_PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


def _put_other(encoder: _Encoder, obj: Any, value: value_pb2.Value, depth: int) -> None:
    if encoder.remote is not None and (sent := encoder.remote(obj, encoder.attachments)) is not None:
        if depth + 1 + nesting(sent) > MAX_DEPTH:
            raise UnsendableError(_TOO_DEEP)
        value.remote.CopyFrom(sent)
        return
    cls: type = type(obj)
    put: _Put
    if isinstance(obj, Handle):
        put = _PUT[cls] = _put_handle
    elif isinstance(obj, np.generic):
        put = _PUT[cls] = _put_scalar
    elif isinstance(obj, StaysHere):
        raise UnsendableError(f"is {describe(obj)}, which {obj.why}")
    elif isinstance(obj, enum.Enum):
        raise UnsendableError(f"is {describe(obj)}, an enum, which can't be sent: pass its name or its value")
    elif is_record_class(cls):
        put = _PUT[cls] = _put_record
    elif isinstance(obj, _PLAIN):
        put = _PUT[cls] = next(_PUT[base] for base in _PLAIN if isinstance(obj, base))
    elif not isinstance(obj, type) and all(hasattr(obj, name) for name in ("__array__", "dtype", "shape")):
        put = _put_array_like  # not cached: a class that `remote` knows may also have __array__
    else:
        by_name = ", or use it in the function by its name" if callable(obj) else ""
        raise UnsendableError(f"is {describe(obj)}, which can't be sent: pass plain data, arrays or handles{by_name}")
    put(encoder, obj, value, depth)
