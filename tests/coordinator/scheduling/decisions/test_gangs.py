"""Gangs, decided purely: placed whole or not at all, failed and retried whole, and no two that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.conftest import search

from pscluster.coordinator.scheduling.decisions.gang import Gang, GangState
from pscluster.coordinator.scheduling.decisions.scheduler import Scheduler
from pscluster.coordinator.scheduling.decisions.tasks import ENDED, Ending, Loss, RunLimits, State, Task

WORKERS = 3
_OVER = (GangState.DONE, GangState.FAILED, GangState.CANCELLED)


def cluster(*up: int, max_attempts: int = 3) -> Scheduler[str]:
    """A scheduler whose workers with these indices are up, and free."""
    scheduler: Scheduler[str] = Scheduler(WORKERS, max_attempts)
    for index in up:
        scheduler.worker_up(index)
        assert scheduler.take(index) == []
    return scheduler


def gang_of(
    size: int, workers: list[int] | None = None, *, retries: int = 0, key: int = 100, min_workers: int = 0
) -> Gang[str]:
    payloads = [f"rank {rank}" for rank in range(size)]
    return Gang(payloads, range(key, key + size), workers, RunLimits(retries=retries), min_workers)


def placed(scheduler: Scheduler[str], gang: Gang[str]) -> list[int]:
    """Send a gang that can be placed, and return its workers."""
    assert scheduler.place_gang() is gang
    for index, member in zip(gang.placed, gang.members, strict=True):
        assert scheduler.take(index) == [member]
    return list(gang.placed)


def test_all_members_are_placed_at_once_or_none() -> None:
    scheduler = cluster(0, 1, 2)
    scheduler.add(busy := Task("ordinary"))
    assert scheduler.take(1) == [busy]
    gang = gang_of(3)
    scheduler.add_gang(gang)
    assert scheduler.place_gang() is None, "worker 1 is busy"
    assert [worker.reserved for worker in scheduler.workers] == [[]] * 3
    scheduler.finish(1, busy.id, 0.1)
    scheduler.take(1)
    assert placed(scheduler, gang) == [0, 1, 2]


def test_later_functions_do_not_delay_it_and_earlier_ones_go_first() -> None:
    scheduler = cluster(0, 1, 2)
    tasks = [Task(f"task {n}") for n in range(8)]
    for task in tasks[:5]:
        scheduler.add(task)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    for task in tasks[5:]:
        scheduler.add(task)
    sent = []
    for _ in range(8):
        for index in range(WORKERS):
            for task in scheduler.take(index):
                sent.append((index, task.payload))
                scheduler.finish(index, task.id, 1.0)
        if scheduler.place_gang() is gang:
            break
    on_others = {payload for index, payload in sent if index in (0, 1)}
    assert on_others <= {f"task {n}" for n in range(5)}, "only earlier ones on workers that it needs"
    assert gang.state is GangState.RUNNING


def test_a_gang_whose_worker_is_gone_holds_none() -> None:
    scheduler = cluster(0, 1)
    waits, goes = gang_of(2, [1, 2]), gang_of(2, [0, 1], key=200)
    scheduler.add_gang(waits)
    scheduler.add(task := Task("ordinary"))
    assert scheduler.take(1) == [task], "worker 1 is not held for a gang that waits for worker 2"
    scheduler.add_gang(goes)
    scheduler.finish(1, task.id, 1.0)
    scheduler.take(1)
    assert placed(scheduler, goes) == [0, 1], "it does not wait behind the other one"
    for index, member in enumerate(goes.members):
        scheduler.finish(index, member.id, 1.0)
        scheduler.take(index)
    assert scheduler.settle_gangs() == ([], [goes])
    scheduler.worker_up(2)
    scheduler.take(2)
    assert placed(scheduler, waits) == [1, 2]


def program(key: int, workers: tuple[int, ...] = (0, 1), *, retries: int = 0, isolated: bool = True) -> Gang[str]:
    """A program of global arrays on these workers."""
    keys = range(key, key + len(workers))
    return Gang([f"program {k}" for k in keys], keys, workers, RunLimits(retries=retries), isolated=isolated)


def alone(key: int, *, retries: int = 0, isolated: bool = True) -> Gang[str]:
    """A program of global arrays on worker 0."""
    return program(key, (0,), retries=retries, isolated=isolated)


def sent(scheduler: Scheduler[str], gang: Gang[str]) -> list[int]:
    """Send a gang that can be placed, have its workers' writers wait for more, and return its workers."""
    indices = placed(scheduler, gang)
    for index in indices:
        assert scheduler.take(index) == []
    return indices


def test_a_gang_of_one_is_sent_while_another_one_runs_on_its_worker() -> None:
    scheduler = cluster(0, 1)
    first, second, third = gangs = [alone(key) for key in (100, 200, 300)]
    for gang in gangs:
        scheduler.add_gang(gang)
    assert sent(scheduler, first) == [0]
    assert sent(scheduler, second) == [0], "it begins once the first has returned"
    assert scheduler.place_gang() is None, "one ahead"
    scheduler.finish(0, first.members[0].id, 1.0)
    assert scheduler.settle_gangs() == ([], [first])
    assert sent(scheduler, third) == [0]


