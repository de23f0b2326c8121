"""A mesh's session: records operations, and sends them as programs to the processes that have the devices.

An operation is recorded, and sent at once if nothing sent before is still running and what is recorded keeps devices
busy for longer than it takes to send it; otherwise it goes with the next that is sent, so that a thousand small
operations are a few messages, and an operation and its fetch are one. A fetch sends what is recorded, and waits for
that program. Without a fetch, what was recorded last may stay here.

States of a program:

    RECORDING --nothing runs and it is worth a message, it is large, or a fetch--> SENT
    SENT      --it has ended----------------------------------> over     its arrays are on the devices
              --it failed, or was cancelled-------------------> FAILED   its arrays are lost
    RECORDING --it can't be sent, or an error is raised-------> FAILED

An error is raised at the next fetch, or by the next operation that is sent: the first one, once. After that, arrays of
programs that have failed, and those that were recorded when it was raised, raise TensorLostError; all others can be
used. What a worker held when it died is lost as well; that is found by the program that uses it next.

A program may begin on one worker while the one before still runs on others, and that one may have to run again. So
arrays that it reads are forgotten with the program after the next, unless they are large: then the next one forgets
them, and waits until the one before has ended.

Two locks, taken in this order: one is held while a program is sent, so that programs are sent in the order in which
they were recorded; the other guards what is recorded, and is never held for long. An operation that finds a program
being sent does not wait: it is recorded, and goes with a later one.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.errors import MisuseError, TensorLostError, WaitTimeoutError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.execution.recording import (
    Loaded,
    Recording,
    Ref,
    Running,
    Sendable,
    Stored,
    Updating,
    described,
    payloads_by_task,
)
from pscluster.spmd.execution.sent_programs import SentPrograms
from pscluster.worker.programs.local.blocks import type_of_arrays
from pscluster.worker.programs.program import ArrayType

Array = npt.NDArray[Any]
T = TypeVar("T")

MAX_INSTRUCTIONS = 512
"""That are recorded before a program is sent although others still run."""

MAX_PAYLOAD_BYTES = 32 << 20
"""The same, of arrays that go with it."""

WORTH_INSTRUCTIONS = 16
"""That are recorded before a program is sent when nothing runs."""

WORTH_WORK = 1 << 16
"""The same, of elements that are computed, made or moved: they take about as long as a message."""

_numbers = itertools.count(1)  # of arrays: workers keep those of all meshes together


@functools.lru_cache(maxsize=1024)
def _places(layout: Layout, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Return where each block lies in an array of this shape, in the order of the devices that are asked for them."""
    return [layout.slices(shape, device) for device in sorted(layout.owners)]


class Executor(Protocol):
    """Has the devices of a mesh."""

    def start(self, program: Sendable) -> Running:
        """Run a program after all that were started before."""

    def check(self) -> None:
        """Raise the error of something else because of which no program can be started now, if there is one."""


