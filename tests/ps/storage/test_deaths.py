"""A parameter server with its directory, whatever its processes, its disk and its coordinators do: a state machine.

Everything is real but the network: the service, the manager's thread, the files. A death is a copy of the directory,
made between any two calls of the operating system, in the middle of a write, or of what a machine without power would
find. The model knows only what was acknowledged, and what was not.

PSCLUSTER_SEARCH=100 searches longer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.conftest import search
from tests.fakes import FakeCall
from tests.ps.storage.support import NEVER, killed, padded, values_of
from tests.waiting import until

from pscluster.core.errors import ConfigurationError, PsClusterError, StaleError, UnavailableError
from pscluster.core.ids import make_identity
from pscluster.core.role.node import NodeService
from pscluster.core.transport.frames import pack, unpack
from pscluster.ps.optim.rules import RULES
from pscluster.ps.server import role as role_module
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.storage.log import writer as log_module
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import node_pb2, ps_pb2

LENGTH = 60
"""Elements of a shard. Each update of the model writes one that no other writes; the first is assigned to."""

OPTIMIZER = 1000
JOB_ID = 78
NOWHERE = 10**9


class Disk:
    """All calls that change something in one directory, one at a time: dies between two of them, fails at some."""

    CALLS = (
        "open",
        "pwritev",
        "posix_fallocate",
        "ftruncate",
        "truncate",
        "unlink",
        "replace",
        "rename",
        "fsync",
        "fdatasync",
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.folder: Path | None = None
        self.dies_in = self.fails_in = NOWHERE
        self.torn = False  # it dies in the middle of the write
        self.code = errno.EIO
        self.lasting = False  # it fails from then on
        self.failed = False
        self.copy: Path | None = None
        self.meanwhile: Callable[[], None] | None = None  # called during a generation, before its nth call
        self.happens_in = NOWHERE
        self._lock = threading.RLock()
        self._real = {call: getattr(os, call) for call in self.CALLS}
        for call in self.CALLS:
            patch.setattr(os, call, self._patched(call))

    def _patched(self, call: str) -> Any:
        def called(target: Any, *rest: Any, **more: Any) -> Any:
            with self._lock:
                if self.folder is None or not self._mine(call, target, rest):
                    return self._real[call](target, *rest, **more)
                return self._called(call, target, *rest, **more)

        return called

    def _mine(self, call: str, target: Any, rest: tuple[Any, ...]) -> bool:
        if call == "open" and not rest[0] & os.O_CREAT:
            return False
        path = Path(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target)
        return path.parent == self.folder and path.name.startswith(("log", "state-", "losses"))

    @staticmethod
    def _is_of_a_generation(call: str, target: Any) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target)
        return path.name.startswith("state-") and call != "unlink"

    def _called(self, call: str, target: Any, *rest: Any, **more: Any) -> Any:
        assert self.folder is not None
        if self.meanwhile is not None and self._is_of_a_generation(call, target):
            self.happens_in -= 1
            if self.happens_in == 0:
                happens, self.meanwhile = self.meanwhile, None
                happens()
        self.dies_in -= 1
        if self.dies_in == 0:
            folder, self.folder = self.folder, None
            if self.torn and call == "pwritev":
                buffers, offset = rest
                whole = b"".join(bytes(buffer) for buffer in buffers)
                os.pwrite(target, whole[: len(whole) // 2], offset)
            self.copy = killed(folder)
            self.folder = folder
        self.fails_in -= 1
        if self.fails_in <= 0:
            if not self.lasting:
                self.fails_in = NOWHERE
            self.failed = True
            raise OSError(self.code, os.strerror(self.code))
        if call in ("fsync", "fdatasync"):
            return None  # a real disk takes time
        return self._real[call](target, *rest, **more)

    def killed(self) -> Path:
        """Return what a process that dies now leaves behind."""
        with self._lock:
            assert self.folder is not None
            return killed(self.folder)

    def heal(self) -> None:
        """Stop failing."""
        with self._lock:
            self.dies_in = self.fails_in = NOWHERE
            self.lasting, self.torn = False, False


class Process:
    """A server's process."""

    def __init__(self, folder: Path, kind: Durability, *, fsync: bool) -> None:
        self.folder, self.kind = folder, kind
        self.manager = StateManager(DurabilityOptions(kind, folder, NEVER, fsync))
        try:
            self.role = ParameterServerRole(0, self.manager)
        except BaseException:
            self.manager.close()
            raise
        self.service = ParameterServerService(self.role)
        self.node = NodeService(make_identity("ps", 0), self.role, lambda: None)
        self.calls: list[tuple[FakeCall, Any]] = []

    def attach(self, request: node_pb2.AttachRequest) -> int:
        """Attach a coordinator."""
        call = FakeCall()
        events = self.node.attach(request, call)  # type: ignore[arg-type]  # as much of a context as it needs
        store_id = next(events).store_id
        self.calls.append((call, events))
        return store_id

    def coordinator_dies(self) -> None:
        """End the coordinator's streams."""
        for call, events in self.calls:
            call.end()
            events.close()
        self.calls.clear()

    def push(self, request: ps_pb2.Request, *buffers: bytes) -> ps_pb2.Reply:
        """Send a request, and return its reply."""
        request.total_bytes, request.last = sum(map(len, buffers)), True
        data = self.service.push(iter([pack(request, buffers)]), FakeCall())  # type: ignore[arg-type]
        return unpack(data, ps_pb2.Reply)[0]

    def wait_until_idle(self) -> None:
        """Wait until the manager's thread has done all that was requested, so that examples are reproducible."""
        plan = self.manager._plan
        until(lambda: plan._saving is None and not (self.manager._job and plan.due() == -np.inf), "it is at rest")

    def end(self) -> None:
        """Stop everything."""
        self.coordinator_dies()
        self.manager.close()


