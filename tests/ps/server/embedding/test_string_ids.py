"""Tables whose ids are strings: the rows of a shard against a dictionary, ids as users give them, and hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.storage.support import padded
from tests.ps.strings import colliding, text_of

from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.core.geometry.partition import Partition
from pscluster.core.transport.frames import padding
from pscluster.ps import row_index
from pscluster.ps.initializers import RandomUniform
from pscluster.ps.optim.row_sums import Groups
from pscluster.ps.row_ids import columns_of, dtype_in, numbers_of, rows_by, string_ids, texts_of
from pscluster.ps.server.embedding.table_changes import carry_out, decide, record_bytes, recorded
from pscluster.ps.server.embedding.tables import new_array, read_rows, rows_of
from pscluster.ps.server.requests import creation, reads, update_checks, updates
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.table_policies import LeastRecentlyUsed, SeenTimes
from pscluster.ps.tables import InitialRows, check_table, shards_of, table_ids
from pscluster.v1 import ps_pb2, state_pb2

DIM, ID_BYTES = 3, 48
WIDTH = DIM + columns_of(ID_BYTES)
INITIAL = InitialRows(RandomUniform(seed=5), DIM)


def strings(texts: list[str]) -> Any:
    return string_ids(texts, "t", ID_BYTES)


def no_fills(optimizer: int) -> Mapping[str, float]:
    raise AssertionError(optimizer)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have strings of one hash meet in the index, too."""
    monkeypatch.setattr(row_index, "_KEY", 0)


class Table:
    """A shard, the log of its updates, and a dictionary that gets the same."""

    def __init__(self, capacity: int = 500, *, policies: bool = False) -> None:
        spec = ps_pb2.VariableSpec(id=1, name="t", dtype="float32", shape=(capacity, WIDTH), owners=[0])
        spec.asynchronous = True
        spec.table.capacity = capacity
        spec.table.dim, spec.table.initializer, spec.table.id_bytes = DIM, "random_uniform", ID_BYTES
        spec.table.numbers = json.dumps(RandomUniform(seed=5).values_by_name())
        for ends in ((capacity,), (WIDTH,)):
            spec.splits.add(ends=ends)
        if policies:
            spec.table.admission.CopyFrom(SeenTimes(2).message())
            spec.table.eviction.CopyFrom(LeastRecentlyUsed().message())
        check_table(spec)
        self.shard = Shard(new_array(0, capacity, WIDTH), row_limit=capacity)
        self.held = HeldVariable(spec, np.dtype(np.float32), Partition.even(tuple(spec.shape), (1, 1)), {0: self.shard})
        self.known: dict[str, Any] = {}
        self.log: list[tuple[Any, bytes]] = []

    def update(self, texts: list[str]) -> None:
        """Add 1 to these rows, each once."""
        ids = strings(texts)
        changes = decide(self.held, self.shard, ids, None, gradient=True)
        record = changes.record(0).SerializeToString()
        if self.held.spec.table.HasField("eviction"):
            assert len(record) <= record_bytes(self.held.spec.table, len(ids)) + 24
        self.log.append((ids, record))
        for gone in texts_of(changes.evicted).tolist():
            del self.known[gone]
        for made in texts_of(changes.made).tolist():
            self.known[made] = INITIAL.of(strings([made]))[0]
        for text in set(texts) & self.known.keys():
            self.known[text] = self.known[text] + np.float32(1)
        self._apply(ids, changes)

    def _apply(self, ids: Any, changes: Any) -> None:
        places = np.unique(carry_out(self.held, self.shard, ids, changes, no_fills).places)
        rows_of(self.shard, DIM).values[places] += np.float32(1)
        self.shard.updates += 1

    def check(self, shard: Shard | None = None) -> None:
        """Compare the rows, and some that there are not, with the dictionary."""
        shard = self.shard if shard is None else shard
        assert set(texts_of(rows_of(shard, DIM).ids()).tolist()) == self.known.keys()
        others = [text for text in map(text_of, range(1000, 1050)) if text not in self.known]
        texts = [*self.known, *others]
        expected = [*self.known.values(), *INITIAL.of(strings(others))]
        read, missing = read_rows(shard, strings(texts), INITIAL)
        np.testing.assert_array_equal(read, expected)
        assert missing.tolist() == [at for at, text in enumerate(texts) if text not in self.known]

    def replayed(self) -> Shard:
        """Return what another process makes of the log."""
        other = Table(self.shard.row_limit)
        other.held.spec.CopyFrom(self.held.spec)
        for ids, record in self.log:
            other._apply(ids, recorded(other.held, other.shard, ids, state_pb2.TableChange.FromString(record)))
        return other.shard


