"""Requests of a checkpoint that are still under way when another one, or another coordinator, ends what they began."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.storage.support import JOB, beside, declare, values_of
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import UnavailableError
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage import checkpoint_parts
from pscluster.ps.storage.checkpoint_parts import CheckpointParts
from pscluster.ps.storage.files.tensor_files import write
from pscluster.v1 import ps_pb2


def drop(parts: CheckpointParts) -> None:
    """End what was begun under number 1."""
    parts.drop_mark(1)
    parts.drop_staged(1)


ENDS: dict[str, Callable[[CheckpointParts], None]] = {
    "dropped": drop,
    "of the previous coordinator": CheckpointParts.forget,
}


@pytest.fixture
def held() -> Store:
    """A store with a variable of ones, in two shards."""
    store = Store(0, JOB)
    declare(store, 1, np.ones(4), (2, 4))
    return store


def shards_of(held: Store) -> list[Shard]:
    """Return the shards of the variable."""
    return list(held.directory.variables[1].shards.values())


def update_all(held: Store) -> None:
    """Change the values of all shards."""
    for shard in shards_of(held):
        with shard.lock:
            shard.array[...] = 5


def request(parts: CheckpointParts, held: Store, path: Path, restore_id: int) -> ps_pb2.RestoreRequest:
    """Write what the store has now to a file, and return a request to restore it."""
    parts.mark(held, 100)
    reply = parts.write(held, 100, str(path))
    restore = ps_pb2.RestoreRequest(id=restore_id)
    for saved in reply.shards:
        (tensor,) = saved.tensors
        tensor.file = path.name
        shard = restore.shards.add(variable=saved.variable, shard=saved.shard)
        shard.arrays.add(array="value").sources.add(tensor=tensor, to=[0], count=[2], **{"from": [0]})
    return restore


def test_one_is_written_after_the_other(held: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that was cut off from the first may have the same file written again."""
    parts, events, go_on = CheckpointParts(), list[str](), threading.Event()

    def slow(path: str, *args: Any) -> Any:
        events.append(f"begins {path}")
        if path.endswith("1"):
            go_on.wait(TIMEOUT)
        written = write(path, *args)
        events.append(f"ends {path}")
        return written

    monkeypatch.setattr(checkpoint_parts, "write", slow)
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    parts.mark(held, 1)
    with beside(lambda: parts.write(held, 1, first)):
        until(lambda: events, "the first is being written")
        parts.mark(held, 2)
        with beside(lambda: parts.write(held, 2, second)):
            until(lambda: parts._written[0] == 2, "the second is asked for")
            go_on.set()
    assert events == [f"begins {first}", f"ends {first}", f"begins {second}", f"ends {second}"]


@pytest.mark.parametrize("end", ENDS)
def test_a_mark_that_ends_too_late(held: Store, end: str) -> None:
    """It holds no old bytes: nobody would write them, and each update would save what it changes."""
    parts, (first, last) = CheckpointParts(), shards_of(held)
    with last.lock:
        with beside(lambda: parts.mark(held, 1)) as raised:
            until(lambda: first._snapshots, "the first shard is marked")
            ENDS[end](parts)
            last.lock.release()
        last.lock.acquire()
    assert raised == []
    assert first._snapshots == last._snapshots == []
    parts.mark(held, 2)
    assert len(first._snapshots) == 1, "the next one is marked"


@pytest.mark.parametrize("end", ENDS)
def test_a_stage_that_ends_too_late(held: Store, tmp_path: Path, end: str) -> None:
    """What it has read is dropped: it takes as much memory as the shards, and must not take their place."""
    parts, entered, go = CheckpointParts(), threading.Event(), threading.Event()
    restore = request(parts, held, tmp_path / "part", 1)

    def where(file: str) -> str:
        entered.set()
        assert go.wait(TIMEOUT)
        return str(tmp_path / file)

    with beside(lambda: parts.stage(held, restore, where)) as raised:
        assert entered.wait(TIMEOUT)
        ENDS[end](parts)
        go.set()
    assert raised == []
    with pytest.raises(UnavailableError, match="has nothing to restore any more"):
        parts.commit(held, 1, 1)
    assert held.term == 0


def test_a_late_copy_of_a_commit(held: Store, tmp_path: Path) -> None:
    """It is refused, and the commit that is under way is not disturbed."""
    parts, shards = CheckpointParts(), shards_of(held)
    restore = request(parts, held, tmp_path / "part", 1)
    update_all(held)
    parts.stage(held, restore, lambda file: str(tmp_path / file))
    with shards[0].lock:
        with beside(lambda: parts.commit(held, 1, 1)) as raised:
            until(lambda: held.term == 1, "the commit has begun")
            with beside(lambda: parts.commit(held, 99, 1)) as refused:
                shards[0].lock.release()
        shards[0].lock.acquire()
    assert raised == []
    assert [type(error) for error in refused] == [UnavailableError]
    assert values_of(held, 1, 0).tolist() == values_of(held, 1, 1).tolist() == [1, 1]
    parts.commit(held, 1, 1)  # a copy of the request has the same answer


def test_another_coordinator_waits_for_a_commit(held: Store, tmp_path: Path) -> None:
    """What the previous one has begun to commit does not come over what this one does."""
    parts, shards, order, entered = CheckpointParts(), shards_of(held), list[str](), threading.Event()
    restore = request(parts, held, tmp_path / "part", 1)
    parts.stage(held, restore, lambda file: str(tmp_path / file))

    def commit() -> None:
        parts.commit(held, 1, 1)
        order.append("committed")

    def take_over() -> None:
        entered.set()
        parts.forget()
        order.append("forgotten")

    with shards[1].lock:
        with beside(commit) as raised:
            until(lambda: held.term == 1, "the commit has begun")
            with beside(take_over):
                assert entered.wait(TIMEOUT)
                shards[1].lock.release()
        shards[1].lock.acquire()
    assert raised == []
    assert order == ["committed", "forgotten"]