def test_a_program_is_sent_to_all_its_workers_while_another_one_runs_on_them() -> None:
    scheduler = cluster(0, 1, 2)
    first, second, third, fourth = gangs = [program(key) for key in (100, 200, 300, 400)]
    for gang in gangs:
        scheduler.add_gang(gang)
    assert sent(scheduler, first) == [0, 1]
    assert sent(scheduler, second) == [0, 1]
    assert [member.follows for member in second.members] == [member.id for member in first.members]
    assert scheduler.place_gang() is None, "one ahead"
    scheduler.finish(1, first.members[1].id, 1.0)
    assert scheduler.settle_gangs() == ([], [])
    assert scheduler.place_gang() is None, "the first one still runs"
    scheduler.finish(0, first.members[0].id, 1.0)
    scheduler.finish(0, second.members[0].id, 1.0)
    assert scheduler.settle_gangs() == ([], [first])
    assert sent(scheduler, third) == [0, 1], "though the second has returned on worker 0"
    assert [member.follows for member in third.members] == [0, second.members[1].id]
    for gang in (second, third):
        for index, member in enumerate(gang.members):
            scheduler.finish(index, member.id, 1.0)
    assert scheduler.settle_gangs() == ([], [second, third])
    assert sent(scheduler, fourth) == [0, 1]
    assert [member.follows for member in fourth.members] == [0, 0]


def test_a_program_that_must_wait_is_not_sent_ahead() -> None:
    scheduler = cluster(0, 1, 2)
    first, second = program(100), program(200)
    second.waits = True
    scheduler.add_gang(first)
    sent(scheduler, first)
    scheduler.add_gang(second)
    assert scheduler.place_gang() is None
    for index, member in enumerate(first.members):
        scheduler.finish(index, member.id, 1.0)
    scheduler.settle_gangs()
    assert sent(scheduler, second) == [0, 1]


def send(scheduler: Scheduler[str], *gangs: Gang[str]) -> None:
    """Schedule, place and send gangs, one after the other."""
    for gang in gangs:
        scheduler.add_gang(gang)
        sent(scheduler, gang)


def run_on(scheduler: Scheduler[str], first: Gang[str], second: Gang[str]) -> None:
    """Place a program and one ahead; the first has returned on worker 0, where the second has begun."""
    send(scheduler, first, second)
    scheduler.finish(0, first.members[0].id, 1.0)
    assert scheduler.settle_gangs() == ([], [])


@pytest.mark.parametrize("how", ["raises", "is cancelled", "gives up"])
def test_a_program_that_follows_one_that_does_not_return_is_taken_back_and_runs_after_it(how: str) -> None:
    scheduler = cluster(0, 1, 2)
    first, second, third = program(100), program(200), program(300)
    run_on(scheduler, first, second)
    scheduler.add_gang(third)
    failed = first.members[1]
    left_behind: list[Task[str]] = []
    if how == "raises":
        scheduler.fail(1, failed, ValueError("no"))
    elif how == "gives up":
        scheduler.gave_up(1, failed, TimeoutError("another one is gone"))
    else:
        _, left_behind = scheduler.cancel([failed])
    left_behind += scheduler.settle_gangs()[0]
    assert second.state is GangState.ENDING
    assert set(second.members) <= set(left_behind)
    for index in (0, 1):
        for task_id in list(scheduler.workers[index].lingering):
            scheduler.lingering_ended(index, task_id)
        scheduler.take(index)
    assert scheduler.place_gang() is None, "it would overtake the second"
    scheduler.shut_out(left_behind)
    scheduler.settle_gangs()
    assert list(scheduler.gangs.line) == [first, second, third][how != "gives up" :]
    assert (first.deaths, second.deaths) == (int(how == "gives up"), 0)


def test_a_death_while_a_program_is_ahead_is_that_of_the_one_that_ran_there() -> None:
    for dies, deaths in ((1, (1, 0)), (0, (0, 1))):
        scheduler = cluster(0, 1, 2)
        first, second = program(100), program(200)
        run_on(scheduler, first, second)
        if dies == 1:
            scheduler.gave_up(0, second.members[0], TimeoutError("another one is gone"))
        lost = scheduler.lose(dies)
        assert lost is (first.members[1] if dies == 1 else second.members[0])
        left_behind, _ = scheduler.settle_gangs()
        assert scheduler.decide_loss(dies, lost) is Loss.AGAIN
        scheduler.requeue(dies)
        scheduler.settle_gangs()
        scheduler.shut_out(left_behind)
        scheduler.settle_gangs()
        assert (first.deaths, second.deaths) == deaths
        assert list(scheduler.gangs.line) == ([first, second] if dies == 1 else [second])
        assert first.state is (GangState.WAITING if dies == 1 else GangState.RUNNING)


@pytest.mark.parametrize(
    ("runs", "follows"),
    [
        (alone(100, retries=1), alone(200)),  # it would run again after the other one
        (alone(100), alone(200, isolated=False)),
        (alone(100, isolated=False), alone(200)),
        (gang_of(2, [0, 1]), alone(200)),
        (program(100), gang_of(2, [0, 1])),
        (program(100), program(200, (1, 0))),
        (program(100), program(200, (0, 1, 2))),
        (program(100), alone(200)),
        (alone(100), program(200)),
    ],
)
def test_other_gangs_wait_until_their_workers_are_free(runs: Gang[str], follows: Gang[str]) -> None:
    scheduler = cluster(0, 1, 2)
    scheduler.add_gang(runs)
    sent(scheduler, runs)
    scheduler.add_gang(follows)
    assert scheduler.place_gang() is None


