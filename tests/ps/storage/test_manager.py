"""What the service relies on: creations are durable, jobs leave nothing behind, requests don't wait for the disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.conftest import attached
from tests.ps.storage.support import (
    IDENTITY,
    JOB,
    NEVER,
    Client,
    Hold,
    Trouble,
    begun,
    beside,
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
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import MisuseError, PsClusterError, StaleError, UnavailableError
from pscluster.ps.request_metrics import ServiceMetrics
from pscluster.ps.server import role as role_module
from pscluster.ps.server.requests import update_checks
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.write_path import write
from pscluster.ps.storage.checkpoint_parts import CheckpointParts
from pscluster.ps.storage.files.generations import StateDirectory
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import node_pb2, ps_pb2, state_pb2

KEPT = [Durability.SNAPSHOT, Durability.LOG]

both = pytest.mark.parametrize("kind", KEPT, ids=lambda kind: str(kind.value))


@both
def test_a_creation_waits_for_its_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability) -> None:
    """A creation is acknowledged once the variable is on disk, not before."""
    disk = Hold(monkeypatch, "pwritev", "state-")
    with begun(tmp_path / "s", kind) as (manager, held):
        manager.save()
        declare(held, 1, np.arange(3.0))
        disk.armed = True
        saved = threading.Event()

        def create() -> None:
            manager.save()
            saved.set()

        with beside(create) as raised:
            assert disk.entered.wait(TIMEOUT)
            assert not saved.is_set()
            assert found_in(killed(tmp_path / "s")).held()[0] == []
            disk.go.set()
        assert raised == []
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [0, 1, 2]


@both
def test_a_creation_that_can_not_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability) -> None:
    """It is refused with the disk's reason, every time; then it works again."""
    disk = Trouble(monkeypatch, "pwritev", "state-", errno.ENOSPC)
    with begun(tmp_path / "s", kind) as (manager, held):
        disk.armed = True
        declare(held, 1, np.arange(3.0))
        for _ in range(2):
            with pytest.raises(PsClusterError, match=f"could not be saved: No space left on device in {tmp_path}"):
                manager.save()
            assert f"durability {kind.value}, failing: No space left" in manager.words
            assert manager.unsaved.startswith("No space left")
        disk.armed = False
        manager.save()
        assert "failing" not in manager.words
        assert not manager.unsaved
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("error", [RuntimeError("words"), MemoryError()], ids=["with words", "without"])
def test_a_generation_that_fails_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A generation that fails otherwise, for example without memory, does not count as saved."""
    real = os.pwritev

    def fails(fd: int, *rest: Any) -> int:
        if "state-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise error
        return real(fd, *rest)

    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.arange(3.0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fails)
            with pytest.raises(PsClusterError, match="could not be saved"):
                manager.save()
        manager.save()


@both
def test_many_creations_at_once(tmp_path: Path, kind: Durability) -> None:
    """Each is on disk when it is acknowledged; they share generations."""
    with begun(tmp_path / "s", kind) as (manager, held):

        def create(variable: int) -> None:
            declare(held, variable, np.full(3, float(variable)))
            manager.save()
            assert manager._job is not None
            saved = manager._job.saved
            assert saved is not None
            assert variable in {spec.id for spec in saved.variables}

        with beside(*(lambda variable=variable: create(variable) for variable in range(1, 9))) as raised:
            pass
        assert raised == []
        assert facts(found_in(killed(tmp_path / "s"))) == facts(held)


@both
def test_a_job_that_ends_leaves_nothing(tmp_path: Path, kind: Durability) -> None:
    """Only the lock is left, and a restarted server has no job."""
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.arange(3.0))
        for _ in range(3):
            manager.save()
            Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        assert len(names(tmp_path / "s")) > 3
        manager.end()
        until(lambda: names(tmp_path / "s") == {"lock"}, "all is removed", lambda: names(tmp_path / "s"))
        manager.save()  # there is no job
    assert names(tmp_path / "s") == {"lock"}
    assert restored(tmp_path / "s") is None


@both
def test_a_job_that_ends_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability) -> None:
    """The generation in progress does not count, and its waiters return."""
    disk = Hold(monkeypatch, "pwritev", "state-")
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.arange(3.0))
        disk.armed = True
        with beside(manager.save) as raised:
            assert disk.entered.wait(TIMEOUT)
            manager.end()
        assert raised == []
        disk.go.set()
        until(lambda: names(tmp_path / "s") == {"lock"}, "all is removed", lambda: names(tmp_path / "s"))
    assert restored(tmp_path / "s") is None


@both
def test_a_new_job_sees_nothing_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability
) -> None:
    """The new one is there even if it begins while the old one is saved, and the server dies at once."""
    disk = Hold(monkeypatch, "pwritev", "state-")
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.arange(3.0))
        declare(held, 2, np.arange(3.0))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        with disk.during(manager.save):
            new = Store(0, JOB + 1)
            manager.begin(new, IDENTITY)
            declare(new, 1, np.full(2, 7.0), name="another")
        manager.save()
        again = found_in(killed(tmp_path / "s"))
        assert facts(again) == facts(new)
        assert again.job == JOB + 1
        Client(manager, new).update(dense(ps_pb2.ADD, np.ones(2)))
        manager.save()
        manager.save()
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [8, 8]


def test_a_disk_that_can_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's files that could not be removed at its end are removed after the next one began."""
    unlink = os.unlink
    failing = True

    def fails(path: Any, **rest: Any) -> None:
        if failing and str(path).endswith((".manifest", ".safetensors")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **rest)

    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.arange(3.0))
        manager.save()
        monkeypatch.setattr(os, "unlink", fails)
        manager.end()
        until(lambda: not manager._clear, "it was tried")
        failing = False
        new = Store(0, JOB + 1)
        manager.begin(new, IDENTITY)
        manager.save()
        assert found_in(killed(tmp_path / "s")).job == JOB + 1
        assert not (tmp_path / "s" / "state-000001.manifest").exists()


