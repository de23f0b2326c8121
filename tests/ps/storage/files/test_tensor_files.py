"""Files of checkpoints, against the safetensors library, and servers' parts in them, on stores in this process."""

from __future__ import annotations

import gc
import hashlib
import json
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from pscluster.coordinator.checkpoints.index import Index, check_whole, read_index, write_index
from pscluster.coordinator.checkpoints.restore_plan import plan_variable
from pscluster.core.errors import CheckpointError, StaleError, UnavailableError
from pscluster.core.geometry.partition import Partition
from pscluster.core.ids import fresh_id
from pscluster.core.transport.frames import padding, view
from pscluster.ps.client.placement.placements import Placements
from pscluster.ps.handles.indexing import whole_index
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.optim.kernels import new_slots
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.optim.rules import RULES
from pscluster.ps.server.requests import creation, update_checks, updates
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import partition_of
from pscluster.ps.storage.checkpoint_parts import CheckpointParts
from pscluster.ps.storage.files import tensor_files
from pscluster.ps.storage.files.spill import Spill
from pscluster.ps.storage.files.tensor_files import WrittenFile, join
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]

NO_CLIENT: Any = SimpleNamespace(placements=Placements(lambda _: (), lambda: None, 0.0))

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
REAL = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "bfloat16"),
]
COMPLEX = ["complex64", "complex128"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (0,), (3, 0, 2), (2, 3, 4), (300, 7)]


def typed(name: str) -> np.dtype[Any]:
    """Return a type by its name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def some(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return values of every kind that the type has, for floats also infinities and NaNs."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    if dtype == np.bool_:
        data &= 1
    return data.view(dtype).reshape(shape)


def write(path: str, *arrays: tuple[str, Array], chunk: int = 7) -> tuple[WrittenFile, list[ps_pb2.SavedTensor]]:
    """Write these arrays, in small pieces."""
    tensors = [tensor_files.tensor_to_write(name, array.dtype, array.shape) for name, array in arrays]
    data = (array.tobytes() for _, array in arrays)
    pieces = ([encoded[at : at + chunk] for at in range(0, len(encoded), chunk)] for encoded in data)
    return tensor_files.write(path, tensors, pieces), tensors


def written(path: Path, arrays: dict[str, Array]) -> tuple[WrittenFile, list[ps_pb2.SavedTensor]]:
    """Write these arrays to a file."""
    return write(str(path), *arrays.items())


# The format


@pytest.mark.parametrize("name", REAL + COMPLEX)
def test_the_library_reads_what_we_write(tmp_path: Path, name: str) -> None:
    """Every type and shape is read bit for bit by the library; complex numbers are pairs."""
    arrays = {f"a/{shape}": some(typed(name), shape) for shape in SHAPES}
    path = tmp_path / "file.safetensors"
    done, _ = written(path, arrays)
    assert done.bytes == path.stat().st_size
    tensors = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    assert tensors.keys() == arrays.keys()
    for key, array in arrays.items():
        assert bytes(tensors[key]["data"]) == array.tobytes()
        assert tuple(tensors[key]["shape"]) == (*array.shape, *([2] if name in COMPLEX else []))
    if name == "bfloat16":
        assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
        return
    loaded = safetensors.numpy.load_file(path)
    for key, array in arrays.items():
        again = loaded[key]
        if name in COMPLEX:
            assert again.dtype == array.real.dtype
            again = np.ascontiguousarray(again).view(array.dtype).reshape(array.shape)
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    with safetensors.safe_open(path, framework="np") as file:  # type: ignore[no-untyped-call]
        assert file.metadata() == {"format": "np"}


@pytest.mark.parametrize("name", REAL)
def test_we_read_what_the_library_writes(tmp_path: Path, name: str) -> None:
    """Every type and shape, from the offsets in the header."""
    arrays = {f"a/{shape}": some(typed(name), shape) for shape in SHAPES}
    path = tmp_path / "file.safetensors"
    safetensors.numpy.save_file(arrays, path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for key, array in arrays.items():
        start, stop = header[key]["data_offsets"]
        saved = tensor_files.tensor_to_write(key, array.dtype, array.shape)
        saved.offset, saved.checksum = 8 + size + start, xxh3_128(data[8 + size + start : 8 + size + stop]).hexdigest()
        again = tensor_files.read(str(path), saved)
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("name", REAL + COMPLEX)
def test_our_own_way_back(tmp_path: Path, name: str) -> None:
    """Each tensor is at the offset that its entry has, with that checksum."""
    arrays = {f"a/{shape}": some(typed(name), shape) for shape in SHAPES}
    path = tmp_path / "file.safetensors"
    done, tensors = written(path, arrays)
    assert xxh3_128(path.read_bytes()[: done.header_bytes]).hexdigest() == done.header_checksum
    for array, saved in zip(arrays.values(), tensors, strict=True):
        again = tensor_files.read(str(path), saved)
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_file_without_tensors(tmp_path: Path) -> None:
    """A server without shards writes a file, too, and the library accepts it."""
    path = tmp_path / "file.safetensors"
    assert written(path, {})[0].bytes == path.stat().st_size
    assert safetensors.numpy.load_file(path) == {}


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """A file in which one tensor would hide the other is not written."""
    with pytest.raises(CheckpointError, match="named 'w'"):
        write(str(tmp_path / "file"), ("w", np.ones(3)), ("w", np.zeros(3)))
    with pytest.raises(CheckpointError, match="named '__metadata__'"):
        write(str(tmp_path / "file"), ("__metadata__", np.ones(3)))


@given(st.text(min_size=1, max_size=30).filter(lambda name: name.isprintable() and name != "__metadata__"))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_names_of_any_kind(tmp_path: Path, name: str) -> None:
    """Quotes, slashes and letters of all scripts."""
    path = tmp_path / "file.safetensors"
    written(path, {name: np.arange(3)})
    assert list(safetensors.numpy.load_file(path)) == [name]


@pytest.mark.parametrize("file", ["", ".", "..", ".hidden", "a/b", "../a", "/etc/passwd", "a\0b", "a\n", "C:\\a"])
def test_a_name_that_leads_elsewhere_is_refused(file: str) -> None:
    """An index can't make a server read or write outside the checkpoint."""
    with pytest.raises(CheckpointError, match="not the name of a file"):
        join("/checkpoints/one", file)


