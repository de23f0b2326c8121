"""The decisions about a local cluster's processes: every interleaving without a process.

First examples; then a state machine, whose model is what a shell would see: processes that were started and have not
ended, what each was sent, and when. It knows of the supervisor only what the module's docstring promises.
"""

from __future__ import annotations

import itertools
import logging
import math
import signal
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import search

from pscluster.coordinator.local.supervisor import Supervisor
from pscluster.coordinator.local.tasks import (
    Action,
    Added,
    Event,
    Exited,
    GiveUp,
    Log,
    Phase,
    Removed,
    RestartPolicy,
    RestartRequested,
    Signal,
    Start,
    Started,
    StartFailed,
    StopRequested,
    TaskKey,
    Tick,
    describe_exit,
)

PS, W0, W1 = ("ps", 0), ("worker", 0), ("worker", 1)
GRACE = 5.0


def check_invariants(supervisor: Supervisor, policy: RestartPolicy) -> None:
    """Fail if the state is one that can't be."""
    for task in supervisor.states():
        alive = task.phase in (Phase.RUNNING, Phase.STOPPING)
        assert (task.pid is not None) == alive, f"{task}: a pid if and only if there is a process"
        assert task.kill_at is None or task.phase is Phase.STOPPING, f"{task}: a kill without a stop"
        assert not task.restart_requested or task.phase is Phase.STOPPING, f"{task}: a restart of nothing"
        assert bool(task.failure) == (task.phase is Phase.GIVEN_UP), f"{task}: given up without a reason"
        assert 0 <= task.restarts_used <= policy.max_restarts, f"{task}: the budget is overdrawn"


class World:
    """A supervisor with its invariants checked at every step, and a clock to turn."""

    def __init__(self, policy: RestartPolicy | None = None, *, until_done: bool = False) -> None:
        policy = policy or RestartPolicy(max_restarts=3)
        self.policy = policy
        self.supervisor = Supervisor(
            [PS, W0, W1], policy, stop_order=("worker", "ps"), grace=GRACE, until_done=until_done
        )
        self.now = 1000.0
        self.pids = itertools.count(100)

    def tell(self, event: Event, jitter: float = 1.0) -> list[Action]:
        """What the supervisor answers."""
        actions = self.supervisor.handle(event, self.now, jitter)
        check_invariants(self.supervisor, self.policy)
        return actions

    def start(self, task: TaskKey) -> int:
        """Answer a Start; the pid."""
        pid = next(self.pids)
        self.tell(Started(task, pid))
        return pid

    def up(self) -> dict[TaskKey, int]:
        """Start everything."""
        self.tell(Tick())
        return {task: self.start(task) for task in (PS, W0, W1)}

    def phase(self, task: TaskKey) -> Phase:
        """Where a task stands."""
        return self.supervisor.state(task).phase


def logs(actions: list[Action]) -> list[str]:
    """The lines to be logged."""
    return [action.text for action in actions if isinstance(action, Log)]


def test_first_tick_starts_all() -> None:
    """All tasks are started at once, in the order given, and without a word."""
    world = World()
    assert world.supervisor.next_due() == -float("inf")
    assert world.tell(Tick()) == [Start(PS), Start(W0), Start(W1)]
    assert world.tell(Started(PS, 7)) == []
    assert world.supervisor.next_due() is None


def test_first_restart_is_immediate_and_tells_the_story() -> None:
    """A first death is answered by a start, and its line names the cause, both pids and the budget."""
    world = World(RestartPolicy(max_restarts=10))
    pid = world.up()[W1]
    assert world.tell(Exited(W1, pid, -signal.SIGKILL)) == [Start(W1)]
    text = f"worker 1 (pid {pid}) was killed by SIGKILL; restarted as pid 4712 (restart 1 of 10)"
    assert world.tell(Started(W1, 4712)) == [Log(logging.WARNING, text, W1)]


def test_an_end_without_a_code_is_told_as_its_launcher_tells_it() -> None:
    """A task may be lost with the machine that it ran on: that is a death."""
    world = World(RestartPolicy(max_restarts=10))
    pid = world.up()[W1]
    assert world.tell(Exited(W1, pid, None, "was lost with its node")) == [Start(W1)]
    text = f"worker 1 (pid {pid}) was lost with its node; restarted as pid 4712 (restart 1 of 10)"
    assert world.tell(Started(W1, 4712)) == [Log(logging.WARNING, text, W1)]


