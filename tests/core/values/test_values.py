"""Values: they arrive unchanged, what can't be sent is named, and nothing received is trusted."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import math
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.dtypes import is_masked_array
from pscluster.core.errors import ProtocolError
from pscluster.core.handles import Handle
from pscluster.core.limits import MAX_DEPTH
from pscluster.core.values import decode, decode_call, encode, encode_call, map_structure, splice
from pscluster.core.values.records import MODULE_MARK
from pscluster.v1 import value_pb2

Value = value_pb2.Value


class Thing(Handle):
    """A handle."""

    handle_kind = "thing"

    def __init__(self, key: str) -> None:
        self.handle_key: str = key

    handle_key: str


@dataclasses.dataclass
class Layer:
    """An ordinary dataclass whose `__init__` must not run on the other side."""

    name: str
    weights: Any = None
    scale: float = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        assert self.name != "never made by its constructor"


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A frozen one with slots, usable as a key."""

    x: int
    y: int


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


class Colour(enum.IntEnum):
    """An enum that is an int."""

    RED = 1


@dataclasses.dataclass
class Area:
    """A dataclass with a cached property, which is not a field and need not be sent."""

    side: int

    @functools.cached_property
    def size(self) -> int:
        """Computed once."""
        return self.side**2


@dataclasses.dataclass
class Kept(dict):  # type: ignore[type-arg]
    """A dataclass that is also a dict, so that its fields are not all of it."""

    x: int = 0


@dataclasses.dataclass(eq=False)
class Prickly:
    """A class whose hash raises any error."""

    x: int

    def __hash__(self) -> int:
        raise OSError("no hash today")


def travelled(obj: Any, limit: int = 64 << 10, **how: Any) -> Any:
    """The object after being sent, with attachments in new writable memory."""
    attachments: list[memoryview] = []
    sent = encode(obj, attachments=attachments, inline_limit=limit).SerializeToString()
    return decode(Value.FromString(sent), attachments=[bytearray(attachment) for attachment in attachments], **how)


def same(left: Any, right: Any) -> bool:
    """Whether they are equal, and of equal types throughout; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return bool(left.dtype == right.dtype and left.shape == right.shape) and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype) and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, complex):
        return repr(left) == repr(right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right)


PLAIN: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 3**500, -(3**500),
    0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1j, complex(math.nan, -0.0),
    "", "grün", "\0", "\ud800 alone", "𝄞", b"", b"\0\xff", [], (), {}, set(), frozenset(),
    [1, [2, (3, {"four": {5}})]], {1: "a", "b": 2, (3, 4): [None], b"c": {}, None: 0, 2.5: 1, Point(1, 2): 3},
    {1, "a", (2, 3), frozenset([4])}, Point(3, -4), Pair([1], Pair(None, 2)), Layer("dense", [1, 2], scale=2.0),
]  # fmt: skip


@pytest.mark.parametrize("obj", PLAIN, ids=lambda obj: "a set" if isinstance(obj, set) and len(obj) > 1 else repr(obj))
def test_plain_data_comes_back(obj: Any) -> None:
    """Every kind of plain data comes back equal and of the same type."""
    assert same(travelled(obj), obj)


DTYPES = [
    "bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16",
    "<U5", "S3", "M8[ns]", "m8[25s]", "M8", "m8[D]",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (2, 0, 3), (1, 2, 3, 4)], ids=repr)
@pytest.mark.parametrize("limit", [0, 64 << 10], ids=["beside", "inline"])
def test_arrays_come_back(name: str, shape: tuple[int, ...], limit: int) -> None:
    """Arrays of every element type and rank come back equal, writable and in C order, inline or attached."""
    dtype = np.dtype(name)
    raw = np.random.default_rng(0).integers(0, 2, (*shape, max(dtype.itemsize, 1)), np.uint8)
    if dtype.kind == "U":
        array = np.full(shape, "añb", dtype)
    else:
        array = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
    back = travelled(array, limit)
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    assert back.flags.c_contiguous
    assert back.dtype.isnative


@pytest.mark.parametrize("limit", [0, 64 << 10], ids=["beside", "inline"])
def test_layout_in_memory_does_not_matter(limit: int) -> None:
    """Transposed, strided, reversed, big-endian and read-only arrays arrive as plain ones."""
    base = np.arange(24.0).reshape(4, 6)
    fixed = base.copy()
    fixed.setflags(write=False)
    for array in (base.T, base[::2, 1::2], base[::-1], base.astype(">f8"), fixed, np.asfortranarray(base)):
        back = travelled(array, limit)
        assert np.array_equal(back, array)
        assert back.flags.c_contiguous
        assert back.flags.writeable
        assert back.dtype == np.dtype("f8")


def test_text_in_big_endian_order() -> None:
    """Arrays of text in the other byte order arrive readable."""
    assert list(travelled(np.array(["ab", "ü"], ">U2"))) == ["ab", "ü"]


SCALARS: list[Any] = [
    np.float32(1.5), np.float64("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j),
    np.str_("grün"), np.str_(""), np.str_("a\0"), np.bytes_(b"x\0"), np.bytes_(b""),
    np.datetime64("2024-02-29", "D"), np.timedelta64(5, "ms"), np.float16(0.1),
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_numpy_scalars_come_back(scalar: Any) -> None:
    """NumPy's scalars stay NumPy scalars of the same type."""
    assert same(travelled(scalar), scalar)