@dataclass(eq=False)
class Entry:
    """An update of a shard that the server has applied."""

    key: tuple[int, int, int]  # of its request: job and function, or client and number; and the item
    kind: str
    element: int
    value: float
    told: bool = False  # acknowledged
    safe: bool = False  # it must be there whatever happens to the process


@dataclass(eq=False)
class Held:
    """A shard in the model: its updates in the order in which they were applied."""

    entries: list[Entry] = field(default_factory=list)
    lost: int = 0  # acknowledged ones that were lost, so far


@dataclass(eq=False)
class Sent:
    """A request of a client, which may send it again."""

    job: int
    incarnation: int
    function: int
    sequence: int
    parts: list[tuple[str, int, int, int]]  # kind, variable, shard, element
    answered: bool = False
    boot_id: int = 0  # the process that received it last

    def key(self, item: int) -> tuple[int, int, int]:
        """Return the key of one of its items."""
        return (self.job, self.function, item) if self.function else (self.incarnation, self.sequence, item)


Drawn = list[tuple[int, int]]


class ServerMachine(RuleBasedStateMachine):
    """Creations, updates, repetitions, generations, deaths, damage, troubles of the disk, and coordinators in turn."""

    # What is drawn depends on nothing that threads race for: numbers stand for shards and the like, modulo how many
    # there are, and rules that do not apply return at once. Otherwise Hypothesis finds that examples do not repeat.
    numbers = st.integers(0, 23)
    parts = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3)  # shards, and kinds of updates
    deaths = st.one_of(st.just(0), st.just(0), st.just(0), st.integers(1, 25))
    torn = st.booleans()

    @initialize(kind=st.sampled_from([Durability.LOG, Durability.LOG, Durability.SNAPSHOT]), fsync=st.booleans())
    def begin(self, kind: Durability, fsync: bool) -> None:
        """Begin with an empty directory, and a job."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(log_module, "_GROW", 4096)
        self.patch.setattr(role_module, "OWN_SECONDS", 0.0)
        self.base = Path(tempfile.mkdtemp(prefix="deaths-"))
        self.disk = Disk(self.patch)
        self.kind, self.fsync = kind, fsync
        self.lives = 0
        self.settled: dict[int, int] = {}
        self.coordinator_number = 0
        self.last_variable = self.last_function = self.last_sequence = self.last_element = 0
        self.shards: dict[int, list[Held]] = {}
        self.rates = {0.0}  # possible learning rates; 0: there is no optimizer
        self.sent: list[Sent] = []
        self.told: dict[tuple[int, int], tuple[int, int]] = {}  # of a shard: boot id and updates
        self.process = Process(self.base / "s", kind, fsync=fsync)
        self.disk.folder = self.process.folder
        self.next_coordinator()

    # Coordinators

    def next_coordinator(self) -> None:
        """A new coordinator takes over; requests of the previous one are refused from now on."""
        self.coordinator_number += 1
        self.job, self.store_id = 100 + self.coordinator_number, getattr(self, "store_id", 0)
        self.closed, self.finished = list[int](), set[int]()
        self.last_function = 0  # numbers begin anew
        self.attach()

    def request(self) -> node_pb2.AttachRequest:
        """Return the present coordinator's request."""
        request = node_pb2.AttachRequest(
            job=self.job,
            job_id=JOB_ID,
            coordinator_number=self.coordinator_number,
            job_name="a job",
            store_id=self.store_id,
        )
        request.coordinator.CopyFrom(make_identity("chief", 0))
        request.closed.extend(self.closed)
        for function in sorted(self.finished):
            request.finished_starts.append(function)
            request.finished_stops.append(function + 1)
        return request

    def attach(self) -> None:
        """The coordinator attaches."""
        self.store_id = self.process.attach(self.request())
        self.process.wait_until_idle()

    @rule(parts=parts, dies=deaths, torn=torn, killed_after=st.booleans())
    def coordinator_dies(self, parts: Drawn, dies: int, torn: bool, killed_after: bool) -> None:
        """And the next one comes, while the server may die, too, or after its first update."""
        self.process.coordinator_dies()
        with self.dying(dies, torn):
            self.next_coordinator()
        if self.died:
            self.start(self.disk.copy)
        elif killed_after and self.can_update:
            if (sent := self.fresh(parts, 1, inside=True)) is not None:
                self.send(sent)
            self.start(self.disk.killed())

    # What happens to the disk meanwhile

    @contextlib.contextmanager
    def dying(self, at: int, torn: bool) -> Iterator[None]:
        """Have the process die in the block, before its nth call, if there are that many."""
        self.disk.copy, self.disk.torn, self.disk.dies_in = None, torn, at or NOWHERE
        yield
        self.process.wait_until_idle()
        self.disk.dies_in = NOWHERE

    @property
    def died(self) -> bool:
        """Whether the process died in the last block."""
        return self.disk.copy is not None

    def at_rest(self) -> None:
        """If all goes well from here, everything that was applied is safe: the next request to save succeeds."""
        self.disk.heal()
        self.process.manager.save()
        self.process.wait_until_idle()
        self.disk.failed = False  # no more refusals
        self.all_safe()

    def all_safe(self) -> None:
        """Note that a generation holds everything."""
        for held in self.all_held():
            for entry in held.entries:
                entry.safe = True

    def all_held(self) -> Iterator[Held]:
        """Yield all shards."""
        return (held for shards in self.shards.values() for held in shards)

    # Creations

    def create(self, request: ps_pb2.CreateRequest, *buffers: bytes) -> bool:
        """Return whether it was acknowledged: then it is on disk, with all that was applied before."""
        try:
            self.process.push(ps_pb2.Request(create=request), *buffers)
        except PsClusterError:
            assert self.disk.failed, "refused without a reason"
            return False
        return True

    @rule(two=st.booleans(), dies=deaths, torn=torn)
    def make(self, two: bool, dies: int, torn: bool) -> None:
        """A variable of one shard or of two."""
        if len(self.shards) >= 4:
            return
        self.last_variable += 1
        variable_id, count = self.last_variable, 2 if two else 1
        ends = [LENGTH * (index + 1) for index in range(count)]
        spec = ps_pb2.VariableSpec(
            id=variable_id,
            name=f"v{variable_id}",
            dtype="float64",
            shape=[ends[-1]],
            splits=[{"ends": ends}],
            owners=[0] * count,
        )
        zeros = b"".join(bytes(chunk) for chunk in padded(*[np.zeros(LENGTH)] * count).chunks)
        with self.dying(dies, torn):
            made = self.create(ps_pb2.CreateRequest(job=self.job, variable=spec), zeros)
        if self.died:
            self.start(self.disk.copy, perhaps={variable_id: [Held() for _ in range(count)]})
            return
        self.shards[variable_id] = [Held() for _ in range(count)]
        if not made:
            self.at_rest()  # it is repeated until it succeeds
        self.all_safe()

    @rule(chosen=numbers, dies=deaths, torn=torn)
    def delete(self, chosen: int, dies: int, torn: bool) -> None:
        """A variable."""
        if not self.shards:
            return
        variable_id = sorted(self.shards)[chosen % len(self.shards)]
        with self.dying(dies, torn):
            try:
                request = ps_pb2.DeleteRequest(job=self.job, name=f"v{variable_id}")
                self.process.service.delete(request, FakeCall())  # type: ignore[arg-type]
                deleted = True
            except PsClusterError:
                assert self.disk.failed
                deleted = False
        gone = self.shards.pop(variable_id)
        if self.died:
            self.start(self.disk.copy, perhaps={variable_id: gone})
            return
        if not deleted:
            self.at_rest()
        self.all_safe()

    @rule(rate=st.sampled_from([1.0, 2.0, 4.0]), dies=deaths, torn=torn)
    def declare(self, rate: float, dies: int, torn: bool) -> None:
        """Declare the optimizer, or another learning rate for it."""
        numbers, flags = RULES["sgd"](learning_rate=rate).to_spec()
        spec = ps_pb2.OptimizerSpec(id=OPTIMIZER, name="o", rule="sgd", numbers=numbers, flags=flags)
        with self.dying(dies, torn):
            made = self.create(ps_pb2.CreateRequest(job=self.job, optimizer=spec))
        if self.died:
            self.rates.add(rate)
            self.start(self.disk.copy)
            return
        self.rates = {rate}
        if not made:
            self.at_rest()
        self.all_safe()

    # Updates

    @property
    def kinds(self) -> list[str]:
        return ["add", "assign"] if 0.0 in self.rates or len(self.rates) > 1 else ["add", "assign", "gradient"]

    @property
    def can_update(self) -> bool:
        return bool(self.shards) and self.last_element < LENGTH - 9

    @rule(
        requests=st.lists(st.tuples(parts, st.booleans()), min_size=1, max_size=3),
        worker=st.integers(1, 2),
        dies=deaths,
        torn=torn,
    )
    def update(self, requests: list[tuple[Drawn, bool]], worker: int, dies: int, torn: bool) -> None:
        """By functions and clients, of one to three shards each."""
        for left, (parts, inside) in zip(reversed(range(len(requests))), requests, strict=True):
            if not self.can_update:
                return
            sent = self.fresh(parts, worker, inside)
            if sent is not None:
                self.send(sent, 0 if left else dies, torn)

    def fresh(self, drawn: Drawn, worker: int, inside: bool) -> Sent | None:
        """A new request; None if its worker is given up."""
        incarnation = 1000 * self.coordinator_number + worker
        if incarnation in self.closed:
            return None
        shards = [(variable, shard) for variable, held in self.shards.items() for shard in range(len(held))]
        parts = []
        for index, kind in drawn:
            self.last_element += 1
            parts.append((self.kinds[kind % len(self.kinds)], *shards[index % len(shards)], self.last_element))
        function = sequence = 0
        if inside:
            self.last_function += 1
            function = self.last_function
        else:
            self.last_sequence += 1
            sequence = self.last_sequence
        sent = Sent(self.job, incarnation, function, sequence, parts)
        self.sent.append(sent)
        return sent

    @rule(chosen=numbers, other=st.booleans(), dies=deaths, torn=torn)
    def send_again(self, chosen: int, other: bool, dies: int, torn: bool) -> None:
        """A client whose request was not answered; a function that runs again, elsewhere; a copy that comes late."""
        if not self.sent:
            return
        latest = self.sent[-8:]
        sent = latest[chosen % len(latest)]
        if not sent.function and sent.answered and sent.boot_id != self.lives:
            return  # connections die with the process, and late copies with them
        if other and sent.function:
            sent.incarnation = sent.incarnation + (1 if sent.incarnation % 1000 == 1 else -1)
        self.send(sent, dies, torn)

    def below(self, sent: Sent) -> int:
        """Return the number below which all requests of this client were answered."""
        mine = [other for other in self.sent if other.incarnation == sent.incarnation and not other.function]
        return min([sent.sequence, *(other.sequence for other in mine if not other.answered)])

    def message(self, sent: Sent) -> tuple[ps_pb2.UpdateRequest, list[bytes]]:
        """Return the message of a request, and its payload."""
        request = ps_pb2.UpdateRequest(job=sent.job, incarnation=sent.incarnation, function=sent.function)
        request.sequence = sent.sequence
        if not sent.function:
            request.settled = self.below(sent)
        buffers = []
        for nth, (kind, variable, shard, element) in enumerate(sent.parts, 1):
            item = request.items.add(variable=variable, shard=shard, nth=nth)
            value = float(element) if kind == "assign" else 1.0
            item.kind = {"add": ps_pb2.ADD, "assign": ps_pb2.ASSIGN, "gradient": ps_pb2.APPLY_GRADIENT}[kind]
            item.optimizer = OPTIMIZER if kind == "gradient" else 0
            item.rows.ids, item.value_bytes = 1, 8
            item.boot_id, item.seen = self.told.get((variable, shard), (0, 0))
            ids = np.array([0 if kind == "assign" else element])
            buffers += [bytes(chunk) for chunk in padded(ids, np.array([value])).chunks]
        return request, buffers

    def send(self, sent: Sent, dies: int = 0, torn: bool = False) -> None:
        """Send it, and note the outcome."""
        request, buffers = self.message(sent)
        refused = self.refused(sent)
        if not refused and any(variable not in self.shards for _, variable, _, _ in sent.parts):
            with pytest.raises(PsClusterError):
                self.process.push(ps_pb2.Request(update=request), *buffers)
            return
        if any(kind == "gradient" for kind, *_ in sent.parts) and "gradient" not in self.kinds:
            return
        reply = error = None
        with self.dying(dies, torn):
            try:
                reply = self.process.push(ps_pb2.Request(update=request), *buffers).update
            except PsClusterError as raised:
                error = raised
        if refused:
            assert isinstance(error, StaleError), f"it was to be refused: {error or reply}"
        else:
            assert error is None or (isinstance(error, UnavailableError) and self.disk.failed), error
            if error is None or "updates are refused" not in str(error):
                self.applied(sent, None if self.died else reply)
        sent.boot_id = self.lives
        if self.died:
            self.start(self.disk.copy)
        elif error is not None and not refused and self.lives % 2:
            self.at_rest()
            self.send(sent)  # without an answer it is sent again, and served

    def refused(self, sent: Sent) -> bool:
        """Return whether the request must be refused."""
        if sent.job != self.job or sent.incarnation in self.closed or sent.function in self.finished:
            return True
        return not sent.function and sent.sequence < self.settled.get(sent.incarnation, 0)

    def applied(self, sent: Sent, reply: ps_pb2.UpdateReply | None) -> None:
        """Note that items that were not applied before are applied now; with a reply they are acknowledged."""
        fresh = 0
        for item, (kind, variable, shard, element) in enumerate(sent.parts):
            held = self.shards[variable][shard]
            entry = next((applied for applied in held.entries if applied.key == sent.key(item)), None)
            if entry is None:
                fresh += 1
                value = {"add": 1.0, "assign": float(element), "gradient": -max(self.rates)}[kind]
                entry = Entry(sent.key(item), kind, element, value)
                held.entries.append(entry)
            if reply is not None:
                entry.told = True
                entry.safe = entry.safe or self.kind is Durability.LOG
        if reply is None:
            return
        assert (reply.applied, reply.repeated_) == (fresh, len(sent.parts) - fresh), "not applied once"
        sent.answered = True
        if not sent.function:
            self.settled[sent.incarnation] = max(self.settled.get(sent.incarnation, 0), self.below(sent))
        for (_, variable, shard, _), count in zip(sent.parts, reply.updates, strict=True):
            boot_id, before = self.told.get((variable, shard), (0, 0))
            self.told[variable, shard] = reply.boot_id, max(count, before if boot_id == reply.boot_id else 0)

    # What the coordinator reports

    @rule(chosen=st.lists(numbers, min_size=1, max_size=3))
    def finish(self, chosen: list[int]) -> None:
        """Functions have ended: nothing more of them is applied."""
        left = sorted(set(range(1, self.last_function + 1)) - self.finished)
        if not left:
            return
        functions = list({left[index % len(left)] for index in chosen})
        request = ps_pb2.FinishFunctionsRequest(
            job=self.job, starts=functions, stops=[start + 1 for start in functions]
        )
        self.process.service.finish_functions(request, FakeCall())  # type: ignore[arg-type]
        self.finished.update(functions)

    @rule(worker=st.integers(1, 2))
    def close_worker(self, worker: int) -> None:
        """A worker is given up."""
        incarnation = 1000 * self.coordinator_number + worker
        request = ps_pb2.CloseIncarnationRequest(job=self.job, incarnation=incarnation)
        self.process.service.close_incarnation(request, FakeCall())  # type: ignore[arg-type]
        self.closed.append(incarnation)

    # Generations, deaths, troubles

    @rule(dies=deaths, torn=torn)
    def save(self, dies: int, torn: bool) -> None:
        """Save a generation."""
        with self.dying(dies, torn):
            try:
                self.process.manager.save()
                saved = True
            except PsClusterError:
                assert self.disk.failed
                saved = False
        if self.died:
            self.start(self.disk.copy)
        elif saved:
            self.all_safe()

    @rule(parts=parts, inside=st.booleans(), at=st.integers(1, 6), dies=deaths, torn=torn, killed_after=st.booleans())
    def save_with_an_update_meanwhile(
        self, parts: Drawn, inside: bool, at: int, dies: int, torn: bool, killed_after: bool
    ) -> None:
        """An update comes as the generation is written: it is in it or after it, and acknowledged at once."""
        if self.disk.failed:
            return
        self.disk.heal()
        sent = self.fresh(parts, 1, inside) if self.can_update else None
        if sent is None:
            return
        request, buffers = self.message(sent)
        replies: list[ps_pb2.UpdateReply | None] = []

        def happens() -> None:
            reply = self.process.push(ps_pb2.Request(update=request), *buffers).update
            replies.append(reply if self.disk.copy is None else None)  # after the death there is no answer

        self.disk.meanwhile, self.disk.happens_in = happens, at
        with self.dying(dies, torn):
            self.process.manager.save()
        self.disk.meanwhile = None
        if not self.died:
            self.all_safe()
        for reply in replies:
            self.applied(sent, reply)
        sent.boot_id = self.lives
        if self.died or killed_after:
            self.start(self.disk.copy or self.disk.killed())

    @rule(calls=st.integers(1, 12), code=st.sampled_from([errno.ENOSPC, errno.EIO]), lasting=st.booleans())
    def trouble(self, calls: int, code: int, lasting: bool) -> None:
        """Have the disk fail once, or from some call on."""
        self.disk.fails_in, self.disk.code, self.disk.lasting = calls, code, lasting

    @rule()
    def disk_is_well(self) -> None:
        """Again."""
        if self.disk.failed:
            self.at_rest()

    kinds_of_state = st.sampled_from([Durability.LOG, Durability.LOG, Durability.SNAPSHOT])

    @rule(kind=kinds_of_state)
    def kill(self, kind: Durability) -> None:
        """Kill the process and restart it, perhaps with another kind of durability."""
        self.start(self.disk.killed(), kind=kind)

    @rule(kind=kinds_of_state)
    def stop(self, kind: Durability) -> None:
        """Stop the server in an orderly way, which loses nothing."""
        self.at_rest()
        assert self.process.service.drain.close(1)
        self.start(self.process.folder, kind=kind)

    def start(
        self, folder: Path | None, perhaps: dict[int, list[Held]] | None = None, kind: Durability | None = None
    ) -> None:
        """Start the next process, with the folder that the previous one left."""
        assert folder is not None
        self.disk.heal()
        self.disk.folder, self.disk.copy = None, None
        self.process.end()
        if self.process.folder != folder:
            shutil.rmtree(self.process.folder)
            folder = folder.rename(self.base / f"s{self.lives}")  # else names grow with every death
        self.lives += 1
        before, self.kind = self.kind, kind or self.kind
        self.process = Process(folder, self.kind, fsync=self.fsync)
        self.disk.folder, self.disk.failed = folder, False
        self.settled.clear()
        self.compare(before, perhaps or {})
        with pytest.raises(UnavailableError, match="is waiting for its coordinator"):
            self.process.push(ps_pb2.Request(update=ps_pb2.UpdateRequest(job=self.job)))
        self.attach()
        again = [sent for sent in self.sent if not self.refused(sent) and (sent.function or not sent.answered)]
        if again and self.lives % 2:  # else later, perhaps
            self.send(again[-1])

    def compare(self, kind: Durability, perhaps: dict[int, list[Held]]) -> None:
        """Compare what was restored with the model, and continue the model with what was restored."""
        store = self.process.role.store
        variables, optimizers, _ = store.held()
        here = {held.spec.id for held in variables}
        assert here - perhaps.keys() == self.shards.keys(), "variables that were made, and not deleted"
        self.shards |= {variable_id: held for variable_id, held in perhaps.items() if variable_id in here}
        rates = {known.spec.numbers["learning_rate"] for known in optimizers} or {0.0}
        assert rates <= self.rates, "another learning rate"
        self.rates = rates
        for variable_id, shards in self.shards.items():
            for shard, held in enumerate(shards):
                self.compare_shard(kind, held, values_of(store, variable_id, shard))

    @staticmethod
    def compare_shard(kind: Durability, held: Held, values: Any) -> None:
        assigned = [entry.element for entry in held.entries if entry.kind == "assign"]
        assert values[0] in (0, *assigned)
        last = assigned.index(int(values[0])) if values[0] else -1
        present = []
        for entry in held.entries:
            if entry.kind == "assign":
                here = assigned.index(entry.element) <= last
            else:
                here = values[entry.element] != 0
            if here:
                present.append(entry)
            else:
                assert not entry.safe, f"{entry} is lost"
                held.lost += entry.told
        if kind is Durability.SNAPSHOT:
            assert present == held.entries[: len(present)], "one is there, and one before it is not"
        held.entries = present
        for entry in present:
            entry.safe = True

    @rule(where=st.floats(0, 1), which=st.integers(0, 20), bit=st.integers(0, 7), newest=st.booleans())
    def damage(self, where: float, which: int, bit: int, newest: bool) -> None:
        """Flip a bit while no process runs: an error, or the right state. Then continue as if nothing had happened."""
        folder = self.disk.folder
        assert folder is not None
        copy = self.disk.killed()
        self.disk.folder = None
        try:
            paths = sorted(path for path in copy.iterdir() if path.name.startswith(("log", "state-")))
            path = max(copy.glob("state-*.manifest")) if newest else paths[which % len(paths)]
            data = bytearray(path.read_bytes())
            while data and not data[-1] and path.name.startswith("log"):
                data.pop()  # space that was reserved, and not written
            if not data:
                return
            at = int(where * (len(data) - 1))
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1 << bit]))
            try:
                process = Process(copy, self.kind, fsync=False)
            except ConfigurationError:
                return
            try:
                self.look_at(process)
            finally:
                process.end()
        finally:
            shutil.rmtree(copy)
            self.disk.folder = folder

    def look_at(self, process: Process) -> None:
        """Check that no value is wrong, and that applied updates are not applied again."""
        here = {held.spec.id for held in process.role.store.held()[0]}
        process.attach(self.request())
        for variable_id in here & self.shards.keys():
            for shard, held in enumerate(self.shards[variable_id]):
                values = values_of(process.role.store, variable_id, shard)
                right = {entry.element: entry.value for entry in held.entries if entry.kind != "assign"}
                assigned = [entry.element for entry in held.entries if entry.kind == "assign"]
                assert values[0] in (0, *assigned)
                assert all(value in (0, right.get(element, 0)) for element, value in enumerate(values[1:], 1))
        for sent in self.sent[-8:]:
            if not sent.function or self.refused(sent) or not all(item[1] in here for item in sent.parts):
                continue
            if any(kind == "gradient" for kind, *_ in sent.parts) and "gradient" not in self.kinds:
                continue
            request, buffers = self.message(sent)
            if any(variable not in self.shards for _, variable, _, _ in sent.parts):
                continue
            with contextlib.suppress(UnavailableError):
                process.push(ps_pb2.Request(update=request), *buffers)
            for kind, variable, shard, element in sent.parts:
                if kind == "add":
                    assert values_of(process.role.store, variable, shard)[element] <= 1, "applied twice"

    # What always holds

    @invariant()
    def the_values_are_those_of_the_updates(self) -> None:
        """Check that each update counts once, and the last assignment."""
        if not hasattr(self, "process"):
            return
        store = self.process.role.store
        for variable_id, shards in self.shards.items():
            for shard, held in enumerate(shards):
                expected = np.zeros(LENGTH)
                for entry in held.entries:
                    expected[0 if entry.kind == "assign" else entry.element] = entry.value
                assert values_of(store, variable_id, shard).tolist() == expected.tolist()
        lost = {f"v{variable_id}": max(held.lost for held in shards) for variable_id, shards in self.shards.items()}
        assert all(count <= lost[name] for name, count in store.lost.items()), "more losses than there were"

    def teardown(self) -> None:
        """Stop the server, and remove the folder."""
        if not hasattr(self, "process"):
            return
        try:
            self.disk.heal()
            self.disk.folder = None
            self.process.end()
        finally:
            self.patch.undo()
            shutil.rmtree(self.base)


TestServer = ServerMachine.TestCase
TestServer.__doc__ = "What was acknowledged is there, as its durability says, and nothing is applied twice."
TestServer.settings = settings(search(25, 30), suppress_health_check=list(HealthCheck))
