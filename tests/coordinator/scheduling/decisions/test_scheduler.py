"""The queue of functions: what it promises, under every order of events that Hypothesis finds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from tests.conftest import search

from pscluster import coordinator
from pscluster.coordinator.scheduling.decisions.assignments import MAX_BATCH_BYTES
from pscluster.coordinator.scheduling.decisions.scheduler import STOP_SECONDS, Scheduler
from pscluster.coordinator.scheduling.decisions.tasks import (
    MAX_WINDOW,
    Ending,
    Late,
    Loss,
    RunLimits,
    State,
    Task,
    WorkerState,
)

WORKERS = 3
MAX_ATTEMPTS = 3

MOST_WORKERS = 5

workers = st.runner().flatmap(lambda machine: st.integers(0, len(machine.up) - 1))
seconds = st.sampled_from([1e-6, 1e-3, 0.01, 10.0])  # windows of 1000, 12, 3 and 2 functions


def check(scheduler: Scheduler[str]) -> None:
    """Assert what always holds inside."""
    for worker in scheduler.workers:
        assert worker.up or not worker.sent, "a worker that is down has nothing"
        assert all(task.state is State.SENT for task in worker.sent.values())
        assert all(task.state is State.ORPHANED for task in worker.orphaned)
        assert worker.up or not worker.lingering, "a lost worker delays nothing"
        assert all(task.state in (State.FAILED, State.CANCELLED) for task in worker.lingering.values())
        assert not set(worker.lingering) & set(worker.sent)
    assert all(task.state is State.QUEUED for task in (*scheduler._begun, *scheduler._queue))
    assert all(task.begun for task in scheduler._begun)
    assert not any(task.begun for task in scheduler._queue)
    if scheduler._barrier_owner in scheduler.barriers:
        assert not scheduler.in_flight, "nothing executes during a barrier"
        assert not scheduler._begun, "a barrier holds no half of a function"
    assert all(task.state is State.BLOCKED and task.blockers > 0 for task in scheduler._blocked)
    assert scheduler.error is None or not scheduler.waiting, "an error leaves nothing waiting"
    held = [task.id for task in (*scheduler._begun, *scheduler._queue, *scheduler._blocked)]
    held += [task_id for worker in scheduler.workers for task_id in worker.sent]
    held += [task.id for worker in scheduler.workers for task in worker.orphaned]
    assert len(held) == len(set(held)), "a task is in one place"
    assert len(held) + len(scheduler.ended) <= scheduler.entered
    assert scheduler._keys == {task.key for task in scheduler.tasks() if task.key}, (
        "a key is a task's that has not ended"
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of events against a model that knows of each function where it is, and nothing else."""

    tasks = Bundle("tasks")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[str] = Scheduler(WORKERS, MAX_ATTEMPTS)
        self.queue: list[Task[str]] = []
        self.blocked: list[Task[str]] = []
        self.sent: list[list[Task[str]]] = [[] for _ in range(WORKERS)]
        self.orphaned: list[list[Task[str]]] = [[] for _ in range(WORKERS)]
        self.up = [False] * WORKERS
        self.idle = [False] * WORKERS  # the last time that it was given tasks there were none for it
        self.leaving = [False] * WORKERS
        self.recalled = [False] * WORKERS
        self.ended: dict[Task[str], State] = {}
        self.started: dict[Task[str], int] = {}  # how often it counts as started
        self.all: list[Task[str]] = []
        self.error: Exception | None = None
        self.final = False

        self.withdrawn: set[Task[str]] = set()
        self.lingering: list[list[Task[str]]] = [[] for _ in range(WORKERS)]  # ended, and may still run
        self.shutting_out: set[Task[str]] = set()  # ended, and a server may still take an update
        self.now = 0.0
        self.front: list[tuple[Task[str], int, float] | None] = [None] * WORKERS  # what it has first, and since when
        self.asked: list[Task[str] | None] = [None] * WORKERS
        self.begun: set[Task[str]] = set()  # an attempt that did not end it may have changed something
        self.gone = [False] * WORKERS  # it has left for good
        self.barriers: list[str] = []
        self.last_barrier = 0
        self.barrier_owner: str | None = None

    def queued(self) -> list[Task[str]]:
        """Return what may be sent, in order: during a cut only what has begun."""
        begun = [task for task in self.queue if task in self.begun]
        return begun if self.barriers else begun + [task for task in self.queue if task not in self.begun]

    # Cuts

    @rule()
    def begin_barrier(self) -> None:
        self.last_barrier += 1
        cut = f"cut {self.last_barrier}"
        self.scheduler.begin_barrier(cut)
        self.barriers.append(cut)

    @precondition(lambda self: self.barriers)
    @rule(data=st.data())
    def take_barrier(self, data: st.DataObject) -> None:
        cut = data.draw(st.sampled_from(self.barriers))
        half = self.executing() or any(task in self.begun for task in self.queue)
        taken = self.scheduler.take_barrier(cut)
        assert taken == (not half and self.barrier_owner in (None, cut)), (
            "it holds no half of a function, and is one's own"
        )
        if taken:
            self.barrier_owner = cut

    @precondition(lambda self: self.barriers)
    @rule(data=st.data())
    def end_barrier(self, data: st.DataObject) -> None:
        cut = data.draw(st.sampled_from(self.barriers))
        self.scheduler.end_barrier(cut)
        self.barriers.remove(cut)
        self.barrier_owner = None if self.barrier_owner == cut else self.barrier_owner

    def executing(self) -> bool:
        """Return whether any attempt could still change something."""
        return any(self.sent) or any(self.orphaned) or bool(self.shutting_out)

    # What the model does with an error

    def end(self, tasks: Sequence[Task[str]], state: State) -> None:
        for task in tasks:
            assert task not in self.ended, "a function ends once"
            self.ended[task] = state

    def first_error(self, error: Exception) -> list[Task[str]]:
        """Set the first error, and return what it cancels."""
        self.error = error
        cancelled, self.blocked, self.queue = [*self.blocked, *self.queue], [], []
        self.end(cancelled, State.CANCELLED)
        return cancelled

    def back_to_queue(self, tasks: list[Task[str]]) -> list[Task[str]]:
        """Queue these before all others, and return those that are cancelled instead."""
        cancelled = [task for task in tasks if self.error is not None or task in self.withdrawn]
        self.end(cancelled, State.CANCELLED)
        self.queue[:0] = [task for task in tasks if task not in cancelled]
        return cancelled

    # The producer

    @precondition(lambda self: self.error is None)
    @rule(
        target=tasks,
        blockers=st.sampled_from([0, 0, 0, 1, 2]),
        size=st.sampled_from([1, 1, MAX_BATCH_BYTES // 2]),
        isolated=st.sampled_from([False, False, True]),
        timeout=st.sampled_from([None, 1.0]),
        retries=st.sampled_from([0, 0, 1, 3]),
        data_retries=st.sampled_from([0, 0, 2]),
        key=st.integers(0, 3),
    )
    def add(
        self, blockers: int, size: int, isolated: bool, timeout: float | None, retries: int, data_retries: int, key: int
    ) -> Task[str]:
        in_use = any(task.key == key for task in self.all if task not in self.ended)
        assert self.scheduler.is_scheduled(key) == (in_use and key > 0), "a key is free again when its task has ended"
        task = Task(
            f"payload {len(self.all)}",
            blockers,
            size,
            isolated=isolated,
            limits=RunLimits(timeout, retries, data_retries),
            key=0 if in_use else key,
        )
        self.scheduler.add(task)
        self.all.append(task)
        assert task.id == len(self.all), "ids rise from 1 in the order of add"
        (self.blocked if blockers else self.queue).append(task)
        self.started[task] = 0
        return task

    @rule(target=tasks, task=consumes(tasks))
    def unblock(self, task: Task[str]) -> object:
        if not task.blockers:
            return task
        self.scheduler.unblock(task)
        if not task.blockers and task in self.blocked:
            self.blocked.remove(task)
            self.queue.append(task)
        return task if task.blockers else multiple()

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.all))) if self.all else set()
        cancelled = [task for task in self.queue + self.blocked if task in chosen]
        assert same(self.scheduler.withdraw(chosen), cancelled)
        self.queue = [task for task in self.queue if task not in chosen]
        self.blocked = [task for task in self.blocked if task not in chosen]
        self.withdrawn |= chosen
        self.end(cancelled, State.CANCELLED)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.all))) if self.all else set()
        waiting = [task for task in self.queue + self.blocked if task in chosen]
        left = [task for held in (*self.sent, *self.orphaned) for task in held if task in chosen]
        cancelled, to_shut_out = self.scheduler.cancel(chosen)
        assert same(cancelled, waiting + left)
        assert same(to_shut_out, left)
        self.queue = [task for task in self.queue if task not in chosen]
        self.blocked = [task for task in self.blocked if task not in chosen]
        for index in range(len(self.up)):
            self.lingering[index] += [task for task in self.sent[index] if task in chosen]
            self.sent[index] = [task for task in self.sent[index] if task not in chosen]
            self.orphaned[index] = [task for task in self.orphaned[index] if task not in chosen]
        self.shutting_out.update(left)
        self.end(waiting + left, State.CANCELLED)

    @precondition(lambda self: self.shutting_out)
    @rule(data=st.data())
    def shut_out(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.shutting_out, key=lambda task: task.id))))
        self.scheduler.shut_out(chosen)
        self.shutting_out -= chosen

    @rule(index=workers, data=st.data())
    def a_stray_ends(self, index: int, data: st.DataObject) -> None:
        if not self.lingering[index]:
            return
        task = data.draw(st.sampled_from(self.lingering[index]))
        outcomes: list[Callable[[], object]] = [
            lambda: self.scheduler.lingering_ended(index, task.id),
            lambda: self.scheduler.give_back(index, [task.id]),
        ]
        assert self.scheduler.finish(index, task.id, 1.0) is None
        assert not data.draw(st.sampled_from(outcomes))(), "it ended before"
        self.lingering[index].remove(task)

    def may_retry(self, task: Task[str], data_unread: bool = False) -> bool:
        """Return whether it has a retry left and is still wanted."""
        retries = max(task.limits.retries, task.limits.data_retries) if data_unread else task.limits.retries
        return task.failures < retries and self.error is None and task not in self.withdrawn

    @rule(index=workers, seconds=st.sampled_from([0.0, 0.6, STOP_SECONDS + 1]), data=st.data())
    def late(self, index: int, seconds: float, data: st.DataObject) -> None:
        self.now += seconds
        sent = self.sent[index]
        reached = data.draw(st.sampled_from([sent[0].position, sent[0].position - 1])) if sent else 0
        outcome = self.scheduler.late(index, reached, self.now)
        late, first = (None, None) if outcome is None else outcome
        if not sent or sent[0].position > reached:
            assert late is None
            return
        task = sent[0]
        if self.lingering[index]:
            self.front[index] = None
            assert late is None, "it waits for what still runs"
            return
        front = self.front[index]
        if front is None or front[:2] != (task, task.position):
            front = self.front[index] = (task, task.position, self.now)
        if task.limits.timeout is None or (over := self.now - front[2] - task.limits.timeout) < 0:
            expected = None
        elif not self.may_retry(task):
            expected = Late.END
        elif self.asked[index] is not task:
            expected, self.asked[index] = Late.STOP, task
        else:
            expected = Late.GIVE_UP if over > STOP_SECONDS else None
        assert late is expected
        assert first is (None if late is None else task)
        if late is Late.END:
            self.time_out(index, task)

    def time_out(self, index: int, task: Task[str]) -> None:
        error = TimeoutError(task.payload)
        cancelled = self.scheduler.fail(index, task, error, runs_on=True)
        self.sent[index].remove(task)
        self.lingering[index].append(task)
        self.shutting_out.add(task)
        if self.error is not None or task in self.withdrawn:
            assert cancelled == [task]
            self.end([task], State.CANCELLED)
        else:
            self.end([task], State.FAILED)
            assert same(cancelled, [] if task.isolated else self.first_error(error))

    @rule()
    def doubt(self) -> None:
        assert self.scheduler.doubt() is not self.final
        if not self.final:
            assert self.scheduler.take_error() is None, "it may have to be final"
            assert not self.scheduler.settled
            self.scheduler.no_doubt()
        assert self.scheduler.settled == self.scheduler.idle

    @rule()
    def take_error(self) -> None:
        taken = self.scheduler.take_error()
        assert taken is (None if self.executing() else self.error)
        if taken is not None and not self.final:
            self.error = None

    # Workers

    @precondition(lambda self: len(self.up) < MOST_WORKERS)
    @rule()
    def joins(self) -> None:
        assert self.scheduler.worker_joined() == len(self.up)
        for of_workers in (self.up, self.idle, self.leaving, self.recalled, self.gone):
            of_workers.append(False)
        for tasks in (self.sent, self.orphaned, self.lingering):
            tasks.append([])
        self.front.append(None)
        self.asked.append(None)

    @rule(index=workers)
    def leaves_for_good(self, index: int) -> None:
        self.lose(index)
        self.requeue(index)
        if not self.gone[index]:
            self.scheduler.worker_left(index, RuntimeError("it has left"))
            self.gone[index] = True

    @rule(index=workers)
    def joins_again(self, index: int) -> None:
        if self.gone[index]:
            assert self.scheduler.worker_joined(index) == index
            self.gone[index] = self.leaving[index] = False

    @rule(index=workers)
    def worker_up(self, index: int) -> None:
        if not self.up[index] and not self.orphaned[index] and not self.gone[index]:
            self.scheduler.worker_up(index)
            self.up[index], self.leaving[index] = True, False
            self.front[index] = self.asked[index] = None

    @rule(index=workers)
    def take(self, index: int) -> None:
        batch = self.scheduler.take(index)
        queue = self.queued()
        assert batch == queue[: len(batch)], "those that have begun before all others, then the oldest first"
        window = self.scheduler.workers[index].window
        room, others_idle = window - len(self.sent[index]), 0
        if self.sent[index]:  # what would only wait here is for those that have nothing; and half a window at a time
            others_idle = sum(self.up[i] and not self.sent[i] and not self.lingering[i] for i in range(len(self.up)))
        may = not self.lingering[index] and room > 0 and (not self.sent[index] or room >= window // 2)
        gets = self.up[index] and not self.leaving[index]
        assert bool(batch) == (gets and may and len(queue) > others_idle)
        assert len(batch) <= max(room, 0)
        assert sum(task.size for task in batch[:-1]) < MAX_BATCH_BYTES
        self.queue = [task for task in self.queue if task not in batch]
        for task in batch:
            self.started[task] += 1
            assert task.attempts == self.started[task] <= MAX_ATTEMPTS
        assert all(task.state is State.SENT for task in batch)
        positions = [task.position for task in self.sent[index] + batch]
        assert positions == sorted(set(positions)), "positions rise in the order of sending"
        self.sent[index] += batch
        self.idle[index] = gets and not batch

    def one_sent(self, index: int, data: st.DataObject) -> Task[str] | None:
        return data.draw(st.sampled_from(self.sent[index])) if self.sent[index] else None

    @rule(index=workers, seconds=seconds, data=st.data())
    def finish(self, index: int, seconds: float, data: st.DataObject) -> None:
        if (task := self.one_sent(index, data)) is not None:
            finished = self.scheduler.finish(index, task.id, seconds)
            if self.asked[index] is task:
                assert finished is None, "it returned too late"
                return
            assert finished is task
            self.sent[index].remove(task)
            self.end([task], State.DONE)

    @rule(index=workers, data=st.data())
    def fail(self, index: int, data: st.DataObject) -> None:
        if (task := self.one_sent(index, data)) is not None:
            self.failed(index, task)

    def failed(self, index: int, task: Task[str]) -> None:
        error = ValueError(task.payload)
        cancelled = self.scheduler.fail(index, task, error)
        self.sent[index].remove(task)
        if self.error is not None or task in self.withdrawn:
            assert cancelled == [task]
            self.end([task], State.CANCELLED)
        else:
            self.end([task], State.FAILED)
            assert same(cancelled, [] if task.isolated else self.first_error(error))

    @rule(index=workers, stopped=st.booleans(), data_unread=st.booleans(), data=st.data())
    def ended_badly(self, index: int, stopped: bool, data_unread: bool, data: st.DataObject) -> None:
        if (task := self.one_sent(index, data)) is None:
            return
        may, before = self.may_retry(task, data_unread), task.failures
        ending = self.scheduler.ended_badly(index, task, stopped=stopped, data_unread=data_unread)
        if stopped and (self.asked[index] is not task or self.error is not None):
            assert ending is Ending.CANCELLED
            self.sent[index].remove(task)
            self.end([task], State.CANCELLED)
            return
        assert ending is (Ending.AGAIN if may else Ending.FAILED)
        assert task.failures == before + may, "each retry is counted"
        if may:
            self.again(index, task)
        else:
            self.failed(index, task)

    @rule(index=workers, data=st.data())
    def outcome_of_what_it_does_not_have(self, index: int, data: st.DataObject) -> None:
        mine = self.sent[index] + self.lingering[index]
        others = [task.id for task in self.all if task not in mine] + [len(self.all) + 1]
        task_id = data.draw(st.sampled_from(others))
        assert self.scheduler.finish(index, task_id, 1.0) is None
        self.scheduler.lingering_ended(index, task_id)
        assert self.scheduler.give_back(index, [task_id]) == []

    @rule(index=workers, data=st.data())
    def give_back(self, index: int, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.sent[index]))) if self.sent[index] else set()
        tasks = [task for task in self.sent[index] if task in chosen]
        cancelled = self.scheduler.give_back(index, [task.id for task in tasks])
        for task in tasks:
            self.sent[index].remove(task)
            self.started[task] -= 1
            self.asked[index] = None if self.asked[index] is task else self.asked[index]
        assert same(cancelled, self.back_to_queue(tasks))

    @rule(index=workers, data=st.data())
    def run_again(self, index: int, data: st.DataObject) -> None:
        if (task := self.one_sent(index, data)) is not None:
            self.again(index, task)

    def again(self, index: int, task: Task[str]) -> None:
        cancelled = self.scheduler.run_again(index, [task.id])
        self.sent[index].remove(task)
        self.asked[index] = None if self.asked[index] is task else self.asked[index]
        self.started[task] -= 1  # these are failures of it
        self.begun.add(task)
        assert same(cancelled, self.back_to_queue([task]))

    @rule(index=workers)
    def lose(self, index: int) -> None:
        held = self.orphaned[index] + self.sent[index]
        assert self.scheduler.lose(index) is (held[0] if held else None)
        for task in self.sent[index][1:]:
            self.started[task] -= 1  # a worker runs its functions in order
        self.orphaned[index] += self.sent[index]
        self.begun.update(self.orphaned[index])
        self.sent[index], self.lingering[index] = [], []
        self.up[index] = self.idle[index] = False

    @rule(index=workers)
    def requeue(self, index: int) -> None:
        if self.up[index]:
            return
        tasks, self.orphaned[index] = self.orphaned[index], []
        loss = self.decide_loss(index, tasks[0]) if tasks else None
        if loss not in (Loss.TOO_LONG, Loss.DEADLY):
            assert same(self.scheduler.requeue(index), self.back_to_queue(tasks))
            return
        error, (ran, *others) = RuntimeError(loss), tasks
        cancelled = self.scheduler.requeue(index, error)
        expected = self.back_to_queue(others)
        self.end([ran], State.FAILED)
        assert same(cancelled, expected + ([] if ran.isolated else self.first_error(error)))

    def decide_loss(self, index: int, task: Task[str]) -> Loss | None:
        stopping, may, before = self.asked[index] is task, self.may_retry(task), task.failures
        loss = self.scheduler.decide_loss(index, task)
        if self.error is not None or task in self.withdrawn:
            assert loss is None, "it is cancelled"
        elif stopping and not may:
            assert loss is Loss.TOO_LONG
        elif self.started[task] >= MAX_ATTEMPTS:
            assert loss is Loss.DEADLY
        else:
            assert loss is (Loss.RETRY if stopping else Loss.AGAIN)
        assert task.failures == before + (loss is Loss.RETRY), "each retry is counted"
        return loss

    @rule(final=st.sampled_from([False, False, False, True]))
    def abort(self, final: bool) -> None:
        error = OSError("from outside")
        cancelled = self.scheduler.abort(error, final=final)
        expected: list[Task[str]] = []
        if final:
            expected = [task for orphaned in self.orphaned for task in orphaned]
            self.orphaned = [[] for _ in range(len(self.up))]
            self.end(expected, State.CANCELLED)
        if self.error is None or (final and not self.final):
            expected += self.first_error(error)
        self.final = self.final or final
        assert same(cancelled, expected)

    @rule(index=workers)
    def worker_busy(self, index: int) -> None:
        self.scheduler.worker_busy(index)
        self.idle[index] = False

    @rule(index=workers)
    def worker_leaves(self, index: int) -> None:
        self.scheduler.worker_leaves(index)
        self.leaving[index], self.idle[index] = True, False

    @rule(index=workers)
    def begin_recall(self, index: int) -> None:
        self.scheduler.begin_recall(index)
        self.recalled[index] = True

    @rule(index=workers)
    def end_recall(self, index: int) -> None:
        assert self.scheduler.end_recall(index) == [i for i in range(len(self.up)) if self.idle[i]]
        self.recalled[index] = False

    @rule()
    def choose(self) -> None:
        free = [i for i in range(len(self.up)) if self.idle[i] and not self.has(i)]
        idle, count = [i for i in range(len(self.up)) if self.idle[i]], self.scheduler.queued
        woken = self.scheduler.to_wake()
        assert len(woken) == len(set(woken))
        assert woken == idle if len(free) < count else len(woken) == count and set(woken) <= set(free)
        chosen = [self.scheduler.next_free() for _ in range(len(free) or 1)]
        assert same_numbers(chosen, free or [None]), "each in turn"

    @rule(index=workers)
    def steal_for(self, index: int) -> None:
        if not self.queued():
            self.take(index)  # now it is idle, if it may be
        stolen, held = self.scheduler.steal_for(index), max(self.sent, key=len)
        asked = self.recalled[self.sent.index(held)]
        if not self.idle[index] or self.has(index) or self.queued() or self.error is not None or len(held) < 2 or asked:
            assert stolen is None
        else:
            assert stolen is not None
            assert self.sent[stolen[0]] is held
            assert 0 < len(stolen[1]) < len(held)
            assert list(stolen[1]) == held[-len(stolen[1]) :], "the later ones: what it runs is the first"
        is_free = self.idle[index] and not self.has(index)
        assert self.scheduler.has_nothing_for(index) == (is_free and not self.queued() and len(held) < 2)

    def has(self, index: int) -> bool:
        """Return whether the worker runs anything."""
        return bool(self.sent[index] or self.lingering[index])

    # What always holds

    @invariant()
    def everything_holds(self) -> None:
        scheduler = self.scheduler
        check(scheduler)
        assert scheduler.error is self.error
        assert scheduler.queued == len(self.queued())
        assert scheduler.begun == [task for task in self.queue if task in self.begun]
        assert scheduler.next_one is next(
            (task for task in self.queue if task in self.begun), next(iter(self.queue), None)
        )
        assert all(task.begun == (task in self.begun) for task in self.all)
        assert scheduler.waiting == len(self.queue) + len(self.blocked)
        assert scheduler.in_flight == sum(map(len, self.sent)) + sum(map(len, self.orphaned)) + len(self.shutting_out)
        assert scheduler.executing == self.executing()
        assert scheduler.ends_waits == (
            not self.executing() and bool(self.error or self.barriers or not scheduler.waiting)
        )
        assert scheduler.idle == (len(self.ended) == len(self.all) and not self.shutting_out)
        assert scheduler.is_shutting_out == bool(self.shutting_out)
        assert list(scheduler.lingering) == [task for of_worker in self.lingering for task in of_worker]
        assert [list(worker.sent.values()) for worker in scheduler.workers] == self.sent
        assert [worker.idle for worker in scheduler.workers] == self.idle
        assert all(worker.up and not worker.leaving for worker in scheduler.workers if worker.idle)
        places = {
            State.QUEUED: self.queue,
            State.BLOCKED: self.blocked,
            State.SENT: [task for sent in self.sent for task in sent],
            State.ORPHANED: [task for orphaned in self.orphaned for task in orphaned],
        }
        for state, tasks in places.items():
            assert all(task.state is state for task in tasks)
        assert all(task.state is state for task, state in self.ended.items())
        assert same([task for tasks in places.values() for task in tasks] + list(self.ended), self.all), "nothing lost"
        assert sorted(scheduler.ended) == sorted(task.id for task in self.ended), "each end is reported once"
        assert all(worker.window <= MAX_WINDOW for worker in scheduler.workers)

    def teardown(self) -> None:
        """However it stands: once the workers return and run what they get, everything ends."""
        self.scheduler.shut_out()
        self.shutting_out.clear()
        for index in range(len(self.up)):
            self.lose(index)
            self.requeue(index)
        for task in list(self.blocked):
            while task.blockers:
                self.scheduler.unblock(task)
            self.blocked.remove(task)
            self.queue.append(task)
        self.joins_again(0)
        self.worker_up(0)
        # A cut can be made, since what has begun is run.
        if self.barriers and self.barrier_owner is None and self.queue:
            while any(task in self.begun for task in self.queue):
                self.take(0)
                for task in list(self.sent[0]):
                    self.finish_one(task)
            self.barrier_owner = self.barriers[0]
            assert self.scheduler.take_barrier(self.barrier_owner)
            self.everything_holds()
            assert self.scheduler.take(0) == [], "nothing is sent while it is held"
        for cut in list(self.barriers):
            self.scheduler.end_barrier(cut)
        self.barriers, self.barrier_owner = [], None
        while self.queue:
            self.take(0)
            for task in list(self.sent[0]):
                self.finish_one(task)
        self.everything_holds()
        assert self.scheduler.idle
        assert self.scheduler.take_error() is self.error

    def finish_one(self, task: Task[str]) -> None:
        assert self.scheduler.finish(0, task.id, 0.001) is task
        self.sent[0].remove(task)
        self.end([task], State.DONE)


