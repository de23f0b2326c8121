"""The decisions about a local cluster's processes: every interleaving without a process."""

from __future__ import annotations

import itertools
import logging
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.coordinator.local.supervisor import (
    Action,
    Event,
    Exited,
    GiveUp,
    Log,
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
    describe_exit,
)

PS, W0, W1 = ("ps", 0), ("worker", 0), ("worker", 1)
GRACE = 5.0


class World:
    """A supervisor with its invariants checked at every step, and a clock to turn."""

    def __init__(self, policy: RestartPolicy | None = None, *, until_done: bool = False) -> None:
        policy = policy or RestartPolicy(max_restarts=3)
        self.supervisor = Supervisor(
            [PS, W0, W1], policy, stop_order=("worker", "ps"), grace=GRACE, until_done=until_done
        )
        self.now = 1000.0
        self.pids = itertools.count(100)

    def tell(self, event: Event, jitter: float = 1.0) -> list[Action]:
        """What the supervisor answers."""
        actions = self.supervisor.handle(event, self.now, jitter)
        self.supervisor.check_invariants()
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


def test_budgets_are_the_tasks_own() -> None:
    """One task's deaths cost another nothing."""
    world = World(RestartPolicy(max_restarts=1))
    pids = world.up()
    for task in (PS, W0, W1):
        assert world.tell(Exited(task, pids[task], 1)) == [Start(task)]
        world.start(task)


def test_no_restart_allowed() -> None:
    """A budget of none gives up at the first death."""
    world = World(RestartPolicy(max_restarts=0))
    (action,) = world.tell(Exited(W0, world.up()[W0], 1))
    assert isinstance(action, GiveUp)


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
    assert "configuration" in action.reason


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
    """What could not be started even once won't by itself."""
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


def test_stop_twice_asks_once() -> None:
    """A second request sends no second SIGTERM, which would end the roles' own draining."""
    world = World()
    world.up()
    assert len(world.tell(StopRequested())) == 2
    assert world.tell(StopRequested()) == []


def test_stop_at_once_kills_all() -> None:
    """Out of patience, everything is killed, in no order and though it was asked before."""
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


def test_start_that_fails_during_the_stop() -> None:
    """A start that fails while the cluster stops is neither a failure nor tried again."""
    world = World()
    world.tell(Tick())
    world.tell(StopRequested())
    for task in (PS, W0, W1):
        assert world.tell(StartFailed(task, "too late")) == []
    assert world.supervisor.ended
    assert not world.supervisor.failures


def test_stop_during_backoff() -> None:
    """A task that waits for its restart is stopped without one."""
    world = World()
    pid = world.up()[W0]
    world.tell(Exited(W0, pid, 1))
    world.tell(Exited(W0, world.start(W0), 1))
    assert world.phase(W0) is Phase.WAITING
    world.tell(StopRequested())
    world.now += 1000.0
    assert Start(W0) not in world.tell(Tick())
    assert world.phase(W0) is Phase.STOPPED


def test_death_during_the_stop_is_told_and_not_restarted() -> None:
    """A parameter server that crashes while the workers stop is worth a line."""
    world = World()
    pids = world.up()
    world.tell(StopRequested())
    (action,) = world.tell(Exited(PS, pids[PS], -signal.SIGSEGV))
    assert isinstance(action, Log)
    assert "SIGSEGV while the cluster was stopping" in action.text


def test_restart_of_a_living_task() -> None:
    """A restart asked for stops the process in order, then starts another, free of charge."""
    world = World()
    pid = world.up()[W0]
    assert world.tell(RestartRequested(W0)) == [Signal(W0, pid, signal.SIGTERM)]
    assert world.tell(RestartRequested(W0)) == []
    assert world.tell(Exited(W0, pid, 0)) == [Start(W0)]
    (action,) = world.tell(Started(W0, 9))
    assert action == Log(logging.WARNING, f"worker 0 (pid {pid}) exited with code 0, as asked; restarted as pid 9", W0)
    assert world.supervisor.state(W0).restarts_used == 0


def test_restart_of_a_stubborn_task() -> None:
    """A process that does not stop for its restart is killed after the grace."""
    world = World()
    pid = world.up()[W0]
    world.tell(RestartRequested(W0))
    world.now += GRACE
    assert world.tell(Tick())[-1] == Signal(W0, pid, signal.SIGKILL)
    assert world.tell(Exited(W0, pid, -signal.SIGKILL)) == [Start(W0)]


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


def test_stop_outdoes_restart() -> None:
    """A stop that comes while a restart is under way leaves the task stopped."""
    world = World()
    pid = world.up()[W0]
    world.tell(RestartRequested(W0))
    world.tell(StopRequested())
    assert Start(W0) not in world.tell(Exited(W0, pid, 0))
    assert world.tell(RestartRequested(W0)) == []
    assert world.phase(W0) is Phase.STOPPED


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "exited with code 1"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
        (None, "ended with a status that something else in this process collected"),
    ],
)
def test_describe_exit(code: int | None, text: str) -> None:
    """Signals are shown by name where they have one."""
    assert describe_exit(code) == text


_STEPS = st.tuples(st.sampled_from(range(7)), st.sampled_from([PS, W0, W1]), st.integers(-15, 3), st.floats(0, 400))


@given(st.lists(_STEPS, max_size=60), st.booleans())
def test_any_interleaving_ends_with_nothing_left(steps: list[tuple[int, TaskKey, int, float]], enabled: bool) -> None:
    """Whatever happens in whatever order: the invariants hold, one process a task, and a stop ends all."""
    world = World(RestartPolicy(enabled=enabled, max_restarts=2))
    starting: set[TaskKey] = set()
    alive: dict[TaskKey, int] = {}
    killed: list[TaskKey] = []
    stopping = False

    def tell(event: Event) -> None:
        for action in world.tell(event, jitter=0.3):
            if isinstance(action, Start):
                assert not stopping
                assert action.task not in starting | alive.keys()
                starting.add(action.task)
            elif isinstance(action, Signal):
                assert alive[action.task] == action.pid
                if action.number == signal.SIGKILL:
                    killed.append(action.task)

    def leave(task: TaskKey, code: int) -> None:
        tell(Exited(task, alive.pop(task), code))

    tell(Tick())
    for kind, task, code, seconds in steps:
        world.now += seconds
        if kind < 2 and task in starting:
            starting.discard(task)
            if kind == 0:
                alive[task] = next(world.pids)
                tell(Started(task, alive[task]))
            else:
                tell(StartFailed(task, "no luck"))
        elif kind < 4 and task in alive:
            leave(task, code)
        elif kind == 4:
            tell(RestartRequested(task))
        elif kind == 5 and code == 3:
            stopping = True
            tell(StopRequested(at_once=seconds > 200))
        else:
            tell(Tick())
    stopping = True
    tell(StopRequested())
    for task in list(starting):
        alive[task] = next(world.pids)
        tell(Started(task, alive[task]))
    while not world.supervisor.ended:
        for task in killed:
            if task in alive:
                leave(task, -signal.SIGKILL)
        due = world.supervisor.next_due()
        assert due is not None or world.supervisor.ended, "something is left that nobody waits for"
        world.now = max(world.now, due or 0.0)
        tell(Tick())
    assert not alive
    assert world.supervisor.settled