def test_large_arrays_travel_beside_without_a_copy() -> None:
    """A large array is an attachment that shares its memory; the receiver uses the buffer it is given."""
    array = np.arange(1000, dtype=np.float32)
    attachments: list[memoryview] = []
    value = encode({"x": [array, 1]}, attachments=attachments, inline_limit=3999)
    assert len(attachments) == 1
    assert value.ByteSize() < 100
    assert np.shares_memory(np.frombuffer(attachments[0], np.float32), array)
    buffer = bytearray(attachments[0])
    back = decode(value, attachments=[buffer])["x"][0]
    back[0] = 7
    assert np.frombuffer(buffer, np.float32)[0] == 7
    read_only = decode(value, attachments=[bytes(buffer)])["x"][0]
    read_only[0] = 8
    unaligned = decode(value, attachments=[memoryview(bytearray(b"x" + buffer))[1:]])["x"][0]
    assert unaligned.flags.aligned
    assert np.array_equal(unaligned, back)


def test_large_text_and_bytes_travel_beside() -> None:
    """Python's str and bytes above the limit are attachments, too."""
    obj = ["é" * 100, b"\xff" * 200, "\ud800" * 100, bytearray(300), memoryview(b"m" * 150)]
    attachments: list[memoryview] = []
    encode(obj, attachments=attachments, inline_limit=99)
    assert [len(attachment) for attachment in attachments] == [200, 200, 300, 300, 150]
    assert travelled(obj, 99) == [obj[0], obj[1], obj[2], bytes(300), b"m" * 150]


def test_many_small_arrays_do_not_make_a_huge_message() -> None:
    """Once a megabyte is inline, arrays above a kilobyte are attached even if they are below the limit."""
    attachments: list[memoryview] = []
    arrays = [np.full(5000, n, np.float64) for n in range(200)]
    value = encode(arrays, attachments=attachments)
    assert value.ByteSize() < 1.2 * (1 << 20)
    back = decode(value, attachments=attachments)
    assert all(map(np.array_equal, arrays, back))


def test_without_attachments_everything_is_inline() -> None:
    """Without a list for attachments one message holds everything."""
    array = np.arange(100_000)
    assert np.array_equal(decode(encode(array)), array)


def test_subclasses_arrive_as_the_plain_type() -> None:
    """An OrderedDict, a defaultdict and a subclass of tuple arrive as dict and tuple."""
    ordered = collections.OrderedDict(a=1)
    counts = collections.defaultdict(list, b=[2])
    size = type("Size", (tuple,), {})([3, 4])
    assert same(travelled([ordered, counts, size]), [{"a": 1}, {"b": [2]}, (3, 4)])


