"""What a task carries: a function, its arguments, and who waits for the result."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pscluster.coordinator.data.dataset import DataPart
from pscluster.coordinator.scheduling.remote_value import RemoteValue
from pscluster.coordinator.scheduling.scheduler import Task
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.handles import Handle
from pscluster.core.transport.channels import MAX_INLINE_BYTES
from pscluster.core.values import MAX_DEPTH, ClassDefiner, children, nesting, splice
from pscluster.v1 import value_pb2, worker_pb2

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


_STEP_BYTES = 64  # of a step without arguments

PLACEHOLDER = "remote-value"


@dataclass(slots=True)
class Call:
    """What a task carries: the function, its arguments, and who waits for the result.

    A million of them may be queued: what is empty is shared, and the message is made when it is sent.
    """

    function: CapturedFunction
    result: weakref.ref[RemoteValue]
    arguments: value_pb2.Value | None = None
    attachments: list[memoryview] | tuple[()] = ()  # large arrays among them
    # RemoteValues among them, by the key of their placeholder.
    remote: Mapping[str, RemoteValue] = field(default_factory=_nothing)
    # Classes of dataclasses among them, which the worker may have to be given; and what adds to them.
    classes: Mapping[str, CapturedFunction] = field(default_factory=_nothing)
    define: ClassDefiner | None = None
    # Handles among them: a per-worker iterator lives on the workers for as long as its handle does.
    handles: Sequence[Handle] = ()
    deaths: Sequence[str] = ()  # of workers that were running it
    retries: int = 0  # how often it may raise and is run again
    timeout: float | None = None  # seconds that it may run, each time
    key: int = 0  # its name in the work, for the servers; 0: it has none
    parts: Sequence[DataPart] = ()  # of distributed datasets, among the handles
    isolated: bool = False  # its error is that of who waits for it, and of nobody else
    applied: bool = False  # some attempt may have applied updates

    @property
    def data_retries(self) -> int:
        """How often it is run again when its examples can't be read."""
        return max((part.dataset.retries for part in self.parts), default=0)

    @property
    def size(self) -> int:
        """Bytes in the message that runs it, about."""
        return _STEP_BYTES if self.arguments is None else _STEP_BYTES + self.arguments.ByteSize()

    def check_size(self) -> int:
        """Return the size; raise TypeError where it is too large for a message."""
        if (size := self.size) > MAX_INLINE_BYTES:
            raise TypeError(
                f"the arguments take {size >> 20} MiB in one message, more than {MAX_INLINE_BYTES >> 20}: pass arrays "
                "or bytes, which travel beside it, in place of many small objects"
            )
        return size


@dataclass(frozen=True, slots=True)
class ResourceRecipe:
    """A per-worker resource, to be built on every worker, anew on those that return."""

    message: worker_pb2.Resource
    function: CapturedFunction


def placeholder(key: str) -> value_pb2.Value:
    """What stands for a RemoteValue argument until its value is ready."""
    return value_pb2.Value(handle=value_pb2.Handle(kind=PLACEHOLDER, key=key))


def fill_arguments(call: Call) -> None:
    """Put the values of RemoteValue arguments, ready now, in the places of their placeholders.

    Raises:
        TypeError: with them the arguments can't be sent.
    """
    if not call.remote or call.arguments is None or isinstance(call.attachments, tuple):
        return
    todo = [call.arguments]
    while todo:
        value = todo.pop()
        kind = value.WhichOneof("kind")
        if kind == "handle" and value.handle.kind == PLACEHOLDER:
            message, buffers = call.remote[value.handle.key]._encoded()
            value.CopyFrom(splice(message, buffers, call.attachments, define=call.define))
        else:
            todo += children(value, kind)
    call.check_size()
    if nesting(call.arguments) > MAX_DEPTH:
        raise TypeError(f"with the values of RemoteValues its arguments are nested more than {MAX_DEPTH} levels deep")
    call.remote = _NOTHING


def step_of(task: Task[Call], attempt: int, term: int) -> worker_pb2.Step:
    """Return the message that runs a task."""
    call = task.payload
    step = worker_pb2.Step(
        function=task.id,
        attempt=attempt,
        definition=call.function.digest,
        arguments=call.arguments,
        want_result=call.result() is not None,
        key=call.key,
        term=term,
    )
    if call.parts:
        step.parts.extend(part.handle_key for part in call.parts)
        # Whether it is to leave out what it can't read, since others have tried.
        tried = task.failures >= task.data_retries
        step.skips = tried and all(part.dataset.on_error == "skip" for part in call.parts)
    return step


def with_dependents(tasks: Iterable[Task[Call]]) -> list[Task[Call]]:
    """Return these, and those that will never have their arguments without them."""
    found, todo = dict[Task[Call], None](), list(tasks)
    while todo:
        task = todo.pop()
        if task in found:
            continue
        found[task] = None
        value = task.payload.result()
        if value is not None and value.dependents:
            todo += value.dependents
    return list(found)