def same_numbers(actual: Sequence[int | None], expected: Sequence[int | None]) -> bool:
    """The same ones, in any order."""
    return sorted(map(str, actual)) == sorted(map(str, expected))


def same(actual: Sequence[Task[str]], expected: Sequence[Task[str]]) -> bool:
    """The same tasks, in any order, none twice."""
    return sorted(task.id for task in actual) == sorted(task.id for task in expected)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.__doc__ = (
    "Nothing is lost, nothing is in two places, the order is kept, the first error wins once; no cut has a half."
)
TestScheduler.settings = search(100, 60)


def scheduler_with(
    tasks: int, *, up: int = 1, max_attempts: int = MAX_ATTEMPTS
) -> tuple[Scheduler[int], list[Task[int]]]:
    """A scheduler with functions in its queue and workers that are up."""
    scheduler: Scheduler[int] = Scheduler(WORKERS, max_attempts)
    made = [Task(task_id) for task_id in range(tasks)]
    for task in made:
        scheduler.add(task)
    for index in range(up):
        scheduler.worker_up(index)
    return scheduler, made


def quick_worker(scheduler: Scheduler[int], index: int) -> None:
    """Let the worker run one function in no time, so that it gets many at once."""
    (task,) = scheduler.take(index)
    scheduler.finish(index, task.id, 1e-6)


