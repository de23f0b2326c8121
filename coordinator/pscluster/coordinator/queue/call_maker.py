"""Makes calls of the script's functions: captures the functions, and encodes the arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pscluster.coordinator.data.data_part import DataPart
from pscluster.coordinator.data.per_worker import PerWorkerDataset, PerWorkerIterator
from pscluster.coordinator.queue.arguments import check_no_part
from pscluster.coordinator.queue.captured_functions import CapturedFunctions
from pscluster.coordinator.scheduling.calls.call import Call, placeholder
from pscluster.coordinator.scheduling.calls.questions import Question
from pscluster.coordinator.scheduling.calls.remote_value import Owner, RemoteValue
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import CapturedFunction, FunctionHandle, partial_of
from pscluster.core.handles import Handle
from pscluster.core.values import HandleResolver, encode_call
from pscluster.v1 import value_pb2
from pscluster.worker.steps.overlap import overlapped

_ELEMENTS = (DataPart, PerWorkerDataset, PerWorkerIterator)
_MAX_OVERLAPPING = 64  # functions with lookups that are captured once; the least recently used are captured again


class CallMaker:
    """Makes the calls of one coordinator.

    Args:
        functions: captures functions.
        resolve_handle: returns the handles in results.
        owner: of the results.
        is_synchronous: whether all workers step together.
    """

    def __init__(
        self, functions: CapturedFunctions, resolve_handle: HandleResolver, owner: Owner, *, is_synchronous: bool
    ) -> None:
        self.functions = functions
        self._resolve_handle = resolve_handle  # the same object for all values
        self._owner = owner
        self._is_synchronous = is_synchronous
        # By the digests of a function and its lookups; the last used one at the end.
        self._overlapping: dict[tuple[str, str], CapturedFunction] = {}

    def make(
        self,
        function: CapturedFunction,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        answer: Callable[[Question], None] | None = None,
    ) -> tuple[RemoteValue, Call]:
        """Return a call with these arguments, as they are now, and its result-to-be."""
        result = RemoteValue(function.name, self._resolve_handle, self._owner)
        call = Call(function, weakref.ref(result), answer=answer)
        if args or kwargs:
            self._encode(call, args or (), dict(kwargs or {}))
        return result, call

    def repeat(self, call: Call) -> tuple[RemoteValue, Call]:
        """Return another call with the same arguments, in the same memory, and its result-to-be.

        Not of one with RemoteValues among them: those take the place of their placeholders there.
        """
        result = RemoteValue(call.function.name, self._resolve_handle, self._owner)
        of_arguments = call.arguments, call.attachments, call.remote, call.classes, call.define, call.handles
        return result, Call(
            call.function, weakref.ref(result), *of_arguments, parts=call.parts, answer=call.answer
        )  # `dataclasses.replace` takes ten times as long

    def _encode(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Encode the arguments, as they are now, into a call."""
        waiting: dict[str, RemoteValue] = {}

        def remote(leaf: Any, _attachments: object) -> value_pb2.Value | None:
            if not isinstance(leaf, RemoteValue):
                return None
            # Another coordinator's value is set under another lock, and names other variables.
            if leaf._resolve_handle is not self._resolve_handle:
                raise MisuseError(f"{leaf!r} is another coordinator's: pass what its fetch() returns")
            waiting[key := str(len(waiting))] = leaf
            return placeholder(key)

        attachments: list[memoryview] = []
        handles: list[Handle] = []
        classes: dict[str, CapturedFunction] = {}

        def define(cls: type) -> str:
            if (known := self.functions.of_class(cls)) is None:
                return ""
            classes[known.digest] = known
            return known.digest

        call.arguments = value_pb2.Value()
        encode_call(
            args, kwargs, attachments=attachments, remote=remote, define=define, into=call.arguments, handles=handles
        )
        # Copies: the caller may change its arrays once this has returned.
        call.attachments = [memoryview(bytes(attachment)) for attachment in attachments]
        for handle in handles:
            if isinstance(handle, FunctionHandle):  # inside a record, such as a served module; or of a layer
                classes[handle.function.digest] = handle.function
        call.remote, call.classes, call.define, call.handles = waiting, classes, define, handles
        call.parts = [handle for handle in handles if isinstance(handle, DataPart)]

    def captured(self, fn: Callable[..., Any]) -> FunctionHandle:
        """Capture a user's function as `schedule` does, to be part of another one."""
        function = self.functions.get(fn)
        check_no_part(function)
        return FunctionHandle(function)

    def overlapped(self, fn: Callable[..., Any], lookups: Callable[..., Any]) -> CapturedFunction:
        """Return a function that runs with what `lookups` names, captured once. See `schedule`."""
        if self._is_synchronous:
            raise MisuseError(
                "lookups with a SynchronousStrategy: schedule runs a function on one worker, and all take its steps; "
                "leave lookups out, or train with fit(..., lookups=, overlap=1) and a staleness of 1 or more"
            )
        step, named = self.captured(fn), self.captured_lookups(lookups)
        key = step.function.digest, named.function.digest
        if (function := self._overlapping.pop(key, None)) is None:
            function = self.functions.capture(partial_of(step.function.name, overlapped, step, named, 1))
            while len(self._overlapping) >= _MAX_OVERLAPPING:
                self._overlapping.pop(next(iter(self._overlapping)), None)
        self._overlapping[key] = function  # at the end
        return function

    def captured_lookups(self, lookups: Callable[..., Any]) -> FunctionHandle:
        """Capture a function that names the rows of a step. TypeError or MisuseError if it can't be one."""
        if not callable(lookups):
            raise TypeError(f"lookups must be a function, not {type_of(lookups)}")
        named = self.captured(lookups)
        if any(isinstance(handle, _ELEMENTS) for handle in named.function.handles):
            raise MisuseError(f"{named.function.name} captures a dataset: lookups must not take elements of it")
        return named


def check_known(call: Call) -> None:
    """Raise MisuseError if the arguments have elements that are not known before the function runs."""
    if any(isinstance(handle, PerWorkerDataset) for handle in call.handles):
        raise MisuseError(
            f"lookups is called before {call.function.name} runs, and can't know the elements of a dataset that starts "
            "over in each function: pass an iter() of it, or a batch"
        )
