"""A local cluster's processes under every order of events: a state machine whose model has real-looking processes.

The model is what a shell would see: processes that were started and have not ended, what each was sent, and when. It
knows of the supervisor only what the module's docstring promises.
"""

from __future__ import annotations

import itertools
import math
import signal
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import search

from pscluster.coordinator.local.supervisor import (
    Event,
    Exited,
    GiveUp,
    Phase,
    RestartPolicy,
    RestartRequested,
    Signal,
    Start,
    Started,
    StartFailed,
    StopRequested,
    Supervisor,
    TaskKey,
    Tick,
)

TASKS: list[TaskKey] = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
GRACE = 5.0
REFILL = 100.0

tasks = st.sampled_from(TASKS)


@dataclass
class Running:
    """A process."""

    pid: int
    since: float
    asked: float = math.inf  # when it was sent SIGTERM
    killed: bool = False


class SupervisorMachine(RuleBasedStateMachine):
    """Processes start, fail to, end in all ways; people ask for restarts and stops; time passes."""

    @initialize(restarts=st.integers(0, 3), enabled=st.booleans())
    def begin(self, restarts: int, enabled: bool) -> None:
        """A cluster of two servers and two workers."""
        self.policy = RestartPolicy(
            enabled=enabled, max_restarts=restarts, refill_after=REFILL, base_delay=1.0, max_delay=3.0
        )
        self.supervisor = Supervisor(TASKS, self.policy, stop_order=("worker", "ps"), grace=GRACE)
        self.now = 1000.0
        self.pids = itertools.count(100)
        self.starting: set[TaskKey] = set()
        self.running: dict[TaskKey, Running] = {}
        self.ever: set[TaskKey] = set()  # started once at least
        self.used = dict.fromkeys(TASKS, 0)  # restarts since the budget was full
        self.earliest = dict.fromkeys(TASKS, 0.0)  # no start before
        self.latest = dict.fromkeys(TASKS, self.now)  # a start, or what ends the task, is due; inf: none is
        self.over: dict[TaskKey, str] = {}  # tasks that get no process by themselves, and why
        self.wanted: set[TaskKey] = set()  # a restart was asked for, and the process before it has not ended
        self.stopping = self.at_once = False
        self.tell(Tick())

    def tell(self, event: Event, jitter: float = 1.0) -> list[TaskKey]:
        """Carry out what the supervisor says; the tasks that it gives up."""
        gave_up = []
        for action in self.supervisor.handle(event, self.now, jitter):
            if isinstance(action, Start):
                self.started(action.task)
            elif isinstance(action, Signal):
                self.signalled(action)
            elif isinstance(action, GiveUp):
                gave_up.append(action.task)
        return gave_up

    def started(self, task: TaskKey) -> None:
        assert not self.stopping, "a start during the stop"
        assert task not in self.starting
        assert task not in self.running, "two processes of one task"
        assert task not in self.over, f"started again, though it is {self.over[task]}"
        assert self.earliest[task] <= self.now <= self.latest[task], "before its time, or behind it"
        self.starting.add(task)
        self.latest[task] = math.inf

    def signalled(self, action: Signal) -> None:
        process = self.running[action.task]
        assert process.pid == action.pid, "a signal for another process"
        assert not process.killed or self.at_once, "killed twice"
        if action.number == signal.SIGTERM:
            assert process.asked == math.inf, "asked to stop twice"
            assert self.stopping or action.task in self.wanted, "asked to stop by nobody"
            if action.task not in self.wanted and action.task[0] == "ps":
                left = [task for task in (*self.starting, *self.running) if task[0] == "worker"]
                assert not left or self.at_once, "a server was stopped before the workers had ended"
            process.asked = self.now
        else:
            assert self.at_once or self.now >= process.asked + GRACE, "killed before its grace was over"
            process.killed = True

    # What happens to processes

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def comes_up(self, data: st.DataObject) -> None:
        """A process was started."""
        task = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.remove(task)
        self.ever.add(task)
        self.running[task] = Running(next(self.pids), self.now)
        self.tell(Started(task, self.running[task].pid))

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def can_not_be_started(self, data: st.DataObject) -> None:
        """What never started is given up, else it is a death."""
        task = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.remove(task)
        self.end(task, StartFailed(task, "no memory"), forever=task not in self.ever)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), code=st.sampled_from([None, 0, 0, 1, 1, 2, 77, -9, -11, -15]))
    def ends(self, data: st.DataObject, code: int | None) -> None:
        """A process ends, by itself or as it was asked to."""
        task = data.draw(st.sampled_from(sorted(self.running)))
        process = self.running.pop(task)
        if self.now - process.since >= REFILL:
            self.used[task] = 0
        self.end(task, Exited(task, process.pid, code), forever=code == 2, in_order=code == 0)

    def end(self, task: TaskKey, event: Event, *, forever: bool = False, in_order: bool = False) -> None:
        """What is to be done about it."""
        wanted = task in self.wanted
        self.wanted.discard(task)
        if self.stopping:
            self.over[task] = "stopped"
        elif wanted:
            self.used[task], self.earliest[task], self.latest[task] = 0, self.now, self.now
        elif in_order:
            self.over[task] = "finished"
        elif forever:
            self.over[task] = "given up"
        elif not self.policy.enabled:
            self.over[task] = "dead"
        elif self.used[task] >= self.policy.max_restarts:
            self.over[task] = "given up"
        else:
            self.used[task] += 1
            nth = self.used[task]
            most = 0.0 if nth == 1 else min(3.0, 2.0 ** (nth - 2))
            self.earliest[task], self.latest[task] = self.now + most / 2, self.now + most
        given_up = self.tell(event, jitter=0.5)
        assert given_up == ([task] if self.over.get(task) == "given up" else []), "people are told of what is given up"

    # What people ask for

    @rule(task=tasks)
    def restart(self, task: TaskKey) -> None:
        """A task is to have a new process, whatever became of it."""
        if not self.stopping:
            if task in self.running:
                process = self.running[task]
                if process.asked == math.inf:
                    self.wanted.add(task)
            elif task not in self.starting:
                self.over.pop(task, None)
                self.used[task], self.earliest[task], self.latest[task] = 0, self.now, self.now
        assert self.tell(RestartRequested(task)) == []

    @precondition(lambda self: self.now > 1010)
    @rule(at_once=st.sampled_from([False, False, True]))
    def stop(self, at_once: bool) -> None:
        """All of it, in order or at once."""
        self.stopping, self.at_once = True, self.at_once or at_once
        self.wanted.clear()
        for task in TASKS:
            if task not in self.starting and task not in self.running:
                self.over.setdefault(task, "stopped")
        assert self.tell(StopRequested(at_once)) == []
        if at_once:
            assert all(process.killed for process in self.running.values())

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, GRACE, REFILL]))
    def time_passes(self, seconds: float) -> None:
        """And the shell comes back when it was told to."""
        end = self.now + seconds
        while (due := self.supervisor.next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            assert self.tell(Tick()) == []
            assert self.supervisor.next_due() != due, "it is told to come back for nothing"
        self.now = end
        assert self.tell(Tick()) == []

    # What always holds

    @invariant()
    def everybody_is_where_the_model_says(self) -> None:
        """Nothing that is due is late, and nobody is forgotten."""
        self.supervisor.check_invariants()
        for task in TASKS:
            state = self.supervisor.state(task)
            process = self.running.get(task)
            assert state.pid == (process.pid if process else None)
            assert state.phase.is_final == (task in self.over), (state, self.over.get(task))
            assert (state.phase is Phase.STARTING) == (task in self.starting)
            if process is not None:
                assert process.killed or self.now < process.asked + GRACE, "its grace is over, and it lives"
            elif task not in self.over and task not in self.starting:
                assert self.now < self.latest[task], "its restart is late"
        if self.stopping:
            workers = [task for task in (*self.starting, *self.running) if task[0] == "worker"]
            turn = "worker" if workers else "ps"
            for task, process in self.running.items():
                assert task[0] != turn or process.asked < math.inf or process.killed, "nobody asks it to stop"
        alive = bool(self.starting or self.running)
        assert self.supervisor.settled == (len(self.over) == len(TASKS))
        assert self.supervisor.ended == (self.stopping and not alive)
        assert len(self.supervisor.failures) == list(self.over.values()).count("given up")

    def teardown(self) -> None:
        """A stop ends everything, whatever went before."""
        if not hasattr(self, "supervisor"):
            return
        self.stop(at_once=False)
        for task in list(self.starting):
            self.starting.remove(task)
            self.running[task] = Running(next(self.pids), self.now)
            self.tell(Started(task, self.running[task].pid))
        for _ in range(2 * len(TASKS)):
            self.time_passes(GRACE)
            for task, process in list(self.running.items()):
                if process.killed:
                    del self.running[task]
                    self.end(task, Exited(task, process.pid, -signal.SIGKILL))
        self.everybody_is_where_the_model_says()
        assert self.supervisor.ended


TestSupervisor = SupervisorMachine.TestCase
TestSupervisor.__doc__ = "One process a task, restarts within their budget and in time, and a stop ends all in order."
TestSupervisor.settings = search(80, 50)