def test_whatever_offers_an_array_is_sent_as_one() -> None:
    """Tensors of other libraries are sent by `__array__`; one that refuses says why."""

    class Tensor:
        dtype, shape = "float32", (2,)

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array([1, 2], np.float32)

    class OnDevice(Tensor):
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("use .cpu() first")

    assert same(travelled(Tensor()), np.array([1, 2], np.float32))
    assert same(travelled(np.zeros((1, 2)).view(np.memmap)), np.zeros((1, 2)))
    with pytest.raises(TypeError, match=r"value\[0\] is .*OnDevice, which gives no array: use .cpu\(\) first"):
        encode([OnDevice()])


def test_extension_dtypes_need_their_library() -> None:
    """bfloat16 works if ml_dtypes is installed, and is an error that names it otherwise."""
    value = Value(array=value_pb2.Array(dtype="bfloat16", shape=[1], data=b"\x80\x3f"))
    try:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        with pytest.raises(ProtocolError, match="ml_dtypes"):
            decode(value)
        return
    assert float(decode(value)[0]) == 1.0
    assert same(travelled(np.ones(3, ml_dtypes.bfloat16)), np.ones(3, ml_dtypes.bfloat16))
    assert same(travelled(ml_dtypes.bfloat16(2)), ml_dtypes.bfloat16(2))


