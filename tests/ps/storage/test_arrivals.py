"""A shard that comes from another server is saved by itself, mostly before it is frozen; what others had stays."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.server.test_moves import PAGE, copy, spec_of
from tests.ps.storage.support import (
    IDENTITY,
    JOB,
    Client,
    Trouble,
    declare,
    declare_rule,
    dense,
    facts,
    found_in,
    killed,
    manager_of,
    names,
    rows,
)
from tests.ps.storage.test_deaths import Disk
from tests.waiting import until

from pscluster.core.errors import PsClusterError, StaleError
from pscluster.ps.server import pages as pages_module
from pscluster.ps.server.moves import Moves
from pscluster.ps.server.state import shard as shard_module
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage import arrivals
from pscluster.ps.storage.files.generations import StateDirectory
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import ps_pb2

Request = ps_pb2.MoveRequest
OWN, MOVING, CUT, RULE = 2, 1, 7, 1000
"""A variable of the target, one of the source, the first one once it is cut, and an optimizer of both."""

both = pytest.mark.parametrize("kind", [Durability.SNAPSHOT, Durability.LOG], ids=lambda kind: str(kind.value))


class Side:
    """A server of a move, with what it saves."""

    def __init__(self, index: int, manager: StateManager) -> None:
        self.manager, self.moves, self.store = manager, Moves(manager), Store(index, JOB)
        manager.restore()
        manager.begin(self.store, IDENTITY)
        self.client = Client(manager, self.store, 9 + index)
        declare_rule(self.store, RULE, "adagrad", learning_rate=0.1)

    def ask(self, action: Request.Action, payload: bytes = b"", **fields: Any) -> tuple[ps_pb2.MoveReply, bytes]:
        request = Request(job=JOB, id=5, action=action, variable=MOVING, shard=0, **fields)
        reply, buffers = self.moves.handle(self.store, request, memoryview(payload))
        return reply, b"".join(buffers)


@contextmanager
def pair(folder: Path, kind: Durability, *, fsync: bool = False) -> Iterator[tuple[Side, Side]]:
    """Two servers: the first has the variable that moves, and the second one another variable, both updated."""
    with manager_of(folder, kind, fsync=fsync) as manager:
        source, target = Side(0, StateManager(DurabilityOptions())), Side(1, manager)
        declare(source.store, MOVING, np.arange(30, dtype=np.float32).reshape(6, 5))
        declare(target.store, OWN, np.zeros(40, np.float32))
        held = source.store.directory.variables[MOVING]
        target.store.directory.variables[MOVING] = HeldVariable(held.spec, held.dtype, held.partition, {})
        manager.save()
        gradient(source, 1.0)
        target.client.update(dense(ps_pb2.ADD, np.ones(40, np.float32), OWN))
        yield source, target


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the shard consist of many pages."""
    for module in (pages_module, shard_module):
        monkeypatch.setattr(module, "PAGE_ELEMENTS", PAGE)


@pytest.fixture
def sides(tmp_path: Path, kind: Durability) -> Iterator[tuple[Side, Side]]:
    with pair(tmp_path / "s", kind) as both_sides:
        yield both_sides


def gradient(side: Side, amount: float) -> None:
    """Update all of the variable that moves, by the optimizer."""
    side.client.update(dense(ps_pb2.APPLY_GRADIENT, np.full((6, 5), amount, np.float32), MOVING, optimizer=RULE))


def freeze(source: Side, target: Side) -> ps_pb2.ShardState:
    """Copy the shard while it changes, and freeze it; return its state."""
    copy(source, target, source.ask(Request.TRACK)[0], 0)
    source.client.update(rows(ps_pb2.ADD, [1, 4], np.ones((2, 5), np.float32), MOVING))
    copy(source, target, source.ask(Request.CHANGED, round=1)[0], 1)
    source.client.update(rows(ps_pb2.ADD, [5], np.ones((1, 5), np.float32), MOVING))
    reply = source.ask(Request.FREEZE, round=2)[0]
    copy(source, target, reply, 2)
    return reply.state


def of_variable(held: Store, variable: int) -> dict[Any, Any]:
    """Return what a store has of a variable's first shard."""
    return {key: value for key, value in facts(held).items() if isinstance(key, tuple) and key[:2] == (variable, 0)}