def test_backoff_doubles_and_waits_for_its_time() -> None:
    """Restarts in a row wait longer and longer, and a tick before the time starts nothing."""
    world = World(RestartPolicy(max_restarts=5, base_delay=1.0, max_delay=3.0))
    pid, delays = world.up()[W0], []
    for _ in range(5):
        actions = world.tell(Exited(W0, pid, 1))
        if world.phase(W0) is Phase.WAITING:
            due = world.supervisor.next_due()
            assert due is not None
            delays.append(due - world.now)
            assert logs(actions), "a restart that has to wait is announced"
            world.now = due - 0.25
            assert world.tell(Tick()) == []
            world.now = due
            actions = world.tell(Tick())
        assert actions == [Start(W0)]
        pid = world.start(W0)
    assert delays == [1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(("jitter", "delay"), [(0.0, 2.0), (0.5, 3.0), (1.0, 4.0)])
def test_jitter_picks_from_the_upper_half(jitter: float, delay: float) -> None:
    """Chance is given from outside and shortens a backoff by a half at most."""
    assert RestartPolicy(base_delay=1.0, max_delay=100.0).delay(4, jitter) == delay


def test_delay_of_many_restarts_is_bounded() -> None:
    """A budget without bounds does not overflow the backoff."""
    assert RestartPolicy(max_delay=10.0).delay(10**9, 1.0) == 10.0


def test_spent_budget_gives_up() -> None:
    """The death after the last restart gives the task up, and says so; the others go on."""
    world = World(RestartPolicy(max_restarts=1))
    pid = world.up()[W0]
    world.tell(Exited(W0, pid, -signal.SIGSEGV))
    pid = world.start(W0)
    (action,) = world.tell(Exited(W0, pid, 3))
    assert isinstance(action, GiveUp)
    assert action.task == W0
    assert action.reason.startswith(f"worker 0 (pid {pid}) exited with code 3;")
    assert world.supervisor.failures == [action.reason]
    assert world.phase(PS) is world.phase(W1) is Phase.RUNNING


def test_budget_refills_after_staying_up() -> None:
    """A process that stayed up long enough gives its task the whole budget back, a shorter one nothing."""
    world = World(RestartPolicy(max_restarts=1, refill_after=600.0))
    pid = world.up()[W0]
    for _ in range(3):
        world.now += 600.0
        assert world.tell(Exited(W0, pid, 1)) == [Start(W0)]
        pid = world.start(W0)
    world.now += 599.0
    assert isinstance(world.tell(Exited(W0, pid, 1))[0], GiveUp)


def test_restarts_switched_off() -> None:
    """Without restarts a death is a line in the log and no failure."""
    world = World(RestartPolicy(enabled=False))
    (action,) = world.tell(Exited(W0, world.up()[W0], -signal.SIGKILL))
    assert isinstance(action, Log)
    assert world.phase(W0) is Phase.DEAD
    assert not world.supervisor.failures


def test_configuration_error_is_never_restarted() -> None:
    """Exit code 2 gives up at once, whatever is left of the budget."""
    world = World()
    pid = world.up()[PS]
    (action,) = world.tell(Exited(PS, pid, 2))
    assert isinstance(action, GiveUp)
    assert f"ps 0 (pid {pid}) exited with code 2" in action.reason
    assert "which a restart can't fix" in action.reason


@pytest.mark.parametrize("until_done", [False, True])
def test_orderly_exit_is_not_restarted(until_done: bool) -> None:
    """Exit code 0 is the end of a task; news only if it was not expected."""
    world = World(until_done=until_done)
    (action,) = world.tell(Exited(W0, world.up()[W0], 0))
    assert isinstance(action, Log)
    assert action.level == (logging.INFO if until_done else logging.WARNING)
    assert world.phase(W0) is Phase.FINISHED


def test_settled_when_all_have_finished() -> None:
    """The cluster is settled with the last exit, and ended only by a stop."""
    world = World(until_done=True)
    pids = world.up()
    for task in (W0, PS, W1):
        assert not world.supervisor.settled
        world.tell(Exited(task, pids[task], 0))
    assert world.supervisor.settled
    assert not world.supervisor.ended
    assert world.tell(StopRequested()) == []
    assert world.supervisor.ended


def test_first_start_that_fails_gives_up() -> None:
    """A task whose first start fails is given up."""
    world = World()
    world.tell(Tick())
    (action,) = world.tell(StartFailed(W0, "no such file"))
    assert action == GiveUp(W0, "worker 0 could not be started: no such file")


def test_later_start_that_fails_is_a_death() -> None:
    """A restart that fails is charged to the budget and tried again."""
    world = World(RestartPolicy(max_restarts=2))
    world.tell(Exited(W0, world.up()[W0], 1))
    world.tell(StartFailed(W0, "no memory"))
    assert world.phase(W0) is Phase.WAITING
    assert world.supervisor.state(W0).restarts_used == 2


def test_stop_takes_workers_first() -> None:
    """The parameter servers are asked to stop when the last worker has ended, and not before."""
    world = World()
    pids = world.up()
    assert world.tell(StopRequested()) == [
        Signal(W0, pids[W0], signal.SIGTERM),
        Signal(W1, pids[W1], signal.SIGTERM),
    ]
    assert world.tell(Exited(W1, pids[W1], 0)) == []
    assert world.tell(Exited(W0, pids[W0], -signal.SIGTERM)) == [Signal(PS, pids[PS], signal.SIGTERM)]
    assert not world.supervisor.ended
    world.tell(Exited(PS, pids[PS], 0))
    assert world.supervisor.ended


def test_stop_kills_when_the_grace_is_over() -> None:
    """A stubborn process gets SIGKILL once, and each role has the whole grace."""
    world = World()
    pids = world.up()
    world.tell(StopRequested())
    world.tell(Exited(W0, pids[W0], 0))
    world.now += GRACE - 1
    assert world.tell(Tick()) == []
    world.now += 1
    log, kill = world.tell(Tick())
    assert isinstance(log, Log)
    assert kill == Signal(W1, pids[W1], signal.SIGKILL)
    assert world.tell(Tick()) == []
    world.tell(Exited(W1, pids[W1], -signal.SIGKILL))
    assert world.supervisor.next_due() == world.now + GRACE


def test_stop_at_once_kills_all() -> None:
    """A stop at once kills every process, in no order, even one that was already asked to stop."""
    world = World()
    pids = world.up()
    world.tell(StopRequested())
    assert world.tell(StopRequested(at_once=True)) == [Signal(task, pid, signal.SIGKILL) for task, pid in pids.items()]
    assert world.supervisor.next_due() is None


def test_stop_between_start_and_started() -> None:
    """A process that comes up during the stop is stopped too, in its turn."""
    world = World()
    world.tell(Tick())
    worker = world.start(W0)
    assert world.tell(StopRequested()) == [Signal(W0, worker, signal.SIGTERM)]
    assert world.tell(Started(PS, 50)) == []
    assert world.tell(Started(W1, 51)) == [Signal(W1, 51, signal.SIGTERM)]
    world.tell(Exited(W0, worker, 0))
    assert world.tell(Exited(W1, 51, 0)) == [Signal(PS, 50, signal.SIGTERM)]


def test_death_during_the_stop_is_told_and_not_restarted() -> None:
    """A parameter server that crashes while the workers stop is worth a line."""
    world = World()
    pids = world.up()
    world.tell(StopRequested())
    (action,) = world.tell(Exited(PS, pids[PS], -signal.SIGSEGV))
    assert isinstance(action, Log)
    assert "SIGSEGV while the cluster was stopping" in action.text


def test_restart_of_a_living_task() -> None:
    """A requested restart stops the process cleanly, then starts another; it does not count as a restart."""
    world = World()
    pid = world.up()[W0]
    assert world.tell(RestartRequested(W0)) == [Signal(W0, pid, signal.SIGTERM)]
    assert world.tell(RestartRequested(W0)) == []
    assert world.tell(Exited(W0, pid, 0)) == [Start(W0)]
    (action,) = world.tell(Started(W0, 9))
    assert action == Log(
        logging.WARNING, f"worker 0 (pid {pid}) exited with code 0, as requested; restarted as pid 9", W0
    )
    assert world.supervisor.state(W0).restarts_used == 0


@pytest.mark.parametrize("code", [0, 2])
def test_restart_of_an_ended_task(code: int) -> None:
    """A task that finished or was given up comes back with a fresh budget, and its failure is forgotten."""
    world = World()
    world.tell(Exited(W0, world.up()[W0], code))
    assert world.tell(RestartRequested(W0)) == [Start(W0)]
    world.start(W0)
    assert not world.supervisor.failures
    assert world.supervisor.state(W0).restarts_used == 0


def test_restart_during_backoff_comes_at_once() -> None:
    """Who asks for a restart does not wait for a backoff."""
    world = World()
    world.tell(Exited(W0, world.up()[W0], 1))
    world.tell(Exited(W0, world.start(W0), 1))
    assert world.tell(RestartRequested(W0)) == [Start(W0)]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "exited with code 1"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
        (None, "ended with an unknown status, which other code in this process collected"),
    ],
)
def test_describe_exit(code: int | None, text: str) -> None:
    """Signals are shown by name where they have one."""
    assert describe_exit(code) == text