class Model:
    """A class that is not plain data."""

    def __init__(self) -> None:
        self.layers = [Layer("a"), Layer("b", {"lock": threading.Event()})]


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (threading.Event(), r"^value is a threading.Event, which can't be sent: pass plain data, arrays or"),
        ([1, {"a": (0, {1: open})}], r"^value\[1\]\['a'\]\[1\]\[1\] is a builtin_function_or_method, which can't"),
        (Model().layers, r"^value\[1\]\.weights\['lock'\] is a threading.Event, "),
        (Pair(1, [object()]), r"^value\.right\[0\] is an object, "),
        ({(1, 2): object()}, r"^value\[a tuple\] is an object, "),
        ({int: 1}, r"^value\.keys\(\) is a type, "),
        ({frozenset([print])}, r"^value\{\.\.\.\}\{\.\.\.\} is a builtin"),
        ([Colour.RED], r"^value\[0\] is a .*Colour, an enum, which can't be sent: pass its name or its value"),
        ([np.array([None])], r"^value\[0\] is an array of Python objects, which can't be sent: pass a list"),
        (np.zeros(1, "i4,f4"), r"^value is a structured array, which can't be sent: pass its fields as a dict"),
        (np.zeros(1, "V3"), r"^value is an array of dtype \|V3, which can't be sent: cast"),
        (np.zeros(1, "O")[0:0], r"an array of Python objects"),
        (np.zeros(1, "g"), r"^value is an array of dtype .*128, which can't be sent: cast it to float64"),
        (np.longdouble(1), r"^value is a scalar of dtype .*128, which can't be sent: cast it to float64"),
        (np.ma.masked_array([1], [True]), r"^value is a masked array, .*: pass its data and its mask"),
        (lambda: 1, r"^value is a function, which can't be sent: .*, or use it in the function by its name"),
        (range(3), r"^value is a range, "),
        (np.ndarray, r"^value is a type, "),
        (Layer, r"^value is a type, "),
        (Kept(), r"^value is a .*Kept, which is also a dict, so its fields are not all of it"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_named(obj: Any, message: str) -> None:
    """The error names the path, the type and the remedy."""
    with pytest.raises(TypeError, match=message):
        encode(obj)


def test_paths_of_a_call() -> None:
    """Arguments are named as the caller wrote them."""
    with pytest.raises(TypeError, match=r"^args\[1\]\['model'\]\[0\]\.weights is an object, "):
        encode_call((1, {"model": [Layer("x", object())]}), {})
    with pytest.raises(TypeError, match=r"^kwargs\['model'\] is an object, "):
        encode_call((), {"model": object()})


def test_cycles_end() -> None:
    """A structure that contains itself is refused with that suspicion; the deepest allowed one arrives."""
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(TypeError, match=r"^value\[0\].*\.\.\. is nested more than .* contain itself\?"):
        encode(loop)
    deep: Any = 1
    for level in range(MAX_DEPTH):
        deep = [deep] if level % 2 else {"k": deep}
    assert travelled(deep) == deep
    with pytest.raises(TypeError, match="levels deep"):
        encode([deep])
    with pytest.raises(TypeError, match="levels deep"):
        encode((Pair(deep, 0),))


def test_the_deepest_value_fits_in_its_messages() -> None:
    """Parsers stop at 100 nested messages: a step with the deepest arguments is still parsed."""
    from pscluster.v1 import worker_pb2

    deep: Any = np.float32(1)
    for _ in range(MAX_DEPTH):
        deep = [deep]
    step = worker_pb2.Step(arguments=encode(deep))
    request = worker_pb2.StepsRequest(steps=[step])
    assert worker_pb2.StepsRequest.FromString(request.SerializeToString()) == request


def test_handles_travel_by_name() -> None:
    """A handle is sent as kind and key, and becomes what the receiver makes of them."""
    thing = Thing("w/0")
    made = {("thing", "w/0"): Thing("w/0")}
    back = travelled(({"a": thing}, thing), resolve_handle=lambda kind, key: made[kind, key])
    assert back[0]["a"] is back[1] is made["thing", "w/0"]
    with pytest.raises(ProtocolError, match="the thing 'w/0' came where a handle is not allowed"):
        travelled(thing)


def test_handles_are_not_pickled_and_copies_are_the_same() -> None:
    """A handle names something on the cluster: pickling is refused with the remedy, and a copy is the handle itself."""
    thing = Thing("w")
    with pytest.raises(TypeError, match=r"thing 'w' lives on the cluster .*: pass it as an argument"):
        pickle.dumps([thing])
    assert copy.copy(thing) is copy.deepcopy([thing])[0] is thing


def test_records_are_made_without_their_constructor() -> None:
    """Fields are set directly: neither `__init__` nor `__post_init__` runs."""
    layer = Layer("x", np.arange(3))
    layer.name = "never made by its constructor"
    back = travelled(layer)
    assert type(back) is Layer
    assert back.name == layer.name
    assert np.array_equal(back.weights, layer.weights)


def test_what_is_no_field_is_not_lost_silently() -> None:
    """An extra attribute is refused, a cached property is not sent, and a missing field is named."""
    layer = Layer("x")
    layer.cache = {}  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"value is a .*Layer, which has the attribute 'cache', which"):
        encode(layer)
    area = Area(3)
    assert area.size == 9
    assert travelled(area) == area
    partial = Layer("x")
    del partial.weights
    with pytest.raises(ProtocolError, match="unknown 'nope'"):
        decode(_edited(layer.__class__("x"), lambda record: record.fields.__setitem__(0, "nope")))


def _edited(obj: Any, edit: Callable[[value_pb2.Record], Any]) -> value_pb2.Value:
    value = encode(obj)
    edit(value.record)
    return value


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: setattr(r, "module", "no.such.module"), "whose module is not imported here"),
        (lambda r: setattr(r, "qualname", "Nothing"), "no such class"),
        (lambda r: setattr(r, "qualname", "Thing"), "neither a dataclass nor a named tuple"),
        (lambda r: setattr(r, "qualname", "Point.x.y"), "no such class"),
        (lambda r: setattr(r, "qualname", "Kept"), "is also a dict"),
        (lambda r: setattr(r, "qualname", ""), "no such class"),
        (lambda r: setattr(r, "module", ""), "not imported"),
        (lambda r: r.fields.append("z"), "2 values"),
        (lambda r: (r.fields.append("z"), r.values.add(none=True)), "unknown 'z'"),
        (lambda r: (r.fields.pop(), r.values.pop()), "missing 'y'"),
        (lambda r: r.fields.__setitem__(1, "x"), "missing 'y'"),
    ],
)
def test_records_that_do_not_fit_are_refused(edit: Callable[[value_pb2.Record], Any], message: str) -> None:
    """A record of an unknown class, or with other fields, is a protocol error that says which."""
    with pytest.raises(ProtocolError, match=message):
        decode(_edited(Point(1, 2), edit))