def test_a_gang_of_one_does_not_overtake_a_function_that_waits() -> None:
    scheduler = cluster(0)
    scheduler.add_gang(first := alone(100))
    sent(scheduler, first)
    scheduler.add(task := Task("ordinary"))
    scheduler.add_gang(second := alone(200))
    assert scheduler.place_gang() is None
    scheduler.finish(0, first.members[0].id, 1.0)
    scheduler.settle_gangs()
    assert scheduler.take(0) == [task]
    scheduler.finish(0, task.id, 1.0)
    scheduler.take(0)
    assert sent(scheduler, second) == [0]


def test_gangs_of_one_run_again_in_their_order_after_a_death_which_is_the_first_ones() -> None:
    scheduler = cluster(0)
    first, second, _ = gangs = [alone(key) for key in (100, 200, 300)]
    for gang in gangs:
        scheduler.add_gang(gang)
    sent(scheduler, first)
    sent(scheduler, second)
    assert scheduler.lose(0) is first.members[0]
    scheduler.settle_gangs()
    assert scheduler.decide_loss(0, first.members[0]) is Loss.AGAIN
    scheduler.requeue(0)
    assert scheduler.settle_gangs() == ([], [])
    assert list(scheduler.gangs.line) == gangs
    assert (first.deaths, second.deaths) == (1, 0)
    scheduler.worker_up(0)
    scheduler.take(0)
    assert sent(scheduler, first) == [0]
    assert sent(scheduler, second) == [0]


def test_a_gang_of_one_that_fails_has_the_next_one_run_again() -> None:
    scheduler = cluster(0)
    first, second = alone(100), alone(200)
    send(scheduler, first, second)
    assert second.members[0].follows == first.members[0].id
    scheduler.fail(0, first.members[0], ValueError("no"))
    left_behind, over = scheduler.settle_gangs()
    assert (left_behind, over) == (second.members, [first])
    scheduler.give_back(0, [second.members[0].id])  # its worker has not begun it
    scheduler.shut_out(left_behind)
    scheduler.settle_gangs()
    assert (first.state, second.state) == (GangState.FAILED, GangState.WAITING)
    scheduler.take(0)
    assert sent(scheduler, second) == [0]


def test_gangs_of_one_that_a_worker_gives_back_one_by_one_keep_their_order() -> None:
    """It is leaving, and has begun neither."""
    scheduler = cluster(0)
    first, second = alone(100), alone(200)
    send(scheduler, first, second)
    scheduler.give_back(0, [first.members[0].id])
    left_behind, _ = scheduler.settle_gangs()
    assert second.state is GangState.ENDING
    scheduler.give_back(0, [second.members[0].id])
    scheduler.shut_out(left_behind)
    scheduler.settle_gangs()
    scheduler.settle_gangs()
    assert list(scheduler.gangs.line) == [first, second]


def test_a_death_ends_the_others_and_all_run_again_once_they_are_shut_out() -> None:
    scheduler = cluster(0, 1, 2)
    gang = gang_of(3)
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    first = list(gang.members)
    scheduler.lose(1)
    left_behind, ended = scheduler.settle_gangs()
    assert ({task.id for task in left_behind}, ended) == ({first[0].id, first[2].id}, [])
    scheduler.decide_loss(1, first[1])
    scheduler.requeue(1)
    assert scheduler.settle_gangs() == ([], [])
    assert gang.state is GangState.ENDING, "a server may still apply what the others have sent"
    assert not scheduler.idle
    scheduler.shut_out(left_behind)
    assert scheduler.settle_gangs() == ([], [])
    assert list(scheduler.gangs.line) == [gang]
    assert gang.deaths == 1
    scheduler.worker_up(1)
    for index in range(WORKERS):
        scheduler.lingering_ended(index, first[index].id)
        scheduler.take(index)
    placed(scheduler, gang)
    assert gang.generation == 2
    assert [member.key for member in gang.members] == [task.key for task in first], "its updates count once"
    assert not {member.id for member in gang.members} & {task.id for task in first}, "the late ones are refused"


def test_it_does_not_run_again_when_the_job_has_failed_since() -> None:
    """As it does when the last worker that can come back has died."""
    scheduler = cluster(0)
    gang = alone(100)
    scheduler.add_gang(gang)
    sent(scheduler, gang)
    scheduler.lose(0)
    assert scheduler.settle_gangs() == ([], [])
    scheduler.abort(ValueError("no worker is left"), final=False)
    scheduler.decide_loss(0, gang.members[0])
    scheduler.requeue(0)
    assert scheduler.settle_gangs() == ([], [gang])
    assert gang.state is GangState.CANCELLED
    assert isinstance(scheduler.take_error(), ValueError)


def test_it_fails_when_too_many_workers_have_died_running_it() -> None:
    scheduler = cluster(0, 1, 2, max_attempts=1)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    scheduler.lose(0)
    left_behind, _ = scheduler.settle_gangs()
    assert scheduler.decide_loss(0, gang.members[0]) is not None
    scheduler.requeue(0, ValueError("too many deaths"))
    scheduler.shut_out(left_behind)
    assert scheduler.settle_gangs() == ([], [gang])
    assert gang.state is GangState.FAILED
    assert isinstance(gang.error, ValueError)


