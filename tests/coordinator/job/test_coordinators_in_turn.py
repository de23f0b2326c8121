"""Coordinators that come, die, end and are late, and servers that restart, in any order: a state machine.

The servers are real, up to the network: node, role, store. A coordinator is a list of steps that it takes when it
pleases the search: it asks the servers what they hold, takes the first and then the others, works, and ends its job
server by server. What it decides is decided by the library's own function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import search
from tests.fakes import FakeCall
from tests.ps.storage.support import padded, values_of

from pscluster.coordinator.job.live_job import LiveJob, continue_job
from pscluster.core.errors import BusyError, PsClusterError, StaleError, UnavailableError
from pscluster.core.ids import make_identity
from pscluster.core.role.node import NodeService
from pscluster.core.transport.frames import pack, unpack
from pscluster.ps.server import role as role_module
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.storage.manager import Restored, StateManager
from pscluster.ps.storage.options import DurabilityOptions
from pscluster.v1 import node_pb2, ps_pb2

SERVERS = 2
VARIABLE = 1


class Surviving(StateManager):
    """A manager whose server finds all that the process before had, as after a generation with nothing logged since."""

    def __init__(self, restored: Restored | None) -> None:
        super().__init__(DurabilityOptions())
        self._restored = restored

    def restore(self) -> Restored | None:
        """What there was."""
        return self._restored


class Server:
    """A parameter server's processes, one after the other."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.start(None)

    def start(self, restored: Restored | None) -> None:
        """A process."""
        self.role = ParameterServerRole(self.index, Surviving(restored))
        self.service = ParameterServerService(self.role)
        self.node = NodeService(make_identity("ps", self.index), self.role, lambda: None)

    def restart(self, *, kept: bool) -> None:
        """The process dies, and another one begins, with what there was or without."""
        restored = None
        if kept and self.role._identity.store_id:
            restored = Restored(self.role.store, self.role._identity, "all of it")
        self.start(restored)


@dataclass(eq=False)
class Coordinator:
    """One process of a script."""

    number: int
    request: node_pb2.AttachRequest
    hellos: list[node_pb2.HelloReply] = field(default_factory=list)
    must_hold: list[int] = field(default_factory=list)  # by server, what it has to hold as it is taken
    streams: dict[int, tuple[FakeCall, Iterator[Any]]] = field(default_factory=dict)
    store_id: dict[int, int] = field(default_factory=dict)
    ever_attached: set[int] = field(default_factory=set)
    ready: bool = False  # it has taken all, and has its variable
    ending: bool = False
    failed: bool = False

    @property
    def job(self) -> int:
        """Its number."""
        job: int = self.request.job
        return job