def values(held: Store) -> dict[Any, Any]:
    """Return all but what is remembered: a replay forgets no request that was answered."""
    return {key: value for key, value in facts(held, ledger=False).items() if key[-1] != "keys"}


def last_segment(folder: Path) -> str:
    """Return the name of the log's last segment; "" if there is no log."""
    return max((name for name in names(folder) if name.startswith("log-")), default="")


@both
def test_it_is_found_after_a_death(sides: tuple[Side, Side], tmp_path: Path, kind: Durability) -> None:
    """From the commit on and not before, with all that has happened to it since, and with the other variables."""
    (source, target), folder, logs = sides, tmp_path / "s", kind is Durability.LOG
    state = freeze(source, target)
    assert not of_variable(found_in(killed(folder), kind), MOVING)
    target.manager.save()
    target.client.update(dense(ps_pb2.ADD, np.ones(40, np.float32), OWN))
    files, before = names(folder), last_segment(folder)
    spec = spec_of_moving(source, 1, 1)
    assert target.ask(Request.COMMIT, state=state, spec=spec)[0].committed
    assert of_variable(target.store, MOVING) == of_variable(source.store, MOVING)
    assert last_segment(folder) == before, "the log goes on"
    assert {name for name in names(folder) if name.endswith("safetensors")} <= files, "nothing else was written"
    found = found_in(killed(folder), kind)
    assert of_variable(found, MOVING) == of_variable(source.store, MOVING)
    assert not logs or of_variable(found, OWN) == of_variable(target.store, OWN)
    target.ask(Request.SERVE, spec=spec)
    for amount in (2.0, 3.0):
        gradient(target, amount)
        target.client.update(dense(ps_pb2.ADD, np.ones(40, np.float32), OWN))
        found, expected = found_in(killed(folder), kind), values(target.store)
        assert not logs or values(found) == expected
        target.manager.save()
        assert values(found_in(killed(folder), kind)) == expected
    gradient(target, 4.0)
    target.ask(Request.PLACE, spec=spec_of_moving(source, 2, 0))
    until(lambda: not of_variable(found_in(killed(folder), kind), MOVING), "its departure is noted")
    found = found_in(killed(folder), kind)
    assert not logs or values(found) == values(target.store)


def spec_of_moving(side: Side, placement: int, owner: int) -> ps_pb2.VariableSpec:
    return spec_of(side.store, placement, owner, variable=MOVING)


@both
@pytest.mark.parametrize("torn", [False, True], ids=["between calls", "in a write"])
def test_a_death_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability, torn: bool) -> None:
    """A process that dies before any call of the operating system restarts without the shard, or with all of it."""
    disk, outcomes = Disk(monkeypatch), list[bool]()

    def left() -> Path | None:
        return disk.copy

    for at in range(1, 100):
        folder = tmp_path / f"{at}" / "s"
        with pair(folder, kind, fsync=True) as (source, target):
            disk.folder, disk.copy, disk.torn = folder, None, torn
            disk.dies_in = at
            state = freeze(source, target)
            target.ask(Request.COMMIT, state=state, spec=spec_of_moving(source, 1, 1))
            disk.folder = None
            if (folder_left := left()) is None:
                break
            found = of_variable(found_in(folder_left, kind), MOVING)
            assert found in ({}, of_variable(source.store, MOVING))
            outcomes.append(bool(found))
    assert outcomes == sorted(outcomes), "from one moment on it has the shard"
    assert len(outcomes) >= 10
    assert not outcomes[0]