def test_fields_may_come_in_another_order() -> None:
    """Fields are matched by name, not by position."""
    for obj in (Point(1, 2), Pair(1, 2)):
        value = encode(obj)
        value.record.fields[:] = value.record.fields[::-1]
        first, second = value.record.values
        first.integer, second.integer = second.integer, first.integer
        assert decode(value) == obj


def test_a_class_can_be_defined_on_the_other_side() -> None:
    """`define` gives the digest of a class, which the receiver's resolver gets; local classes need it."""

    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(TypeError, match=r"a class inside a function.*define the class at the top"):
        encode(Local(1))
    value = encode([Local(1), Point(1, 2)], define=lambda cls: "abc" if cls is Local else "")
    asked: list[tuple[str, str]] = []

    def resolve(definition: str, module: str, qualname: str) -> type:
        asked.append((definition, qualname.rpartition(".")[2]))
        return Local if definition == "abc" else Point

    assert decode(value, resolve_record=resolve) == [Local(1), Point(1, 2)]
    assert asked == [("abc", "Local"), ("", "Point")]


def test_a_module_may_be_known_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a module that bears the mark is sent under the name that the mark gives."""
    marked = dataclasses.make_dataclass("Marked", ["x"], namespace={"__module__": __name__})
    monkeypatch.setitem(vars(sys.modules[__name__]), MODULE_MARK, "__main__")
    assert encode(marked(1)).record.module == "__main__"


def test_remote_values_are_spliced_in() -> None:
    """What `remote` returns for an object replaces it, with its attachments renumbered."""

    class Future:
        pass

    attachments_of_it: list[memoryview] = []
    big = np.arange(100.0)
    result = encode({"r": [big, big + 1, Point(1, 2)]}, attachments=attachments_of_it, inline_limit=10)

    def remote(obj: Any, attachments: list[memoryview] | None) -> value_pb2.Value | None:
        return splice(result, attachments_of_it, attachments) if isinstance(obj, Future) else None

    attachments: list[memoryview] = []
    args = (big * 2, Future(), Future(), Thing("t"))
    value = encode_call(args, {"k": Future()}, attachments=attachments, inline_limit=10, remote=remote)
    assert len(attachments) == 7
    back, kwargs = decode_call(value, attachments=attachments, resolve_handle=lambda *name: name)
    assert np.array_equal(back[0], big * 2)
    assert back[3] == ("thing", "t")
    for structure in (back[1], back[2], kwargs["k"]):
        assert np.array_equal(structure["r"][0], big)
        assert np.array_equal(structure["r"][1], big + 1)
        assert structure["r"][2] == Point(1, 2)
    assert np.array_equal(decode(encode([Future()], remote=remote))[0]["r"][1], big + 1)
    assert result == encode({"r": [big, big + 1, Point(1, 2)]}, attachments=[], inline_limit=10)


def test_splicing_checks_and_defines() -> None:
    """A value that lacks its attachments is refused; records get definitions; depth adds up."""
    with pytest.raises(ProtocolError, match="attachment 1, but there are 0"):
        splice(encode(np.ones(3), attachments=[], inline_limit=0), [], [])
    spliced = splice(encode([Point(1, 2)]), [], None, define=lambda cls: f"digest of {cls.__name__}")
    assert spliced.list.items[0].record.definition == "digest of Point"
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    inner = encode(deep)
    assert decode(encode(Thing, remote=lambda *_: inner)) == deep
    with pytest.raises(TypeError, match="levels deep"):
        encode([Thing], remote=lambda *_: inner)
    for _ in range(5):
        inner = Value(remote=inner)
    with pytest.raises(ProtocolError, match="levels deep"):
        splice(inner, [], None)


def test_the_arguments_of_a_call_are_checked() -> None:
    """Arguments other than (args, kwargs) are refused."""
    assert decode_call(encode_call((1, "a"), {"b": None})) == ((1, "a"), {"b": None})
    wrongs: list[Any] = [None, (), ((), {1: 2}), ([], {}), ((), {}, 1), [(), {}]]
    for wrong in wrongs:
        with pytest.raises(ProtocolError, match="arguments of a call"):
            decode_call(encode(wrong))


def _array(**fields: Any) -> value_pb2.Value:
    return Value(array=value_pb2.Array(**fields))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Value(), "empty value"),
        (_array(dtype="float64", shape=[2**62], data=b"few"), "came with 3 bytes"),
        (_array(dtype="float64", shape=[2**62, 4], data=b""), "came with 0 bytes"),
        (_array(dtype="uint8", shape=[2**63, 2], data=b""), "came with 0 bytes"),
        (_array(dtype="uint8", shape=[0, 2**63]), "can't have the shape"),
        (_array(dtype="uint8", shape=[0] * 65), "65 dimensions"),
        (_array(dtype="uint8", shape=[1] * 65, data=b"1"), "65 dimensions"),
        (_array(dtype="object", shape=[1], data=b"12345678"), "unknown element type"),
        (_array(dtype="O", shape=[1], data=b"12345678"), "unknown element type"),
        (_array(dtype="V8", shape=[1], data=b"12345678"), "unknown element type"),
        (_array(dtype="i4,f4", shape=[1], data=b"12345678"), "unknown element type"),
        (_array(dtype="<U0", shape=[2**60]), "empty or too long"),
        (_array(dtype="S999999999", shape=[0]), "empty or too long"),
        (_array(dtype="<U1", shape=[1], data=b"\xff\xff\xff\x7f"), "a character that doesn't exist"),
        (_array(dtype="bool", shape=[1], data=b"\x02"), "neither 0 nor 1"),
        (_array(dtype="datetime64[0s]", shape=[1], data=b"12345678"), None),
        (_array(dtype="float128", shape=[1], data=bytes(16)), "float128"),
        (_array(dtype="float64", shape=[1], attachment=1), "attachment 1 of 0"),
        (_array(dtype="str", data=b"\xff"), "not in UTF-8"),
        (Value(scalar=value_pb2.Array(dtype="float64", shape=[1], data=bytes(8))), "scalar with a shape"),
        (Value(scalar=value_pb2.Array(dtype="float64", data=bytes(7))), "came with 7 bytes"),
        (Value(scalar=value_pb2.Array(dtype="<U1", data=b"\xff\xff\xff\x7f")), "or no text"),
        (Value(scalar=value_pb2.Array(dtype="S2", data=b"\xff")), "came with 1 bytes"),
        (Value(scalar=value_pb2.Array(dtype="bool", data=b"\xff")), "neither 0 nor 1"),
        (Value(complex=value_pb2.Array(data=b"1")), "complex number came with 1 bytes"),
        (Value(dict=value_pb2.Pairs(keys=[Value(none=True)])), "1 keys and 0 values"),
        (Value(dict=value_pb2.Pairs(keys=[encode([])], values=[encode(1)])), "can't be one: unhashable"),
        (Value(set=value_pb2.Sequence(items=[encode({})])), "can't be one: unhashable"),
        (Value(frozenset=value_pb2.Sequence(items=[encode(Prickly(1))])), "no hash today"),
    ],
)  # fmt: skip
def test_malformed_values_are_refused(value: value_pb2.Value, message: str | None) -> None:
    """Each malformed value is a ProtocolError, or harmless."""
    if message is None:
        decode(value)
        return
    with pytest.raises(ProtocolError, match=message):
        decode(value)


def test_an_attachment_belongs_to_one_array() -> None:
    """Two arrays in one attachment would share their memory."""
    value = encode([np.ones(3), np.ones(3)], attachments=[], inline_limit=0)
    value.list.items[1].array.attachment = 1
    with pytest.raises(ProtocolError, match="attachment 1 of 2, missing or used before"):
        decode(value, attachments=[bytearray(24), bytearray(24)])


def test_structures_are_mapped() -> None:
    """Every leaf is replaced; containers, including those of the user's classes, keep their type."""

    def double(leaf: Any) -> Any:
        return leaf * 2

    structure = {"a": [1, (2, Pair(3, Layer("x", 4)))], "b": np.ones(2)}
    mapped = map_structure(double, structure)
    assert mapped["a"] == [2, (4, Pair(6, Layer("xx", 8, scale=2.0)))]
    assert np.array_equal(mapped["b"], [2, 2])
    assert structure["a"][0] == 1  # type: ignore[index]
    counts = map_structure(double, collections.defaultdict(int, a=1))
    assert (counts["a"], counts["new"]) == (2, 0)
    assert map_structure(double, 4) == 8
    assert map_structure(str, {1, 2}) == "{1, 2}"
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contain itself"):
        map_structure(double, loop)


