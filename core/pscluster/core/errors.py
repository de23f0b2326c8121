"""The errors of pscluster, and their one table to and from gRPC status."""

from __future__ import annotations

from typing import Any

import grpc

from pscluster.core.display.notebook import render_traceback
from pscluster.core.display.sanitize import shown

__all__ = [
    "AuthenticationError",
    "BusyError",
    "CancelledError",
    "CheckpointError",
    "CheckpointMismatchError",
    "ConfigurationError",
    "DatasetError",
    "EndOfDatasetError",
    "FunctionCancelled",
    "FunctionError",
    "FunctionTimeoutError",
    "InvalidUpdateError",
    "LayoutError",
    "MemberTimeoutError",
    "MemberUnavailableError",
    "MeshError",
    "MisuseError",
    "NotPermittedError",
    "PSUnavailableError",
    "PackError",
    "ProtocolError",
    "PsClusterError",
    "RefusedError",
    "ShardMovedError",
    "ShardedGatherError",
    "StaleError",
    "TensorLostError",
    "UnavailableError",
    "UnknownVariableError",
    "UnsupportedFunctionError",
    "VersionMismatchError",
    "WaitTimeoutError",
    "WorkerLostError",
]


class PsClusterError(Exception):
    """Base of pscluster's own errors."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows of it: the user's lines, and what it says."""
        return render_traceback(self)


class ConfigurationError(PsClusterError, ValueError):
    """The configuration (TF_CONFIG, arguments, environment) is wrong: correct it and start again."""


class MisuseError(PsClusterError):
    """The caller's mistake: the message says how to correct the call."""


class InvalidUpdateError(MisuseError, ValueError):
    """An update or read of wrong shape, dtype or ids. Nothing was changed on any shard."""


class UnknownVariableError(MisuseError, KeyError):
    """No variable or optimizer of that name lives on the server."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


class MeshError(MisuseError, ValueError):
    """A mesh of devices makes no sense, or does not fit the devices there are."""


class LayoutError(MisuseError, ValueError):
    """A layout does not fit its mesh, its array, or another layout."""


class ShardedGatherError(MisuseError, ValueError):
    """Something would gather a sharded array without having been told to: call `full()` if that is meant."""


class UnsupportedFunctionError(MisuseError, TypeError):
    """A function of NumPy is not available for global arrays; the message says what can be done."""


class PackError(MisuseError, ValueError):
    """Components don't make a global array."""


class RefusedError(PsClusterError):
    """The peer understood the request and refused it."""


class VersionMismatchError(RefusedError):
    """The peer runs another version of pscluster."""


class AuthenticationError(RefusedError):
    """The cluster token is missing or differs from the peer's, or a side does not trust the other's certificate."""


class NotPermittedError(RefusedError):
    """The caller's certificate is for a role that may not call this."""


class BusyError(RefusedError):
    """Another coordinator holds this role."""


class StaleError(RefusedError):
    """The request belongs to a closed incarnation, an ended function or another job."""


class ProtocolError(RefusedError):
    """A message makes no sense where it came."""


class ShardMovedError(RefusedError):
    """The shard lives on another server by now: ask this one where. Clients follow, so that users never see this."""

    server: int | None = None  # that has refused


class UnavailableError(PsClusterError):
    """The peer can't be reached; it may come back."""


class PSUnavailableError(UnavailableError):
    """A parameter server died, or was restarted and has lost its variables."""


class MemberUnavailableError(UnavailableError):
    """Another worker of a gang, one function on several workers, died, failed, or was stopped."""


class TensorLostError(UnavailableError):
    """A global array is lost, with a worker that held blocks of it. Make it again."""

    number: int | None = None  # of the array that its worker does not have; users never see it


class CheckpointError(PsClusterError):
    """A checkpoint can't be written or read; the message says which file, and what is wrong. Nothing was changed."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is intact, but its variables or optimizers differ from those here. Nothing was changed."""


class WaitTimeoutError(PsClusterError, TimeoutError):
    """A wait ended by its timeout."""


class MemberTimeoutError(MemberUnavailableError, WaitTimeoutError):
    """Another worker of a gang has done nothing for long, and does not answer: it is frozen, or cut off."""


class CancelledError(PsClusterError):
    """The function was cancelled because another one failed first. Schedule it again."""


class EndOfDatasetError(PsClusterError):
    """A step function requested more elements than its dataset has."""

    steps: int = 0  # of a synchronous run: how many were done before
    results: Any = None  # and what they returned, as `SynchronousStrategy.run` would have returned it