class Session:
    """Records and sends the operations of one mesh: see the module's docstring. Thread-safe."""

    has_values = True
    """Whether arrays have values that can be fetched."""

    def __init__(self, mesh: Mesh, executor: Executor, tasks: Sequence[int] | None = None) -> None:
        self.mesh = mesh
        self.tasks = range(len(mesh.tasks)) if tasks is None else tasks
        """Those whose blocks come from here, and can be fetched: positions in `mesh.tasks`."""
        self.dropped: deque[int] = deque()  # numbers of arrays that nothing refers to; may be added to at any time
        self.executor = executor
        self._sending = threading.RLock()
        self._lock = threading.RLock()
        self._programs = itertools.count(1)
        self._recording = self._new_recording()
        self._sent = SentPrograms(self.dropped)
        self._has_updated = False  # a variable, ever

    @functools.cached_property
    def devices(self) -> tuple[int, ...]:
        """The devices of its tasks, by number."""
        return tuple(sorted(device for task in self.tasks for device in self.mesh.devices_of(task)))

    def gather(self, facts: list[Any]) -> list[Any]:
        """Return what is known of each device of the mesh, given it for `devices`: plain data."""
        return facts

    def why_lost(self, ref: Ref) -> str | None:
        """Return why the program that makes an array has failed; None if it has not, as far as is known."""
        return self._sent.why_failed(ref.program)

    # Operations

    def load(self, of: ArrayType, blocks: Mapping[int, Array]) -> Ref:
        """Return an array made of blocks, by their numbers in its layout. The blocks must not change any more.

        They are sent with the first program that needs the array. If a worker dies while that runs, they are sent
        again; and if that fails, with the next one.
        """
        ref = Ref(self, next(_numbers), of, 0, "distribute")
        ref.blocks = blocks
        return ref

    def create(self, of: ArrayType, maker: str, numbers: Sequence[float]) -> Ref:
        """Return an array that is made in place; see `worker.programs.makers`."""
        with self._lock:
            ref = self._ref(of, maker)
            self._recording.create(ref, maker, numbers)
        self._send_soon()
        return ref

    def move(self, source: Ref, of: ArrayType) -> Ref:
        """Return the array in another layout."""
        with self._lock:
            self._use(source)
            ref = self._ref(of, source.made_by)
            self._recording.move(ref, source)
        self._send_soon()
        return ref

    def read(self, variable: Stored) -> Ref:
        """Return the value that a variable has when the program runs."""
        self._before_read(variable)
        with self._lock:
            ref = self._ref(variable.type, "reading a variable")
            self._recording.read(ref, variable)
        self._send_soon()
        return ref

    def value_of(self, variable: Stored, make: Callable[[Ref], T]) -> T:
        """Return what is made of the value of a variable."""
        return make(self.read(variable))

    def update(self, updates: Sequence[Updating]) -> None:
        """Update variables, all at once. Their values must not have been relaid out for it."""
        with self._lock:
            for updating in updates:
                self._use(updating.source)
            for updating in updates:
                self._recording.update(updating)
            self._has_updated = True
        self._send_soon()

    def _before_read(self, variable: Stored) -> None:
        """Send what is recorded if it updates the variable: a program reads before it updates."""
        with self._lock:
            updates = self._recording.updates(variable)
        if updates:
            self.flush()

    def compute(
        self,
        types: Sequence[ArrayType],
        function: str,
        inputs: Sequence[Ref],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        work: int = 0,
    ) -> list[Ref]:
        """Return the results of a function that is called on each device's blocks, which is as much `work`."""
        with self._lock:
            for source in inputs:
                self._use(source)
            refs = [self._ref(of, function) for of in types]
            self._recording.compute(refs, function, inputs, args, kwargs, work)
        self._send_soon()
        return refs

    def call(
        self,
        program: Sendable,
        definition: Callable[..., Any] | None,
        inputs: Sequence[Ref],
        types: Sequence[ArrayType],
        name: str,
    ) -> list[Ref]:
        """Run a program that was recorded before, with these arrays, and return what it makes.

        Workers are sent a definition once, in place of the program. `name` is the program's, for people.
        """
        outputs = [next(_numbers) for _ in types]
        number, running = self._call(program, definition, inputs, outputs)
        made = [Ref(self, output, of, number, name) for output, of in zip(outputs, types, strict=True)]
        for nth, place in enumerate(program.sent_here):
            made[place].sent_here = running, nth
        return made

    def call_untyped(
        self, program: Sendable, definition: Callable[..., Any], inputs: Sequence[Ref], layouts: Sequence[Layout]
    ) -> list[Ref]:
        """Run a program whose only outputs are arrays of unknown types, in these layouts, and wait for their types."""
        outputs = [next(_numbers) for _ in layouts]
        try:
            number, running = self._call(program, definition, inputs, outputs)
            self._wait(None)
            fetched = iter(running.result()[0][-1])
        except BaseException:
            self.dropped.extend(outputs)  # some of the workers may have them
            raise
        types = [type_of_arrays(next(fetched), next(fetched), layout) for layout in layouts]
        name = definition.__qualname__
        return [Ref(self, output, of, number, name) for output, of in zip(outputs, types, strict=True)]

    def _call(
        self,
        program: Sendable,
        definition: Callable[..., Any] | None,
        inputs: Sequence[Ref],
        outputs: list[int],
    ) -> tuple[int, Running]:
        """Send a program of its own, after what is recorded. Return its number, too."""
        with self._sending:
            if len(self._recording):
                self._send()
            self._reap()
            self._raise_first()
            with self._lock:
                for source in inputs:
                    self._check(source)
                sent = {place: source.blocks for place, source in enumerate(inputs) if source.blocks is not None}
                # What is recorded next comes after it.
                number = self._recording.number
                self._recording = self._new_recording()
                numbers = [source.number for source in inputs]
                dropped, waits = self._forgettable(numbers)
            arrays = [(blocks, inputs[place].type) for place, blocks in sent.items()]
            more = payloads_by_task(self.mesh, self.tasks, arrays)
            started = replace(
                program,
                inputs=numbers,
                outputs=outputs,
                forgotten=sorted(dropped),
                payloads=[[*program.payloads[task], *also] for task, also in zip(self.tasks, more, strict=True)],
                definition=definition,
                sent=list(sent),
                waits=waits,
            )
            self._has_updated |= program.updates
            running = self._start(
                number, started, inputs, [(weakref.ref(inputs[place]), of) for place, of in sent.items()]
            )
            for place in sent:
                inputs[place].blocks = None
            return number, running

    def blocks(self, source: Ref, timeout: float | None = None) -> list[Array]:
        """Return the block of each of `devices`."""
        return self._fetch(source, every_device=True, timeout=timeout)

    def whole(self, source: Ref, timeout: float | None = None) -> Array:
        """Return the whole array, a new one: each block comes from one device."""
        if source.sent_here is not None:
            running, nth = source.sent_here
            self._wait_for([running], timeout)
            with self._lock:
                self._check(source)
            return next(block for fetched in running.result() for block in fetched[nth]).copy()
        blocks = self._fetch(source, every_device=False, timeout=timeout)
        if len(blocks) == 1:
            return blocks[0].copy()
        of = source.type
        out = np.empty(of.shape, of.dtype)
        for place, block in zip(_places(of.layout, of.shape), blocks, strict=True):
            out[place] = block
        return out

    def _fetch(self, source: Ref, *, every_device: bool, timeout: float | None) -> list[Array]:
        """Return blocks of an array, in the order of their devices: of every device, or of each block's first."""
        with self._sending:
            self._reap()
            self._raise_first()
            with self._lock:
                self._use(source)
                self._recording.fetch(source, every_device=every_device)
            running = self._send()
        self._wait(timeout)
        fetched = running.result()
        owners = self.devices if every_device else sorted(source.type.layout.owners)
        by_task = dict(zip(self.tasks, (iter(results[-1]) for results in fetched), strict=True))
        return [next(by_task[self.mesh.task_of[device]]) for device in owners]

    def flush(self) -> None:
        """Send what is recorded. Raises the first error that has not been raised."""
        with self._sending:
            if len(self._recording):
                self._send()

    def wait(self, timeout: float | None = None) -> None:
        """Send what is recorded, and wait until everything has ended. Raises the first error."""
        self.flush()
        self._wait(timeout)

    def settle(self, timeout: float, *, reads: bool = False) -> None:
        """Send what is recorded if variables have been updated, or with `reads`; wait until everything has ended.

        Raises no error of what was computed: the next fetch does. But the error of a scheduled function, if that has
        not been raised: until then nothing can be sent, and what is recorded stays so. WaitTimeoutError after `timeout`
        seconds.
        """
        if not (self._has_updated or reads):
            return
        with self._sending:
            self._reap()
            if not self._sent.has_unraised and len(self._recording):
                self.executor.check()
                self._send()
        self._end(self._running(), timeout)

    def _wait(self, timeout: float | None) -> None:
        """Wait until everything that was sent has ended. Raises the first error, or WaitTimeoutError."""
        self._wait_for(self._running(), timeout)

    def _wait_for(self, sent: Sequence[Running], timeout: float | None) -> None:
        """Wait until these programs have ended. Raises the first error of all that have, or WaitTimeoutError."""
        self._end(sent, timeout)
        self._reap()
        self._raise_first()

    def _running(self) -> list[Running]:
        with self._lock:
            return self._sent.running

    @staticmethod
    def _end(sent: Sequence[Running], timeout: float | None) -> None:
        """Wait until these programs have ended, whatever came of them. WaitTimeoutError after `timeout` seconds."""
        if timeout is not None:
            timeout = checks.real("timeout", timeout, ", or None", kind="number of seconds", finite=False, at_least=0)
        deadline = None if timeout is None else time.monotonic() + timeout
        for running in sent:  # in order: programs may end in another one, but the first error is the cause
            if not running.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise WaitTimeoutError(
                    f"not computed within {timeout:g} s: workers of the mesh are computing, busy with something else, "
                    "or gone (coordinator.explain() says what is waiting for what); the computation continues"
                )

    # Sending

    def _ref(self, of: ArrayType, made_by: str) -> Ref:
        return Ref(self, next(_numbers), of, self._recording.number, made_by)

    def _new_recording(self) -> Recording:
        return Recording(self.mesh, next(self._programs), self.tasks)

    def _use(self, ref: Ref) -> None:
        """Record that an array's blocks are sent, if they are still here. TensorLostError if it was never made."""
        if self._sent.any_failed or ref.session is not self:
            self._check(ref)
        if ref.blocks is not None:
            self._recording.load(ref, ref.blocks)
            ref.blocks, ref.program = None, self._recording.number

    def _check(self, ref: Ref) -> None:
        """Raise TensorLostError if an array was never made, and MisuseError if it is one of a traced function."""
        if not ref.session.has_values:
            raise MisuseError(
                f"{described(ref.made_by, ref.type)}, is part of a traced function, and has no value outside of its "
                "call: return it from the function, and use what the call returns"
            )
        if (why := ref.session.why_lost(ref)) is not None:
            raise TensorLostError(
                f"{described(ref.made_by, ref.type)}, was not made, since an operation has failed: {why}"
            )

    def _send_soon(self) -> None:
        """Send what is recorded, unless it can wait for something that runs."""
        recording = self._recording
        large = len(recording) >= MAX_INSTRUCTIONS or recording.payload_bytes >= MAX_PAYLOAD_BYTES
        if not large and len(recording) < WORTH_INSTRUCTIONS and recording.work < WORTH_WORK:
            return
        self._reap()
        if self._sent.any_running and not large:
            return
        if self._sending.acquire(blocking=large):
            try:
                if len(self._recording):
                    self._send()
            finally:
                self._sending.release()

    def _send(self) -> Running:
        """Send what is recorded. In the order of sending."""
        self._reap()
        self._raise_first()
        with self._lock:
            recording, self._recording = self._recording, self._new_recording()
            dropped, waits = self._forgettable(recording.inputs)
            inputs = list(recording.inputs.values())
            program = recording.finish(dropped)
            if waits:
                program = replace(program, waits=True)
        return self._start(recording.number, program, inputs, recording.loaded)

    def _start(self, number: int, program: Sendable, inputs: Sequence[Ref], loaded: Sequence[Loaded]) -> Running:
        try:
            running = self.executor.start(program)
        except BaseException as error:
            with self._lock:
                self._sent.fail(number, error, loaded, program.forgotten)
            raise
        with self._lock:
            self._sent.add(number, running, inputs, loaded, program.forgotten)
        return running

    def _forgettable(self, inputs: Collection[int]) -> tuple[set[int], bool]:
        return self._sent.forgettable(inputs, alone=len(self.mesh.tasks) == 1)

    def _reap(self) -> None:
        """Take note of programs that have ended."""
        if self._sent.any_running:
            with self._lock:
                self._sent.reap()

    def _raise_first(self) -> None:
        with self._lock:
            if (error := self._sent.take_error(self._recording.number, self._recording.loaded)) is None:
                return
            self._recording = self._new_recording()
        try:
            raise error.with_traceback(None)
        finally:
            del error  # it refers to this frame: a cycle would keep the frames of all callers for a while
