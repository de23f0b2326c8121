"""Contributions to steps on real servers in this process, which die and are restored at any moment."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.server.synchronous.support import COMMIT, OPEN, REDUCE, RUN, STAGE, WAIT, Server, add, gradient, piece
from tests.ps.storage.support import IDENTITY, JOB, Trouble, beside, declare_rule, killed, put, rows
from tests.waiting import TIMEOUT, until

from pscluster.core import fault_points
from pscluster.core.errors import MisuseError, ProtocolError, StaleError, UnavailableError
from pscluster.ps.server.synchronous import steps as steps_module
from pscluster.ps.server.synchronous.runs import MAX_RUNS
from pscluster.ps.storage.log import reader as log_reader
from pscluster.ps.storage.log import writer as log
from pscluster.ps.storage.log.format import FIRST
from pscluster.ps.storage.options import Durability
from pscluster.v1 import ps_pb2

Make = Callable[..., Server]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return what starts servers, and stops them."""
    with contextlib.ExitStack() as stack:

        def started(index: int = 1, kind: Durability = Durability.LOG) -> Server:
            server = Server(index, tmp_path / f"ps-{index}", kind)
            stack.callback(server.close)
            return server

        yield started


@pytest.fixture
def other(make: Make) -> Server:
    """Start a server that does not decide."""
    return make(1)


@pytest.fixture
def first(make: Make) -> Server:
    """Start server 0."""
    return make(0)


@contextlib.contextmanager
def at(monkeypatch: pytest.MonkeyPatch, point: str, act: Callable[[], object]) -> Iterator[None]:
    """Call this when a point is reached for the first time."""
    done: list[object] = []

    def reached(name: str) -> None:
        if name == point and not done:
            done.append(name)
            act()

    with monkeypatch.context() as patch:
        patch.setattr(fault_points, "on_reach", reached)
        yield
    assert done, f"{point} was not reached"


def stage_both(server: Server, step: int = 0, epoch: int = 1) -> None:
    """Stage a step whole: it adds 3."""
    server.send(STAGE, 0, add(1), step=step, epoch=epoch)
    server.send(STAGE, 1, add(2), step=step, epoch=epoch)


# Restarts


def test_what_is_staged_survives_and_is_applied_once(other: Server) -> None:
    stage_both(other)
    found = other.restarted()
    assert found.value() == 0
    found.reach(1)
    found.reach(1)
    assert found.value() == 3
    again = found.restarted()
    again.reach(1)
    assert again.value() == 3
    stage_both(again, step=1)
    again.reach(2)
    assert again.restarted().value() == 6


def test_half_a_step_survives_and_is_completed(other: Server) -> None:
    other.send(STAGE, 0, add(1))
    found = other.restarted()
    found.send(STAGE, 1, add(2))
    found.send(STAGE, 0, add(1))  # its answer was lost
    found.reach(1)
    assert found.value() == 3


def test_a_step_that_only_server_0_has_committed(first: Server, other: Server) -> None:
    stage_both(other)
    assert first.send(COMMIT, 0, add(10)).missing == [1]
    assert first.send(COMMIT, 1, add(20)).committed == 1
    found_first, found = first.restarted(), other.restarted()
    assert found_first.send(OPEN, 0, epoch=2).committed == 1
    assert found_first.value() == 30
    assert found.value() == 0
    found.reach(1)
    assert found.value() == 3


def test_what_server_0_has_not_committed_is_asked_for_again(first: Server) -> None:
    first.send(COMMIT, 0, add(1))
    first.manager.save()  # not in the next segment either: some replica may have ended since
    found = first.restarted()
    assert found.send(WAIT, 0).unknown
    assert found.send(COMMIT, 0, add(1)).missing == [1]
    assert found.send(COMMIT, 1, add(2)).committed == 1
    assert found.send(WAIT, 0).committed == 1
    assert found.send(COMMIT, 1, add(2)).committed == 1
    assert found.value() == 3


@pytest.mark.parametrize("staged", [1, 2])
def test_a_generation_between_staging_and_commit(other: Server, staged: int) -> None:
    for replica in range(staged):
        other.send(STAGE, replica, add(1 + replica))
    for _ in range(3):  # the first segment is removed
        other.store.directory.metadata.changes += 1
        other.manager._note_change()
        other.manager.save()
    found = other.restarted()
    for replica in range(staged, 2):
        found.send(STAGE, replica, add(1 + replica))
    found.reach(1)
    assert found.value() == 3