def test_urls(tmp_path: Path) -> None:
    """A path may be a URL of fsspec."""
    array = np.arange(10.0)
    for path in (f"file://{tmp_path}/file", "memory://checkpoint/file"):
        _, (saved,) = write(path, ("w", array))
        again = tensor_files.read(path, saved)
        np.testing.assert_array_equal(again, array)


def test_damage_is_told_with_the_file_and_the_tensor(tmp_path: Path) -> None:
    """A flipped bit, a file that is too short, missing or not a file, a type of another size."""
    array = np.arange(10.0)
    path = tmp_path / "file"
    _, (saved,) = written(path, {"w": array})
    good = path.read_bytes()

    def read(dtype: str = "float64", at: Path = path) -> Array:
        saved.dtype = dtype
        return tensor_files.read(str(at), saved)

    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: w is not"):
        read()
    path.write_bytes(good[:-3])
    with pytest.raises(CheckpointError, match=rf"{path} is too short: 3 bytes"):
        read()
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{path} is too short: 80 bytes"):
        read()
    path.write_bytes(good)
    with pytest.raises(CheckpointError, match=rf"{path}: w of float32\[10\] takes 40 bytes, not 80"):
        read("float32")
    with pytest.raises(CheckpointError, match=r"elsewhere can't be read: No such file"):
        read(at=tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"can't be read: Is a directory"):
        read(at=tmp_path)
    np.testing.assert_array_equal(read(), array)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("regular/file", "Not a directory|File exists"),
        ("", "Is a directory"),
        ("ghostly://bucket/file", "ghostly"),
    ],
)
def test_a_file_that_cant_be_written(tmp_path: Path, path: str, reason: str) -> None:
    """The error names the path and gives the reason."""
    (tmp_path / "regular").write_text("a file")
    whole = path if "://" in path else str(tmp_path / path)
    with pytest.raises(CheckpointError, match=rf"{whole} can't be written: .*{reason}"):
        write(whole, ("w", np.ones(3)))


# Servers in this process