def test_updates_go_on_while_a_generation_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With snapshots updates don't wait for the disk, and a generation is of the moment at which it began."""
    small_blocks(monkeypatch)
    disk = Hold(monkeypatch, "pwritev", "state-", passes=1)
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.zeros((40, 3)))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.ones((40, 3))))
        with disk.during(manager.save):
            client.update(dense(ps_pb2.ADD, np.ones((40, 3))))
            client.update(rows(ps_pb2.ADD, [3, 39], np.ones((2, 3))))
            assert values_of(held, 1)[3].tolist() == [3] * 3
        assert (values_of(found_in(killed(tmp_path / "s")), 1) == 1).all()
        manager.save()
        assert facts(found_in(killed(tmp_path / "s"))) == facts(held)


def test_slots_that_are_made_while_a_generation_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's header lists all arrays: the first gradient adds some, and all of them are saved."""
    disk = Hold(monkeypatch, "pwritev", "state-")
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        manager.save()  # the one that the start of a job asks for must not hold one of the variables
        for variable in (1, 2):
            declare(held, variable, np.zeros(30))
        declare_rule(held, 3, "adam", learning_rate=0.5, ema=0.5)
        with disk.during(manager.save):
            disk.armed = False
            Client(manager, held).update(dense(ps_pb2.APPLY_GRADIENT, np.ones(30), 2, optimizer=3))
        again = found_in(killed(tmp_path / "s"))
        assert facts(again) == facts(held)
        assert sorted(again.held()[0][1].shards[0].arrays()) == ["average/3", "slot/3/m", "slot/3/v", "value"]
        (path,) = (tmp_path / "s").glob("*.safetensors")
        assert sorted(safetensors.numpy.load_file(path)) == [
            *("1/0/value", "2/0/average/3", "2/0/slot/3/m", "2/0/slot/3/v", "2/0/value")
        ]


def test_updates_with_a_log_go_on_while_a_generation_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for their record, not for the generation; a death in the middle of it loses none."""
    small_blocks(monkeypatch)
    disk = Hold(monkeypatch, "pwritev", "state-", passes=1)
    with begun(tmp_path / "s", Durability.LOG) as (manager, held):
        declare(held, 1, np.zeros((40, 3)))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.ones((40, 3))))
        with disk.during(manager.save):
            client.update(dense(ps_pb2.ADD, np.ones((40, 3))))
            client.update(rows(ps_pb2.ADD, [3, 39], np.ones((2, 3))))
            expected = values_of(held, 1).tolist()
            assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == expected
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == expected


def test_generations_come_by_themselves(tmp_path: Path) -> None:
    """Generations are saved after changes; without changes nothing is written."""
    with begun(tmp_path / "s", Durability.SNAPSHOT, every=0.005) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        for count in range(1, 4):
            client.update(dense(ps_pb2.ADD, np.ones(3)))
            until(lambda: manager._plan._saving is None and manager._plan.due() is None, "it is saved")
            assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [count] * 3
        saved, there = manager._plan.saved, names(tmp_path / "s")
        manager.close()
        assert (manager._plan.saved, names(tmp_path / "s")) == (saved, there)
        manager._directory = None  # it is closed


def test_generations_that_never_come_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--snapshot-seconds inf` is accepted: then only stops and creations save."""
    died = list[Any]()
    monkeypatch.setattr(threading, "excepthook", died.append)
    with begun(tmp_path / "s", Durability.SNAPSHOT, every=float("inf")) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        until(lambda: manager._changed._waiters, "the manager waits")  # type: ignore[attr-defined]
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        until(lambda: died or manager._changed._waiters, "the manager waits")  # type: ignore[attr-defined]
    assert values_of(found_in(tmp_path / "s"), 1).tolist() == [1] * 3
    assert died == []


