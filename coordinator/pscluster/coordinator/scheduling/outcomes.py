"""What functions' ends mean: the errors that are made of them, and what workers' failures say."""

from __future__ import annotations

from typing import TypeVar

import grpc

from pscluster.coordinator.scheduling.call import Call
from pscluster.coordinator.scheduling.scheduler import Task
from pscluster.core.errors import (
    CancelledError,
    DatasetError,
    FunctionError,
    FunctionTimeoutError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
    from_rpc,
)
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import worker_pb2
from pscluster.worker.failures import PARTLY_APPLIED, failure_of, rebuild_failure

E = TypeVar("E", bound=FunctionError)


def says_data_unread(failure: worker_pb2.Failure | None) -> bool:
    """Return whether a function failed since its examples could not be read."""
    return failure is not None and _is(failure, DatasetError)


def says_server_lost(failure: worker_pb2.Failure) -> bool:
    """Return whether a worker says that a parameter server is lost, which may be out of its reach only."""
    return _is(failure, PSUnavailableError)


def _is(failure: worker_pb2.Failure, error: type[Exception]) -> bool:
    return (failure.module, failure.qualname) == (error.__module__, error.__qualname__)


def unpreparable(error: Exception, worker: PeerAddress) -> Exception:
    """Return why a worker can't be given what a function needs; raise what says that the worker itself is gone.

    That a parameter server is out of the worker's reach does not say so.
    """
    failure = from_rpc(error, str(worker)) if isinstance(error, grpc.RpcError) else error
    if isinstance(failure, UnavailableError | StaleError) and not isinstance(failure, PSUnavailableError):
        raise error
    return failure


def raised(worker: int, task: Task[Call], failure: worker_pb2.Failure) -> FunctionError:
    """Return the error of a function that raised."""
    return rebuild_failure(
        failure,
        function=task.payload.function.name,
        worker=worker,
        attempts=task.attempts + task.failures,
        partly_applied=task.payload.applied,
    )


def too_long(worker: int, task: Task[Call]) -> FunctionTimeoutError:
    """Return the error of a function that ran longer than it may."""
    call, error = task.payload, FunctionTimeoutError()
    error.function, error.worker, error.attempts = call.function.name, worker, task.attempts + task.failures
    error.summary = f"{error.function} ran longer than its timeout of {call.timeout:g} s on worker {worker}"
    return told_of_part(call, error)


def deadly(worker: int, task: Task[Call], max_attempts: int) -> FunctionError:
    """Return the error of a function that was running on as many workers that died as may die of one."""
    call, error = task.payload, FunctionError()
    error.function, error.worker, error.attempts = call.function.name, worker, max_attempts
    error.summary = (
        f"{error.function} was running on {max_attempts} workers that died, so it may be what kills them, and goes to "
        f"no other: {'; '.join(call.deaths)}"
    )
    return told_of_part(call, error)


def not_begun(function: CapturedFunction, worker: int, attempts: int, why: Exception) -> FunctionError:
    """Return the error of a function that a worker could not be given.

    It is an instance of the reason's class, too: a lost server is caught as such, whoever noticed it first.
    """
    error = rebuild_failure(failure_of(why), function=function.name, worker=worker, attempts=attempts)
    error.remote_traceback = ""  # it is not the worker's
    error.summary = f"{function.name} can't be started on worker {worker}: {why}"
    return error


def cancelled_error(name: str, first: Exception | None, applied: bool = False) -> CancelledError:
    """Return the error of a function that was cancelled, by the first error of another one if there is one."""
    why = f"because another function failed first ({type(first).__name__})" if first else "before it had ended"
    if applied:
        why += f". {PARTLY_APPLIED} If it should count"
    error = CancelledError(f"{name} was cancelled {why}: schedule it again")
    error.__cause__ = first
    return error


def told_of_part(call: Call, error: E) -> E:
    """Return the error of a call that is over, which says now whether it may have applied a part."""
    if call.applied:
        error.partly_applied, error.summary = True, f"{error.summary}\n{PARTLY_APPLIED}"
    return error