class Servers:
    """Stores in place of servers, each with its part of checkpoints."""

    def __init__(self, count: int) -> None:
        self.stores = [Store(index, 7) for index in range(count)]
        self.parts = [CheckpointParts() for _ in range(count)]
        self.specs: dict[str, ps_pb2.VariableSpec] = {}
        self.rules: dict[str, tuple[int, str]] = {}
        self._sequence = 0

    def declare(self, name: str, values: Array, ends: Sequence[Sequence[int]] | None = None, first: int = 0) -> None:
        """Create a variable with these cuts, its shards in turn on the servers."""
        cuts = [[length] for length in values.shape] if ends is None else ends
        spec = ps_pb2.VariableSpec(id=len(self.specs) + 1, name=name, dtype=values.dtype.name, shape=values.shape)
        for cut in cuts:
            spec.splits.add(ends=cut)
        partition = Partition(values.shape, tuple(map(tuple, cuts)))
        spec.owners.extend((first + shard) % len(self.stores) for shard in range(partition.num_shards))
        blocks = [np.ascontiguousarray(values[whole_index(block)]) for block in partition.blocks]
        for store in self.stores:
            mine = [block for block, owner in zip(blocks, spec.owners, strict=True) if owner == store.index]
            creation.create(store, ps_pb2.CreateRequest(job=7, variable=spec), payload(mine))
        self.specs[name] = spec

    def optimizer(
        self, name: str, rule: str, *, optimizer_id: int = 0, ema: float = 0.0, **hyperparameters: Any
    ) -> None:
        """Create an optimizer."""
        numbers, flags = RULES[rule](**hyperparameters).to_spec()
        spec = ps_pb2.OptimizerSpec(
            id=optimizer_id or 100 + len(self.rules),
            name=name,
            rule=rule,
            numbers=numbers,
            flags=flags,
            ema_momentum=ema,
        )
        self.rules[name] = spec.id, rule
        for store in self.stores:
            creation.create(store, ps_pb2.CreateRequest(job=7, optimizer=spec), Payload([]))

    def update(
        self,
        variable: str,
        shard: int,
        kind: ps_pb2.UpdateKind,
        values: Array,
        optimizer: str = "",
        *,
        function: int = 0,
        key: int = 0,
        late: int = 0,
    ) -> None:
        """Update a whole shard, under the present term or an earlier one."""
        spec = self.specs[variable]
        store = self.stores[spec.owners[shard]]
        self._sequence += 1
        request = ps_pb2.UpdateRequest(job=7, incarnation=9, function=function, key=key, term=store.term - late)
        request.sequence = 0 if function else self._sequence
        request.items.add(
            variable=spec.id,
            shard=shard,
            kind=kind,
            optimizer=self.rules[optimizer][0] if optimizer else 0,
            rows=ps_pb2.Rows(all=True),
            nth=1,
            value_bytes=values.nbytes,
        )
        total = values.nbytes + padding(values.nbytes)
        updates.apply(store, request, update_checks.check_update(store, request, total), payload([values]))

    def train(self, variable: str, shard: int, optimizer: str, seed: int = 0) -> None:
        """Apply a gradient to a shard."""
        spec = self.specs[variable]
        shape = partition_of(spec).block(shard).shape
        gradient = np.random.default_rng(seed).normal(size=shape).astype(typed(spec.dtype))
        self.update(variable, shard, ps_pb2.APPLY_GRADIENT, gradient, optimizer)

    def mark(self, checkpoint_id: int = 1) -> None:
        """Mark all shards."""
        for store, parts in zip(self.stores, self.parts, strict=True):
            parts.mark(store, checkpoint_id)

    def write(self, folder: Path | str, checkpoint_id: int = 1) -> Index:
        """Write the marked shards."""
        index = Index(checkpoint_id, "now", 0.0)
        for spec in self.specs.values():
            index.add_variable(spec)
        names = {spec.id: name for name, spec in self.specs.items()}
        for store, parts in zip(self.stores, self.parts, strict=True):
            file = f"part-{store.index}-of-{len(self.stores)}.safetensors"
            index.add_file(file, parts.write(store, checkpoint_id, join(str(folder), file)), names)
        check_whole(index, str(folder))
        write_index(str(folder), index)
        return index

    def save(self, folder: Path | str) -> Index:
        """Mark and write."""
        self.mark()
        return self.write(folder)

    def restore(self, folder: Path | str) -> None:
        """Restore as the coordinator does."""
        path = str(folder)
        index = read_index(path)
        check_whole(index, path)
        requests = {store.index: ps_pb2.RestoreRequest() for store in self.stores}
        for name, spec in self.specs.items():
            plan_variable(Variable.of(spec, NO_CLIENT), index.variables[name], path, requests)
        restore_id = fresh_id()
        for store, parts in zip(self.stores, self.parts, strict=True):
            requests[store.index].id = restore_id
            parts.stage(store, requests[store.index], lambda file: join(path, file))
        for store, parts in zip(self.stores, self.parts, strict=True):
            parts.commit(store, restore_id, store.term + 1)

    def whole(self, variable: str) -> dict[str, bytes]:
        """Return all arrays of a variable, whole; those that shards lack as before the first gradient."""
        spec = self.specs[variable]
        partition, dtype = partition_of(spec), typed(spec.dtype)
        arrays: dict[str, Array] = {}

        def put(key: str, index: int, array: Array) -> None:
            whole = arrays.setdefault(key, np.zeros(partition.shape, array.dtype))
            whole[whole_index(partition.block(index))] = array

        for index, owner in enumerate(spec.owners):
            held = {v.spec.name: v for v in self.stores[owner].held()[0]}[variable]
            shard = held.shards[index]
            assert shard.array.dtype == dtype
            put("value", index, shard.array)
            for name, (optimizer, rule) in self.rules.items():
                if dtype.kind not in "fV" and dtype != BFLOAT16:
                    continue
                slots = shard.slots.get(optimizer) or new_slots(RULES[rule](), shard.array.shape, dtype)
                for slot, array in slots.items():
                    put(f"{name}/{slot}", index, array)
                average = shard.averages.get(optimizer, shard.array.astype(compute_dtype(dtype)))
                put(f"{name}/average", index, average)
        return {key: array.tobytes() for key, array in arrays.items()}

    def facts(self) -> dict[str, Any]:
        """Return all that is held."""
        facts: dict[str, Any] = {}
        for store in self.stores:
            for held in store.held()[0]:
                for index, shard in held.shards.items():
                    arrays = {key: (array.dtype.name, array.tobytes()) for key, array in shard.arrays().items()}
                    facts[f"{held.spec.name} {index}"] = arrays, dict(shard.steps), shard.updates, shard.version
        return facts