class CoordinatorsMachine(RuleBasedStateMachine):
    """Up to a few coordinators at once, of the same script or of another."""

    @initialize()
    def begin(self) -> None:
        """Two servers."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(role_module, "OWN_SECONDS", 0.0)
        self.servers = [Server(index) for index in range(SERVERS)]
        self.coordinators: list[Coordinator] = []
        self.count = 0
        # By server: who has it (a coordinator that was let in last), and how many additions there are of which job.
        self.master: list[Coordinator | None] = [None] * SERVERS
        self.shut_out: list[set[int]] = [set() for _ in range(SERVERS)]  # jobs' numbers
        self.added = [0] * SERVERS
        self.held_job = [0] * SERVERS  # of what it holds
        self.has_variable = [False] * SERVERS

    coordinators_of = st.integers(0, 9)

    def pick(self, which: int) -> Coordinator:
        return self.coordinators[which % len(self.coordinators)]

    # A coordinator's steps

    @precondition(lambda self: len(self.coordinators) < 3)
    @rule(script=st.sampled_from(["a", "a", "a", "b"]), take_over=st.sampled_from([False, False, True]))
    def starts(self, script: str, take_over: bool) -> None:
        """It asks all servers what they hold, and decides."""
        self.count += 1
        request = node_pb2.AttachRequest(
            job=1000 + self.count, job_id=2000 + self.count, coordinator_number=1, job_name=script, take_over=take_over
        )
        request.coordinator.CopyFrom(make_identity("chief", 0))
        mine = Coordinator(self.count, request)
        hello = node_pb2.HelloRequest(identity=request.coordinator)
        mine.hellos = [server.node.hello(hello, FakeCall()) for server in self.servers]  # type: ignore[arg-type]
        mine.must_hold = continue_job(request, mine.hellos)
        if request.coordinator_number > 1:
            assert {reply.job_id for reply in mine.hellos} == {request.job_id}, "goes on with half a job"
            assert {reply.job_name for reply in mine.hellos} == {script}, "goes on with another's job"
        self.coordinators.append(mine)

    @precondition(lambda self: any(not coordinator.ready for coordinator in self.coordinators))
    @rule(which=coordinators_of, steps=st.integers(1, SERVERS + 1))
    def goes_on(self, which: int, steps: int) -> None:
        """Take that many steps towards its work, or as many as it can."""
        beginning = [coordinator for coordinator in self.coordinators if not coordinator.ready]
        mine = beginning[which % len(beginning)]
        for _ in range(steps):
            left = [server for server in range(SERVERS) if server not in mine.streams]
            if left:
                self.attach(mine, left[0])
            else:
                self.look(mine)

    @precondition(lambda self: any(coordinator.ready for coordinator in self.coordinators))
    @rule(which=coordinators_of, server=st.integers(0, SERVERS - 1))
    def dials_again(self, which: int, server: int) -> None:
        """Where its connection was lost."""
        mine = self.one_that_works(which)
        if server not in mine.streams:
            self.attach(mine, server)

    def one_that_works(self, which: int) -> Coordinator:
        working = [coordinator for coordinator in self.coordinators if coordinator.ready]
        return working[which % len(working)]

    def attach(self, mine: Coordinator, server: int) -> None:
        """To the first server before the others."""
        if mine.ending or mine.failed:
            return
        target, held = self.servers[server], self.held_job[server]
        request = node_pb2.AttachRequest()
        request.CopyFrom(mine.request)
        request.store_id = mine.store_id.get(server, mine.must_hold[server])
        call = FakeCall()
        events = target.node.attach(request, call)  # type: ignore[arg-type]
        master = self.master[server]
        try:
            event = next(events)
        except BusyError:
            assert master is not None
            assert master is not mine
            assert server in master.streams, "busy, but no coordinator holds it"
            if not mine.ever_attached:
                mine.failed = True
            return
        except StaleError:
            # Refused for good: somebody has taken it over, or it has lost what it held.
            assert held != mine.request.job_id or (master is not None and master is not mine)
            mine.failed = True
            return
        if master is not None and master is not mine and server in master.streams:
            assert mine.request.take_over, "two coordinators at a time"
        assert mine.job not in self.shut_out[server], "let in again after the next one"
        self.shut_out[server] |= {
            coordinator.job for coordinator in self.coordinators if server in coordinator.ever_attached
        } - {mine.job}
        mine.streams[server], mine.store_id[server] = (call, events), event.store_id
        mine.ever_attached.add(server)
        if held != mine.request.job_id:
            assert mine.request.coordinator_number == 1, "it goes on with a job of which this server has lost its part"
            assert not self.has_variable[server] or held != 0
            assert target.role.store.totals() == (0, 0), "a new job finds something"
            self.held_job[server], self.added[server], self.has_variable[server] = mine.request.job_id, 0, False
        self.master[server] = mine

    def look(self, mine: Coordinator) -> None:
        """With all servers taken: makes its variable, or finds it as it was left."""
        if mine.ready or mine.failed:
            return
        try:
            directories = [
                server.service.describe(ps_pb2.DescribeRequest(job=mine.job, all=True), FakeCall())  # type: ignore[arg-type]
                for server in self.servers
            ]
            live, remains = LiveJob.of(directories)
            if mine.request.coordinator_number > 1:
                assert ("v" in live.variables) == all(self.has_variable), "what lived is gone"
                for remain in remains:
                    request = ps_pb2.DeleteRequest(job=mine.job, name=remain.name, id=remain.id)
                    for server in self.servers:
                        server.service.delete(request, FakeCall())  # type: ignore[arg-type]
                    self.has_variable = [False] * SERVERS
            if "v" not in live.variables:
                spec = ps_pb2.VariableSpec(
                    id=live.last_id + 1,
                    name="v",
                    dtype="float64",
                    shape=[SERVERS],
                    splits=[{"ends": range(1, SERVERS + 1)}],
                    owners=range(SERVERS),
                )
                for index in range(SERVERS):
                    self.push(index, ps_pb2.Request(create=ps_pb2.CreateRequest(job=mine.job, variable=spec)), 0.0)
                    self.has_variable[index], self.added[index] = True, 0
        except (StaleError, UnavailableError):
            assert any(master is not mine for master in self.master) or any(s.role.waiting for s in self.servers)
            return
        mine.ready = True

    def push(self, index: int, request: ps_pb2.Request, value: float) -> ps_pb2.Reply:
        chunks = [bytes(chunk) for chunk in padded(np.array([value])).chunks]
        request.total_bytes, request.last = sum(map(len, chunks)), True
        data = self.servers[index].service.push(iter([pack(request, chunks)]), FakeCall())  # type: ignore[arg-type]
        return unpack(data, ps_pb2.Reply)[0]

    @precondition(lambda self: any(coordinator.ready for coordinator in self.coordinators))
    @rule(which=coordinators_of, server=st.integers(0, SERVERS - 1))
    def updates(self, which: int, server: int) -> None:
        """Adds one, whether it has the server still or not: only the one that was let in last is heard."""
        mine = self.one_that_works(which)
        self.count += 1
        held = self.servers[server].role.store.held()[0]
        update = ps_pb2.UpdateRequest(job=mine.job, incarnation=mine.job, sequence=self.count)
        variable_id = held[0].spec.id if held else VARIABLE
        item = update.items.add(variable=variable_id, shard=server, nth=1, kind=ps_pb2.ADD, value_bytes=8)
        item.rows.all = True
        try:
            reply = self.push(server, ps_pb2.Request(update=update), 1.0)
        except PsClusterError:
            waiting = self.servers[server].role.waiting
            assert self.master[server] is not mine or waiting or self.held_job[server] != mine.request.job_id
            return
        assert reply.update.applied == 1
        assert self.master[server] is mine, "one that was shut out is heard"
        self.added[server] += 1

    @precondition(lambda self: self.coordinators)
    @rule(which=coordinators_of, server=st.integers(0, SERVERS - 1))
    def loses_a_connection(self, which: int, server: int) -> None:
        """And does not know it yet, or dials again."""
        self.drop(self.pick(which), server)

    @staticmethod
    def drop(mine: Coordinator, server: int) -> None:
        if server in mine.streams:
            call, events = mine.streams.pop(server)
            call.end()
            events.close()  # type: ignore[attr-defined]  # a generator

    @precondition(lambda self: self.coordinators)
    @rule(which=coordinators_of)
    def dies(self, which: int) -> None:
        """Without a word, or as it has failed."""
        mine = self.pick(which)
        for server in range(SERVERS):
            self.drop(mine, server)
        self.coordinators.remove(mine)

    @precondition(lambda self: any(coordinator.ready for coordinator in self.coordinators))
    @rule(which=coordinators_of, server=st.integers(0, SERVERS - 1))
    def ends(self, which: int, server: int) -> None:
        """Its job, on one server after the other, as late as can be."""
        mine = self.one_that_works(which)
        mine.ending = True
        master = self.master[server]
        try:
            self.servers[server].node.end_job(node_pb2.EndJobRequest(job=mine.job), FakeCall())  # type: ignore[arg-type]
        except StaleError:
            assert master is not mine or self.held_job[server] != mine.request.job_id
            return
        if master is mine:
            self.master[server] = None
            self.held_job[server], self.added[server], self.has_variable[server] = 0, 0, False
        else:
            assert self.held_job[server] == 0, "a late end dropped another's state"

    # Servers

    @rule(server=st.integers(0, SERVERS - 1), kept=st.sampled_from([True, True, False]))
    def restarts(self, server: int, kept: bool) -> None:
        """A server, with what it had, or, without durability, with nothing."""
        for mine in self.coordinators:
            self.drop(mine, server)
        self.servers[server].restart(kept=kept)
        if not kept:
            self.held_job[server], self.added[server], self.has_variable[server] = 0, 0, False
            self.master[server] = None

    @invariant()
    def everything_is_as_it_was_left(self) -> None:
        """What a server holds is of one job, and all of it."""
        for index, server in enumerate(getattr(self, "servers", ())):
            role = server.role
            assert role._identity.job_id == self.held_job[index]
            held = role.store.held()[0]
            assert bool(held) == self.has_variable[index]
            for variable in held:
                assert values_of(role.store, variable.spec.id, index).tolist() == [self.added[index]]

    def teardown(self) -> None:
        """Nothing waits any more."""
        for mine in getattr(self, "coordinators", ()):
            for server in range(SERVERS):
                self.drop(mine, server)
        if hasattr(self, "patch"):
            self.patch.undo()


TestCoordinators = CoordinatorsMachine.TestCase
TestCoordinators.__doc__ = (
    "One coordinator is heard, what is held is of one job, and a job goes on whole or not at all."
)
TestCoordinators.settings = search(80, 40)
