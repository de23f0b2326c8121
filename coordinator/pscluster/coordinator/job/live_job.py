"""A job whose coordinator died, as the next one finds it: what lives on the servers is attached to by name.

    the servers say what they hold --> all of one lineage, under the job's name, held by nobody --> its next epoch
                                   \\-> anything else ------------------------------------------> a new job

A coordinator that dies while it takes the servers leaves some of them in its epoch and others in the one before: they
are of one lineage all the same, and the next coordinator's epoch is above both.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.ps.spec import PINNED
from pscluster.v1 import node_pb2, ps_pb2

logger = logging.getLogger(__name__)


def default_job_name() -> str:
    """Where the script lies: the same script started again means the same job."""
    script = sys.argv[0] if sys.argv else ""
    return os.path.abspath(script) if script and script not in ("-", "-c", "-m") else ""


def continue_job(request: node_pb2.AttachRequest, found: Sequence[node_pb2.HelloReply]) -> list[int]:
    """Make the request one that goes on with what the servers hold, if that is a whole job of this name.

    Returns:
        By server, what it has to hold as it is taken: one that is restarted until then may have lost it.
    """
    lineages = {reply.lineage for reply in found}
    names = {reply.job_name for reply in found}
    anything = [0] * len(found)
    if lineages == {0}:
        return anything
    if any(reply.holder for reply in found) and not request.take_over:
        return anything  # it will be refused
    if len(lineages) > 1 or 0 in lineages:
        logger.warning("the servers hold parts of different jobs; starting a new job and dropping what they hold")
    elif names != {request.job_name} or not request.job_name:
        logger.info("dropping another job (%s) from the servers: its coordinator is gone", *names)
    else:
        request.lineage, request.epoch = lineages.pop(), max(reply.epoch for reply in found) + 1
        return [reply.holding for reply in found]
    return anything


@dataclass
class LiveJob:
    """What there is, by name, until it is attached to."""

    variables: dict[str, ps_pb2.VariableSpec] = field(default_factory=dict)
    optimizers: dict[str, ps_pb2.OptimizerSpec] = field(default_factory=dict)
    last_id: int = 0

    @staticmethod
    def of(directories: Sequence[ps_pb2.DescribeReply]) -> tuple[LiveJob, list[ps_pb2.VariableSpec]]:
        """From what the servers know; and the variables that not all of them know, or that an evaluation has left."""
        live = LiveJob()
        found = [spec for directory in directories for spec in directory.variables]
        knowing = Counter(spec.id for spec in found)
        whole = {number for number, count in knowing.items() if count == len(directories)}
        whole -= {spec.id for spec in found if spec.name.startswith(PINNED)}
        live.variables = {spec.name: spec for spec in found if spec.id in whole}
        for directory in directories:
            live.optimizers.update({spec.name: spec for spec in directory.optimizers})
        live.last_id = max([*knowing, *(spec.id for spec in live.optimizers.values())], default=0)
        remains = {spec.id: spec for spec in found if spec.id not in whole}
        return live, list(remains.values())

    def take_variable(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ps_pb2.VariableSpec | None:
        """The variable of this name, if it lives. MisuseError if it has another shape or type."""
        spec = self.variables.get(name)
        if spec is None:
            return None
        if tuple(spec.shape) != shape or spec.dtype != dtype.name:
            raise MisuseError(
                f"variable {name!r} is {dtype.name}{list(shape)} here, but {spec.dtype}{list(spec.shape)} in the job "
                "being resumed: start over with ParameterServerStrategy(..., resume=False)"
            )
        return self.variables.pop(name)

    def take_optimizer(self, wanted: ps_pb2.OptimizerSpec) -> ps_pb2.OptimizerSpec | None:
        """The optimizer of this name as it is, if it lives. MisuseError if it is of another rule."""
        spec = self.optimizers.get(wanted.name)
        if spec is None:
            return None
        if spec.rule != wanted.rule:
            raise MisuseError(
                f"optimizer {wanted.name!r} is {wanted.rule} here, but {spec.rule} in the job being resumed: "
                "start over with ParameterServerStrategy(..., resume=False)"
            )
        del self.optimizers[wanted.name]
        if (dict(spec.numbers), spec.schedule) != (dict(wanted.numbers), wanted.schedule):
            logger.warning(
                "optimizer %r keeps the hyperparameters it has in the resumed job; those given here are ignored",
                wanted.name,
            )
        spec.iterations = 0
        return spec