@pytest.mark.parametrize(("waited", "ahead"), [(0.0, 1), (0.4, 1), (0.6, 2)])
def test_functions_that_wait_for_their_data(waited: float, ahead: int) -> None:
    """A worker has one more of them, whose data it can prepare; not before the second, and not if another has none."""
    scheduler, (first, *tasks) = scheduler_with(6, up=2)
    assert scheduler.take(0) == [first]
    scheduler.finish(0, first.id, 1.0, waited)
    assert len(scheduler.take(0)) == 1 + ahead
    assert scheduler.take(0) == []
    assert len(scheduler.take(1)) == 1
    assert all(task.state is State.SENT for task in tasks[: 2 + ahead])


def test_lost_functions_go_to_the_head_in_their_order() -> None:
    """What a lost worker had runs before what was never sent, the oldest first."""
    scheduler, tasks = scheduler_with(8)
    quick_worker(scheduler, 0)
    taken = scheduler.take(0)
    assert taken == tasks[1:]
    late = Task(99)
    scheduler.add(late)
    scheduler.lose(0)
    assert scheduler.take(1) == [], "nothing of it runs before the servers have closed the worker's incarnation"
    assert scheduler.requeue(0) == []
    scheduler.worker_up(1)
    order: list[Task[int]] = []
    while batch := scheduler.take(1):
        order += batch
        for task in batch:
            scheduler.finish(1, task.id, 1.0)
    assert order == [*tasks[1:], late]


