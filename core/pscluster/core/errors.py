"""The errors of pscluster, and their one table to and from gRPC status.

    PsClusterError
    ├── ConfigurationError (ValueError)      what was set up contradicts itself: mend it and start again
    ├── MisuseError                          the caller's mistake: mend the call
    │   ├── InvalidUpdateError (ValueError)      wrong shape, dtype or ids; nothing was changed
    │   └── UnknownVariableError (KeyError)      no variable (or optimizer) of that name is on the server
    ├── RefusedError                         the peer understood and said no
    │   ├── VersionMismatchError                 another version of pscluster
    │   ├── AuthenticationError                  no cluster token or certificate, or one that the peer does not accept
    │   ├── NotPermittedError                    a certificate that does not open what was called
    │   ├── BusyError                            another coordinator holds the role
    │   ├── StaleError                           of a closed incarnation, an ended function or another job
    │   └── ProtocolError                        a message that makes no sense
    ├── UnavailableError                     the peer can't be reached; it may come back
    │   └── PSUnavailableError                   a parameter server died or was restarted empty
    ├── CheckpointError                      a checkpoint can't be written or read: the message says which, and why
    │   └── CheckpointMisfitError                it is whole, but of other variables or optimizers than are here
    ├── WaitTimeoutError (TimeoutError)      a wait with a timeout ended without its event
    ├── CancelledError                       cancelled because another function failed first: schedule it anew
    ├── EndOfDatasetError                    a step asked a finite dataset for more than it has
    ├── DatasetError                         examples of a distributed dataset can't be read: which, and why
    └── FunctionError                        a scheduled function raised; also an instance of what it raised
        └── FunctionTimeoutError (TimeoutError)  it ran longer than the `timeout` it was scheduled with

`FunctionCancelled` derives from BaseException, so that a step function's `except Exception` does not
swallow the request to stop. It never leaves a worker.
"""

from __future__ import annotations

from typing import Any

import grpc

from pscluster.core.sanitize import shown


class PsClusterError(Exception):
    """Base of all errors that pscluster raises of its own accord."""


class ConfigurationError(PsClusterError, ValueError):
    """The configuration (TF_CONFIG, arguments, environment) is wrong: mend it and start again."""


class MisuseError(PsClusterError):
    """The caller's mistake: the message says how to mend the call."""


class InvalidUpdateError(MisuseError, ValueError):
    """An update or read of wrong shape, dtype or ids. Nothing was changed on any shard."""


class UnknownVariableError(MisuseError, KeyError):
    """No variable or optimizer of that name lives on the server."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


class RefusedError(PsClusterError):
    """The peer understood the request and refused it."""


class VersionMismatchError(RefusedError):
    """The peer runs another version of pscluster."""


class AuthenticationError(RefusedError):
    """The cluster token is missing or another one than the peer's; or the two sides do not trust their certificates."""


class NotPermittedError(RefusedError):
    """The caller's certificate is of a role that may not call this."""


class BusyError(RefusedError):
    """Another coordinator holds this role."""


class StaleError(RefusedError):
    """The request belongs to a closed incarnation, an ended function or another job."""


class ProtocolError(RefusedError):
    """A message that makes no sense where it came."""


class UnavailableError(PsClusterError):
    """The peer can't be reached; it may come back."""


class PSUnavailableError(UnavailableError):
    """A parameter server died, or was restarted and has lost its variables."""


class CheckpointError(PsClusterError):
    """A checkpoint can't be written or read; the message says which file, and what is wrong. Nothing was changed."""


class CheckpointMisfitError(CheckpointError):
    """A checkpoint is whole, but of other variables or optimizers than there are here. Nothing was changed."""


class WaitTimeoutError(PsClusterError, TimeoutError):
    """A wait ended by its timeout."""


class CancelledError(PsClusterError):
    """The function was cancelled because another one failed first. Schedule it again."""


class EndOfDatasetError(PsClusterError):
    """A step function asked a finite dataset for more elements than it has."""


class DatasetError(PsClusterError):
    """Examples of a distributed dataset can't be read; the message says which, and why.

    Attributes:
        examples: how many; of a file that can't be read, 1.
    """

    examples: int = 0


class FunctionCancelled(BaseException):
    """Ends a running step function at its next library call, because its job is cancelled."""


class FunctionError(PsClusterError):
    """A scheduled function raised. Also an instance of the class it raised, where that class is known here.

    Attributes:
        function: name of the scheduled function.
        worker: index of the worker it ran on, or None if it never ran there to its end.
        attempts: how often it was started, this time included.
        remote_traceback: the traceback on the worker, as text.
        partly_applied: some of its updates may have been applied. They stay.
    """

    function: str = ""
    worker: int | None = None
    attempts: int = 0
    remote_traceback: str = ""
    partly_applied: bool = False
    summary: str = ""
    _fetched: bool = False  # somebody was told of it by a RemoteValue

    def __str__(self) -> str:
        return self.summary


class FunctionTimeoutError(FunctionError, TimeoutError):
    """A scheduled function ran longer than the `timeout` it was scheduled with."""


# kind on the wire, class, gRPC status. More special classes stand before their bases.
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
    ("refused", RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    ("checkpoint-misfit", CheckpointMisfitError, grpc.StatusCode.FAILED_PRECONDITION),
    ("checkpoint", CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
    ("ps-unavailable", PSUnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("unavailable", UnavailableError, grpc.StatusCode.UNAVAILABLE),
    ("configuration", ConfigurationError, grpc.StatusCode.FAILED_PRECONDITION),
    ("error", PsClusterError, grpc.StatusCode.UNKNOWN),
)
_BY_KIND = {kind: cls for kind, cls, _ in _TABLE}

KIND_METADATA = "pscluster-error"
"""Trailing metadata key under which a status carries the kind of our error."""

# Worth another try with the same key, on a fresh connection.
RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


def is_retryable(error: BaseException) -> bool:
    """Did a call fail as it does where the peer can't be reached? Of grpc's errors, not ours."""
    return isinstance(error, grpc.RpcError) and error.code() in RETRYABLE


def kind_of(error: PsClusterError) -> tuple[str, grpc.StatusCode]:
    """The wire's name of an error and the gRPC status it travels under."""
    for kind, cls, status in _TABLE:
        if isinstance(error, cls):
            return kind, status
    raise AssertionError(f"the table ends with the base class, yet it missed {error!r}")


def from_kind(kind: str, message: str) -> PsClusterError:
    """The error that a peer named. An unknown kind, of a newer peer, is a plain refusal."""
    return _BY_KIND.get(kind, RefusedError)(shown(message, lines=True))


def from_rpc(error: grpc.RpcError, peer: str) -> PsClusterError:
    """Our error for a failed call to `peer` (a phrase such as "ps 0 at 127.0.0.1:2222")."""
    code, details = error.code(), shown(error.details() or "", lines=True)
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == KIND_METADATA:
            return from_kind(str(value), details)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{peer} refused the cluster token: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"{peer} speaks gRPC but is not a pscluster role of this kind: {details}")
    # A server that stops cancels what is under way: it may be started again. And where a call ends while a request is
    # being written, grpc.aio has no status but its own.
    cut_off = code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"
    if cut_off or code in RETRYABLE or code is grpc.StatusCode.CANCELLED:
        if details.startswith("failed to connect to all addresses"):  # gRPC repeats the address, which the peer has
            details = details.rpartition(": ")[2]
        return UnavailableError(f"{peer} can't be reached: {code.name}: {details}")
    return RefusedError(f"{peer} failed the call: {code.name}: {details}")
