"""Generations on disk: a restore gives what was saved, an older state, or nothing; never anything else."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tests.ps.storage.support import (
    IDENTITY,
    JOB,
    NEVER,
    Client,
    Facts,
    Part,
    Trouble,
    begun,
    declare,
    declare_rule,
    dense,
    facts,
    found_in,
    killed,
    manager_of,
    names,
    restored,
    rows,
    small_blocks,
    values_of,
)

from pscluster.core.errors import ConfigurationError, PsClusterError, StaleError, UnavailableError
from pscluster.core.functions.definitions import capture
from pscluster.ps.optim.rules import RULES, UpdateRule
from pscluster.ps.optim.schedules import CosineDecay
from pscluster.ps.server.requests import creation
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage.files.generations import StateDirectory
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import ps_pb2, state_pb2

Array = npt.NDArray[Any]

ALL_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
]


def any_bits(shape: tuple[int, ...], name: str) -> Array:
    """Return random bits: NaNs of all kinds, infinities, both zeros."""
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    random = np.random.default_rng(len(name))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = random.integers(0, 2 if name == "bool" else 256, size).astype(np.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("blocks", ["small", "whole"])
def test_every_type_and_shape_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: str) -> None:
    """Bit for bit, scalars and empty arrays too, in one shard and in several."""
    if blocks == "small":
        small_blocks(monkeypatch)
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        for index, name in enumerate(ALL_DTYPES):
            declare(held, index * 10 + 1, any_bits((), name))
            declare(held, index * 10 + 2, any_bits((7, 5), name), (3, 3, 7))
            declare(held, index * 10 + 3, any_bits((0, 3), name))
            declare(held, index * 10 + 4, any_bits((3, 0), name), (1, 3))
            declare(held, index * 10 + 5, any_bits((2, 1, 9), name))
        manager.save()
        assert facts(found_in(killed(tmp_path / "s"))) == facts(held)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_optimizers_with_all_they_remember(tmp_path: Path, name: str, dtype: str) -> None:
    """After a restore the next gradients have the same effect as in the store that kept running."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    schedule = json.dumps(CosineDecay(initial_learning_rate=0.5, decay_steps=10).to_spec())
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.linspace(-1, 1, 30).astype(kind).reshape(6, 5), (4, 6))
        declare_rule(held, 2, name, schedule=schedule, ema=0.9)
        declare_rule(held, 3, name, learning_rate=0.25)
        first = Client(manager, held)

        def train(client: Client) -> None:
            random = np.random.default_rng(client.sequence)
            for optimizer in (2, 3, 2):
                whole = random.normal(size=(4, 5)).astype(kind)
                client.update(dense(ps_pb2.APPLY_GRADIENT, whole, optimizer=optimizer))
                some = random.normal(size=(3, 5)).astype(kind)
                client.update(rows(ps_pb2.APPLY_GRADIENT, [1, 0, 1], some, shard=1, optimizer=optimizer))

        train(first)
        manager.save()
        again = found_in(killed(tmp_path / "s"))
        assert facts(again) == facts(held)
        second = Client(StateManager(DurabilityOptions()), again)
        second.sequence = first.sequence
        train(first)
        train(second)
        assert facts(again) == facts(held)


def test_what_is_remembered_of_updates(tmp_path: Path) -> None:
    """Keys, closed incarnations, ended functions and settled requests: each refuses the same as before."""
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.zeros(4, np.float32), (2, 4))
        one, other, closed = Client(manager, held, 9), Client(manager, held, (1 << 64) - 1), Client(manager, held, 11)
        twos = np.full(2, 2, np.float32)
        made = [
            one.made(dense(ps_pb2.ADD, twos), dense(ps_pb2.ADD, twos, shard=1)),
            other.made(dense(ps_pb2.ADD, twos, shard=1)),
            one.made(dense(ps_pb2.ADD, twos), function=5),
        ]
        for update in made:
            one.send(update)
        late = closed.made(dense(ps_pb2.ADD, twos))
        held.close_incarnation(11)
        held.finish_functions([(1, 4), (8, 1 << 40)])
        ended = one.made(dense(ps_pb2.ADD, twos), function=3)
        for index in range(5):
            one.update(dense(ps_pb2.ADD, twos * index))
        before = facts(held)
        manager.save()
        again = found_in(killed(tmp_path / "s"))
    assert facts(again) == before
    client = Client(StateManager(DurabilityOptions()), again)
    assert client.send(made[1]).repeated_ == 1
    assert client.send(made[2]).repeated_ == 1
    for refused, why in ((made[0], "answered long ago"), (late, "given up"), (ended, "has ended")):
        with pytest.raises(StaleError, match=why):
            client.send(refused)
    assert facts(again) == before