def test_a_death_is_an_attempt_of_the_oldest_only() -> None:
    """A worker that dies costs an attempt to the function it ran, not to those that waited for it to end."""
    scheduler, (first, *rest) = scheduler_with(8, max_attempts=2)
    for death in (1, 2):
        scheduler.workers[0].seconds = 1e-6
        assert scheduler.take(0) == [first, *rest]
        assert scheduler.lose(0) is first
        assert [task.attempts for task in (first, *rest)] == [death] + [0] * 7
        loss = scheduler.decide_loss(0, first)
        assert loss is (Loss.DEADLY if death == 2 else Loss.AGAIN)
        cancelled = scheduler.requeue(0, RuntimeError("spent") if loss is Loss.DEADLY else None)
        scheduler.worker_up(0)
    assert first.state is State.FAILED
    assert same_ids(cancelled, rest)


def test_what_is_given_back_counts_as_never_started() -> None:
    """A worker may give functions back more often than a function has attempts."""
    scheduler, (task,) = scheduler_with(1, max_attempts=1)
    for _ in range(5):
        assert scheduler.take(0) == [task]
        assert scheduler.give_back(0, [task.id]) == []
    assert scheduler.take(0) == [task]
    assert scheduler.finish(0, task.id, 1.0) is task
    assert task.attempts == 1