W2 = ("worker", 2)


def test_a_task_that_is_added_is_one_like_any_other() -> None:
    """It is started at once, restarted when it dies, and stopped with the others."""
    world = World()
    world.up()
    assert world.tell(Added(W2)) == [Start(W2)]
    pid = world.start(W2)
    assert world.tell(Added(W2)) == [], "there is one"
    assert world.tell(Exited(W2, pid, 1)) == [Start(W2)]
    pid = world.start(W2)
    assert Signal(W2, pid, signal.SIGTERM) in world.tell(StopRequested())
    assert world.tell(Added(("worker", 3))) == [], "the cluster stops"


def test_a_task_that_is_removed_stops_cleanly_and_is_forgotten() -> None:
    """It gets SIGTERM, SIGKILL after its grace, and no other process, however it ends."""
    world = World()
    pid = world.up()[W1]
    assert world.tell(Removed(W1)) == [Signal(W1, pid, signal.SIGTERM)]
    assert world.tell(RestartRequested(W1)) == []
    world.now += GRACE
    assert Signal(W1, pid, signal.SIGKILL) in world.tell(Tick())
    assert world.supervisor.has(W1)
    assert world.tell(Exited(W1, pid, -signal.SIGKILL)) == []
    assert not world.supervisor.has(W1)
    assert world.supervisor.why_gone(W1) == "the local cluster was scaled down"
    assert world.tell(Removed(W1)) == []
    assert world.tell(Added(W1)) == [Start(W1)]