class DatasetError(PsClusterError):
    """Examples of a distributed dataset can't be read; the message says which, and why."""

    examples: int = 0  # their number; 1 for an unreadable file


class FunctionCancelled(BaseException):
    """Ends a running step function at its next library call. Never leaves a worker."""

    # A BaseException, so that a step function's `except Exception` does not swallow it.


class FunctionError(PsClusterError):
    """A scheduled function raised. Also an instance of the class it raised, if that class is known here."""

    function: str = ""  # its name
    worker: int | None = None  # the index of the worker it ran on, or None if it never finished on one
    attempts: int = 0  # how often it was started, including this time
    remote_traceback: str = ""  # the traceback on the worker
    partly_applied: bool = False  # some of its updates may have been applied. They stay
    summary: str = ""
    _fetched: bool = False  # a RemoteValue has raised it
    _shown_in: int | None = None  # in this cell of a notebook

    def __str__(self) -> str:
        return self.summary


class WorkerLostError(FunctionError):
    """A function was running on workers that died, too often to run on another one."""


class FunctionTimeoutError(FunctionError, TimeoutError):
    """A scheduled function ran longer than the `timeout` it was scheduled with."""


# kind on the wire, class, gRPC status. Subclasses come before their bases.
_TABLE: tuple[tuple[str, type[PsClusterError], grpc.StatusCode], ...] = (
    ("invalid-update", InvalidUpdateError, grpc.StatusCode.INVALID_ARGUMENT),
    ("unknown-variable", UnknownVariableError, grpc.StatusCode.NOT_FOUND),
    ("misuse", MisuseError, grpc.StatusCode.INVALID_ARGUMENT),
    ("version", VersionMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    ("authentication", AuthenticationError, grpc.StatusCode.UNAUTHENTICATED),
    ("not-permitted", NotPermittedError, grpc.StatusCode.PERMISSION_DENIED),
    ("busy", BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ("stale", StaleError, grpc.StatusCode.ABORTED),
    ("protocol", ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    ("shard-moved", ShardMovedError, grpc.StatusCode.ABORTED),
    ("refused", RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    ("checkpoint-mismatch", CheckpointMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    ("checkpoint", CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
    ("ps-unavailable", PSUnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("member-unavailable", MemberUnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("unavailable", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("configuration", ConfigurationError, grpc.StatusCode.FAILED_PRECONDITION),
    ("error", PsClusterError, grpc.StatusCode.UNKNOWN),
)
_BY_KIND = {kind: cls for kind, cls, _ in _TABLE}

KIND_METADATA = "pscluster-error"  # trailing metadata key for the kind of our error

# Worth another try with the same key, on a fresh connection.
RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


def is_retryable(error: BaseException) -> bool:
    """Return whether an error of grpc's says that the peer can't be reached."""
    return isinstance(error, grpc.RpcError) and error.code() in RETRYABLE


def kind_of(error: PsClusterError) -> tuple[str, grpc.StatusCode]:
    """Return the wire name of an error and the gRPC status it travels under."""
    for kind, cls, status in _TABLE:
        if isinstance(error, cls):
            return kind, status
    raise AssertionError(f"the table ends with the base class, yet it missed {error!r}")


def from_kind(kind: str, message: str) -> PsClusterError:
    """Return the error that a peer named; for an unknown kind, of a newer peer, a plain RefusedError."""
    return _BY_KIND.get(kind, RefusedError)(shown(message, lines=True))


def from_rpc(error: grpc.RpcError, peer: str) -> PsClusterError:
    """Return our error for a failed call to `peer` (a phrase such as "ps 0 at 127.0.0.1:2222")."""
    code, details = error.code(), shown(error.details() or "", lines=True)
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == KIND_METADATA:
            return from_kind(str(value), details)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{peer} refused the cluster token: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"{peer} speaks gRPC but is not a pscluster role of this kind: {details}")
    # A stopping server cancels the calls under way, and may be started again. And when a call ends while a request is
    # being written, grpc.aio reports only this internal status.
    cut_off = code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"
    if cut_off or code in RETRYABLE or code is grpc.StatusCode.CANCELLED:
        if details.startswith("failed to connect to all addresses"):  # gRPC repeats the address, which `peer` has
            details = details.rpartition(": ")[2]
        return UnavailableError(f"{peer} can't be reached: {code.name}: {details}")
    return RefusedError(f"{peer} failed the call: {code.name}: {details}")