def test_nothing_of_a_checkpoint_whose_old_values_are_lost_is_kept(tmp_path: Path) -> None:
    """It fails, with the reason; the next one does not."""
    servers = Servers(1)
    servers.declare("v", np.zeros(9))
    store = servers.stores[0]
    store.spill = Spill(tmp_path, limit=0)
    servers.mark()
    shard = store.held()[0][0].shards[0]
    with shard.lock:
        shard.before_change()
        shard.array[...] = 1
    assert store.spill._file is not None
    store.spill._file.truncate(3)
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="old values read back from the disk are damaged"):
                servers.parts[0].write(store, 1, str(tmp_path / "part"))
        assert store.spill.spilled == 0
    finally:
        gc.enable()


def test_nothing_of_a_checkpoint_that_failed_is_kept(tmp_path: Path) -> None:
    """Only the error, for copies of the request: the marked arrays may be large."""
    servers = Servers(1)
    servers.declare("v", np.zeros(9))
    servers.mark()
    store = servers.stores[0]
    shard = store.held()[0][0].shards[0]
    with shard.lock:
        shard.before_change()
        shard.array[...] = 1
    assert store.spill.in_memory == shard.array.nbytes, "it is to be written"
    (tmp_path / "file").write_text("no folder")
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="can't be written"):
                servers.parts[0].write(store, 1, str(tmp_path / "file" / "part"))
        assert store.spill.in_memory == 0
    finally:
        gc.enable()


def payload(arrays: Sequence[Array]) -> Payload:
    """Return a request's payload."""
    pieces = [piece for array in arrays for piece in (bytes(view(array)), bytes(padding(array.nbytes)))]
    return Payload([memoryview(b"".join(pieces))])


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[int]]:
    """Draw cuts of each axis, with empty pieces among them."""
    return [[*sorted(draw(st.lists(st.integers(0, length), max_size=3))), length] for length in shape]


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@given(st.data(), shapes, st.sampled_from(["float32", "bfloat16", "float16", "int64", "complex64", "bool"]))
@settings(max_examples=120)
def test_any_cut_on_any_servers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple[int, ...], dtype: str
) -> None:
    """Saved from any servers and cuts, restored to any others: values, slots, averages and steps are the same."""
    folder = tmp_path_factory.mktemp("checkpoint")
    old, new = Servers(data.draw(st.integers(1, 4))), Servers(data.draw(st.integers(1, 4)))
    values = some(typed(dtype), shape, 3)
    if values.dtype.kind in "fcV":
        values = np.random.default_rng(4).normal(size=shape).astype(values.dtype)
    old.declare("w", values, data.draw(cuts(shape)))
    old.declare("other", np.arange(4.0), [[1, 4]], first=1)
    new.declare("other", np.zeros(4), [[4]])
    new.declare("w", np.zeros_like(values), data.draw(cuts(shape)), first=1)
    shards = len(old.specs["w"].owners)
    for servers, optimizer_id in ((old, 100), (new, 200)):
        servers.optimizer("by/adagrad", "adagrad", optimizer_id=optimizer_id)
        servers.optimizer("with_average", "adam", optimizer_id=optimizer_id + 1, ema=0.5)
    trained = st.lists(st.integers(0, shards - 1), max_size=5)
    if dtype in ("float32", "bfloat16", "float16"):
        for turn, shard in enumerate(data.draw(trained)):
            old.train("w", shard, "by/adagrad", turn)
        for turn, shard in enumerate(data.draw(trained)):
            old.train("w", shard, "with_average", turn)
        for shard in {0, len(new.specs["w"].owners) - 1}:  # for the restore to replace
            new.train("w", shard, "with_average")
    before = old.whole("w"), old.whole("other")
    saved = old.save(folder)
    new.restore(folder)
    assert (new.whole("w"), new.whole("other")) == before
    steps = saved.variables["w"].steps
    assert sorted(saved.variables["w"].steps[0]) == sorted(
        name for name in ("by/adagrad", "with_average") if steps[0].get(name)
    )
    for name, (optimizer_id, _) in new.rules.items():
        most = max((counted.get(name, 0) for counted, s in zip(steps, blocks_of(old), strict=True) if s), default=0)
        held = [store.held()[0] for store in new.stores]
        here = [
            s.steps.get(optimizer_id, 0)
            for variables in held
            for v in variables
            if v.spec.name == "w"
            for s in v.shards.values()
        ]
        assert max(here) == most
    shutil.rmtree(folder)


