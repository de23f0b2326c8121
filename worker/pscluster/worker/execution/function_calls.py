"""A function's arguments decoded, the function called, and its result encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pscluster.core.functions.definitions import record_resolver
from pscluster.core.handles import Handle
from pscluster.core.transport.channels import MAX_INLINE_BYTES
from pscluster.core.transport.frames import Buffer
from pscluster.core.values import decode_call, encode
from pscluster.v1 import worker_pb2
from pscluster.worker.data.per_worker import EndOfIterator
from pscluster.worker.data.prefetch import EndOfPart, Part
from pscluster.worker.job import Job

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(
    job: Job,
    step: worker_pb2.Step,
    attachments: list[memoryview],
    parts: Sequence[Part],
    note: Callable[[Handle], object] | None = None,
) -> Arguments:
    """Decode what a function is called with; `parts`: those of datasets that it takes.

    `note` is called with each of the other handles.
    """
    if not step.HasField("arguments"):
        return (), {}

    def with_parts(kind: str, key: str) -> Handle:
        matching = (part for part in parts if kind == Part.handle_kind and key == part.handle_key)
        if (part := next(matching, None)) is not None:
            return part
        handle = job.resolve_handle(kind, key)
        if note is not None:
            note(handle)
        return handle

    return decode_call(
        step.arguments,
        attachments=attachments,
        resolve_handle=with_parts if parts or note is not None else job.resolve_handle,
        resolve_record=record_resolver(job.definition),
    )


def encode_result(job: Job, function: int, result: Any, outcome: worker_pb2.Outcome) -> None:
    """Encode a function's result into its outcome. Large arrays stay here, until they are fetched."""
    attachments: list[memoryview] = []
    value = encode(result, path="the result", attachments=attachments, into=outcome.value)
    if (size := value.ByteSize()) > MAX_INLINE_BYTES:
        raise TypeError(
            f"the result takes {size >> 20} MiB in one message, more than {MAX_INLINE_BYTES >> 20}: return arrays "
            "or bytes, which travel beside it, instead of many small objects"
        )
    if attachments:
        # Copied, since the user's code may go on using its arrays after the function has returned.
        copies: list[Buffer] = [bytes(attachment) for attachment in attachments]
        outcome.attachments.function = function
        outcome.attachments.sizes.extend(map(len, copies))
        job.results[function] = copies


def call_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], parts: Sequence[Part]
) -> Any:
    """Call a function and return its result. It must read all of its parts of datasets."""
    try:
        result = function(*args, **kwargs)
    except EndOfPart:
        if any(part.skipped for part in parts):
            return None  # the element that it wanted could not be read, and is skipped
        raise
    for part in parts:
        part.check_read()
    return result


def without_stop(error: BaseException) -> BaseException:
    """Replace a StopIteration, which, raised by `join()` or `fetch()` in a loop, would end that loop."""
    if isinstance(error, EndOfIterator):
        return error.error().with_traceback(error.__traceback__)
    if isinstance(error, StopIteration):  # as Python does when one leaves a generator
        return RuntimeError("the function raised StopIteration").with_traceback(error.__traceback__)
    return error