def test_first_error_wins_and_is_taken_once() -> None:
    """The second error is not kept; the first can be taken when nothing executes, and then the queue is as new."""
    scheduler, tasks = scheduler_with(5, up=3)
    first, second = (scheduler.take(index)[0] for index in range(2))
    assert scheduler.fail(0, first, ValueError("first")) == tasks[2:]
    assert first.state is State.FAILED
    assert scheduler.take_error() is None, "another one still executes"
    assert scheduler.fail(1, second, ValueError("second")) == [second]
    error = scheduler.take_error()
    assert str(error) == "first"
    assert scheduler.take_error() is None
    again = Task(7)
    scheduler.add(again)
    assert scheduler.take(2) == [again]


def test_a_final_error_stays() -> None:
    """Every later call names a lost parameter server, and no later error hides it."""
    scheduler, tasks = scheduler_with(3)
    scheduler.take(0)
    scheduler.lose(0)
    lost = OSError("the server")
    assert same_ids(scheduler.abort(lost, final=True), tasks)
    scheduler.abort(ValueError("later"), final=False)
    scheduler.abort(ValueError("much later"), final=True)
    assert [scheduler.take_error(), scheduler.take_error()] == [lost, lost]
    assert scheduler.idle


def same_ids(actual: Sequence[Task[int]], expected: Sequence[Task[int]]) -> bool:
    """The same tasks, in any order."""
    return sorted(task.id for task in actual) == sorted(task.id for task in expected)