@pytest.mark.parametrize("policies", [False, True])
def test_rows_are_those_of_a_dictionary(policies: bool) -> None:
    """Random updates of rows that come and go, restarts from the array alone, and a replay; some share a hash."""
    rng, table = np.random.default_rng(3), Table(300 if policies else 2000, policies=policies)
    for number in range(200):
        table.update([text_of(int(each)) for each in rng.zipf(1.2, 60) % 1500 - 1])
        if number % 50 == 13:
            table.shard.rows = None  # as after a restart
            table.check()
    table.check()
    assert set(colliding()) <= table.known.keys()
    assert (len(table.known) == 300) is policies
    if policies:
        table.check(table.replayed())


def test_strings_of_one_hash_are_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list(colliding(20))
    ids = strings(texts)
    assert len(np.unique(numbers_of(ids))) == len(np.unique(shards_of(ids, 1000))) == 1
    groups = Groups.of(strings(texts[:3] * 2 + ["x", texts[1]]))
    assert sorted(groups.ids.tolist()) == sorted(strings([*texts[:3], "x"]).tolist())
    assert groups.ids[groups.inverse].tolist() == strings(texts[:3] * 2 + ["x", texts[1]]).tolist()
    table = Table()
    with monkeypatch.context() as patch:
        patch.setattr(row_index, "_KEY", 7)
        assert len(np.unique(row_index.RowIndex()._first_slots(ids))) > 15
    for count in range(1, 20):
        table.update(texts[:count])
    table.check()
    values = read_rows(table.shard, ids, INITIAL)[0]
    assert len(np.unique(values[:, 0])) == 20  # they began as one, and have had 19 to 0 updates


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12), max_size=30))
@settings(max_examples=60, deadline=None)
def test_ids_are_what_they_are_in_every_form(texts: list[str]) -> None:
    """Arrays, lists and columns of one string give one id, which is it; its hash does not depend on the others."""
    ids = strings(texts)
    assert texts_of(ids).tolist() == texts
    forms: list[Any] = [np.array(texts, object), pa.array(texts, pa.string()), [text.encode() for text in texts], ids]
    forms += [np.array(texts), tuple(texts), pa.chunked_array([texts[:3], texts[3:]], pa.string())]
    if hasattr(np.dtypes, "StringDType"):
        forms.append(np.array(texts, np.dtypes.StringDType()))
    for form in forms:
        again = string_ids(form, "t", ID_BYTES)
        assert again.dtype == ids.dtype
        np.testing.assert_array_equal(again, ids)
    alone = [int(numbers_of(strings([text]))[0]) for text in texts]
    assert alone == numbers_of(ids).tolist() == numbers_of(ids.astype("S48")).tolist()
    groups = Groups.of(ids)
    assert sorted(texts_of(groups.ids).tolist()) == sorted(set(texts))
    np.testing.assert_array_equal(groups.ids[groups.inverse], ids)


def test_hashes_are_the_same_in_every_version() -> None:
    """They say which shard has a row, and what rows that were never stored have."""
    ids = strings(["", "a", "pscluster", "thé 東京", "x" * 48])
    assert [f"{each:016x}" for each in numbers_of(ids).tolist()] == [
        "0000000000000000",
        "4f5da978776a9db1",
        "eb9e323468cb9e22",
        "f06245e8f76a6de9",
        "9a26c7a675bb016b",
    ]
    texts = [f"user-{number}" for number in range(50_000)]
    counts = np.bincount(shards_of(string_ids(texts, "t", 16), 7), minlength=7)
    assert counts.min() > 0.97 * len(texts) / 7
    rows = INITIAL.of(strings(texts[:5000]))
    assert len(np.unique(rows)) > 0.99 * rows.size


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["a", None], r"ids are strings, but ids\[1\] is None"),
        (["a", float("nan")], r"ids\[1\] is nan, a float"),
        ([["a"], [7]], r"ids\[1, 0\] is 7, an int"),
        (np.array([5, 6]), r"ids are strings, but ids\[0\] is 5, of int64"),
        (np.array([0.5]), r"ids\[0\] is 0.5, of float64"),
        (5, "ids are strings, but ids is 5, of int64"),
        (["a", "b" * 49], r"ids\[1\], 'b{40}'\.\.\., has 49 bytes of UTF-8; the limit .* max_id_bytes, is 48"),
        (np.array(["", "é" * 25]), r"ids\[1\], 'é{25}', has 50 bytes"),
        (np.array(["", "b" * 49]), r"ids\[1\], 'b{40}'\.\.\., has 49 bytes"),
        (["\0"], r"ids\[0\], '\\x00', has a NUL"),
        (["a", "a\0"], r"ids\[1\], 'a\\x00', has a NUL"),
        (np.array([b"a\0b"]), r"ids\[0\], 'a\\x00b', has a NUL"),
        ([b"\xff"], r"ids\[0\], b'\\xff', is not UTF-8"),
        (np.array([b"\xc3", b"\xa9"]), r"ids\[0\], b'\\xc3', is not UTF-8"),
        (["\ud800"], r"ids\[0\], '\\ud800', is not UTF-8"),
        (pa.array(["a", None]), r"ids\[1\] is None"),
        ([["a"], ["b", "c"]], r"ids\[0\] is \['a'\], a list"),
    ],
)
def test_wrong_strings_are_named_with_their_place(ids: Any, said: str) -> None:
    with pytest.raises(InvalidUpdateError, match=f"^table 't': .*{said}"):
        table_ids(ids, "t", ID_BYTES)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["a", "b"], "ids must be integers, but the first is .*'a'.*, a str.*make the table with ids=str"),
        (np.array([b"a"]), "ids must be integers, but the first is .*b'a'"),
        (np.array([1, None]), "ids must be integers, but they are object, such as None .position 1.: give whole"),
    ],
)
def test_strings_are_no_int64(ids: Any, said: str) -> None:
    with pytest.raises(InvalidUpdateError, match=said):
        table_ids(ids, "t")