def test_what_is_removed_before_it_runs() -> None:
    """One that is being started is stopped once it is; one that waits, or has ended, is forgotten at once."""
    world = World()
    world.tell(Tick())
    world.start(PS)
    assert world.tell(Removed(W0)) == []
    assert world.tell(Started(W0, 77)) == [Signal(W0, 77, signal.SIGTERM)]
    assert world.tell(Removed(W1)) == []
    assert world.tell(StartFailed(W1, "no memory")) == [], "nobody is told of what nobody wants"
    assert not world.supervisor.has(W1)
    assert world.tell(Exited(W0, 77, 0)) == []
    assert [state.task for state in world.supervisor.states()] == [PS]
    assert world.tell(Added(W1)) == [Start(W1)]
    pid = world.start(W1)
    for _ in range(2):
        world.tell(Exited(W1, pid, 1))
        if world.phase(W1) is Phase.WAITING:
            break
        pid = world.start(W1)
    assert world.tell(Removed(W1)) == []
    assert not world.supervisor.has(W1)


TASKS: list[TaskKey] = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
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
        assert self.earliest[task] <= self.now <= self.latest[task], "too early, or too late"
        self.starting.add(task)
        self.latest[task] = math.inf

    def signalled(self, action: Signal) -> None:
        process = self.running[action.task]
        assert process.pid == action.pid, "a signal for another process"
        assert not process.killed or self.at_once, "killed twice"
        if action.signal_number == signal.SIGTERM:
            assert process.asked == math.inf, "asked to stop twice"
            assert self.stopping or action.task in self.wanted, "stopped without a request"
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
        assert given_up == ([task] if self.over.get(task) == "given up" else []), (
            "the user is told of each one given up"
        )

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
        """Stop the cluster, role by role or at once."""
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
        """Time passes until the next tick is due."""
        end = self.now + seconds
        while (due := self.supervisor.next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            assert self.tell(Tick()) == []
            assert self.supervisor.next_due() != due, "a tick was due for nothing"
        self.now = end
        assert self.tell(Tick()) == []

    # What always holds

    @invariant()
    def everybody_is_where_the_model_says(self) -> None:
        """Nothing that is due is late, and no process is forgotten."""
        check_invariants(self.supervisor, self.policy)
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
                assert task[0] != turn or process.asked < math.inf or process.killed, "it is not told to stop"
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
TestSupervisor.__doc__ = "One process per task, restarts within the budget and in time, and a stop role by role."
TestSupervisor.settings = search(80, 50)