@both
def test_a_stop_saves_what_there_is(tmp_path: Path, kind: Durability) -> None:
    """An orderly stop loses nothing."""
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        expected = facts(held)
    assert facts(found_in(tmp_path / "s")) == expected


@both
def test_a_stop_that_can_not_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability) -> None:
    """A stop that can't save ends all the same, and leaves the previous generation."""
    disk = Trouble(monkeypatch, "pwritev", "state-", errno.EIO)
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        disk.armed = True
    disk.armed = False
    expected = 1 if kind is Durability.LOG else 0
    assert values_of(found_in(tmp_path / "s"), 1).tolist() == [expected] * 3


@both
@pytest.mark.parametrize("every", [0.001, NEVER], ids=["often", "when asked"])
def test_many_generations(tmp_path: Path, kind: Durability, every: float) -> None:
    """With many shards of which few change: a bounded number of files and bytes, and the live store comes back."""
    random = np.random.default_rng(2)
    with begun(tmp_path / "s", kind, every) as (manager, held):
        for variable in range(1, 16):
            declare(held, variable, np.zeros((4, 3)), (1, 2, 3, 4))
        declare_rule(held, 99, "adam", ema=0.9)
        manager.save()
        client, most = Client(manager, held), 0
        for _ in range(60):
            for _ in range(random.integers(1, 4)):
                target = int(random.integers(1, 16)), int(random.integers(0, 4))
                client.update(dense(ps_pb2.APPLY_GRADIENT, random.normal(size=(1, 3)), *target, optimizer=99))
            manager.save()
            if every == NEVER:
                most = max(most, len(names(tmp_path / "s")))
                data = [path for path in (tmp_path / "s").iterdir() if path.suffix == ".data"]
                assert len(data) <= 8 + 2
        until(lambda: manager._plan._saving is None, "no generation is being saved")
        assert most <= 1 + 2 + 10 + 3
        keys = "keys" if kind is Durability.LOG else ""
        live, again = facts(held), facts(found_in(killed(tmp_path / "s")))
        for state in (live, again):
            for key in [fact for fact in state if isinstance(fact, tuple) and fact[-1] == keys]:
                del state[key]
        assert again == live


@both
def test_deleted_variables_are_gone(tmp_path: Path, kind: Durability) -> None:
    """Deleted variables leave neither updates in the log, nor keys, nor, two generations later, bytes."""
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.full(1000, 123456789.0))
        declare(held, 2, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(1000)), dense(ps_pb2.ADD, np.ones(3), 2))
        held.delete("v1")
        manager.save()
        again = found_in(killed(tmp_path / "s"))
        assert facts(again) == facts(held)
        assert [variable.spec.name for variable in again.held()[0]] == ["v2"]
        for _ in range(2):
            Client(manager, held, 10 + _).update(dense(ps_pb2.ADD, np.ones(3), 2))
            manager.save()
        data = b"".join(path.read_bytes() for path in (tmp_path / "s").iterdir() if path.suffix == ".data")
        assert np.full(10, 123456789.0).tobytes() not in data