def blocks_of(servers: Servers) -> list[int]:
    """Return the sizes of the shards of w."""
    return [block.size for block in partition_of(servers.specs["w"]).blocks]


Saved = tuple[Servers, Path, Callable[[], Servers]]
"""Servers, a checkpoint of theirs, and a maker of others into which it can be restored."""


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Servers, a checkpoint of theirs, and a maker of other servers into which it can be restored."""
    servers = Servers(2)
    servers.declare("w", np.arange(24, dtype=np.float32).reshape(6, 4), [[2, 3, 6], [1, 4]])
    servers.declare("n", np.array(3, np.int64))
    servers.optimizer("adagrad", "adagrad", ema=0.5)
    for shard in (0, 2, 3, 3):
        servers.train("w", shard, "adagrad", shard)
    servers.save(tmp_path / "one")

    def others() -> Servers:
        made = Servers(3)
        made.declare("n", np.array(-1, np.int64))
        made.declare("w", np.full((6, 4), -1, np.float32), [[5, 6], [4]])
        made.optimizer("adagrad", "adagrad", ema=0.5)
        made.train("w", 0, "adagrad")
        return made

    return servers, tmp_path / "one", others


def state(servers: Servers) -> dict[str, dict[str, bytes]]:
    """Return all variables, whole."""
    return {name: servers.whole(name) for name in servers.specs}


def never_wrong(folder: Path, file: Path, servers: Servers, right: dict[str, Any]) -> bool:
    """Check that restoring is right, or raises CheckpointError that names the file; return whether it was refused."""
    before = servers.facts()
    refusal = ""
    try:
        servers.restore(folder)
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert str(file) in refusal
        assert servers.facts() == before
        return True
    assert {name: right[name] for name in servers.specs} == state(servers)
    return False


def test_no_flipped_bit_goes_unnoticed(saved: Saved) -> None:
    """In every file: the bit is refused with the file's name and nothing changed, or does not matter."""
    servers, folder, others = saved
    right = state(servers)
    chance = random.Random(1)
    refused: dict[str, int] = {}
    target = others()
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["index.json", *(f"part-{i}-of-2.safetensors" for i in range(2))]
    for file in files:
        good = file.read_bytes()
        for bit in chance.sample(range(8 * len(good)), 250):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            if never_wrong(folder, file, target, right):
                refused[file.name] = refused.get(file.name, 0) + 1
            else:
                target = others()
        file.write_bytes(good)
    assert refused["index.json"] == 250, "every bit of the index counts"
    assert not never_wrong(folder, folder, target, right)


def test_every_bit_of_a_tensor_counts(saved: Saved) -> None:
    """A flipped bit in the bytes of the tensors is always found."""
    servers, folder, others = saved
    right, target = state(servers), others()
    index = read_index(str(folder))
    for name, entry in index.files.items():
        file = folder / name
        good = file.read_bytes()
        assert len(good) == entry.bytes
        for at in range(entry.header_bytes, entry.bytes):
            file.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            assert never_wrong(folder, file, target, right)
        file.write_bytes(good)


def test_truncated_files(saved: Saved) -> None:
    """A file that ends too early anywhere is refused, and so is a missing one."""
    servers, folder, others = saved
    right, target = state(servers), others()
    chance = random.Random(2)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for length in {0, 1, 7, 8, len(good) - 1, *chance.sample(range(len(good)), 40)}:
            file.write_bytes(good[:length])
            assert never_wrong(folder, file if file.suffix != ".json" else folder, target, right)
        file.unlink()
        assert never_wrong(folder, file if file.suffix != ".json" else folder, target, right)
        file.write_bytes(good)
    assert not never_wrong(folder, folder, target, right)