def test_the_rule_of_a_class_by_value_is_awaited(tmp_path: Path) -> None:
    """A rule that came as a pickle is not saved, but the server knows which one is missing."""
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.zeros(3, np.float32))
        declare_by_value(held)
        manager.save()
        copy = killed(tmp_path / "s")
        assert not any(b"cloudpickle" in path.read_bytes() for path in copy.iterdir())
        again = found_in(copy)
        assert not again.held()[1]
        assert list(again.held()[2]) == [2]
        declare_by_value(again)
        assert again.held()[2] == {}


def by_value() -> type[UpdateRule]:
    """A class that can only be sent as a pickle."""

    @dataclass(frozen=True)
    class Mine(UpdateRule):
        name: ClassVar[str] = "mine"

        @property
        def slots(self) -> Mapping[str, float]:
            return {}

        def apply(self, param: Array, grad: Array, *_: Any) -> None:
            param -= grad

    return Mine


def declare_by_value(held: Store) -> None:
    """Declare optimizer 2."""
    definition = next(
        form for form in capture(by_value()).forms() if form.pickle
    )  # as a client sends it: the pickle is the payload
    pickled, definition.pickle = definition.pickle, b""
    spec = ps_pb2.OptimizerSpec(id=2, name="mine", rule="custom")
    request = ps_pb2.CreateRequest(job=held.job, optimizer=spec, rule=definition)
    creation.create(held, request, Payload([memoryview(pickled)]))


def test_a_rule_that_is_still_awaited_at_the_next_restart(tmp_path: Path) -> None:
    """A server that saves a generation and dies before the coordinator came still knows what it lacks."""
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.zeros(3, np.float32))
        declare_by_value(held)
        manager.save()
        copy = killed(tmp_path / "s")
    with manager_of(copy, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        Client(manager, recovered.store).update(dense(ps_pb2.ADD, np.ones(3, np.float32)))
        manager.save()
    assert found_in(copy).held()[2].keys() == {2}


RULE_MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from pscluster.ps.optim.rules import UpdateRule

@dataclass(frozen=True)
class Own(UpdateRule):
    name: ClassVar[str] = "own"

    @property
    def slots(self):
        return {}

    def apply(self, param, grad, slots, scalars, scratch):
        param -= grad
"""


class OwnRule:
    """A rule in a user's own module, and optimizer 2 with it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.source = folder / "own_rule_of_a_user.py"
        self.source.write_text(RULE_MODULE)
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, self.source.stem, raising=False)
        definition = capture(importlib.import_module(self.source.stem).Own).by_reference
        assert definition is not None
        self.definition = definition

    def declare(self, held: Store) -> None:
        """Declare it as a client that has the module does."""
        spec = ps_pb2.OptimizerSpec(id=2, name="mine", rule="custom")
        creation.create(held, ps_pb2.CreateRequest(job=JOB, optimizer=spec, rule=self.definition), Payload([]))

    def edit(self) -> None:
        """Edit the module, which makes it another version."""
        self.source.write_text(RULE_MODULE + "\n# edited\n")


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnRule]:
    """Give a rule in a module of its own."""
    own = OwnRule(tmp_path, monkeypatch)
    yield own
    sys.modules.pop(own.source.stem, None)


def gradient() -> Part:
    """Return a gradient of ones for optimizer 2."""
    return dense(ps_pb2.APPLY_GRADIENT, np.ones(3, np.float32), optimizer=2)


