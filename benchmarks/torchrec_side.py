"""TorchRec's side of the recommender rows: its workers share out the tables, and take steps together, over gloo.

torchrec_side.py --workers N

Tables are sharded by its planner for processors without GPUs, with Adagrad fused into their backward pass; dense layers
are replicated (DDP). One worker has all, and no collectives but its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from driver import Handlers, serve
from gloo_side import join_group
from members import asked_members, time_requests
from recommender import Dense
from recommender_data import LEARNING_RATE, WIDTH, batches


def member(rank: int, size: int, where: str) -> None:
    """Join the group, and time what is asked for."""
    join_group(rank, size, where)
    trainers: dict[tuple[int, int], Any] = {}

    def work_of(request: Any) -> Callable[[], object]:
        shape = request["tables"], request["rows"]
        once = trainers.get(shape) or trainers.setdefault(shape, trainer(rank, *shape))
        return lambda: [once() for _ in range(-(-request["n"] // size))]  # a step of all is one of each

    time_requests(work_of, dist.barrier)


def trainer(rank: int, tables: int, rows: int) -> Callable[[], object]:
    """Return a step of the model under DistributedModelParallel."""
    logging.disable(logging.WARNING)  # of libraries that it looks for at import
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"f{table}" for table in range(tables)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingBagConfig(name=f"t{name}", embedding_dim=WIDTH, num_embeddings=rows, feature_names=[name])
                for name in names
            ]
            self.tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
            self.dense = Dense(tables)

        def forward(self, features: torch.Tensor, ids: Any) -> torch.Tensor:
            found = self.tables(ids)
            logits: torch.Tensor = self.dense(features, [found[name] for name in names])
            return logits

    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LEARNING_RATE}
    )
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(Model(), [sharder], dist.group.WORLD)
    model = DistributedModelParallel(
        Model(),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )
    adagrad = torch.optim.Adagrad(
        [value for name, value in model.named_parameters() if "dense" in name and value.requires_grad], LEARNING_RATE
    )
    data = itertools.cycle(
        (
            torch.from_numpy(features),
            KeyedJaggedTensor.from_lengths_sync(
                names,
                torch.cat([torch.from_numpy(own) for own in ids]),
                torch.ones(tables * len(labels), dtype=torch.int32),
            ),
            torch.from_numpy(labels),
        )
        for ids, features, labels in batches(rank, tables, rows)
    )

    def step() -> None:
        features, ids, labels = next(data)
        adagrad.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(features, ids), labels).backward()
        adagrad.step()

    return step


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the members and wait until all have joined."""
    ask = asked_members(stack, os.path.abspath(__file__), int(sys.argv[1].removeprefix("--workers=")))

    def recommend(n: int, tables: int, rows: int, overlap: int) -> float:
        """Seconds for this many training steps, on all workers together."""
        del overlap
        return ask(n=n, tables=tables, rows=rows)

    return {"recommend": recommend}, {"torchrec": importlib.metadata.version("torchrec")}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        member(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        serve(start)