@pytest.mark.parametrize("up", [1, 2, 3])
def test_a_worker_takes_no_more_than_its_share(up: int) -> None:
    """A quick worker leaves the others their part of a short queue."""
    scheduler, _ = scheduler_with(13, up=up)
    quick_worker(scheduler, 0)
    assert len(scheduler.take(0)) == 12 // up


def test_a_worker_of_unknown_speed_gets_one_function() -> None:
    """Before a worker has finished anything it has one function, however long the queue; after a return again."""
    scheduler, _ = scheduler_with(50)
    assert len(scheduler.take(0)) == 1
    assert scheduler.take(0) == []
    scheduler.lose(0)
    scheduler.requeue(0)
    scheduler.worker_up(0)
    assert len(scheduler.take(0)) == 1


def test_one_has_the_queue_to_itself() -> None:
    """While one producer schedules exclusively, no other does; a full queue takes nothing from any."""
    scheduler: Scheduler[int] = Scheduler(1, 1, max_queued=2)
    assert scheduler.may_add("me")
    assert scheduler.begin_exclusive("me")
    assert not scheduler.begin_exclusive("other")
    assert scheduler.may_add("me")
    assert not scheduler.may_add("other")
    scheduler.end_exclusive("other")
    assert not scheduler.may_add("other"), "it was not its to end"
    scheduler.end_exclusive("me")
    assert scheduler.may_add("other")
    for task_id in range(2):
        scheduler.add(Task(task_id))
    assert not scheduler.may_add("other")