def test_durability_none_touches_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and no thread is started."""
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    manager = StateManager(DurabilityOptions(directory=tmp_path / "s"))
    assert manager.restore() is None
    held = Store(0, JOB)
    manager.begin(held, IDENTITY)
    for call in ("open", "pwritev", "posix_fallocate", "fsync"):
        monkeypatch.setattr(os, call, None)
    declare(held, 1, np.zeros(3))
    manager.save()
    manager.check_rule("any")
    assert Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3))).applied == 1
    manager.end()
    manager.close()
    assert manager.words == "durability none"
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_a_rule_by_value_and_a_log(tmp_path: Path) -> None:
    """With a log they are refused, with advice; with snapshots they are accepted."""
    with manager_of(tmp_path / "log") as manager, pytest.raises(MisuseError, match=r"'mine'.*durability snapshot"):
        manager.check_rule("mine")
    with manager_of(tmp_path / "snapshot", Durability.SNAPSHOT) as manager:
        manager.check_rule("mine")


@pytest.mark.parametrize(
    "lives",
    [
        (Durability.LOG, Durability.SNAPSHOT, Durability.LOG),
        (Durability.SNAPSHOT, Durability.LOG, Durability.SNAPSHOT, Durability.SNAPSHOT),
        (Durability.LOG, Durability.LOG, Durability.LOG),
    ],
    ids=lambda lives: " ".join(kind.value for kind in lives),
)
def test_another_choice_at_the_next_start(tmp_path: Path, lives: tuple[Durability, ...]) -> None:
    """Updates that were acknowledged under the previous choice are restored."""
    folder = tmp_path / "s"
    with begun(folder, lives[0]) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held, 100).update(dense(ps_pb2.ADD, np.ones(3)))
        if lives[0] is Durability.SNAPSHOT:
            manager.save()
        folder = killed(folder)
    expected = 1
    for kind in lives[1:]:
        with manager_of(folder, kind) as manager:
            recovered = manager.restore()
            assert recovered is not None
            assert values_of(recovered.store, 1).tolist() == [expected] * 3
            assert recovered.identity == IDENTITY
            Client(manager, recovered.store, 100 + expected).update(dense(ps_pb2.ADD, np.ones(3)))
            if kind is Durability.SNAPSHOT:
                manager.save()
            expected += 1
            folder = killed(folder)
    assert values_of(found_in(folder), 1).tolist() == [expected] * 3


def test_a_coordinator_s_marks_are_dropped_with_it() -> None:
    """The next coordinator continues with the values; checkpoints that were begun are dropped."""
    role = ParameterServerRole(0, StateManager(DurabilityOptions()))
    role.job_began(node_pb2.AttachRequest(job=JOB, job_id=5, coordinator_number=1))
    attached(role, node_pb2.AttachRequest(job=JOB))
    declare(role.store, 1, np.zeros(3))
    role.parts.mark(role.store, 1)
    client = Client(role.manager, role.store)
    client.update(dense(ps_pb2.ADD, np.ones(3)))
    assert role.manager.spill.in_memory == 24
    role.job_began(node_pb2.AttachRequest(job=JOB + 1, job_id=5, coordinator_number=2))
    assert role.manager.spill.in_memory == 0
    assert values_of(role.store, 1).tolist() == [1, 1, 1]
    with pytest.raises(StaleError, match="not marked"):
        role.parts.write(role.store, 1, "nowhere")
    shard = role.store.held()[0][0].shards[0]
    with shard.lock:
        assert shard.replace(np.zeros(3)), "nothing is written"


def test_a_restored_server_waits_for_its_coordinator(tmp_path: Path) -> None:
    """Requests are refused until the coordinator has reported who was given up meanwhile; those still are then."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        copy = killed(tmp_path / "s")
    with manager_of(copy) as manager:
        role = ParameterServerRole(0, manager)
        assert role.restored_job == JOB
        with pytest.raises(UnavailableError, match="is waiting for its coordinator"):
            role.serving()
        request = node_pb2.AttachRequest(job=JOB, closed=[9], finished_starts=[3], finished_stops=[5])
        assert attached(role, request).store_id == IDENTITY.store_id
        client = Client(manager, role.serving())
        with pytest.raises(StaleError, match="given up"):
            client.update(dense(ps_pb2.ADD, np.ones(3)))
        with pytest.raises(StaleError, match="has ended"):
            Client(manager, role.store, 10).update(dense(ps_pb2.ADD, np.ones(3)), function=4)
        role.job_began(node_pb2.AttachRequest(job=JOB + 1))
        assert attached(role, node_pb2.AttachRequest(job=JOB + 1)).store_id not in (0, IDENTITY.store_id)
        assert role.serving().held()[0] == []
        manager.save()
        role.job_ended()
        until(lambda: names(copy) == {"lock"}, "all is removed")


def test_a_restored_server_without_room_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts, has everything, and refuses updates until there is room."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        copy = killed(tmp_path / "s")
    disk = Trouble(monkeypatch, "posix_fallocate", "log-", errno.ENOSPC)
    disk.armed = True
    with manager_of(copy, every=0.01) as manager:
        recovered = manager.restore()
        assert recovered is not None
        client = Client(manager, recovered.store, 10)
        made = client.made(dense(ps_pb2.ADD, np.ones(3)))
        with pytest.raises(UnavailableError):
            client.send(made)
        assert values_of(recovered.store, 1).tolist() == [1] * 3
        disk.armed = False
        until(lambda: "failing" not in manager.words, "there is room, and it is seen")
        assert client.send(made).applied == 1
        assert values_of(recovered.store, 1).tolist() == [2] * 3


