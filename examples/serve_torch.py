"""Answer requests with the model of torch_recommender.py, from its checkpoints and without a cluster.

    pscluster run --ps 2 --workers 2 examples/torch_recommender.py --checkpoints /tmp/recommender
    python examples/serve_torch.py /tmp/recommender < requests

A request is a line of JSON: {"user": an id, "liked": five ids of items, 0 for none, "item": an id}, or lists of these
for several at once. The answer is a line, too: {"likes": the probability that the user likes the item, or a list of
them, "version": of the model}; or {"error": what is wrong}. A web framework would call `answer` in the same way.

The embeddings are mapped into memory, so any number of processes share them, and other models could follow deltas.
"""

import argparse
import json
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch_recommender import Recommender

import pscluster.torch
from pscluster.coordinator.checkpoints.saved import SavedVariables
from pscluster.coordinator.serving import ServingTable


class Rows(nn.Module):
    """Stands for an nn.Embedding, or an nn.EmbeddingBag of means without the rows of id 0, of a mapped table."""

    def __init__(self, table: ServingTable, *, mean: bool = False) -> None:
        super().__init__()
        self.table, self.mean = table, mean

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(self.table.lookup(ids.numpy()))
        if not self.mean:
            return rows
        there = (ids != 0)[..., None]
        return (rows * there).sum(-2) / there.sum(-2).clamp(min=1)


class Model(NamedTuple):
    """One version of the model."""

    module: Recommender
    version: int


def load(directory: str) -> Model:
    """Load the newest checkpoint: the tables and all else from the same one."""
    user = ServingTable.open(directory, "user.weight")
    saved = SavedVariables(user.path)
    liked, item = (ServingTable.open(user.path, f"{name}.weight") for name in ("liked", "item"))
    with torch.device("meta"):  # without memory for the embeddings
        module = Recommender()
    module.user, module.liked, module.item = Rows(user), Rows(liked, mean=True), Rows(item)
    module.to_empty(device="cpu")
    pscluster.torch.load_checkpoint(module, saved)
    return Model(module.eval(), user.version.number)


def answer(model: Model, request: dict[str, Any]) -> dict[str, Any]:
    """Return the probability that a user likes an item. ValueError says what is wrong with a request."""
    if not {"user", "liked", "item"} <= request.keys():
        raise ValueError("a request has 'user', 'liked' and 'item'")
    user, liked, item = (np.asarray(request[name]) for name in ("user", "liked", "item"))
    if user.ndim > 1 or item.shape != user.shape or liked.shape != (*user.shape, 5):
        raise ValueError(f"there must be a user, an item and five items liked, not {list(liked.shape)}")
    if any(each.dtype.kind != "i" for each in (user, liked, item)):
        raise ValueError("ids must be whole numbers")
    ids = (torch.from_numpy(each.reshape(-1, *each.shape[user.ndim :])) for each in (user, liked, item))
    with torch.no_grad():
        likes = torch.sigmoid(model.module(*ids)).reshape(user.shape)
    return {"likes": likes.tolist(), "version": model.version}


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer requests with the model of torch_recommender.py.")
    parser.add_argument("directory", help="of its checkpoints")
    model = load(parser.parse_args().directory)
    for line in sys.stdin:
        try:
            reply = answer(model, dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