def test_keys_of_what_has_not_ended_are_not_forgotten() -> None:
    """A key is told to the servers with the number of its task or later, once."""
    scheduler, _ = scheduler_with(0)
    task = Task(1, key=7)
    scheduler.add(task)
    assert scheduler.forget([7, 8]) == {8}
    assert scheduler.take(0) == [task]
    scheduler.finish(0, task.id, 1.0)
    assert scheduler.forget([7]) == {7}
    assert scheduler.take_ended() == ([task.id], {7, 8})
    assert scheduler.take_ended() == ([], set())


def test_what_did_not_stop_uses_up_a_retry_when_its_worker_is_lost() -> None:
    """A function that runs too long and does not stop costs its worker, and fails once it has no retry left."""
    scheduler, (task,) = scheduler_with(1)
    task.limits = RunLimits(timeout=1.0, retries=1)
    scheduler.take(0)
    for now, expected in (
        (0.0, None),
        (1.0, (Late.STOP, task)),
        (1.5, None),
        (2.0 + STOP_SECONDS, (Late.GIVE_UP, task)),
    ):
        assert scheduler.late(0, 1, now) == expected
    assert scheduler.finish(0, task.id, 2.0) is None, "it comes too late"
    assert scheduler.lose(0) is task
    assert scheduler.decide_loss(0, task) is Loss.RETRY
    assert scheduler.requeue(0) == []
    assert not scheduler.may_retry(task), "that was its only retry"