def test_a_log_that_is_full_and_has_room_again(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Trouble(monkeypatch, "posix_fallocate", "log-", errno.ENOSPC)
    other.send(STAGE, 0, add(1))
    monkeypatch.setattr(other.manager._log, "_allocated", 0)
    disk.armed = True
    with pytest.raises(UnavailableError, match="can't grow"):
        other.send(STAGE, 1, add(2))
    disk.armed = False
    other.send(STAGE, 1, add(2))
    found = other.restarted()
    found.reach(1)
    assert found.value() == 3


def test_a_log_that_breaks_does_not_lose_what_was_staged_before(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation that repairs it makes the old segment obsolete: what is staged must be in the new one by then."""
    stage_both(other)
    disk = Trouble(monkeypatch, "pwritev", "log-")
    found: list[Server] = []
    with at(monkeypatch, "ps.manifest.after", lambda: found.append(other.restarted())):
        disk.armed = True
        with pytest.raises(UnavailableError, match="could not be written"):
            other.send(STAGE, 0, add(5), run=RUN + 1)
        disk.armed = False
        other.manager.save()
    found[0].reach(1)
    assert found[0].value() == 3
    other.send(STAGE, 0, add(5), run=RUN + 1)
    other.restarted().reach(1)


def test_records_that_the_machine_has_lost(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure, a server whose log has lost its end does not pass over the steps in it."""
    stage_both(other)
    folder = killed(other.folder)
    segment = max(folder.glob("log-*.bin"))
    data = segment.read_bytes()
    segment.write_bytes(data[:FIRST] + bytes(len(data) - FIRST))
    for module in (log, log_reader):
        monkeypatch.setattr(module, "machine_boot_id", lambda: b"another boot....")
    found = Server(1, folder)
    with pytest.raises(StaleError, match="older state"):
        found.reach(1)
    found.close()


def test_a_commit_that_waits_is_answered_once_the_step_is_committed(
    first: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "WAIT_SECONDS", TIMEOUT)
    answers: list[ps_pb2.StepState] = []
    waiter = threading.Thread(target=lambda: answers.append(first.send(COMMIT, 0, add(1), wait=True)))
    waiter.start()
    until(lambda: first.store.runs.staged(), "the first COMMIT has come")
    assert first.send(COMMIT, 1, add(2), wait=True).committed == 1
    waiter.join(TIMEOUT)
    assert [answer.committed for answer in answers] == [1]
    assert first.value() == 3


# Gradients that the replicas reduce


def test_pieces_that_are_staged_survive(other: Server) -> None:
    declare_rule(other.store, 9, "sgd", learning_rate=1.0)
    other.manager.save()
    for replica in range(2):
        other.send(STAGE, replica, piece(4.0, replica))
    found = other.restarted()
    found.reach(1)
    assert found.value() == found.restarted().value() == -4


@pytest.mark.parametrize(
    ("theirs", "match"),
    [
        ({"updated": [2], "reduced": 5}, "replica 0 has applied gradients to 'v1', and replica 1 to 'v2'"),
        ({"updated": [1], "reduced": 6}, "replicas 0 and 1 have applied gradients to 'v1', but not alike"),
        ({"updated": [1]}, "replicas 0 and 1 have applied gradients to 'v1', but not alike"),
    ],
)
@pytest.mark.parametrize("kind", [REDUCE, COMMIT])
@pytest.mark.parametrize("turned", [False, True])
def test_replicas_that_reduce_differently(
    first: Server, theirs: dict[str, Any], match: str, kind: ps_pb2.Contribution.Kind, turned: bool
) -> None:
    """The second one to say so is told at once, the first when it asks why another takes no part."""
    sends = [
        lambda: first.send(REDUCE, 0, updated=[1], reduced=5),
        lambda: first.send(kind, 1, **theirs),
    ]
    sends.reverse() if turned else None
    assert sends[0]().committed == 0
    for _ in range(2):
        with pytest.raises(MisuseError, match=match):
            sends[1]()
        with pytest.raises(MisuseError, match=match):
            first.send(REDUCE, 0, updated=[1], reduced=5)
    assert first.send(OPEN, 0, epoch=2).committed == 0
    for replica in range(2):
        assert first.send(REDUCE, replica, updated=[1], reduced=5, epoch=2).committed == 0


def test_replicas_that_reduce_learn_that_the_data_has_ended(first: Server) -> None:
    assert not first.send(REDUCE, 0, updated=[1], reduced=5).ended
    assert first.send(COMMIT, 1, ended=True).ended
    assert first.send(REDUCE, 0, updated=[1], reduced=5).ended


def test_a_late_copy_of_what_was_reduced_changes_nothing(first: Server) -> None:
    for replica in range(2):
        first.send(COMMIT, replica, add(1))
    assert first.send(REDUCE, 0, updated=[2], reduced=5, step=0).committed == 1
    for replica in range(2):
        first.send(COMMIT, replica, add(1), step=1)
    assert first.value() == 4


# An attempt that has failed


def test_what_an_attempt_that_failed_has_staged_is_dropped_by_the_next(other: Server) -> None:
    """Also by a server that has found it in its log; until then no shard that it changes is frozen."""
    for replica in range(2):
        other.send(STAGE, replica, add(1))
    other.send(STAGE, 0, add(5), step=1)  # so the first step is committed; and one replica does not end the second
    for server in (other, other.restarted()):
        changed, unchanged = (server.store.find(variable, 0)[1] for variable in (1, 2))
        server.store.check_not_staged(unchanged)
        with pytest.raises(StaleError, match="a synchronous step that changes the shard is under way"):
            server.store.check_not_staged(changed)
        assert server.send(OPEN, 0, step=1, epoch=2, after=1).committed == 1
        server.store.check_not_staged(changed)
        assert server.value() == 2
        with pytest.raises(StaleError, match="another one has begun"):
            server.send(STAGE, 1, add(5), step=1)


# A step that is applied and not logged


def test_a_step_that_could_not_be_logged_is_finished_before_anything_else(
    first: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in memory, and a next attempt at it would be dropped as a repetition, while other servers take it."""
    disk = Trouble(monkeypatch, "pwritev", "log-")
    full = Trouble(monkeypatch, "posix_fallocate", "log-", errno.ENOSPC)
    first.send(COMMIT, 0, add(1))
    disk.armed = full.armed = True
    with pytest.raises(UnavailableError, match="could not be logged"):
        first.send(COMMIT, 1, add(2))
    for kind in (OPEN, WAIT):
        with pytest.raises(UnavailableError):
            first.send(kind, 0, epoch=2)
    assert first.restarted().value() == 0
    disk.armed = full.armed = False
    first.manager.save()
    until(lambda: not first.manager._log or not first.manager._log.broken, "the log is repaired")
    assert first.send(OPEN, 0, epoch=2).committed == 1
    assert first.value() == first.restarted().value() == 3
    assert first.restarted().send(OPEN, 0, epoch=3).committed == 1


def test_no_generation_holds_half_a_step(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that is written while a step is applied has some shards with it, others without it."""
    for replica in range(2):
        other.send(STAGE, replica, add(1), add(1, variable=2))
    saved, found = threading.Event(), list[Server]()

    def save() -> None:
        other.manager.save()
        saved.set()

    def half() -> None:
        saver.start()
        assert not saved.wait(0.5)
        found.append(other.restarted())

    saver = threading.Thread(target=save)
    with at(monkeypatch, "ps.ledger.after", half):
        other.reach(1)
    assert saved.wait(TIMEOUT)
    saver.join()
    for server in (found[0], other.restarted()):
        server.reach(1)
        assert (server.value(1), server.value(2)) == (2, 2)


# Attempts


def test_what_an_earlier_attempt_has_staged_is_never_applied(other: Server) -> None:
    """The step that is committed in the next attempt has no part for this server."""
    stage_both(other)
    found = other.restarted()
    for server in (other, found):
        server.reach(1, epoch=2)
        assert server.value() == 0
        assert server.store.runs.staged() == []
        stage_both(server, step=1, epoch=2)
        server.reach(2, epoch=2)
        assert server.value() == 3


def test_a_later_attempt_takes_the_place_of_an_earlier_one(other: Server) -> None:
    stage_both(other, epoch=1)
    other.send(STAGE, 0, add(4), epoch=2)
    with pytest.raises(StaleError, match="another one has begun"):
        other.send(STAGE, 1, add(2), epoch=1)
    other.send(STAGE, 1, add(5), epoch=2)
    for server in (other, other.restarted()):
        server.reach(1, epoch=2)
        assert server.value() == 9


def test_different_updates_are_refused_before_the_step_can_be_committed(first: Server, other: Server) -> None:
    """Otherwise server 0 commits what another server can't combine."""
    for server in (first, other):
        declare_rule(server.store, 9, "sgd", learning_rate=1.0)
    table = rows(ps_pb2.APPLY_GRADIENT, [0], np.ones(1), optimizer=9)
    other.send(STAGE, 0, gradient(1))
    for wrong in ([table], [gradient(1), gradient(1)], [gradient(1, variable=2)], []):
        with pytest.raises(MisuseError, match=r"replica 1 has gradients of .*, and replica 0 of 'v1'"):
            other.send(STAGE, 1, *wrong)
    other.send(STAGE, 1, gradient(1), add(5))  # other updates may differ
    other.reach(1)
    assert other.value() == 3
    first.send(COMMIT, 0, gradient(1))
    with pytest.raises(MisuseError, match="rows"):
        first.send(COMMIT, 1, rows(ps_pb2.APPLY_GRADIENT, [0], np.ones(1), optimizer=9))
    with pytest.raises(MisuseError, match="rows"):
        first.send(WAIT, 0)
    assert first.value() == 0


def test_a_step_that_ended_is_not_committed(first: Server) -> None:
    first.send(COMMIT, 0, add(1))
    assert first.send(COMMIT, 1, ended=True).ended
    assert first.send(WAIT, 0).ended
    assert first.send(OPEN, 0, epoch=2).committed == 0
    assert first.value() == 0


# A server that has restarted without a log


def test_a_new_run_on_a_server_that_restarted_without_a_log(make: Make) -> None:
    """It has missed nothing of a run that begins, also of steps that have no part for it."""
    server = make(kind=Durability.SNAPSHOT)
    stage_both(server)
    server.manager.save()
    found = server.restarted()
    with pytest.raises(StaleError, match="--durability log"):
        found.reach(1)
    for step, run in ((0, RUN + 1), (3, RUN + 2)):
        found.reach(0, run)
        found.reach(step, run)
        for replica in range(2):
            found.send(STAGE, replica, add(1), step=step, run=run)
        found.reach(step + 1, run)
    assert found.value() == 4


# Other coordinators, and checkpoints


def test_a_takeover_waits_for_the_step_that_is_being_applied(first: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next coordinator then reads how many steps are committed; no other one may be."""
    taken = threading.Event()

    def take_over() -> None:
        first.store.take_over(JOB + 1)
        taken.set()

    def begin() -> None:
        thread.start()
        assert not taken.wait(0.3)

    thread = threading.Thread(target=take_over)
    first.send(COMMIT, 0, add(1), add(1, variable=2))
    with at(monkeypatch, "ps.ledger.after", begin):
        assert first.send(COMMIT, 1, add(2), add(2, variable=2)).committed == 1
    thread.join(TIMEOUT)
    assert taken.is_set()
    assert (first.value(1), first.value(2)) == (3, 3)
    assert '"steps":1' in first.store.directory.metadata.texts["synchronous"]


def test_no_step_is_committed_after_a_takeover(first: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A COMMIT was checked, and then the job was taken over, before it could be counted."""
    first.send(COMMIT, 0, add(1))

    def late(_: object) -> None:
        first.store.take_over(JOB + 1)

    monkeypatch.setattr("pscluster.ps.server.synchronous.steps.check_contribution", late)
    with pytest.raises(StaleError, match="another coordinator took it over"):
        first.send(COMMIT, 1, add(2))
    assert first.value() == 0
    assert first.store.runs.staged() == []


def test_the_next_coordinator_ends_what_was_staged(other: Server) -> None:
    """It has the committed step applied, and drops the other one; also if the server restarts in between."""
    stage_both(other)
    other.store.take_over(JOB + 1)
    other.manager.take_over(IDENTITY)
    other.manager.save()
    found = other.restarted()
    found.store.take_over(JOB + 1)
    for server, committed in ((other, 1), (found, 0)):
        server.reach(1, epoch=1 if committed else 2)
        assert server.value() == 3 * committed
        assert server.store.runs.staged() == []


def test_what_a_dead_coordinators_first_step_has_staged_goes_with_the_next_run(other: Server) -> None:
    """Nothing was committed of that run, so the next coordinator does not know of it."""
    stage_both(other)
    other.store.take_over(JOB + 1)
    assert len(other.store.runs.staged()) == 2
    other.send(STAGE, 0, add(1), run=RUN + 1, job=JOB + 1)
    assert len(other.store.runs.staged()) == 1


def test_the_record_of_a_step_is_in_the_metadata(first: Server) -> None:
    for run, step in ((RUN, 0), (RUN + 1, 0), (RUN + 1, 1)):
        first.send(COMMIT, 0, add(1), run=run, step=step, replicas=1)
    record = {"job": JOB, "run": RUN + 1, "steps": 2, "epoch": 1, "before": {}, "after": {}}
    assert steps_module._decision(first.store) == record
    assert steps_module._decision(first.restarted().store) == record


def test_positions_before_the_last_step(first: Server) -> None:
    """They are those after the last contribution, unless steps without it, or with others, have moved them since."""
    first.send(COMMIT, 0, add(1), replicas=1, positions={7: 1, 8: 5})
    state = first.send(OPEN, 0, step=1, epoch=1, replicas=1)
    assert (dict(state.before), dict(state.after)) == ({}, {7: 1, 8: 5})
    first.send(COMMIT, 0, add(1), step=1, replicas=1, positions={7: 4}, before={7: 3})
    state = first.send(OPEN, 0, step=2, epoch=1, replicas=1)
    assert (dict(state.before), dict(state.after)) == ({7: 3, 8: 5}, {7: 4, 8: 5})
    first.send(COMMIT, 0, add(1), step=2, replicas=1, positions={7: 5})
    state = first.send(OPEN, 0, step=3, epoch=1, replicas=1)
    assert (dict(state.before), dict(state.after)) == ({7: 4, 8: 5}, {7: 5, 8: 5})


# What hostile or broken clients send


@pytest.mark.parametrize("index", [0, 1])
def test_kinds_that_are_none(make: Make, index: int) -> None:
    server = make(index)
    for kind in (0, 17, STAGE if index == 0 else COMMIT, *([] if index == 0 else [WAIT])):
        with pytest.raises(ProtocolError, match="of kind"):
            server.send(kind, 0, add(1))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="updates with a question"):
        server.send(OPEN, 0, add(1))
    assert server.store.runs.staged() == []


def test_absurd_numbers(first: Server, other: Server) -> None:
    with pytest.raises(ProtocolError, match="the limit is"):
        first.send(COMMIT, 0, add(1), replicas=1 << 31)
    with pytest.raises(ProtocolError, match="replica 2, of 2"):
        other.send(STAGE, 2, add(1))
    with pytest.raises(StaleError, match="0 of the 9223372036854775808"):
        first.send(COMMIT, 0, add(1), step=1 << 63)
    with pytest.raises(StaleError):
        first.reach((1 << 64) - 1)
    for server in (first, other):
        with pytest.raises(ProtocolError, match="without a number"):
            server.reach(1, run=0)
    assert first.send(COMMIT, 0, add(1), epoch=0, replicas=1).committed == 1
    other.send(STAGE, 0, add(1), step=(1 << 64) - 1, replicas=1, run=5)
    with pytest.raises(ProtocolError):
        first.send(COMMIT, 0, put("synchronous", "{}"))


def test_many_runs_do_not_displace_what_is_staged(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can name a run: neither what is staged is lost, nor a step that is being applied."""
    stage_both(other)

    def name_many() -> None:
        for run in range(1000, 1000 + 3 * MAX_RUNS):
            other.reach(1, run)

    name_many()
    with at(monkeypatch, "ps.step.before", name_many):
        other.reach(1)
    assert other.value() == 3
    stage_both(other, step=1)
    for run in range(2000, 2000 + MAX_RUNS - 1):
        other.send(STAGE, 0, add(1), run=run)
    with pytest.raises(ProtocolError, match="16 synchronous runs are staged here already"):
        other.send(STAGE, 0, add(1), run=3000)
    other.reach(2)
    assert other.value() == 6


def test_the_most_that_is_staged(other: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "_MOST_BYTES", 3 * 16)
    for replica in range(3):
        other.send(STAGE, replica, add(1), replicas=4)
    with pytest.raises(MisuseError, match="more than half of the machine's memory"):
        other.send(STAGE, 3, add(1), replicas=4)
    assert len(other.store.runs.staged()) == 3


def test_a_replica_that_never_comes_holds_no_thread(first: Server) -> None:
    """A request that waits for it is answered all the same."""
    first.send(COMMIT, 0, add(1))
    assert first.send(WAIT, 0).missing == [1]


def test_both_replicas_at_once(first: Server) -> None:
    """One of them applies the step, and the other one learns of it."""
    for step in range(20):
        states: list[ps_pb2.StepState] = []

        def commit(replica: int, step: int = step, states: list[ps_pb2.StepState] = states) -> None:
            state = first.send(COMMIT, replica, add(1), step=step)
            while state.committed <= step:
                state = first.send(WAIT, replica, step=step)
            states.append(state)

        with beside(lambda: commit(0), lambda: commit(1)) as raised:
            pass
        assert raised == []
        assert [state.committed for state in states] == [step + 1] * 2
    assert first.value() == first.restarted().value() == 40
