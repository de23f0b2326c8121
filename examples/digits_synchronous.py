"""Train a digit classifier with replicas that step together: digits_ddp.py, moved from DistributedDataParallel.

    pscluster run --ps 2 --workers 4 examples/digits_synchronous.py

From the same initial parameters and with the same batches it has the same losses. It needs torch beside pscluster.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pscluster.coordinator import InputContext, SynchronousStrategy, TFConfigClusterResolver, Variable, optimizers

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
TEST = 360  # of the 1,797 examples


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Images as (1797, 64), from 0 to 1, and labels."""
    with np.load(DATA) as file:
        return torch.from_numpy(file["images"].astype(np.float32) / 16), torch.from_numpy(
            file["labels"].astype(np.int64)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier with replicas that step together.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas together")
    options = parser.parse_args()

    strategy = SynchronousStrategy(TFConfigClusterResolver())
    replicas = strategy.num_replicas_in_sync

    x, y = load()
    data = TensorDataset(x[:-TEST], y[:-TEST])

    def loader_of(rank: int) -> DataLoader[Any]:
        sampler = DistributedSampler(data, replicas, rank, seed=1)
        return DataLoader(data, options.batch_size // replicas, sampler=sampler)

    def batches(context: InputContext) -> Iterator[Any]:  # runs on each worker
        loader = loader_of(context.input_pipeline_id)
        for epoch in range(options.epochs):
            loader.sampler.set_epoch(epoch)
            yield from loader

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss_of = nn.CrossEntropyLoss()
    with strategy.scope():
        variables = {name: Variable(parameter, name=name) for name, parameter in model.named_parameters()}
        optimizer = optimizers.SGD(0.1, momentum=0.9)

    def load_parameters() -> None:
        values = strategy.read(variables)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})

    def step(iterator: Iterator[Any]) -> float:  # runs on all workers at once
        inputs, labels = next(iterator)
        load_parameters()
        model.zero_grad()
        loss = loss_of(model(inputs), labels)
        loss.backward()
        gradients = [(parameter.grad, variables[name]) for name, parameter in model.named_parameters()]
        optimizer.apply_gradients(gradients, examples=len(inputs))  # the mean over the examples of all replicas
        return float(loss.item())

    iterator = iter(strategy.distribute_datasets_from_function(batches))
    for epoch in range(options.epochs):
        losses = strategy.run(step, args=(iterator,), steps=len(loader_of(0)), collect="mean")
        print(f"epoch {epoch + 1}: loss {strategy.reduce('mean', losses, axis=None):.8f}")

    load_parameters()
    with torch.no_grad():
        accuracy = (model(x[-TEST:]).argmax(dim=1) == y[-TEST:]).float().mean()
    print(f"test accuracy {float(accuracy):.4f}")


if __name__ == "__main__":
    main()