def test_a_worker_is_idle_from_an_empty_queue_until_it_is_busy() -> None:
    """Functions are sent past its writer only while that waits for them."""
    scheduler, _ = scheduler_with(0)
    assert scheduler.next_free() is None, "it has not asked for any"
    assert scheduler.take(0) == []
    assert scheduler.next_free() == 0
    scheduler.worker_busy(0)
    assert scheduler.next_free() is None
    assert scheduler.take(1) == []
    assert not scheduler.workers[1].idle, "it is down"


def test_a_worker_that_leaves_gets_nothing_until_it_is_back() -> None:
    """From the notice that it leaves to its return a worker is not idle, and is given nothing."""
    scheduler, (task,) = scheduler_with(1)
    scheduler.worker_leaves(0)
    assert scheduler.take(0) == []
    assert scheduler.to_wake() == []
    scheduler.lose(0)
    scheduler.worker_up(0)
    assert scheduler.take(0) == [task]


def test_nothing_is_stolen_while_a_worker_is_asked() -> None:
    """One request at a time recalls functions from a worker; when it is over, the idle workers may steal."""
    scheduler, tasks = scheduler_with(8)
    quick_worker(scheduler, 0)
    assert scheduler.take(0) == tasks[1:]
    scheduler.worker_up(1)
    assert scheduler.take(1) == []
    scheduler.begin_recall(0)
    assert scheduler.steal_for(1) is None
    assert scheduler.end_recall(0) == [1]
    assert scheduler.steal_for(1) == (0, tasks[5:])


_SCHEDULERS = tuple(f"scheduling/decisions/{name}.py" for name in ("scheduler", "assignments", "gangs", "tasks"))


def test_no_other_module_changes_what_it_knows_of_workers() -> None:
    """The coordinator's other modules assign nothing to a worker's state: they report events."""
    known, folder = {item.name for item in fields(WorkerState)}, Path(coordinator.__file__).parent
    changes = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in folder.rglob("*.py")
        if path.relative_to(folder).as_posix() not in _SCHEDULERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node.attr in known
        # The parts of the dispatcher have handles of workers, with attributes of the same names.
        if not ast.unparse(node.value).endswith("handle")
    ]
    assert not changes
