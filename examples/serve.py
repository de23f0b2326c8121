"""Answer requests with the click model of embedding.py, from its checkpoints and without a cluster.

    pscluster run --ps 2 --workers 2 examples/embedding.py --checkpoints /tmp/clicks
    python examples/serve.py /tmp/clicks < requests

A request is a line of JSON: {"ids": 26 row ids, "dense": 13 numbers}, or lists of these for several clicks at once. The
answer is a line, too: {"click": the probability of a click, or a list of them, "version": of the model}; or {"error":
what is wrong}. A web framework would call `answer` in the same way.
"""

import argparse
import json
import sys
from typing import Any, NamedTuple

import numpy as np

from pscluster.coordinator.checkpoints.saved import SavedVariables
from pscluster.coordinator.serving import ServingTable

Array = np.ndarray[Any, np.dtype[Any]]


class Model(NamedTuple):
    """One version of the model. The table is mapped into memory, so any number of processes share it."""

    table: ServingTable
    head: Array  # [dim]
    w: Array  # [dense features]
    b: Array  # []


def load(directory: str) -> Model:
    """Load the newest checkpoint: both parts of the model from the same one."""
    table = ServingTable.open(directory, "table")
    saved = SavedVariables(table.path)
    return Model(table, saved["head"], saved["w"], saved["b"])


def answer(model: Model, request: dict[str, Any]) -> dict[str, Any]:
    """Return the probability of a click, as embedding.py predicts it. ValueError says what is wrong with a request."""
    if not {"ids", "dense"} <= request.keys():
        raise ValueError("a request has 'ids' and 'dense'")
    rows = model.table.lookup(request["ids"])
    x = np.asarray(request["dense"], np.float32)
    if rows.ndim < 2 or x.shape != (*rows.shape[:-2], len(model.w)):
        raise ValueError(f"there must be {len(model.w)} dense features for each list of ids, not {list(x.shape)}")
    z = rows.sum(axis=-2) @ model.head + x @ model.w + model.b
    return {"click": (1 / (1 + np.exp(-z))).tolist(), "version": model.table.version.number}


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer requests with the click model of embedding.py.")
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