def test_ids_of_no_rows_have_the_shape_that_was_given() -> None:
    empties: list[Any] = [[], np.empty((0, 3)), np.empty((2, 0), "U4")]
    for empty in empties:
        assert string_ids(empty, "t", 16).shape == np.shape(empty)
    assert len(numbers_of(strings([]))) == 0
    assert Groups.of(strings([])).ids.shape == (0,)


def test_rows_say_by_their_width_what_ids_they_have() -> None:
    for id_bytes in (16, 48, 1024):
        assert dtype_in(7 + columns_of(id_bytes), 7) == np.dtype(f"S{id_bytes}")
    assert dtype_in(7 + columns_of(0), 7) == np.int64
    for width in (0, 7, 10, 12, 7 + columns_of(1032)):
        with pytest.raises(ValueError, match="have no ids"):
            dtype_in(width, 7)
    spec = Table().held.spec
    for id_bytes in (8, 17, 1032):
        spec.table.id_bytes = id_bytes
        with pytest.raises(ProtocolError, match=f"has ids of {id_bytes} bytes; they must be a multiple of 8 in 16"):
            check_table(spec)


def test_requests_that_are_cut_at_any_byte_are_refused() -> None:
    """So are those whose ids are wider than the table's, or of the other kind; whole ones are taken."""
    store = Store(0, 1)
    creation.create(store, ps_pb2.CreateRequest(job=1, variable=Table().held.spec), Payload([]))
    creation.create(store, ps_pb2.CreateRequest(job=1, variable=dense_spec()), padded(np.zeros((3, DIM), np.float32)))
    ids, values = strings(["one", "thé", "x" * 21]), np.ones((3, DIM), np.float32)
    rows, payload = rows_by(ids), padded(ids, values)
    ids_bytes = ids.nbytes + padding(ids.nbytes)
    total = ids_bytes + values.nbytes + padding(values.nbytes)

    def update(rows: ps_pb2.Rows, variable: int = 1) -> ps_pb2.UpdateRequest:
        item = ps_pb2.UpdateItem(variable=variable, kind=ps_pb2.ADD, rows=rows, nth=1, value_bytes=values.nbytes)
        return ps_pb2.UpdateRequest(job=1, incarnation=9, function=1, items=[item])

    def read(rows: ps_pb2.Rows, variable: int = 1) -> ps_pb2.ReadRequest:
        return ps_pb2.ReadRequest(job=1, items=[ps_pb2.ReadItem(variable=variable, rows=rows)])

    for stop in range(total):
        with pytest.raises(ProtocolError, match=f"{stop} bytes whose items need {total}"):
            update_checks.check_update(store, update(rows), stop)
    for stop in range(ids_bytes):
        with pytest.raises(ProtocolError, match=f"{stop} bytes of row numbers whose items need {ids_bytes}"):
            reads.sources_of(store, read(rows), stop)
    for id_bytes in (0, 1, 15, 22, ID_BYTES + 1, (1 << 32) - 1):
        other = ps_pb2.Rows(ids=3, id_bytes=id_bytes)
        with pytest.raises((ProtocolError, InvalidUpdateError)):
            update_checks.check_update(store, update(other), total)
    for wrong in (ps_pb2.Rows(ids=3), ps_pb2.Rows(ids=3, id_bytes=ID_BYTES + 1)):
        with pytest.raises(InvalidUpdateError, match="ids are strings of up to 48 bytes, not"):
            reads.sources_of(store, read(wrong), ids_bytes)
    for checked in (
        lambda: update_checks.check_update(store, update(rows, 2), total),
        lambda: reads.sources_of(store, read(rows, 2), 80),
    ):
        with pytest.raises(ProtocolError, match="ids of 'd' as strings, but they are integers"):
            checked()
    updates.apply(store, update(rows), update_checks.check_update(store, update(rows), total), payload)
    answer = b"".join(reads.read(store, read(rows), padded(ids)))
    initial = INITIAL.of(ids) + 1
    assert answer[: values.nbytes] == initial.tobytes()


def dense_spec() -> ps_pb2.VariableSpec:
    spec = ps_pb2.VariableSpec(id=2, name="d", dtype="float32", shape=(3, DIM), owners=[0])
    for length in spec.shape:
        spec.splits.add(ends=[length])
    return spec