def test_updates_after_a_restore_that_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused until it is: the log could not go on from what was saved before."""
    disk = Trouble(monkeypatch, "pwritev", "state-", errno.ENOSPC)
    with begun(tmp_path / "s", every=0.01) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client, parts = Client(manager, held), CheckpointParts()
        client.update(dense(ps_pb2.ADD, np.ones(3)))
        shard = ps_pb2.RestoreShard(variable=1, arrays=[ps_pb2.RestoreArray(array="value")])
        parts.stage(held, ps_pb2.RestoreRequest(id=1, shards=[shard]), str)
        disk.armed = True
        parts.commit(held, 1, 1)
        with pytest.raises(PsClusterError, match="could not be saved"):
            manager.save()
        made = client.made(dense(ps_pb2.ADD, np.ones(3)))
        made[0].term = 1
        with pytest.raises(UnavailableError, match="until the restored checkpoint has been saved"):
            client.send(made)
        copy = killed(tmp_path / "s")
        assert values_of(found_in(copy, Durability.LOG), 1).tolist() == [1] * 3, "as it was before"
        disk.armed = False
        until(lambda: "failing" not in manager.words, "there is room, and it is seen")
        assert client.send(made).applied == 1
        assert values_of(found_in(killed(tmp_path / "s"), Durability.LOG), 1).tolist() == [1] * 3, "after the restore"
    with manager_of(copy) as manager:  # other servers may have been restored: the job goes on with that mixture
        recovered = manager.restore()
        assert recovered is not None
        assert Client(manager, recovered.store).send(made).applied == 1
        assert recovered.store.term == 0, "the coordinator learns that this one was not"
        again = killed(copy)
    assert values_of(found_in(again, Durability.LOG), 1).tolist() == [2] * 3


# What clients have seen beyond what was restored


def knowing(client: Client, boot_id: int, seen: int, variable: int = 1) -> ps_pb2.UpdateReply:
    """Send an addition of ones from a client that has seen this count under this boot id."""
    update = dense(ps_pb2.ADD, np.ones(3), variable)
    update[0].boot_id, update[0].seen = boot_id, seen
    return client.update(update)


def losses_in(folder: Path, expected: dict[tuple[int, int], int]) -> None:
    """Wait until exactly these losses are written there."""

    def written() -> dict[tuple[int, int], int] | None:
        with tempfile.TemporaryDirectory() as other:
            if (folder / "losses").exists():
                shutil.copy(folder / "losses", other)
            directory = StateDirectory(Path(other))
            losses = directory.losses()
            directory.close()
        if losses is None or losses.store_id != IDENTITY.store_id:
            return None
        return {(loss.variable, loss.shard): loss.updates for loss in losses.lost}

    until(lambda: written() == expected, f"{expected} is written down", written)


@pytest.mark.parametrize("spoil", ["cut", "flipped", "empty", "missing", "of another job"])
def test_what_is_lost_is_counted_and_written_down(tmp_path: Path, spoil: str) -> None:
    """Losses are found by what clients have seen, and add up over two restarts. Damaged records of them are ignored."""
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.zeros(6), (3, 6))
        declare(held, 2, np.zeros(3))
        client = Client(manager, held)
        manager.save()
        told = [client.update(dense(ps_pb2.ADD, np.ones(3))) for _ in range(2)]
        manager.save()  # two updates are saved
        told += [client.update(dense(ps_pb2.ADD, np.ones(3))) for _ in range(3)]
        assert [reply.updates[0] for reply in told] == [1, 2, 3, 4, 5]
        first_life = told[-1].boot_id
        assert {reply.boot_id for reply in told} == {held.losses.boot_id} == {first_life}
        knowing(client, first_life, 5)
        assert held.lost == {}, "this process knows all of its own life"
        copy = killed(tmp_path / "s")
    with manager_of(copy, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        held = recovered.store
        client.manager, client.held = manager, held
        assert held.lost == {}, "no client has reported anything"
        assert knowing(client, first_life, 2).updates == [3]
        assert knowing(client, 0, 99).updates == [4]  # a client that has seen nothing
        assert held.lost == {}
        assert "losses" not in names(copy)
        knowing(client, first_life, 4)
        assert held.lost == {"v1": 2}
        losses_in(copy, {(1, 0): 2})
        told = [knowing(client, first_life, seen) for seen in (5, 3, 5)]
        assert held.lost == {"v1": 3}, "the most that anybody knows of"
        losses_in(copy, {(1, 0): 3})
        second_life = told[-1].boot_id
        assert second_life != first_life
        assert told[-1].updates == [8]
        manager.save()  # eight are saved
        reply = knowing(client, second_life, 8)
        assert (reply.boot_id, list(reply.updates)) == (second_life, [9])
        knowing(client, second_life, 9, 2)  # all of which this process knows
        assert held.lost == {"v1": 3}
        again = killed(copy)
        bad = killed(copy)
    with manager_of(again, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        held = recovered.store
        client.manager, client.held = manager, held
        assert held.lost == {"v1": 3}
        knowing(client, first_life, 5)
        assert held.lost == {"v1": 3}, "what was counted at the restart before"
        knowing(client, second_life, 10)
        knowing(client, second_life, 1, 2)
        assert held.lost == {"v1": 5, "v2": 1}
        losses_in(again, {(1, 0): 5, (2, 0): 1})
        role = node_pb2.StatusReply()
        ParameterServerRole.describe(_role_of(held, manager), role)
        assert dict(role.lost_updates) == {"v1": 5, "v2": 1}
        held.delete("v1")
        assert held.lost == {"v2": 1}
    whole = (bad / "losses").read_bytes()
    if spoil == "of another job":
        directory = StateDirectory(bad)
        other = directory.losses()
        assert other is not None
        other.store_id += 1
        directory.write_losses(other)
        directory.close()
    elif spoil == "missing":
        (bad / "losses").unlink()
    else:
        flipped = whole[:-1] + bytes([whole[-1] ^ 1])
        (bad / "losses").write_bytes({"cut": whole[:-1], "flipped": flipped, "empty": b""}[spoil])
    with manager_of(bad, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        held = recovered.store
        client.manager, client.held = manager, held
        assert values_of(held, 1).tolist() == [8] * 3
        assert held.lost == {}
        knowing(client, second_life, 9)
        assert held.lost == {"v1": 1}
        losses_in(bad, {(1, 0): 1})
    manager = StateManager(DurabilityOptions(Durability.SNAPSHOT, bad))
    try:
        assert manager.restore() is not None
        manager.end()
        until(lambda: names(bad) == {"lock"}, "all is removed", lambda: names(bad))
    finally:
        manager.close()


def _role_of(held: Store, manager: StateManager) -> ParameterServerRole:
    role = ParameterServerRole.__new__(ParameterServerRole)
    role.store, role.manager, role.waiting, role.metrics = held, manager, False, ServiceMetrics()
    return role


def test_a_disk_that_can_not_take_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is reported all the same, and written with the next one."""
    disk = Trouble(monkeypatch, "pwritev", "losses", errno.ENOSPC)
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        boot_id = held.losses.boot_id
        copy = killed(tmp_path / "s")
    with manager_of(copy, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        client, disk.armed = Client(manager, recovered.store), True
        knowing(client, boot_id, 4)
        until(lambda: disk.raised, "it was tried")
        assert recovered.store.lost == {"v1": 4}
        disk.armed = False
        knowing(client, boot_id, 6)
        assert recovered.store.lost == {"v1": 6}
        losses_in(copy, {(1, 0): 6})
        assert "losses.new" not in names(copy)


def test_a_loss_of_a_variable_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    """The update was checked before, so the response is as without losses."""
    with begun(tmp_path / "s", Durability.SNAPSHOT) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        boot_id = held.losses.boot_id
        copy = killed(tmp_path / "s")
    with manager_of(copy, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        client, update = Client(manager, recovered.store), dense(ps_pb2.ADD, np.ones(3))
        update[0].boot_id, update[0].seen = boot_id, 4
        request, payload, total = client.made(update)
        placed = update_checks.check_update(recovered.store, request, total)
        recovered.store.delete("v1")
        assert write(manager, recovered.store, request, placed, payload, total).applied == 1
        assert recovered.store.lost == {}


# Another coordinator of the same job


def coordinator(number: int, store_id: int = 0) -> node_pb2.AttachRequest:
    """Return the coordinator with this number; each has its own job number."""
    return node_pb2.AttachRequest(
        job=JOB + number, job_id=78, coordinator_number=number, job_name="a job", store_id=store_id
    )


def attach(role: ParameterServerRole, request: node_pb2.AttachRequest) -> int:
    """Attach as the node does; return the store id."""
    role.admit(request)
    if request.job != role.store.job:
        role.job_began(request)
    return attached(role, request).store_id


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted server does not wait for its previous coordinator."""
    monkeypatch.setattr(role_module, "OWN_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
@both
def test_another_coordinator_takes_over(tmp_path: Path, kind: Durability) -> None:
    """The values stay under another job number: updates of the previous coordinator are no longer applied."""
    with manager_of(tmp_path / "s", kind) as manager:
        role = ParameterServerRole(0, manager)
        store_id = attach(role, coordinator(1))
        held = role.serving()
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.ones(3)))
        client.update(dense(ps_pb2.ADD, np.ones(3)), function=4)
        late, checked = (client.made(dense(ps_pb2.ADD, np.full(3, 100.0))) for _ in range(2))
        placed = update_checks.check_update(held, checked[0], checked[2])
        other = Client(manager, held, 10)
        mine = other.made(dense(ps_pb2.ADD, np.full(3, 100.0)), function=5)
        placed_mine = update_checks.check_update(held, mine[0], mine[2])

        assert attach(role, coordinator(2, store_id)) == store_id
        assert role.store is held
        assert held.job == JOB + 2
        manager.save()
        with pytest.raises(StaleError, match="serves another job"):
            client.send(late)
        for (request, payload, total), ready in ((checked, placed), (mine, placed_mine)):
            with pytest.raises(StaleError, match="serves another job"):
                write(manager, held, request, ready, payload, total)
        assert values_of(held, 1).tolist() == [2] * 3
        if manager._log is not None:
            assert manager._log._plan.all_ended
        for old in (coordinator(1), coordinator(1, store_id)):
            with pytest.raises(StaleError, match="coordinator number 2 of this job has taken it over from number 1"):
                role.admit(old)
        # Functions are numbered anew: the fourth of this coordinator is not the fourth of the previous one.
        fresh = Client(manager, held, 11).update(dense(ps_pb2.ADD, np.full(3, 10.0)), function=4)
        assert (fresh.applied, fresh.repeated_) == (1, 0)
        manager.save()
        expected = facts(held)
        copy = killed(tmp_path / "s")
    with manager_of(copy, kind) as manager:
        role = ParameterServerRole(0, manager)
        assert facts(role.store) == expected
        assert role.restored_job == JOB + 2
        reply = node_pb2.HelloReply()
        role.fill_hello(reply)
        assert (reply.store_id, reply.job_id, reply.coordinator_number, reply.job_name) == (store_id, 78, 2, "a job")
        for old in (coordinator(1), coordinator(1, store_id)):
            with pytest.raises(StaleError, match="has taken it over from number 1"):
                role.admit(old)
        role.admit(coordinator(3, store_id))
        with pytest.raises(StaleError, match="start a new coordinator"):
            role.admit(coordinator(2, store_id + 1))
        assert attach(role, coordinator(2, store_id)) == store_id
        assert values_of(role.serving(), 1).tolist() == [12] * 3
        client = Client(manager, role.serving(), 11)
        again = client.made(dense(ps_pb2.ADD, np.full(3, 10.0)), function=4)
        assert client.send(again).repeated_ == 1
        with pytest.raises(StaleError, match="serves another job"):
            client.send(late)


@pytest.mark.usefixtures("at_once")
def test_a_death_after_a_take_over(tmp_path: Path) -> None:
    """The server dies before the next periodic generation: the new coordinator's functions are applied once."""
    with manager_of(tmp_path / "s") as manager:
        role = ParameterServerRole(0, manager)
        store_id = attach(role, coordinator(1))
        held = role.serving()
        declare(held, 1, np.zeros(3))
        manager.save()
        attach(role, coordinator(2, store_id))
        client = Client(manager, held)
        made = client.made(dense(ps_pb2.ADD, np.ones(3)), function=4)

        def acknowledged() -> bool:
            try:
                return client.send(made).updates == [1]
            except UnavailableError:  # perhaps until the take-over is saved
                return False

        until(acknowledged, "the update is acknowledged", lambda: manager.words)
        copy = killed(tmp_path / "s")
    with manager_of(copy) as manager:
        role = ParameterServerRole(0, manager)
        assert values_of(role.store, 1).tolist() == [1] * 3
        assert attach(role, coordinator(2, store_id)) == store_id
        client = Client(manager, role.serving())
        assert client.send(made).repeated_ == 1, "a repetition was applied again"
        assert values_of(role.store, 1).tolist() == [1] * 3


@pytest.mark.usefixtures("at_once")
@both
def test_the_previous_coordinator_and_a_death_after_a_take_over(tmp_path: Path, kind: Durability) -> None:
    """Once an update of the new one is acknowledged, the old one is refused, by the next process, too."""
    with manager_of(tmp_path / "s", kind) as manager:
        role = ParameterServerRole(0, manager)
        store_id = attach(role, coordinator(1))
        declare(role.serving(), 1, np.zeros(3))
        manager.save()
        attach(role, coordinator(2, store_id))
        until(lambda: manager._plan._saving is None and manager._plan.due() != -np.inf, "what was asked for is saved")
        copy = killed(tmp_path / "s")
    with manager_of(copy, kind) as manager:
        role = ParameterServerRole(0, manager)
        with pytest.raises(StaleError, match="has taken it over from number 1"):
            role.admit(coordinator(1, store_id))


@pytest.mark.usefixtures("at_once")
@both
def test_functions_of_the_previous_coordinator_and_a_death(tmp_path: Path, kind: Durability) -> None:
    """Their keys do not come back with a shard that was not written again: the next one's numbers begin anew."""
    with manager_of(tmp_path / "s", kind) as manager:
        role = ParameterServerRole(0, manager)
        store_id = attach(role, coordinator(1))
        held = role.serving()
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)), function=4)  # it has not ended
        manager.save()
        attach(role, coordinator(2, store_id))
        manager.save()
        copy = killed(tmp_path / "s")
    with manager_of(copy, kind) as manager:
        role = ParameterServerRole(0, manager)
        assert attach(role, coordinator(2, store_id)) == store_id
        reply = Client(manager, role.serving(), 10).update(dense(ps_pb2.ADD, np.full(3, 10.0)), function=4)
        assert reply.applied == 1, "another's fourth function"
        assert values_of(role.store, 1).tolist() == [11] * 3