@pytest.mark.parametrize("which", ["index.json", "part-0-of-2.safetensors", "part-1-of-2.safetensors"])
def test_files_of_two_checkpoints_mixed(saved: Saved, tmp_path: Path, which: str) -> None:
    """A file of another checkpoint of the same variables is detected."""
    servers, folder, others = saved
    for shard in range(6):
        servers.train("w", shard, "adagrad", 9 + shard)
    servers.update("n", 0, ps_pb2.ADD, np.array(1, np.int64))
    servers.save(tmp_path / "two")
    shutil.copy(tmp_path / "two" / which, folder / which)
    target = others()
    before = target.facts()
    with pytest.raises(CheckpointError, match=r"is damaged|is too short"):
        target.restore(folder)
    assert target.facts() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "7",
        '"x"',
        "{",
        "[" * 100_000,
        '{"weight_map": {}, "metadata": {}}',
        "\0\xff",
        "1" * 9999,
    ],
    ids=lambda text: f"{text[:12]!r}",
)
def test_a_foreign_index(saved: Saved, text: str) -> None:
    """JSON of another program, or none, is refused with the file's name."""
    _, folder, _ = saved
    (folder / "index.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=r"index\.json (was written by another program|is damaged)"):
        read_index(str(folder))


def signed(body: dict[str, Any]) -> bytes:
    """Return an index with the right digest."""
    body.pop("sha256", None)
    text = json.dumps(body, indent=1, sort_keys=True)
    return (text[:-2] + f',\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n').encode()


def test_an_index_of_another_version(saved: Saved) -> None:
    """The error says which version it is."""
    _, folder, _ = saved
    file = folder / "index.json"
    body = json.loads(file.read_bytes())
    assert signed(dict(body)) == file.read_bytes()
    file.write_bytes(signed({**body, "version": 3}))
    with pytest.raises(CheckpointError, match=r"index\.json has format version 3; this program reads version 2"):
        read_index(str(folder))
    file.write_bytes(signed({**body, "format": "other"}))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_index(str(folder))


def test_an_index_that_leads_out_of_its_directory(saved: Saved) -> None:
    """A file elsewhere is not read, whatever the index says."""
    _, folder, others = saved
    file = folder / "index.json"
    shutil.copy(folder / "part-0-of-2.safetensors", folder.parent / "outside")
    file.write_bytes(signed(json.loads(file.read_text().replace("part-0-of-2.safetensors", "../outside"))))
    target = others()
    before = target.facts()
    with pytest.raises(CheckpointError, match=r"'\.\./outside' is not the name of a file"):
        target.restore(folder)
    assert target.facts() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("variables"),
        lambda body: body.pop("number"),
        lambda body: body["variables"]["w"].pop("ends"),
        lambda body: body["variables"]["w"].update(ends=[[6]]),
        lambda body: body["variables"]["w"].update(ends=[[7], [4]]),
        lambda body: body["variables"]["w"].update(shape="six"),
        lambda body: body["variables"]["w"]["arrays"].pop("value"),
        lambda body: body["variables"]["w"]["arrays"]["value"].pop(),
        lambda body: body["variables"]["w"]["arrays"]["value"][0].update(shard=99),
        lambda body: body["variables"]["w"]["arrays"]["value"][0].update(dtype="float33"),
        lambda body: body["variables"]["w"]["arrays"]["value"][0].update(dtype="float64"),
        lambda body: body["variables"]["w"]["arrays"]["value"][0].update(surprise=1),
        lambda body: body["variables"].update(w=None),
        lambda body: body.update(files=[]),
    ],
)
def test_an_index_that_makes_no_sense(saved: Saved, change: Callable[[dict[str, Any]], object]) -> None:
    """Even with the right digest it is a CheckpointError that names the directory, and nothing is changed."""
    _, folder, others = saved
    file = folder / "index.json"
    body = json.loads(file.read_bytes())
    change(body)
    file.write_bytes(signed(body))
    target = others()
    before = target.facts()
    with pytest.raises(CheckpointError, match=str(folder)):
        target.restore(folder)
    assert target.facts() == before


