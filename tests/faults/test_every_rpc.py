"""Every call between roles, with the request lost, the answer lost, delayed, or duplicated; final numbers are exact.

The methods are those of the protobuf descriptors: a new one is tested, or fails because no job calls it. Each fault
strikes once, in a cluster that all tests share; each test is a separate job. A fault that loses something strikes
alone. Delays and duplicates strike many methods in one job; also alone, if PSCLUSTER_SEARCH asks for more than every
test run does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import SEARCH
from tests.faults.armed import CUT, Armed, Round, armed_cluster
from tests.faults.arming.faults import CALL_KINDS, LASTING
from tests.faults.steps import note, wait_for
from tests.faults.support import status
from tests.roles.wire import SERVICES
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    ParameterServerStrategy,
    Variable,
    experimental_get_current_worker_index,
)
from pscluster.coordinator.cli.health import is_healthy
from pscluster.core.errors import FunctionError
from pscluster.core.transport.methods import methods

NTH = {
    "/pscluster.v1.ParameterServer/Checkpoint": (1, 2, 3),  # mark, write, drop
    "/pscluster.v1.ParameterServer/Restore": (1, 2),  # read, commit
    "/pscluster.v1.ParameterServer/Push": (1, 4, 7),  # a variable, an optimizer, an update
}
"""Which of the calls, where they are not all alike; else the first."""

LOSING = ("lose_request", "lose_response")

PARTS = {
    "Checkpoint": ("checkpoint",),
    "Restore": ("checkpoint",),
    "Recall": ("recall", "checkpoint"),
    "Answer": ("questions",),
    "Delete": ("directory",),
    "Push": ("directory", "beside"),
    "Pull": ("beside",),
    "Upload": ("beside",),
    "Download": ("beside",),
    "Release": ("beside",),
}
"""What a job needs to do, beside counting, for a method to be called."""

NOT_CALLED = {
    "/grpc.health.v1.Health/Watch": "grpc's own: none of ours calls it",
    "/pscluster.v1.Worker/Exchange": "between workers, in gangs only: see tests/worker/collectives",
    "/pscluster.v1.Worker/MoveServers": "if a server moves: see tests/roles/test_returning_servers.py, which has all",
    "/pscluster.v1.ParameterServer/Move": "if a shard moves: see tests/faults/test_moves.py, which has all kinds",
    "/pscluster.v1.Coordinator/Register": "by workers that join: see tests/roles/test_joining.py, which has all kinds",
}


@dataclass(frozen=True)
class Case:
    """A fault at a call, or at a message of a stream."""

    role: str
    path: str
    kind: str
    nth: int
    message: bool = False

    @property
    def fault(self) -> str:
        """The fault in the syntax for arming."""
        return f"{self.role}/{'message' if self.message else 'rpc'}:{self.path}={self.kind}@{self.nth}"

    @property
    def short(self) -> str:
        """The name for the test."""
        return f"{self.role}-{self.path.rpartition('/')[2]}{'-message' if self.message else ''}-{self.nth}-{self.kind}"


def cases() -> Iterator[Case]:
    """All roles that others call, all their methods, all kinds of faults."""
    for role in ("ps", "worker"):
        for service in SERVICES[role]:
            for method in methods(service):
                if method.path in NOT_CALLED:
                    continue
                for kind in CALL_KINDS:
                    for nth in NTH.get(method.path, (1,)):
                        yield Case(role, method.path, kind, nth)
                    if method.path in LASTING and method.client_streaming:
                        for nth in (2, 5):
                            yield Case(role, method.path, kind, nth, message=True)


def plans() -> Iterator[list[Case]]:
    """The sets of faults that strike in one job."""
    together: defaultdict[tuple[str, int], list[Case]] = defaultdict(list)
    seen: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for case in cases():
        if case.kind in LOSING or "Health" in case.path or SEARCH > 1:
            yield [case]
        else:
            method = case.role, case.path, case.kind
            together[case.kind, seen[method]].append(case)
            seen[method] += 1
    yield from together.values()


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Armed]:
    """Two servers and two workers, for all tests of the module; no role dies."""
    with armed_cluster(tmp_path_factory.mktemp("faults"), 2, 2, durability="log") as armed:
        pids = armed.cluster.pids
        yield armed
        assert armed.cluster.pids == pids, "a role died"


def asked(armed: Armed, case: Case) -> None:
    """Make the calls that only tools make: health."""
    armed.until_all_live()  # no job has waited for them before
    address = armed.cluster.cluster_spec().task_address(case.role, 0)
    healthy, said = is_healthy(address, armed.cluster.token)
    assert healthy is not (case.kind in LOSING), said
    assert is_healthy(address, armed.cluster.token)[0]


def name_of(plan: list[Case]) -> str:
    """The name for the test."""
    return plan[0].short if len(plan) == 1 else f"{len(plan)}-{plan[0].short}"


@pytest.mark.parametrize("plan", [pytest.param(plan, id=name_of(plan)) for plan in plans()])
def test_a_fault_at_a_call(armed: Armed, plan: list[Case], tmp_path: Path) -> None:
    """The job ends, every function has counted once on every element, and the roles hold what they should."""
    methods = [case.path.rpartition("/")[2] for case in plan]
    faults = [case.fault for case in plan] + [CUT] * ("CloseIncarnation" in methods)
    armed.arm(*faults)
    if "Health" in plan[0].path:
        asked(armed, plan[0])
        armed.until_struck(*faults)
        return
    parts = {part for method in methods for part in PARTS.get(method, ())}
    awaited = faults[methods.index("Recall")] if "Recall" in methods else faults[0]
    with ParameterServerStrategy(armed.cluster, FixedShardsPartitioner(2), ps_timeout=TIMEOUT) as strategy:
        round_ = Round(armed, awaited, strategy, tmp_path)
        round_.run(*parts)
        armed.until_struck(*(fault for fault in faults if "EndJob" not in fault))
        for reply in strategy.client.statuses():
            assert reply.state == "serving", "the coordinator has the servers"
        may_be_refused = plan[0].kind in LOSING and methods[0] in ("Checkpoint", "Restore")
        assert may_be_refused or not round_.refused, round_.refused
    armed.until_struck(*faults)
    for index in range(2):
        until(lambda index=index: status(armed.cluster, "ps", index).variables == 0, "nothing is left of the job")  # type: ignore[misc]


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("kind", ["duplicate:0.3", "twice", "at_once"])
def test_a_copy_does_not_begin_a_dataset_anew(armed: Armed, kind: str, nth: int) -> None:
    """Whichever of the first uploads is duplicated, a function or a dataset, no element is given out twice."""
    fault = f"worker/rpc:/pscluster.v1.Worker/Upload={kind}@{nth}"
    armed.arm(fault)
    with ParameterServerStrategy(armed.cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(lambda: range(1_000_000)))

        def element(iterator: Any) -> tuple[int, int]:
            return experimental_get_current_worker_index(), int(next(iterator))

        def other() -> None:
            """Another function to upload."""

        elements: list[tuple[int, int]] = []
        while not armed.how_it_ended(fault):
            values = [coordinator.schedule(element, args=(iterator,)) for _ in range(20)]
            coordinator.schedule(other)
            elements += coordinator.fetch(values, TIMEOUT)
        elements += coordinator.fetch([coordinator.schedule(element, args=(iterator,)) for _ in range(20)], TIMEOUT)
        for worker in range(2):
            mine = [element for index, element in elements if index == worker]
            assert sorted(mine) == list(range(len(mine)))


@pytest.mark.parametrize("kind", CALL_KINDS)
def test_what_runs_is_cancelled_all_the_same(armed: Armed, kind: str, tmp_path: Path) -> None:
    """When a function fails, an endless one on the other worker is told to stop."""
    folder = str(tmp_path)
    with ParameterServerStrategy(armed.cluster) as strategy, strategy.scope():
        count = Variable(np.zeros(3), name="count")
        coordinator = ClusterCoordinator(strategy)

        def endless() -> None:
            note(folder, "begun")
            while not (tmp_path / "given-up").exists():
                count.read_value()

        def fails() -> None:
            wait_for(folder, "fail")
            raise ValueError("on purpose")

        coordinator.schedule(endless)
        coordinator.schedule(fails)
        try:
            wait_for(folder, "begun")
            fault = f"worker/rpc:/pscluster.v1.Worker/Recall={kind}@1"
            armed.arm(fault)
            note(folder, "fail")
            with pytest.raises(FunctionError, match="on purpose"):
                coordinator.join(TIMEOUT / 3)
        finally:
            note(folder, "given-up")  # otherwise it would keep its worker from the next job
        armed.until_struck(fault)


def test_no_method_is_forgotten() -> None:
    """Each method that others call has each kind of fault; exceptions are listed with a reason."""
    covered = {(case.role, case.path, case.kind) for plan in plans() for case in plan}
    own = {service for service in SERVICES["chief"] if service not in SERVICES["worker"]}
    assert all(method.path in NOT_CALLED for service in own for method in methods(service))
    for role in ("ps", "worker"):
        for service in SERVICES[role]:
            for method in methods(service):
                for kind in CALL_KINDS:
                    assert (role, method.path, kind) in covered or method.path in NOT_CALLED
