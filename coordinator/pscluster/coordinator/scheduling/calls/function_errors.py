"""The errors of functions, and the meaning of workers' failures."""

from __future__ import annotations

from typing import TypeVar

import grpc

from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.core.errors import (
    CancelledError,
    DatasetError,
    FunctionError,
    FunctionTimeoutError,
    MemberTimeoutError,
    MemberUnavailableError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
    WorkerLostError,
    from_rpc,
)
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import worker_pb2
from pscluster.worker.failures import PARTLY_APPLIED, failure_of, rebuild_failure

E = TypeVar("E", bound=FunctionError)


def says_data_unread(failure: worker_pb2.Failure | None) -> bool:
    return failure is not None and _is(failure, DatasetError)


def says_server_lost(failure: worker_pb2.Failure) -> bool:
    """Return whether a worker reports a parameter server as lost; it may only be unreachable from there."""
    return _is(failure, PSUnavailableError)


def says_member_gone(failure: worker_pb2.Failure) -> bool:
    """Return whether a member of a gang reports that another one is gone, or does not answer."""
    return _is(failure, MemberUnavailableError) or _is(failure, MemberTimeoutError)


def _is(failure: worker_pb2.Failure, error: type[Exception]) -> bool:
    return (failure.module, failure.qualname) == (error.__module__, error.__qualname__)


def unpreparable(error: Exception, worker: PeerAddress) -> Exception:
    """Return why a worker can't be sent what a function needs; raise the error if it means that the worker is lost.

    That the worker can't reach a parameter server does not mean that.
    """
    failure = from_rpc(error, str(worker)) if isinstance(error, grpc.RpcError) else error
    if isinstance(failure, UnavailableError | StaleError) and not isinstance(failure, PSUnavailableError):
        raise error
    return failure


def raised(worker: int, task: Task[Call], failure: worker_pb2.Failure) -> FunctionError:
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
    error.summary = f"{error.function} ran longer than its timeout of {task.limits.timeout:g} s on worker {worker}"
    return with_part_applied(call, error)


def too_many_deaths(worker: int, task: Task[Call], max_attempts: int) -> WorkerLostError:
    """Return the error of a function that was running on `max_attempts` workers when they died."""
    call, error = task.payload, WorkerLostError()
    deaths = call.deaths if task.gang is None else [death for member in task.gang.payloads for death in member.deaths]
    error.function, error.worker, error.attempts = call.function.name, worker, max_attempts
    error.summary = (
        f"{error.function} was running on {max_attempts} workers that died, so it may be what kills them, and goes to "
        f"no other: {'; '.join(deaths)}"
    )
    return with_part_applied(call, error)


def not_begun(function: CapturedFunction, worker: int, attempts: int, why: Exception) -> FunctionError:
    """Return the error of a function that could not be sent to a worker.

    It is also an instance of the reason's class: a lost server is caught as such, no matter where it was noticed.
    """
    error = rebuild_failure(failure_of(why), function=function.name, worker=worker, attempts=attempts)
    error.remote_traceback = ""  # it is not the worker's
    error.summary = f"{function.name} can't be started on worker {worker}: {why}"
    return error


def cancelled_error(name: str, first: Exception | None, applied: bool = False) -> CancelledError:
    """Return the error of a function that was cancelled, because of the error of another one if one is given."""
    why = f"because another function failed first ({type(first).__name__})" if first else "before it had ended"
    again = f". {PARTLY_APPLIED} To have it done," if applied else ":"
    error = CancelledError(f"{name} was cancelled {why}{again} schedule it again")
    error.__cause__ = first
    return error


def with_part_applied(call: Call, error: E) -> E:
    """Add to the error of a call that it may have applied some updates, if so, and return it."""
    if call.applied:
        error.partly_applied, error.summary = True, f"{error.summary}\n{PARTLY_APPLIED}"
    return error