@pytest.mark.usefixtures("at_once")
def test_a_take_over_while_a_generation_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No generation of the previous coordinator has updates of the next one: they would be applied again."""
    disk, commit, copies = Hold(monkeypatch, "pwritev", "state-"), StateDirectory.commit, list[Path]()

    def committed(directory: StateDirectory, manifest: state_pb2.Manifest) -> None:
        commit(directory, manifest)
        if disk.entered.is_set():
            copies.append(killed(directory.path))

    monkeypatch.setattr(StateDirectory, "commit", committed)
    with manager_of(tmp_path / "s", Durability.SNAPSHOT) as manager:
        role = ParameterServerRole(0, manager)
        store_id = attach(role, coordinator(1))
        held = role.serving()
        for variable in (1, 2):
            declare(held, variable, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        for variable in (1, 2):
            client.update(dense(ps_pb2.ADD, np.ones(3), variable))
        disk.armed = True
        with beside(manager.save):
            assert disk.entered.wait(TIMEOUT)  # the first is being written, the second waits for it
            attach(role, coordinator(2, store_id))
            client = Client(manager, held, 10)
            made = client.made(dense(ps_pb2.ADD, np.full(3, 10.0), 2), function=4)
            assert client.send(made).applied == 1
            disk.armed = False
            disk.go.set()
    assert copies
    for copy in copies:
        with manager_of(copy, Durability.SNAPSHOT) as manager:
            role = ParameterServerRole(0, manager)
            attach(role, coordinator(2, store_id))
            Client(manager, role.serving(), 10).send(made)
            assert values_of(role.store, 2).tolist() == [11] * 3


@pytest.mark.usefixtures("at_once")
def test_a_damaged_generation_after_a_take_over(tmp_path: Path) -> None:
    """The older one is of the previous coordinator; the new one's functions are still applied once."""
    with manager_of(tmp_path / "s") as manager:
        role = ParameterServerRole(0, manager)
        store_id = attach(role, coordinator(1))
        held = role.serving()
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)), function=5)
        attach(role, coordinator(2, store_id))
        manager.save()
        client = Client(manager, held, 10)
        made = client.made(dense(ps_pb2.ADD, np.full(3, 10.0)), function=4)
        assert client.send(made).applied == 1
        copy = killed(tmp_path / "s")
    newest = max(copy.glob("state-*.manifest"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with manager_of(copy) as manager:
        role = ParameterServerRole(0, manager)
        assert values_of(role.store, 1).tolist() == [11] * 3
        for old in (coordinator(1), coordinator(1, store_id)):
            with pytest.raises(StaleError, match="has taken it over from number 1"):
                role.admit(old)
        assert attach(role, coordinator(2, store_id)) == store_id
        client = Client(manager, role.serving(), 10)
        assert client.send(made).repeated_ == 1, "a repetition was applied again"
        assert client.update(dense(ps_pb2.ADD, np.full(3, 100.0)), function=5).applied == 1, "another's fifth function"
        assert values_of(role.store, 1).tolist() == [111] * 3