def give_up(scheduler: Scheduler[str], index: int, member: Task[str]) -> None:
    scheduler.gave_up(index, member, TimeoutError("another one is gone"))
    scheduler.take(index)


def test_the_error_of_the_one_that_failed_counts_not_of_those_that_missed_it() -> None:
    scheduler = cluster(0, 1, 2)
    gang = gang_of(3)
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    give_up(scheduler, 0, gang.members[0])
    assert scheduler.settle_gangs() == ([], []), "the others are not cancelled: one of them has the cause"
    scheduler.fail(1, gang.members[1], ValueError("the cause"))
    left_behind, _ = scheduler.settle_gangs()
    assert left_behind == [gang.members[2]]
    scheduler.shut_out(left_behind)
    assert scheduler.settle_gangs() == ([], [gang])
    assert isinstance(gang.error, ValueError)


def test_members_that_miss_each_other_run_again_a_bounded_number_of_times() -> None:
    scheduler = cluster(0, 1, 2, max_attempts=2)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    for attempt in (1, 2):
        placed(scheduler, gang)
        for index, member in enumerate(list(gang.members)):
            give_up(scheduler, index, member)
        assert scheduler.settle_gangs() == ([], [gang] if attempt == 2 else [])
    assert gang.state is GangState.FAILED
    assert isinstance(gang.error, TimeoutError)


def test_a_death_that_others_noticed_first_counts_once() -> None:
    scheduler = cluster(0, 1, 2)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    give_up(scheduler, 0, gang.members[0])
    scheduler.settle_gangs()
    scheduler.lose(1)
    scheduler.settle_gangs()
    scheduler.decide_loss(1, gang.members[1])
    scheduler.requeue(1)
    assert scheduler.settle_gangs() == ([], [])
    assert (list(scheduler.gangs.line), gang.deaths) == ([gang], 1)


def die(scheduler: Scheduler[str], gang: Gang[str], index: int) -> Loss | None:
    """Lose the worker of one member, and go on until the gang can be placed again."""
    (member,) = (member for member, at in zip(gang.members, gang.placed, strict=True) if at == index)
    scheduler.lose(index)
    left_behind, _ = scheduler.settle_gangs()
    loss = scheduler.decide_loss(index, member)
    scheduler.requeue(index, ValueError("too many deaths") if loss is Loss.DEADLY else None)
    scheduler.shut_out(left_behind)
    scheduler.settle_gangs()
    scheduler.worker_up(index)
    for at in range(WORKERS):
        for other in list(scheduler.workers[at].lingering):
            scheduler.lingering_ended(at, other)
        scheduler.take(at)
    return loss


def test_deaths_count_since_a_step_was_committed_last() -> None:
    """A gang that takes steps outlives any number of deaths, and fails after as many without a step between them."""
    scheduler = cluster(0, 1, 2, max_attempts=2)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    for _ in range(5):
        placed(scheduler, gang)
        assert scheduler.gangs.progressed(gang.members[1])
        assert [member.attempts for member in gang.members] == [1, 1]
        assert die(scheduler, gang, 0) is Loss.AGAIN
        assert gang.deaths == 1
    placed(scheduler, gang)
    assert die(scheduler, gang, 1) is Loss.DEADLY
    assert gang.state is GangState.FAILED


def test_a_death_after_the_step_counts_also_if_it_is_known_first() -> None:
    """What a member told before another one died may arrive after that; of an earlier generation it means nothing."""
    scheduler = cluster(0, 1, 2, max_attempts=3)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    earlier = gang.members[1]
    assert die(scheduler, gang, 0) is Loss.AGAIN
    assert not scheduler.gangs.progressed(earlier)
    placed(scheduler, gang)
    dead, other = gang.members
    scheduler.lose(0)
    left_behind, _ = scheduler.settle_gangs()
    assert scheduler.decide_loss(0, dead) is Loss.AGAIN
    assert gang.deaths == 2
    assert scheduler.gangs.progressed(other)
    assert gang.deaths == 1
    scheduler.requeue(0)
    scheduler.shut_out(left_behind)
    scheduler.settle_gangs()
    assert (gang.state, gang.deaths, gang.members[0].attempts) == (GangState.WAITING, 1, 1)


def test_members_that_miss_each_other_after_each_step_run_again() -> None:
    scheduler = cluster(0, 1, 2, max_attempts=2)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    for _ in range(4):
        placed(scheduler, gang)
        scheduler.gangs.progressed(gang.members[0])
        for index, member in enumerate(list(gang.members)):
            give_up(scheduler, index, member)
        assert scheduler.settle_gangs() == ([], [])
        assert gang.deaths == 1