# Fuzz

finite = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(), st.complex_numbers(),
    st.text(), st.text(st.characters(codec=None)), st.binary(), st.builds(Point, st.integers(), st.integers()),
)  # fmt: skip
arrays = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(["f4", "i8", "?", "c8", "<U3", "S2", "m8[s]", ">i2", "u1"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
data = st.recursive(
    finite | arrays | arrays.map(lambda array: array.reshape(-1)[0] if array.size else np.int8(1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text() | st.integers(), inner, max_size=4),
        st.sets(st.integers() | st.text(), max_size=4),
        st.frozensets(st.binary(max_size=9), max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(Layer, st.text(), inner),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(data, st.sampled_from([0, 8, 64 << 10]))
def test_any_data_comes_back(obj: Any, limit: int) -> None:
    """Any combination of sendable data comes back the same, whether arrays are sent inline or attached."""
    native = map_structure(_native, obj)
    assert _alike(travelled(obj, limit), native)


def _native(leaf: Any) -> Any:
    return leaf.astype(leaf.dtype.newbyteorder("=")) if isinstance(leaf, np.ndarray) else leaf


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, Layer):
        return type(right) is Layer and left.name == right.name and _alike(left.weights, right.weights)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, dict):
        return isinstance(right, dict) and _alike(list(left.items()), list(right.items()))
    return same(left, right)


def _outcome(sent: bytes, attachments: list[bytearray]) -> None:
    """Decode, or raise ProtocolError and nothing else."""
    try:
        value = Value.FromString(sent)
    except DecodeError:
        return
    try:
        got = decode(value, attachments=attachments, resolve_handle=lambda kind, key: Thing(key))
    except ProtocolError:
        return
    # An accepted value is sound: it can be shown, and sent again.
    repr(got)
    encode(got)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_decoded(sent: bytes) -> None:
    """Any bytes decode to a value or are a ProtocolError."""
    _outcome(sent, [bytearray(8)])


@settings(max_examples=400, deadline=None)
@given(
    data,
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_damaged_values_are_refused_or_decoded(obj: Any, edits: list[tuple[int, int]], cut: int) -> None:
    """A real value with a few bytes changed, or its end cut off, gives a value or a ProtocolError."""
    attachments: list[memoryview] = []
    sent = bytearray(encode([obj, Thing("t")], attachments=attachments, inline_limit=16).SerializeToString())
    for position, byte in edits:
        sent[position % len(sent)] = byte
    _outcome(bytes(sent[: len(sent) - cut]), [bytearray(attachment) for attachment in attachments])


def test_a_module_that_another_thread_is_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class of masked arrays is not there yet, so nobody has made one."""
    monkeypatch.setitem(sys.modules, "numpy.ma", types.ModuleType("numpy.ma"))
    assert not is_masked_array([1, 2])
