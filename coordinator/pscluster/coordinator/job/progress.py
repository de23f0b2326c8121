"""How far a job is, in words of the user's own: kept as a variable, so that it is as durable as the others."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from pscluster.coordinator.variables.creation import VariableCreator
from pscluster.coordinator.variables.partitioners import FixedShardsPartitioner
from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.fault_points import reach
from pscluster.ps.handles.scope import VariableRequest
from pscluster.ps.handles.variable import Variable
from pscluster.ps.spec import OURS

NAME = f"{OURS}progress"
TRAINING = f"{OURS}training"
"""That of `fit`."""

CAPACITY = 64 << 10
_LENGTH_BYTES = 4


class JobProgress:
    """Of one job. The variable is made when something is first kept."""

    def __init__(self, variables: VariableCreator, name: str = NAME) -> None:
        self._variables = variables
        self._name = name
        self._variable: Variable | None = None

    def load(self) -> dict[str, Any]:
        """What was kept last; {} if nothing was."""
        if self._variable is None and not self._variables.lives(self._name):
            return {}
        return decoded(self._bytes().read_value().tobytes())

    def save(self, values: Mapping[str, Any]) -> None:
        """In place of what was kept before."""
        try:
            text = json.dumps(values, default=_plain, allow_nan=True).encode()
        except (TypeError, ValueError) as error:
            raise MisuseError(f"progress must be representable as JSON: {error}") from None
        room = CAPACITY - _LENGTH_BYTES
        if len(text) > room:
            raise MisuseError(
                f"progress of {len(text):,} bytes, and at most {room:,} fit: save less, or use a variable"
            )
        data = np.zeros(CAPACITY, np.uint8)
        data[: _LENGTH_BYTES + len(text)] = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little") + text, np.uint8)
        reach("coordinator.progress.before")
        self._bytes().assign(data)
        reach("coordinator.progress.after")

    def prepare(self, saved: Container[str]) -> None:
        """Have the variable, if a checkpoint has it."""
        if self._name in saved:
            self._bytes()

    def _bytes(self) -> Variable:
        if self._variable is None:
            known = {variable.name: variable for variable in self._variables.all}
            self._variable = known.get(self._name)
        if self._variable is None:
            zeros, whole = np.zeros(CAPACITY, np.uint8), FixedShardsPartitioner(1)
            request = VariableRequest(zeros, self._name, None, None, trainable=False, partitioner=whole)
            self._variable = self._variables.create_variable(request, ours=True)
        return self._variable


def decoded(data: bytes) -> dict[str, Any]:
    """What was kept, from the variable's bytes. CheckpointError if they are something else."""
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        found: Any = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + size]) if size else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the variable {NAME!r}, or one like it, holds no progress: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"the variable {NAME!r}, or one like it, holds no progress, but {found!r:.80}")
    return found


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON type")