def test_a_retry_is_one_of_all() -> None:
    scheduler = cluster(0, 1, 2)
    gang = gang_of(2, [0, 1], retries=1)
    scheduler.add_gang(gang)
    for generation in (1, 2):
        placed(scheduler, gang)
        failed, other = gang.members
        if scheduler.ended_badly(0, failed).name == "AGAIN":
            scheduler.run_again(0, [failed.id])
        else:
            scheduler.fail(0, failed, ValueError("again"))
        left_behind, ended = scheduler.settle_gangs()
        assert left_behind == [other]
        assert not ended
        scheduler.shut_out(left_behind)
        assert scheduler.settle_gangs() == ([], [gang] if generation == 2 else [])
        scheduler.lingering_ended(1, other.id)
        for index in (0, 1):
            scheduler.take(index)
    assert gang.state is GangState.FAILED
    assert scheduler.error is None, "its owner makes the error that of the job"


def fails(scheduler: Scheduler[str], gang: Gang[str]) -> bool:
    """Have the first member raise, and everything end; return whether the gang runs again."""
    member = gang.members[0]
    again = scheduler.ended_badly(0, member) is Ending.AGAIN
    if again:
        scheduler.run_again(0, [member.id])
    else:
        scheduler.fail(0, member, ValueError("again"))
    left_behind, _ = scheduler.settle_gangs()
    scheduler.shut_out(left_behind)
    scheduler.settle_gangs()
    for index, worker in enumerate(scheduler.workers):
        for task_id in list(worker.lingering):
            scheduler.lingering_ended(index, task_id)
        scheduler.take(index)
    return again


def test_retries_are_those_since_the_last_committed_steps() -> None:
    scheduler = cluster(0, 1, 2)
    gang = gang_of(2, [0, 1], retries=1)
    scheduler.add_gang(gang)
    for _ in range(4):
        placed(scheduler, gang)
        scheduler.gangs.progressed(gang.members[1])
        assert fails(scheduler, gang)
        assert (gang.failures, gang.errors) == (1, 1)
    placed(scheduler, gang)
    assert not fails(scheduler, gang)
    assert gang.state is GangState.FAILED


def test_a_timeout_is_one_of_all_steps() -> None:
    """However many of them are committed in each attempt."""
    scheduler = cluster(0, 1, 2)
    gang = gang_of(2, [0, 1], retries=1)
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    scheduler.workers[0].stopping = gang.members[0].id
    assert fails(scheduler, gang)
    placed(scheduler, gang)
    scheduler.gangs.progressed(gang.members[1])
    assert not fails(scheduler, gang)


@pytest.mark.parametrize("running", [False, True])
def test_cancelling_one_member_cancels_all(running: bool) -> None:
    scheduler = cluster(0, 1, 2)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    if running:
        placed(scheduler, gang)
    cancelled, left_behind = scheduler.cancel([gang.members[1]])
    assert set(cancelled) == set(gang.members)
    assert len(left_behind) == (2 if running else 0)
    scheduler.settle_gangs() if running else None
    scheduler.shut_out(left_behind)
    _, ended = scheduler.settle_gangs()
    assert ended == [gang]
    assert gang.state is GangState.CANCELLED


def test_a_barrier_waits_for_a_gang_that_has_begun_and_holds_back_others() -> None:
    scheduler = cluster(0, 1, 2)
    owner = object()
    gang, other = gang_of(2, [0, 1]), gang_of(1, [2], key=200)
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    scheduler.add_gang(other)
    scheduler.begin_barrier(owner)
    assert scheduler.place_gang() is None, "it has not begun"
    assert not scheduler.take_barrier(owner)
    scheduler.lose(0)
    left_behind, _ = scheduler.settle_gangs()
    scheduler.decide_loss(0, gang.members[0])
    scheduler.requeue(0)
    scheduler.lingering_ended(1, gang.members[1].id)
    scheduler.shut_out(left_behind)
    scheduler.settle_gangs()
    assert not scheduler.take_barrier(owner), "half of the gang's updates may have been applied"
    scheduler.worker_up(0)
    for index in (0, 1):
        scheduler.take(index)
    for index in placed(scheduler, gang):
        scheduler.finish(index, gang.members[index].id, 1.0)
    assert scheduler.settle_gangs() == ([], [gang])
    assert scheduler.take_barrier(owner)
    scheduler.end_barrier(owner)
    assert placed(scheduler, other) == [2]


def test_it_fails_when_a_worker_that_it_needs_has_left_for_good() -> None:
    scheduler = cluster(0, 1, 2)
    waits, some, any_two = gang_of(2, [1, 2], key=10), gang_of(3, [0, 1, 2], min_workers=1, key=20), gang_of(2, key=30)
    scheduler.lose(2)
    for gang in (waits, some, any_two):
        scheduler.add_gang(gang)
    assert scheduler.settle_gangs() == ([], [])
    why = RuntimeError("it has left")
    scheduler.worker_left(2, why)
    assert scheduler.settle_gangs() == ([], [waits])
    assert (waits.state, waits.error) == (GangState.FAILED, why)
    assert scheduler.place_gang() is some, "the others can do without it"
    assert scheduler.worker_joined(2) == 2
    scheduler.worker_up(2)


def test_it_fails_when_a_worker_left_that_ran_it() -> None:
    scheduler = cluster(0, 1)
    gang = gang_of(2, [0, 1])
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    scheduler.lose(1)
    (left_behind, ended) = scheduler.settle_gangs()
    assert ended == []
    scheduler.shut_out(left_behind)
    scheduler.lingering_ended(0, gang.members[0].id)
    scheduler.requeue(1)
    why = RuntimeError("it has left")
    scheduler.worker_left(1, why)
    assert scheduler.settle_gangs() == ([], [gang])
    assert gang.error is why
    assert scheduler.idle


