"""The policy for retrying calls to a peer that may come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tenacity

from pscluster.core.errors import PSUnavailableError, UnavailableError, is_retryable

FEW_ATTEMPTS = 3
"""Attempts at a call that must not delay its caller for long."""


def may_pass(error: BaseException) -> bool:
    """Return whether the peer was unreachable but may come back. False for a server that is known to be lost."""
    return is_retryable(error) or (isinstance(error, UnavailableError) and not isinstance(error, PSUnavailableError))


def until(
    *also: type[Exception],
    seconds: float = math.inf,
    attempts: float = math.inf,
    over: Callable[[], object] = lambda: False,
    wait: Callable[[tenacity.RetryCallState], float] | None = None,
) -> dict[str, Any]:
    """Return arguments for tenacity that retry errors that `may_pass`, or are in `also`, after a short random delay.

    No attempt begins later than `seconds` after the first, or if `over`, called after a failure, says to give up.
    `wait` returns another delay.
    """

    def stop(state: tenacity.RetryCallState) -> bool:
        late = (state.seconds_since_start or 0.0) >= seconds
        return late or state.attempt_number >= attempts or bool(over())

    return {
        "retry": tenacity.retry_if_exception(lambda error: may_pass(error) or isinstance(error, also)),
        "wait": wait or tenacity.wait_random_exponential(multiplier=0.05, max=0.25),
        "stop": stop,
    }
