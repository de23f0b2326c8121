"""The errors of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pscluster.core.errors import PsClusterError

if TYPE_CHECKING:
    from pscluster.launch.result import Result


class TrainingFailedError(PsClusterError):
    """The training function of a member failed, and was not, or could not be, run again.

    `errors` has the errors by rank; `result` what was reported before.
    """

    def __init__(self, message: str, errors: Mapping[int, BaseException], result: Result) -> None:
        super().__init__(message)
        self.errors = dict(errors)
        self.result = result