def test_several_members_of_one_worker_are_sent_at_once() -> None:
    scheduler = cluster(0, 1)
    gang = gang_of(4, [0, 0, 1, 1])
    scheduler.add_gang(gang)
    assert scheduler.place_gang() is gang
    assert scheduler.take(0) == gang.members[:2]
    assert scheduler.take(1) == gang.members[2:]
    scheduler.worker_up(2)
    scheduler.take(2)
    assert scheduler.steal_for(2) is None, "they run already, and belong there"
    for member, index in zip(gang.members, (0, 0, 1, 1), strict=True):
        scheduler.finish(index, member.id, 1.0)
    assert scheduler.settle_gangs() == ([], [gang])


def test_others_run_the_members_of_a_worker_that_is_lost_until_it_is_back() -> None:
    scheduler = cluster(0, 1, 2)
    scheduler.lose(1)
    gang = gang_of(6, [0, 0, 1, 1, 2, 2], min_workers=2)
    scheduler.add_gang(gang)
    assert scheduler.place_gang() is gang
    assert gang.placed == [0, 0, 0, 2, 2, 2]
    for index in (0, 2):
        assert len(scheduler.take(index)) == 3
    scheduler.worker_up(1)
    left_behind, ended = scheduler.settle_gangs()
    assert (set(left_behind), ended) == (set(gang.members), [])
    scheduler.shut_out(left_behind)
    for task in left_behind:
        scheduler.lingering_ended(gang.placed[gang.rank_of(task)], task.id)
    scheduler.settle_gangs()
    for index in range(WORKERS):
        scheduler.take(index)
    assert scheduler.place_gang() is gang
    assert gang.placed == [0, 0, 1, 1, 2, 2]
    assert gang.deaths == 0


def test_it_waits_for_workers_that_are_awaited_and_for_the_fewest_that_it_needs() -> None:
    scheduler = cluster(0)
    gang = gang_of(3, [0, 1, 2], min_workers=1)
    scheduler.add_gang(gang)
    assert scheduler.place_gang() is None, "the others may come up soon"
    scheduler.worker_missing(1)
    assert scheduler.place_gang() is None
    scheduler.worker_missing(2)
    assert scheduler.place_gang() is gang
    assert gang.placed == [0, 0, 0]
    other = cluster(0, 1, 2)
    other.lose(1)
    other.lose(2)
    other.add_gang(gang_of(3, [0, 1, 2], min_workers=2))
    assert other.place_gang() is None


def test_a_worker_that_is_back_does_not_end_what_has_ended_in_part() -> None:
    scheduler = cluster(0, 1, 2)
    scheduler.lose(2)
    gang = gang_of(3, [0, 1, 2], min_workers=1)
    scheduler.add_gang(gang)
    scheduler.place_gang()
    for index in (0, 1):
        scheduler.take(index)
    scheduler.finish(1, gang.members[1].id, 1.0)
    scheduler.settle_gangs()
    scheduler.worker_up(2)
    assert scheduler.settle_gangs() == ([], [])
    for task in (gang.members[0], gang.members[2]):
        scheduler.finish(0, task.id, 1.0)
    assert scheduler.settle_gangs() == ([], [gang])


def test_a_gang_that_can_do_without_a_member() -> None:
    """Whose worker is lost, or is left behind, when the others have returned; not before."""
    for how in ("lost", "silent", "missed another"):
        scheduler = cluster(0, 1, 2)
        gang = gang_of(3, [0, 1, 2], min_workers=1)
        gang.spare = 1
        scheduler.add_gang(gang)
        placed(scheduler, gang)
        late = gang.members[1]
        for index in (0, 2):
            assert not scheduler.leave_behind([late])
            scheduler.finish(index, gang.members[index].id, 1.0)
            scheduler.settle_gangs()
        assert gang.has_enough
        assert gang.late == [late]
        if how == "lost":
            scheduler.lose(1)
            assert scheduler.settle_gangs() == ([], [])
            assert scheduler.decide_loss(1, late) is None
            scheduler.requeue(1)
            assert scheduler.settle_gangs() == ([], [gang])
        elif how == "silent":
            assert scheduler.leave_behind([late]) == [late]
            assert scheduler.settle_gangs() == ([], [gang])
        else:
            give_up(scheduler, 1, late)
            assert scheduler.settle_gangs() == ([], [gang])
        assert gang.state is GangState.DONE
        assert gang.deaths == 0


def test_who_is_left_behind_is_as_good_as_lost_until_its_member_has_ended() -> None:
    scheduler = cluster(0, 1, 2)
    first, second = (gang_of(3, [0, 1, 2], min_workers=1, key=key) for key in (100, 200))
    first.spare = second.spare = 1
    scheduler.add_gang(first)
    placed(scheduler, first)
    for index in (0, 2):
        scheduler.finish(index, first.members[index].id, 1.0)
    scheduler.settle_gangs()
    late = first.members[1]
    scheduler.shut_out(scheduler.leave_behind([late]))
    scheduler.settle_gangs()
    scheduler.add_gang(second)
    for index in (0, 2):
        scheduler.take(index)
    assert scheduler.place_gang() is second
    assert second.placed == [0, 0, 2]
    for index in (0, 2):
        scheduler.take(index)
    scheduler.lingering_ended(1, late.id)
    left_behind, _ = scheduler.settle_gangs()
    assert set(left_behind) == set(second.members), "its replica moves back"