def test_a_checkpoint_in_an_object_store(saved: Saved) -> None:
    """Any file system of fsspec works, and damage to the index is detected there, too."""
    servers, _, others = saved
    servers.save("memory://run/ckpt")
    target = others()
    target.restore("memory://run/ckpt")
    assert state(target) == {name: state(servers)[name] for name in target.specs}
    with fsspec.open("memory://run/ckpt/part-1-of-2.safetensors", "wb") as file:
        file.write(b"short")
    before = target.facts()
    with pytest.raises(CheckpointError, match=r"memory://run/ckpt/part-1-of-2\.safetensors is too short"):
        target.restore("memory://run/ckpt")
    assert target.facts() == before
    with pytest.raises(CheckpointError, match=r"memory://run/other is not a checkpoint"):
        target.restore("memory://run/other")


# Marks


def test_what_is_written_is_what_was_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, slots, averages and variables after the mark are not in it, at whatever block they arrive."""
    monkeypatch.setattr("pscluster.ps.server.state.shard.CHUNK_BYTES", 64)
    servers = Servers(2)
    servers.declare("w", np.zeros((40, 8), np.float32), [[20, 40], [8]])
    servers.optimizer("adam", "adam", ema=0.5)
    servers.train("w", 0, "adam")
    before = servers.whole("w")
    servers.mark()
    servers.train("w", 0, "adam", 1)
    servers.train("w", 1, "adam", 2)
    stop = threading.Event()

    def goes_on() -> None:
        turn = 3
        while not stop.is_set():
            servers.train("w", turn % 2, "adam", turn)
            turn += 1

    thread = threading.Thread(target=goes_on)
    thread.start()
    try:
        index = servers.write(tmp_path / "one")
    finally:
        stop.set()
        thread.join()
    assert {key for key, pieces in index.variables["w"].arrays.items() if len(pieces) == 2} == {"value"}
    others = Servers(1)
    others.declare("w", np.ones((40, 8), np.float32))
    others.optimizer("adam", "adam", ema=0.5)
    others.restore(tmp_path / "one")
    assert others.whole("w") == before
    assert captures(servers) == 0


def captures(servers: Servers) -> int:
    """Return the number of snapshots for which updates still save blocks."""
    held = [variable for store in servers.stores for variable in store.held()[0]]
    return sum(len(shard._snapshots) for variable in held for shard in variable.shards.values())


def test_marks_are_released(tmp_path: Path) -> None:
    """Once written, dropped, replaced or failed, no old bytes are held."""
    servers = Servers(1)
    servers.declare("w", np.zeros(9))
    (store,), (parts,) = servers.stores, servers.parts
    parts.mark(store, 1)
    parts.mark(store, 2)
    assert captures(servers) == 1
    with pytest.raises(StaleError, match="checkpoint 1 is not marked"):
        parts.write(store, 1, str(tmp_path / "file"))
    written = parts.write(store, 2, str(tmp_path / "file"))
    assert captures(servers) == 0
    assert parts.write(store, 2, str(tmp_path / "file")) == written, "a copy of the request has the same answer"
    parts.mark(store, 3)
    with pytest.raises(CheckpointError, match="can't be written"):
        parts.write(store, 3, str(tmp_path / "file" / "below"))
    assert captures(servers) == 0
    parts.mark(store, 4)
    parts.forget()
    assert captures(servers) == 0


def test_a_mark_leaves_what_is_staged(saved: Saved) -> None:
    """A save that begins in the middle of a restore does not undo half of it, nor the reverse."""
    servers, folder, others = saved
    target = others()
    before = target.facts()
    requests = {index: ps_pb2.RestoreRequest() for index in range(3)}
    index = read_index(str(folder))
    for name, spec in target.specs.items():
        plan_variable(Variable.of(spec, NO_CLIENT), index.variables[name], str(folder), requests)
    target.mark()
    for server in range(3):
        requests[server].id = 5
        target.parts[server].stage(target.stores[server], requests[server], lambda name: str(folder / name))
    assert target.facts() == before
    target.write(folder.parent / "two")
    target.mark()
    for server in range(3):
        target.parts[server].commit(target.stores[server], 5, 1)
    versions = {key: version for key, (*_, version) in target.facts().items()}
    assert all(versions[key] > version for key, (*_, version) in before.items()), "copies that clients keep are old"
    assert state(target) == {name: state(servers)[name] for name in target.specs}


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    """A missing one is ignored; one with other, more or fewer slots is refused, and nothing changes."""
    servers = Servers(1)
    servers.declare("w", np.zeros(4, np.float32))
    servers.optimizer("rule", "adam")
    servers.train("w", 0, "rule")
    servers.save(tmp_path / "one")

    def target(rule: str, name: str = "rule", **hyperparameters: Any) -> Servers:
        made = Servers(1)
        made.declare("w", np.ones(4, np.float32))
        made.optimizer(name, rule, **hyperparameters)
        made.train("w", 0, name)
        return made

    gone = target("adam", "another")
    gone.restore(tmp_path / "one")
    assert gone.facts()["w 0"][0] == {"value": ("float32", servers.whole("w")["value"])}
    assert gone.facts()["w 0"][1] == {}
    for refusing, said in ((target("adagrad"), "slot '.' .*does not keep"), (target("adam", amsgrad=True), "lacks")):
        before = refusing.facts()
        with pytest.raises(CheckpointError, match=said):
            refusing.restore(tmp_path / "one")
        assert refusing.facts() == before
        refusing.train("w", 0, "rule")
    again = target("adamw")
    again.restore(tmp_path / "one")
    again.train("w", 0, "rule")


def test_names_that_meet_are_refused(tmp_path: Path) -> None:
    """A variable that is named like a slot of another one would replace it in the file, or in the map."""
    for count in (1, 2):  # on one server, and on two
        servers = Servers(count)
        servers.declare("w", np.zeros(4, np.float32))
        servers.optimizer("adam", "adam")
        servers.train("w", 0, "adam")
        slot = next(iter(RULES["adam"]().slots))
        servers.declare(f"w/adam/{slot}", np.ones(4, np.float32), first=1)
        with pytest.raises(CheckpointError, match=f"named 'w/adam/{slot}"):
            servers.save(tmp_path / f"{count}")
    servers = Servers(1)  # the slot is of another shard: the names meet when shards are merged
    servers.declare("w", np.zeros(4, np.float32), [[2, 4]])
    servers.optimizer("adam", "adam")
    servers.train("w", 1, "adam")
    servers.declare("w/adam/m", np.ones(4, np.float32))
    with pytest.raises(CheckpointError, match="named 'w/adam/m'"):
        servers.save(tmp_path / "shards")


def test_what_functions_with_keys_have_done(tmp_path: Path) -> None:
    """Updates in the checkpoint are not repeated, however its shards are cut now; later ones are, after a restore."""
    servers = Servers(2)
    servers.declare("w", np.zeros(4), [[2, 4]])
    servers.declare("v", np.zeros(4))

    def add(to: Servers, key: int, late: int = 0, shards: int = 2) -> list[list[float]]:
        for shard in range(shards):
            one = np.ones(4 // shards)
            to.update("w", shard, ps_pb2.ADD, one, function=key, key=key, late=late)
        to.update("v", 0, ps_pb2.ADD, np.ones(4), function=key, key=key, late=late)
        return [np.frombuffer(to.whole(name)["value"]).tolist() for name in ("w", "v")]

    assert add(servers, 1) == [[1] * 4] * 2
    assert add(servers, 1) == [[1] * 4] * 2
    servers.save(tmp_path / "one")
    assert add(servers, 2) == [[2] * 4] * 2
    servers.restore(tmp_path / "one")
    with pytest.raises(StaleError, match="a checkpoint was restored since this update was sent"):
        add(servers, 3, late=1)
    assert add(servers, 1) == [[1] * 4] * 2
    assert add(servers, 2) == [[2] * 4] * 2
    del servers.specs["v"]  # it stays unchanged, with the updates that are remembered of it
    servers.restore(tmp_path / "one")
    servers.specs["v"] = read_spec(servers, "v")
    assert add(servers, 2) == [[2] * 4] * 2
    other = Servers(1)
    other.declare("w", np.zeros(4))
    other.declare("v", np.zeros(4))
    other.restore(tmp_path / "one")
    assert add(other, 1, shards=1) == [[1] * 4] * 2
    assert add(other, 2, shards=1) == [[2] * 4] * 2


def read_spec(servers: Servers, name: str) -> ps_pb2.VariableSpec:
    """Return what the servers know of a variable."""
    return servers.stores[0].describe([name], []).variables[0]


def test_commit_of_what_is_not_staged() -> None:
    """It is refused: for another number, another store, or a second time."""
    servers = Servers(2)
    servers.declare("w", np.zeros(4, np.float32))
    before = servers.facts()
    parts, store = servers.parts[0], servers.stores[0]
    with pytest.raises(UnavailableError, match="has nothing to restore any more"):
        parts.commit(store, 5, 1)
    parts.stage(store, ps_pb2.RestoreRequest(id=5), str)
    with pytest.raises(UnavailableError, match="has nothing to restore any more"):
        parts.commit(store, 6, 1)
    with pytest.raises(UnavailableError, match="has nothing to restore any more"):
        parts.commit(Store(0, 7), 5, 1)
    parts.stage(store, ps_pb2.RestoreRequest(id=5), str)
    parts.forget()
    with pytest.raises(UnavailableError, match="has nothing to restore any more"):
        parts.commit(store, 5, 1)
    assert servers.facts() == before