@pytest.mark.parametrize("kind", [Durability.SNAPSHOT, Durability.LOG], ids=lambda kind: str(kind.value))
def test_a_rule_by_reference_that_is_another_now(tmp_path: Path, own_rule: OwnRule, kind: Durability) -> None:
    """Its file was edited before the restart: all values are restored, and its gradients wait for its declaration."""
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.arange(3, dtype=np.float32))
        own_rule.declare(held)
        client = Client(manager, held)
        manager.save()
        client.update(gradient())
        manager.save()  # it holds the gradient, so that the rule is not needed to restore it
        client.update(dense(ps_pb2.ADD, np.full(3, 10, np.float32)))
        manager.save()
        assert facts(found_in(killed(tmp_path / "s"))) == facts(held)
        copy = killed(tmp_path / "s")
    own_rule.edit()
    with manager_of(copy, kind) as manager:
        recovered = manager.restore()
        assert recovered is not None, "all values are lost for want of a rule"
        assert values_of(recovered.store, 1).tolist() == [9, 10, 11]
        assert recovered.store.held()[2].keys() == {2}
        client = Client(manager, recovered.store, 10)
        made = client.made(gradient())
        with pytest.raises(UnavailableError, match="is waiting for the rule of optimizer 'mine'"):
            client.send(made)
        assert client.update(dense(ps_pb2.ADD, np.ones(3, np.float32))).applied == 1
        own_rule.source.write_text(RULE_MODULE)
        own_rule.declare(recovered.store)
        manager.save()
        assert client.send(made).applied == 1
        assert values_of(recovered.store, 1).tolist() == [9, 10, 11]
        if kind is Durability.SNAPSHOT:
            manager.save()
        assert values_of(found_in(killed(copy)), 1).tolist() == [9, 10, 11]


def test_a_rule_by_reference_that_the_log_needs(tmp_path: Path, own_rule: OwnRule) -> None:
    """Without it the gradients in the log can't be replayed: the error says so, and with the rule they are."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3, np.float32))
        own_rule.declare(held)
        manager.save()
        Client(manager, held).update(gradient())
        copy = killed(tmp_path / "s")
    own_rule.edit()
    with pytest.raises(ConfigurationError, match=r"own_rule_of_a_user.* start it once with --durability snapshot"):
        restored(copy, Durability.LOG)
    own_rule.source.write_text(RULE_MODULE)
    assert values_of(found_in(copy, Durability.LOG), 1).tolist() == [-1] * 3


# Damage


class Saved:
    """A directory with two generations, as a process that died left it, and the state of each."""

    def __init__(self, folder: Path, kind: Durability) -> None:
        self.states = list[Facts]()
        with begun(folder, kind) as (manager, held):
            declare(held, 1, np.arange(40, dtype=np.float32).reshape(8, 5), (3, 8))
            declare(held, 2, np.array(1.5))
            declare(held, 3, np.arange(5, dtype=np.int8))
            declare_rule(held, 4, "adam", ema=0.5)
            client = Client(manager, held)
            for index in range(2):
                ones = np.full((3, 5), index + 1, np.float32)
                client.update(dense(ps_pb2.APPLY_GRADIENT, ones, optimizer=4))
                client.update(rows(ps_pb2.ADD, [1, 4], ones[:2], shard=1))
                client.update(dense(ps_pb2.ADD, np.array(0.25), variable=2), function=100 + index)
                held.close_incarnation(index + 50)
                manager.save()
                self.states.append(facts(held))
            self.folder = killed(folder)
        self.older, self.newest = self.states
        assert self.older != self.newest
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir() if path.name != "lock"}
        self.kind = kind

    def outcome(self) -> str:
        """Describe what a restart with the present files gives."""
        try:
            held = restored(self.folder)
        except ConfigurationError:
            return "refused"
        if held is None:
            return "nothing"
        state = facts(held)
        assert state in self.states, "what was restored never was"
        return "newest" if state == self.newest else "older"

    def mend(self) -> None:
        """Restore all files."""
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Two generations."""
    small_blocks(monkeypatch)
    return Saved(tmp_path / "s", Durability.SNAPSHOT)