def test_errors_and_losses_before_the_others_have_returned_count_as_ever() -> None:
    scheduler = cluster(0, 1, 2)
    gang = gang_of(3, [0, 1, 2], min_workers=1)
    gang.spare = 1
    scheduler.add_gang(gang)
    placed(scheduler, gang)
    scheduler.finish(0, gang.members[0].id, 1.0)
    scheduler.lose(1)
    left_behind, _ = scheduler.settle_gangs()
    assert left_behind == [gang.members[2]]
    assert gang.state is GangState.ENDING


class GangMachine(RuleBasedStateMachine):
    """All interleavings of gangs, functions, deaths, errors and cancels. In the end everything ends."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = cluster(0, 1, 2, max_attempts=1_000)
        self.gangs: list[Gang[str]] = []
        self.unshut: list[Task[str]] = []
        self.lost: list[int] = []
        self.ended: list[Gang[str]] = []
        self.returned: dict[int, int] = {}  # by worker: the task that returned there last

    def settle(self) -> None:
        left_behind, ended = self.scheduler.settle_gangs()
        self.unshut += left_behind
        for gang in ended:
            earlier = (other for other in self.gangs[: self.gangs.index(gang)] if other.is_program and gang.is_program)
            if gang.state is GangState.DONE:  # else it may be cancelled while it waits
                assert all(other.is_over for other in earlier if list(other.workers or ()) == list(gang.workers or ()))
        self.ended += ended

    def running(self) -> Iterator[tuple[int, Task[str]]]:
        for index, worker in enumerate(self.scheduler.workers):
            for task in list(worker.sent.values()):
                yield index, task

    def first(self) -> list[tuple[int, Task[str]]]:
        """What each worker may end next: it runs its tasks in order, once those that were left behind have ended."""
        for index, worker in enumerate(self.scheduler.workers):
            while (
                worker.sent
                and not worker.lingering
                and next(iter(worker.sent.values())).follows not in self.follow(index)
            ):
                self.scheduler.give_back(index, [next(iter(worker.sent))])
                self.settle()
        tasks = [(index, next(iter(worker.sent.values()), None)) for index, worker in enumerate(self.scheduler.workers)]
        return [
            (index, task) for index, task in tasks if task is not None and not self.scheduler.workers[index].lingering
        ]

    def follow(self, index: int) -> tuple[int, int]:
        """What may follow on a worker: anything, and what follows the task that returned there last."""
        return 0, self.returned.get(index, 0)

    def finished(self, index: int, task: Task[str]) -> None:
        if self.scheduler.finish(index, task.id, 1.0) is not None:
            self.returned[index] = task.id

    @precondition(lambda self: self.scheduler.error is None)
    @rule()
    def schedule(self) -> None:
        self.scheduler.add(Task("ordinary"))

    @precondition(lambda self: self.scheduler.error is None and len(self.gangs) < 6)
    @rule(workers=st.one_of(st.integers(1, WORKERS), st.permutations(range(WORKERS))), size=st.integers(1, WORKERS))
    def schedule_together(self, workers: int | list[int], size: int) -> None:
        key = 100 * (len(self.gangs) + 1)
        if isinstance(workers, int):
            gang = gang_of(workers, retries=1, key=key)
        else:
            gang = gang_of(size, workers[:size], retries=1, key=key)
        self.gangs.append(gang)
        self.scheduler.add_gang(gang)

    @precondition(lambda self: self.scheduler.error is None and len(self.gangs) < 6)
    @rule()
    def schedule_alone(self) -> None:
        self.gangs.append(alone(100 * (len(self.gangs) + 1)))
        self.scheduler.add_gang(self.gangs[-1])

    @precondition(lambda self: self.scheduler.error is None and len(self.gangs) < 6)
    @rule(workers=st.sampled_from([(0, 1), (0, 1), (1, 2), (2, 0, 1)]))
    def schedule_program(self, workers: tuple[int, ...]) -> None:
        self.gangs.append(program(100 * (len(self.gangs) + 1), workers))
        self.scheduler.add_gang(self.gangs[-1])

    @precondition(lambda self: self.scheduler.error is None and len(self.gangs) < 4)
    @rule()
    def run_one_ahead(self) -> None:
        """Two programs in a row, on workers that are free: the way to most of what concerns one that is ahead."""
        for _ in range(2):
            self.schedule_program((0, 1))
            self.place()
            for index in (0, 1, 0, 1):
                self.take(index)

    @precondition(lambda self: self.scheduler.error is None and len(self.gangs) < 6)
    @rule(devices=st.integers(1, 2), min_workers=st.integers(1, WORKERS), spare=st.integers(0, WORKERS - 1))
    def schedule_steps(self, devices: int, min_workers: int, spare: int) -> None:
        homes = [index for index in range(WORKERS) for _ in range(devices)]
        key = 100 * (len(self.gangs) + 1)
        self.gangs.append(gang_of(len(homes), homes, retries=1, key=key, min_workers=min_workers))
        self.gangs[-1].spare = spare
        self.scheduler.add_gang(self.gangs[-1])

    @rule()
    def place(self) -> None:
        self.scheduler.place_gang()

    @rule(index=st.integers(0, WORKERS - 1))
    def take(self, index: int) -> None:
        if self.scheduler.workers[index].up:
            self.scheduler.take(index)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if running := self.first():
            self.finished(*data.draw(st.sampled_from(running)))
            self.settle()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if running := self.first():
            index, task = data.draw(st.sampled_from(running))
            if self.scheduler.ended_badly(index, task).name == "AGAIN":
                self.scheduler.run_again(index, [task.id])
            elif task.id in self.scheduler.workers[index].sent:
                self.scheduler.fail(index, task, ValueError("failed"))
            self.settle()

    @rule(data=st.data())
    def miss_another(self, data: st.DataObject) -> None:
        if running := [(index, task) for index, task in self.first() if task.gang is not None]:
            index, task = data.draw(st.sampled_from(running))
            self.scheduler.gave_up(index, task, TimeoutError("another one is gone"))
            self.settle()

    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        if running := [task for _, task in self.running() if task.gang is not None]:
            assert self.scheduler.gangs.progressed(data.draw(st.sampled_from(running)))

    @rule(data=st.data())
    def leave_behind(self, data: st.DataObject) -> None:
        if running := [task for _, task in self.running() if task.gang is not None]:
            self.unshut += self.scheduler.leave_behind([data.draw(st.sampled_from(running))])
            self.settle()

    @rule(index=st.integers(0, WORKERS - 1))
    def lose(self, index: int) -> None:
        if self.scheduler.workers[index].up:
            self.scheduler.lose(index)
            self.settle()
            self.lost.append(index)

    @precondition(lambda self: self.lost)
    @rule()
    def come_back(self) -> None:
        index = self.lost.pop(0)
        for task in self.scheduler.workers[index].orphaned:
            self.scheduler.decide_loss(index, task)
        self.scheduler.requeue(index)
        self.settle()
        self.scheduler.worker_up(index)

    @rule(index=st.integers(0, WORKERS - 1))
    def lingering_end(self, index: int) -> None:
        for task_id in list(self.scheduler.workers[index].lingering):
            self.scheduler.lingering_ended(index, task_id)

    @rule()
    def shut_out(self) -> None:
        self.scheduler.shut_out()
        self.unshut.clear()
        self.settle()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if tasks := list(self.scheduler.tasks()):
            self.scheduler.cancel([data.draw(st.sampled_from(tasks))])
            self.settle()

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if tasks := list(self.scheduler.tasks()):
            self.scheduler.withdraw([data.draw(st.sampled_from(tasks))])
            self.settle()

    @rule()
    def abort(self) -> None:
        self.scheduler.abort(ValueError("aborted"), final=False)
        self.settle()

    @rule()
    def take_error(self) -> None:
        self.scheduler.take_error()

    @invariant()
    def placed_whole_or_not_at_all(self) -> None:
        workers = self.scheduler.workers
        held = {id(task) for worker in workers for task in (*worker.sent.values(), *worker.orphaned, *worker.reserved)}
        for gang in self.gangs:
            if gang.state is GangState.RUNNING:
                gone = [member for member in gang.members if member.state is State.DONE or member in gang.gave_up]
                if gang.has_enough:
                    gone += [member for member in gang.members if member.state is State.CANCELLED]
                assert all(id(member) in held or member in gone for member in gang.members)
            elif gang.state is not GangState.ENDING:
                assert not any(id(member) in held for member in gang.members)

    @invariant()
    def one_generation_at_a_time(self) -> None:
        for index, task in self.running():
            if task.gang is not None:
                assert task in task.gang.members
                assert task.gang.placed[task.gang.rank_of(task)] == index

    @invariant()
    def none_waits_while_there_is_an_error(self) -> None:
        assert self.scheduler.error is None or not self.scheduler.gangs.line

    @invariant()
    def attempts_count_deaths(self) -> None:
        for gang in self.gangs:
            assert 0 <= gang.deaths_before <= gang.deaths
            assert all(0 <= member.attempts - gang.deaths_before <= 1 for member in gang.members)

    @invariant()
    def ended_gangs_are_told_of_once(self) -> None:
        assert len(set(map(id, self.ended))) == len(self.ended)
        assert all(gang.state in _OVER for gang in self.ended)

    def teardown(self) -> None:
        """Once workers are up and functions return, everything ends."""
        for _ in range(200):
            while self.lost:
                self.come_back()
            self.shut_out()
            self.scheduler.take_error()
            for index in range(WORKERS):
                self.lingering_end(index)
                self.scheduler.take(index)
            self.place()
            for index in range(WORKERS):
                self.scheduler.take(index)
            for index, task in self.first():
                self.finished(index, task)
                if task.state not in ENDED:
                    self.scheduler.ended_badly(index, task, stopped=True)
            self.settle()
            if self.scheduler.settled:
                break
        assert self.scheduler.settled
        assert {id(gang) for gang in self.ended} == {id(gang) for gang in self.gangs}


TestGangMachine = GangMachine.TestCase
TestGangMachine.__doc__ = "Gangs run whole, one generation at a time, and each ends once, whatever happens to others."
TestGangMachine.settings = search(60, 60)
