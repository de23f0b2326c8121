"""A job whose coordinator died, as the next one finds it: what lives on the servers is attached to by name.

    the servers say what they hold --> all have one job id and the job's name, and no coordinator --> its next number
                                   \\-> anything else -------------------------------------------> a new job

A coordinator that dies while it takes the servers leaves some of them with its number and others with the one before:
they still have one job id, and the next coordinator's number is above both.
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

from pscluster.core.errors import ConfigurationError, MisuseError
from pscluster.ps.row_ids import columns_of, kind_of
from pscluster.v1 import node_pb2, ps_pb2

logger = logging.getLogger(__name__)


def default_job_name() -> str:
    """Return the path of the script: the same script started again means the same job."""
    script = sys.argv[0] if sys.argv else ""
    return os.path.abspath(script) if script and script not in ("-", "-c", "-m") else ""


def continue_job(request: node_pb2.AttachRequest, replies: Sequence[node_pb2.HelloReply]) -> list[int]:
    """Make the request continue the job that the servers hold, if that is a whole job of this name.

    Return the store id that each server must hold when it is taken (0: any): it may lose it in a restart until then.
    """
    job_ids = {reply.job_id for reply in replies}
    names = {reply.job_name for reply in replies}
    if job_ids == {0} or (any(reply.holder for reply in replies) and not request.take_over):
        pass  # they hold nothing, or the request will be refused
    elif len(job_ids) > 1 or 0 in job_ids:
        held = [f"ps {index}: {_words_of(reply)}" for index, reply in enumerate(replies)]
        logger.warning(
            "the servers hold no whole job (%s); starting a new job and dropping what they hold", "; ".join(held)
        )
    elif names != {request.job_name} or not request.job_name:
        logger.warning(
            "dropping job %r, whose coordinator is gone, from the servers, since this is job %r; "
            "ParameterServerStrategy(..., job_name=) of both must be equal to resume one",
            *names,
            request.job_name,
        )
    else:
        if (count := replies[0].num_servers) not in (0, len(replies)):
            raise ConfigurationError(
                f"job {request.job_name!r} now has {count} parameter servers, and the coordinator's cluster lists "
                f"{len(replies)}: list all of them, or start over with ParameterServerStrategy(..., resume=False)"
            )
        request.job_id, request.coordinator_number = (
            job_ids.pop(),
            max(reply.coordinator_number for reply in replies) + 1,
        )
        return [reply.store_id for reply in replies]
    return [0] * len(replies)


def _words_of(reply: node_pb2.HelloReply) -> str:
    """Describe the job of which a server holds a part."""
    return f"{reply.job_name!r}, id {reply.job_id:016x}" if reply.job_id else "nothing"


@dataclass
class LiveJob:
    """Variables and optimizers on the servers, by name, until they are attached to."""

    variables: dict[str, ps_pb2.VariableSpec] = field(default_factory=dict)
    optimizers: dict[str, ps_pb2.OptimizerSpec] = field(default_factory=dict)
    last_id: int = 0

    @staticmethod
    def of(directories: Sequence[ps_pb2.DescribeReply]) -> tuple[LiveJob, list[ps_pb2.VariableSpec]]:
        """Return what the servers hold, and the variables that not all of them have or that an evaluation has left."""
        live = LiveJob()
        specs = [spec for directory in directories for spec in directory.variables]
        knowing = Counter(spec.id for spec in specs)
        whole = {id_ for id_, count in knowing.items() if count == len(directories)}
        whole -= {spec.id for spec in specs if spec.evaluation}
        live.variables = {spec.name: spec for spec in specs if spec.id in whole}
        for directory in directories:
            live.optimizers.update({spec.name: spec for spec in directory.optimizers})
        live.last_id = max([*knowing, *(spec.id for spec in live.optimizers.values())], default=0)
        remains = {spec.id: spec for spec in specs if spec.id not in whole}
        return live, list(remains.values())

    def take_variable(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], table: ps_pb2.TableSpec | None = None
    ) -> ps_pb2.VariableSpec | None:
        """Return the live variable of this name, if any. Raise MisuseError if it has another shape or type."""
        spec = self.variables.get(name)
        if spec is not None and spec.HasField("table") is (table is None):
            kinds = ("a variable", "an EmbeddingTable")[:: 1 if table is None else -1]
            raise MisuseError(
                f"{name!r} is {kinds[0]} here, but {kinds[1]} in the job being resumed: start over with "
                "ParameterServerStrategy(..., resume=False)"
            )
        if spec is not None and table is not None and spec.table.id_bytes != table.id_bytes:
            here, there = (kind_of(each.dim + columns_of(each.id_bytes), each.dim) for each in (table, spec.table))
            raise MisuseError(
                f"{name!r} has ids that are {here} here, but {there} in the job being resumed: start over with "
                "ParameterServerStrategy(..., resume=False)"
            )
        if (
            spec is not None and table is not None
        ):  # its shape follows from the number of shards, which may have changed
            if (table.dim, table.capacity) != (spec.table.dim, spec.table.capacity):
                raise MisuseError(
                    f"table {name!r} has dim={table.dim} and capacity={table.capacity or None} here, but "
                    f"dim={spec.table.dim} and capacity={spec.table.capacity or None} in the job being resumed: start "
                    "over with ParameterServerStrategy(..., resume=False)"
                )
        elif spec is not None and (tuple(spec.shape) != shape or spec.dtype != dtype.name):
            raise MisuseError(
                f"variable {name!r} is {dtype.name}{list(shape)} here, but {spec.dtype}{list(spec.shape)} in the job "
                "being resumed: start over with ParameterServerStrategy(..., resume=False)"
            )
        return self.variables.pop(name, None)

    def take_optimizer(self, wanted: ps_pb2.OptimizerSpec) -> ps_pb2.OptimizerSpec | None:
        """Return the live optimizer of this name as it is, if any. Raise MisuseError if its rule differs."""
        if (spec := self.optimizers.get(wanted.name)) is None:
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