@both
def test_no_room(sides: tuple[Side, Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability) -> None:
    """It is refused before anything is copied; or, at the end, not taken. No file is left, and the next move works."""
    (source, target), folder = sides, tmp_path / "s"
    del kind
    first, files = source.ask(Request.TRACK)[0], names(folder)
    room = Trouble(monkeypatch, "posix_fallocate", "state-", errno.ENOSPC)
    room.armed = True
    with pytest.raises(PsClusterError, match=f"a shard can't be saved: No space left on device in {folder}"):
        copy(source, target, first, 0)
    assert names(folder) == files
    room.armed = False
    copy(source, target, first, 0)
    disk = Trouble(monkeypatch, "pwritev", "manifest", errno.EIO)
    disk.armed = True
    with pytest.raises(PsClusterError, match=f"could not be saved: Input/output error in {folder}"):
        target.ask(Request.COMMIT, state=first.state, spec=spec_of_moving(source, 1, 1))
    disk.armed = False
    assert not of_variable(target.store, MOVING)
    target.ask(Request.WITHDRAW, spec=spec_of_moving(source, 1, 1))
    target.manager.save()
    assert not of_variable(found_in(killed(folder)), MOVING)


@pytest.mark.parametrize("kind", [Durability.LOG])
@pytest.mark.parametrize("why", ["another variable", "synchronous steps", "many files", "another coordinator"])
def test_when_all_is_saved(
    sides: tuple[Side, Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability, why: str
) -> None:
    """Where the last generation can't be extended, a whole one is saved."""
    (source, target), folder = sides, tmp_path / "s"
    del kind
    state = freeze(source, target)
    if why == "another variable":
        declare(target.store, 3, np.ones(3, np.float32))
    elif why == "synchronous steps":
        with target.store.runs.changed:
            target.store.runs.idle(4)
    elif why == "many files":
        monkeypatch.setattr(arrivals, "MAX_FILES", 1)
    else:
        target.store.job = JOB + 1
        target.store.job, target.manager._job.saved.job = JOB, JOB + 1  # type: ignore[union-attr]  # as if before
    before = last_segment(folder)
    target.ask(Request.COMMIT, state=state, spec=spec_of_moving(source, 1, 1))
    assert last_segment(folder) > before
    assert values(found_in(killed(folder))) == values(target.store)


@both
def test_a_move_that_is_given_up(sides: tuple[Side, Side], tmp_path: Path, kind: Durability) -> None:
    """Its file is removed, and pages that come late are not written anywhere."""
    (source, target), folder = sides, tmp_path / "s"
    del kind
    files = names(folder)
    first = source.ask(Request.TRACK)[0]
    copy(source, target, first, 0)
    (file,) = (staged.file for staged in target.moves._staged.values())
    assert file is not None
    assert names(folder) - files == {file.path.name}
    target.ask(Request.WITHDRAW, spec=spec_of_moving(source, 1, 1))
    assert names(folder) == files
    with pytest.raises(StaleError, match="this move is over"):
        file.put("value", 0, memoryview(b"late"))


class OneCut:
    """A variable of the target that is cut into two shards there, all of which is filled in."""

    def __init__(self, target: Side) -> None:
        self.target, self.values, self.updates = target, np.full(40, 2, np.float32), 2
        self.final = ps_pb2.VariableSpec()
        self.final.CopyFrom(target.store.directory.variables[OWN].spec)
        self.final.id, self.final.origin, self.final.owners[:] = CUT, OWN, [1, 1]
        self.final.splits[0].ends[:] = [25, 40]

    def ask(self, action: Request.Action, payload: bytes = b"", **fields: Any) -> None:
        request = Request(job=JOB, id=5, action=action, variable=OWN, **fields)
        self.target.moves.handle(self.target.store, request, memoryview(payload))

    def make(self) -> None:
        made = ps_pb2.VariableSpec()
        made.CopyFrom(self.final)
        made.name, made.evaluation = f"pscluster/cut/{CUT}/v", 8
        self.ask(Request.MAKE, spec=made)
        self.ask(Request.TRACK, shard=0)
        self.target.client.update(dense(ps_pb2.ADD, np.ones(40, np.float32), OWN))  # functions run
        self.ask(Request.CAPTURE, shard=0)
        for shard, part in enumerate(np.split(self.values, [25])):
            self.ask(Request.FILL, part.tobytes(), shard=shard, arrays=["value"], round=1)
            self.ask(Request.SETTLE, shard=shard, state=ps_pb2.ShardState(updates=self.updates))

    def found(self, folder: Path, kind: Durability) -> tuple[int, list[float]]:
        """Return which variable there is after a death, and its values."""
        held = [held for held in found_in(killed(folder), kind).held()[0] if not held.spec.evaluation]
        (there,) = [each for each in held if each.spec.id in (OWN, CUT)]
        return there.spec.id, np.concatenate([shard.array for _, shard in sorted(there.shards.items())]).tolist()


@both
def test_new_shards_of_a_cut(sides: tuple[Side, Side], tmp_path: Path, kind: Durability) -> None:
    """They are saved beside what was saved before, as long as nothing else needs to be; the log goes on."""
    cut, folder = OneCut(sides[1]), tmp_path / "s"
    cut.target.manager.save()
    cut.make()
    files, before = {name for name in names(folder) if name.endswith("safetensors")}, last_segment(folder)
    cut.ask(Request.SEAL)
    assert cut.found(folder, kind) == (OWN, [2.0 if kind is Durability.LOG else 1.0] * 40)
    cut.ask(Request.ADOPT, spec=cut.final)
    assert cut.found(folder, kind) == (CUT, [2.0] * 40)
    assert last_segment(folder) == before
    assert len({name for name in names(folder) if name.endswith("safetensors")} - files) == 2, "one for each new shard"
    for shard, length in enumerate((25, 15)):
        cut.target.client.update(dense(ps_pb2.ADD, np.ones(length, np.float32), CUT, shard))
    assert cut.found(folder, kind) == (CUT, [3.0 if kind is Durability.LOG else 2.0] * 40)
    cut.target.manager.save()
    assert cut.found(folder, kind) == (CUT, [3.0] * 40)


@both
def test_a_death_at_any_moment_of_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability) -> None:
    """A process that dies before any call of the operating system restarts with old shards, or with new ones."""
    disk, outcomes = Disk(monkeypatch), list[int]()
    old = [2.0 if kind is Durability.LOG else 1.0] * 40

    def left() -> Path | None:
        return disk.copy

    for at in range(1, 200, 4):
        folder = tmp_path / f"{at}" / "s"
        with pair(folder, kind) as (_, target):
            cut = OneCut(target)
            target.manager.save()
            cut.make()
            disk.folder, disk.copy, disk.dies_in = folder, None, at
            cut.ask(Request.SEAL)
            cut.ask(Request.ADOPT, spec=cut.final)
            target.manager.save()
            disk.folder = None
            if (folder_left := left()) is None:
                break
            variable, values = cut.found(folder_left, kind)
            assert values == (old if variable == OWN else [2.0] * 40)
            outcomes.append(variable)
    assert outcomes == sorted(outcomes, key=[OWN, CUT].index), "from one moment on it has the new ones"
    assert {*outcomes} == {OWN, CUT}


def test_no_room_for_new_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut is refused, and nothing of it is left."""
    folder = tmp_path / "s"
    with pair(folder, Durability.LOG) as (_, target):
        cut = OneCut(target)
        cut.make()
        files, room = names(folder), Trouble(monkeypatch, "posix_fallocate", "state-", errno.ENOSPC)
        room.armed = True
        with pytest.raises(PsClusterError, match=f"a shard can't be saved: No space left on device in {folder}"):
            cut.ask(Request.SEAL)
        assert names(folder) == files
        cut.ask(Request.ABANDON, spec=ps_pb2.VariableSpec(evaluation=8))
        room.armed = False
        assert cut.found(folder, Durability.LOG) == (OWN, [2.0] * 40)


def test_new_shards_that_were_saved_half_filled(tmp_path: Path) -> None:
    """A generation has them before they are whole. They have no updates, so their count does not tell."""
    folder = tmp_path / "s"
    with pair(folder, Durability.SNAPSHOT) as (_, target):
        cut = OneCut(target)
        cut.updates, counted = 0, cut.ask

        def ask(action: Request.Action, payload: bytes = b"", **fields: Any) -> None:
            if action == Request.FILL and fields["shard"]:
                target.manager.save()
            counted(action, payload, **fields)

        cut.ask = ask  # type: ignore[method-assign]
        cut.make()
        with target.store.runs.changed:
            target.store.runs.idle(4)  # then a whole generation is saved
        cut.ask(Request.SEAL)
        cut.ask(Request.ADOPT, spec=cut.final)
        assert cut.found(folder, Durability.SNAPSHOT) == (CUT, [2.0] * 40)


@pytest.mark.parametrize("kind", [Durability.SNAPSHOT])
def test_a_file_that_is_begun_while_others_are_removed(
    sides: tuple[Side, Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability
) -> None:
    """It is kept, although nothing refers to it yet."""
    target, folder = sides[1], tmp_path / "s"
    manager, begun = target.manager, list[Any]()
    listed = StateDirectory._files

    def files(directory: Any) -> Any:
        if not begun:
            begun.append(manager.shard_file(99, 0, {"value": np.ones(3, np.float32)}))
        return listed(directory)

    monkeypatch.setattr(StateDirectory, "_files", files)
    manager.save()
    del kind
    assert begun[0].path.name in names(folder)
    begun[0].discard()
