"""What a task carries: a function, its arguments, and its result-to-be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pscluster.coordinator.data.data_part import DataPart
from pscluster.coordinator.scheduling.calls.questions import Question
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.handles import Handle
from pscluster.core.limits import MAX_DEPTH
from pscluster.core.transport.channels import MAX_INLINE_BYTES
from pscluster.core.values import splice
from pscluster.core.values.encoding import ClassDefiner
from pscluster.core.values.nesting import children, nesting
from pscluster.v1 import value_pb2, worker_pb2

_NOTHING: Mapping[str, Any] = MappingProxyType({})

_STEP_BYTES = 64  # of a step without arguments

PLACEHOLDER = "remote-value"


@dataclass(slots=True)
class Call:
    """A function, its arguments, and its result-to-be.

    A million of them may be queued: empty members are shared, and the message is made when it is sent.
    """

    function: CapturedFunction
    result: weakref.ref[RemoteValue]
    arguments: value_pb2.Value | None = None
    attachments: list[memoryview] | tuple[()] = ()  # large arrays among them
    # RemoteValues among them, by the key of their placeholder.
    remote: Mapping[str, RemoteValue] = field(default_factory=lambda: _NOTHING)
    # Classes of dataclasses among them, and captured functions, which the worker may lack; and what adds to these.
    classes: Mapping[str, CapturedFunction] = field(default_factory=lambda: _NOTHING)
    define: ClassDefiner | None = None
    # Handles among them: a per-worker iterator lives on the workers as long as its handle.
    handles: Sequence[Handle] = ()
    deaths: Sequence[str] = ()  # of workers that were running it
    parts: Sequence[DataPart] = ()  # of distributed datasets, among the handles
    applied: bool = False  # some attempt may have applied updates
    takes_whole_steps: bool = False  # its updates are applied with a whole step, or not at all
    # Gets what it asks while it runs, on the thread of its worker's connection: it must not block. It may keep a
    # question, and answer later.
    answer: Callable[[Question], None] | None = None

    def may_have_applied(self) -> None:
        """Note that an attempt was lost or left behind: what it has applied is unknown."""
        self.applied |= not self.takes_whole_steps

    @property
    def data_retries(self) -> int:
        """Return how often it is retried when its examples can't be read."""
        return max((part.dataset.retries for part in self.parts), default=0)

    def check_size(self) -> int:
        """Return the approximate bytes of the message that runs it; raise TypeError if they are too many for one."""
        if self.arguments is None:
            return _STEP_BYTES
        if (size := _STEP_BYTES + self.arguments.ByteSize()) > MAX_INLINE_BYTES:
            raise TypeError(
                f"the arguments take {size >> 20} MiB in one message, more than {MAX_INLINE_BYTES >> 20}: pass arrays "
                "or bytes, which travel beside it, in place of many small objects"
            )
        return size


@dataclass(frozen=True, slots=True)
class ResourceRecipe:
    """A per-worker resource, built on every worker, and again on each that comes back."""

    message: worker_pb2.Resource
    function: CapturedFunction
    homes: Sequence[int] = ()  # if it is of replicas in sync: the indices of their workers, in the order of ranks


def placeholder(key: str) -> value_pb2.Value:
    """Return the stand-in for a RemoteValue argument until its value is ready."""
    return value_pb2.Value(handle=value_pb2.Handle(kind=PLACEHOLDER, key=key))


def fill_arguments(call: Call) -> None:
    """Replace placeholders by the values, which are ready. Raise TypeError if the arguments can't be sent with them."""
    if not call.remote or call.arguments is None or isinstance(call.attachments, tuple):
        return
    todo = [call.arguments]
    while todo:
        value = todo.pop()
        kind = value.WhichOneof("kind")
        if kind == "handle" and value.handle.kind == PLACEHOLDER:
            ready = call.remote[value.handle.key]
            value.CopyFrom(splice(ready._message, ready._attachments, call.attachments, define=call.define))
        else:
            todo += children(value, kind)
    call.check_size()
    if nesting(call.arguments) > MAX_DEPTH:
        raise TypeError(f"its arguments, with the values of RemoteValues, are nested more than {MAX_DEPTH} levels deep")
    call.remote = _NOTHING


def add_step(request: worker_pb2.StepsRequest, task: Task[Call], attempt: int, term: int, placements: int) -> None:
    """Add what runs a task to a message: in place, since messages are copied where they are put together."""
    call = task.payload
    step = request.steps.add(
        function=task.id,
        attempt=attempt,
        definition=call.function.digest,
        arguments=call.arguments,
        want_result=call.result() is not None,
        key=task.key,
        term=term,
        placements=placements,
    )
    if task.gang is not None:
        step.gang.CopyFrom(task.gang.described)
        step.gang.rank, step.gang.follows = task.gang.rank_of(task), task.follows
    if call.parts:
        step.parts.extend(part.handle_key for part in call.parts)
        step.skips = task.data_retries_are_used_up and all(part.dataset.on_error == "skip" for part in call.parts)


def with_dependents(tasks: Iterable[Task[Call]]) -> list[Task[Call]]:
    """Return these tasks, and those that need their results, directly or not."""
    chosen, todo = dict[Task[Call], None](), list(tasks)
    while todo:
        task = todo.pop()
        if task in chosen:
            continue
        chosen[task] = None
        if (value := task.payload.result()) is not None and value.dependents:
            todo += value.dependents
    return list(chosen)