def used_bytes(saved: Saved) -> dict[str, set[int]]:
    """Return, by file, the bytes that matter, according to the manifests."""
    used: dict[str, set[int]] = {name: set() for name in saved.files}
    directory = StateDirectory(saved.folder)
    try:
        for generation in directory.generations():
            manifest = directory.manifest(generation)
            used[f"state-{generation:06d}.manifest"] = set(range(len(saved.files[f"state-{generation:06d}.manifest"])))
            for shard in manifest.shards:
                for array in shard.arrays:
                    used[array.file] |= set(range(array.offset, array.offset + array.bytes))
    finally:
        directory.close()
    return used


def test_no_flipped_bit_passes(saved: Saved) -> None:
    """Anywhere in any file: the newest generation is whole, or is not used; padding does not matter."""
    assert saved.outcome() == "newest"
    used, seen = used_bytes(saved), dict[str, set[str]]()
    for name, data in saved.files.items():
        step = max(len(data) // 50, 1)
        for at in [*range(0, len(data), step), len(data) - 1]:
            changed = bytearray(data)
            changed[at] ^= 1 << at % 8
            (saved.folder / name).write_bytes(changed)
            outcome = saved.outcome()
            if at not in used[name]:
                assert outcome == "newest", f"byte {at} of {name} is not used"
            seen.setdefault(name, set()).add(outcome)
        saved.mend()
    last = max(name for name in seen if name.endswith("manifest"))
    assert seen.pop(last) == {"older"}
    assert seen.pop(min(name for name in seen if name.endswith("manifest"))) == {"newest"}
    assert {"refused", "older"} & set().union(*seen.values()), "no flip in the data mattered"


def test_no_cut_passes(saved: Saved) -> None:
    """Of any file, to any length, including nothing at all."""
    last = max(name for name in saved.files if name.endswith("manifest"))
    for name, data in saved.files.items():
        for size in sorted({0, 1, len(data) - 1, *range(0, len(data), max(len(data) // 25, 1))}):
            if size < len(data):
                (saved.folder / name).write_bytes(data[:size])
                outcome = saved.outcome()
                if name.endswith("manifest"):
                    assert outcome == ("older" if name == last else "newest")
        saved.mend()


def test_files_that_are_missing_or_swapped_or_longer(saved: Saved) -> None:
    """None of them gives a wrong state."""
    for name, data in saved.files.items():
        (saved.folder / name).unlink()
        saved.outcome()
        saved.mend()
        (saved.folder / name).write_bytes(data + b"\0" * 100)
        saved.outcome()
        for other in saved.files:
            if other != name:
                (saved.folder / name).write_bytes(saved.files[other])
                (saved.folder / other).write_bytes(data)
                saved.outcome()
                saved.mend()
        saved.mend()
        for other in saved.files:
            (saved.folder / other).unlink()
        assert saved.outcome() == "nothing"
        saved.mend()
    assert saved.outcome() == "newest"


def test_half_written_generations_are_never_taken_for_one(saved: Saved) -> None:
    """A process that died left parts of its next generation: data, a manifest that was not renamed yet."""
    newest_file = max(name for name in saved.files if name.endswith("manifest"))
    (saved.folder / "state-000099.safetensors").write_bytes(b"x" * 100)
    (saved.folder / "state-000098.manifest.new").write_bytes(saved.files[newest_file])
    (saved.folder / "state-000097.manifest").write_bytes(b"")
    assert saved.outcome() == "newest"
    with manager_of(saved.folder, Durability.SNAPSHOT) as manager:
        assert manager.restore() is not None
        for _ in range(2):
            manager.save()
    assert saved.outcome() == "newest"
    left = [name for name in names(saved.folder) if "00009" in name]
    assert sorted(left) == ["state-000098.manifest", "state-000099.manifest"], "what is half written stays for ever"


def test_after_a_fall_back_the_next_generations_are_good(saved: Saved) -> None:
    """The damaged generation is not overwritten in place, and is removed."""
    manifest = saved.folder / max(name for name in saved.files if name.endswith("manifest"))
    manifest.write_bytes(saved.files[manifest.name][:-1])
    with manager_of(saved.folder, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        assert "s ago (1 newer snapshot was damaged)" in recovered.words
        Client(manager, recovered.store, 200).update(dense(ps_pb2.ADD, np.ones((3, 5), np.float32)))
        manager.save()
        assert not manifest.exists()
        expected = facts(recovered.store)
        assert facts(found_in(killed(saved.folder))) == expected


def test_damage_to_what_two_generations_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shard that has not changed is in one file: a flipped bit there damages both, and the file is named."""
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        for variable in (1, 2):
            declare(held, variable, np.zeros(30))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(30), 2))
        manager.save()
        copy = killed(tmp_path / "s")
    kept = StateDirectory(copy)
    newest, before = (kept.manifest(generation) for generation in kept.generations())
    kept.close()
    shared = {a.file for s in newest.shards for a in s.arrays} & {a.file for s in before.shards for a in s.arrays}
    assert len(shared) == 1
    path = copy / shared.pop()
    (offset,) = (a.offset for s in newest.shards for a in s.arrays if a.file == path.name)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"none of the state in .* can be used"):
        restored(copy)
    assert caplog.text.count(f"{path.name} is damaged: ") == 2


def test_a_state_of_which_nothing_is_whole(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    """A server does not start empty over it: it gives the reason for each generation, and advice that works."""
    for name in saved.files:
        (saved.folder / name).write_bytes(b"\0" * 64)
    with pytest.raises(ConfigurationError, match=r"none of the state in .* can be used.*move it away to start over"):
        restored(saved.folder)
    assert caplog.text.count("can't be used") == 2
    assert {path.read_bytes() for path in saved.folder.glob("state-*")} == {b"\0" * 64}, "it is left as it was"
    for path in saved.folder.glob("state-*"):
        path.unlink()
    assert saved.outcome() == "nothing"


@pytest.mark.parametrize("ending", ["manifest", "safetensors"])
def test_a_disk_that_can_not_be_read(saved: Saved, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """The file may be whole: the server does not fall back to an older generation, but reports the error."""
    opened = io.open

    def fails(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path).endswith(ending):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", fails)
        with pytest.raises(ConfigurationError, match=r"can't be read \(Input/output error\): fix that"):
            restored(saved.folder)
    assert saved.outcome() == "newest"


def test_manifests_that_are_whole_but_make_no_sense(saved: Saved) -> None:
    """The CRC is correct, but arrays are elsewhere, or do not fit their variables: it is not used."""
    directory = StateDirectory(saved.folder)
    good = directory.manifest(directory.generations()[0])
    directory.close()

    def elsewhere(manifest: state_pb2.Manifest) -> None:
        manifest.shards[0].arrays[0].file = "../secret"

    def lost(manifest: state_pb2.Manifest) -> None:
        del manifest.shards[0]

    def twisted(manifest: state_pb2.Manifest) -> None:
        manifest.shards[0].arrays[0].shape.reverse()

    def nameless(manifest: state_pb2.Manifest) -> None:
        manifest.shards[0].arrays[0].array = "slot/4/other"

    def strange(manifest: state_pb2.Manifest) -> None:
        manifest.shards[0].arrays[0].dtype = "object"

    def shorter(manifest: state_pb2.Manifest) -> None:
        manifest.shards[0].arrays[0].shape[0] -= 1

    spoils: list[Callable[[state_pb2.Manifest], None]] = [elsewhere, lost, twisted, nameless, strange, shorter]
    for spoil in spoils:
        bad = state_pb2.Manifest.FromString(good.SerializeToString())
        spoil(bad)
        bad.generation += 1
        directory = StateDirectory(saved.folder)
        directory.commit(bad)
        directory.close()
        assert saved.outcome() == "newest", spoil.__name__


# The directory


OTHER = """
import sys
from pathlib import Path
from pscluster.ps.storage.files.generations import StateDirectory
held = StateDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    """The second gets advice; once the first has died, in whatever way, the directory is free."""
    folder = tmp_path / "s"
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            ConfigurationError, match=rf"another parameter server \(pid {other.pid}\) .*its own --state-dir"
        ):
            StateManager(DurabilityOptions(Durability.SNAPSHOT, folder))
        other.kill()
    StateManager(DurabilityOptions(Durability.SNAPSHOT, folder)).close()


def test_two_managers_of_one_process(tmp_path: Path) -> None:
    """The second one is refused in the same process, too."""
    first = StateManager(DurabilityOptions(Durability.LOG, tmp_path))
    with pytest.raises(ConfigurationError, match=rf"\(pid {os.getpid()}\) .*--state-dir"):
        StateManager(DurabilityOptions(Durability.LOG, tmp_path))
    first.close()
    StateManager(DurabilityOptions(Durability.LOG, tmp_path)).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user(tmp_path: Path) -> None:
    """In a directory that all may write to, another user may have made it first, with any state, or links, in it."""
    folder = tmp_path / "ps-0"
    folder.mkdir(mode=0o777)
    (folder / "lock").symlink_to(tmp_path / "ours")
    (tmp_path / "ours").write_text("important")
    os.chown(folder, 1234, 1234)
    with pytest.raises(ConfigurationError, match=r"ps-0, which belongs to another user \(uid 1234, .*--state-dir"):
        StateManager(DurabilityOptions(Durability.LOG, folder))
    assert (tmp_path / "ours").read_text() == "important"
    assert len(list(folder.iterdir())) == 1


def test_a_directory_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigurationError, match=f"can't be stored in {folder} .*--state-dir .*--durability none"):
            StateManager(DurabilityOptions(Durability.SNAPSHOT, folder))
    opened = os.open

    def no_permission(path: Any, flags: int, *mode: int, **rest: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith("lock"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *mode, **rest)

    monkeypatch.setattr(os, "open", no_permission)
    with pytest.raises(ConfigurationError, match=r"Permission denied.*PSCLUSTER_STATE_DIR"):
        StateManager(DurabilityOptions(Durability.SNAPSHOT, tmp_path / "s"))


def test_durability_without_a_directory() -> None:
    """The error names the option."""
    with pytest.raises(ConfigurationError, match="--state-dir"):
        StateManager(DurabilityOptions(Durability.LOG))


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_disk_that_fails_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whichever write of a generation fails, the directory holds the previous one, and then the next."""
    small_blocks(monkeypatch)
    with begun(tmp_path / "s", Durability.SNAPSHOT, fsync=True) as (manager, held):
        declare(held, 1, np.arange(30, dtype=np.float32))
        manager.save()
        before, client = facts(held), Client(manager, held)

        class Countdown(Trouble):
            """Fails at the n-th call only."""

            left = 0

            def fail(self) -> None:
                self.left -= 1
                if self.left == 0:
                    super().fail()

        disk = Countdown(monkeypatch, call, code=errno.ENOSPC)
        disk.armed = True
        for at in range(1, 20):
            client.update(dense(ps_pb2.ADD, np.ones(30, np.float32)))
            disk.left = at
            try:
                manager.save()
            except PsClusterError:
                assert "failing: No space left" in manager.words
                # If only the names were not synced, the new one is there already.
                assert facts(found_in(killed(tmp_path / "s"))) in (before, facts(held))
                assert sorted(names(tmp_path / "s")) == sorted(
                    name for name in names(tmp_path / "s") if not name.endswith(".new")
                )
            else:
                break
            disk.left = 0
            manager.save()
            assert "failing" not in manager.words
            before = facts(held)
            assert facts(found_in(killed(tmp_path / "s"))) == before
        assert disk.left > 0, "a write failed, and the failure was not reported"
        assert at > 2
        assert len(names(tmp_path / "s")) <= 5


def test_a_generation_of_nothing(tmp_path: Path) -> None:
    """A job without variables is restored, too."""
    with begun(tmp_path / "s", Durability.SNAPSHOT, NEVER) as (manager, held):
        manager.save()
        again = found_in(killed(tmp_path / "s"))
        assert facts(again) == facts(held)
        assert again.job == JOB
        shutil.copytree(tmp_path / "s", tmp_path / "t")
    with manager_of(tmp_path / "t", Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        assert recovered.identity == IDENTITY
