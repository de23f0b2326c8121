"""Train a digit classifier with torch's DistributedDataParallel: what digits_synchronous.py was made from.

torchrun --nproc-per-node 4 examples/digits_ddp.py
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
TEST = 360  # of the 1,797 examples


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Images as (1797, 64), from 0 to 1, and labels."""
    with np.load(DATA) as file:
        return torch.from_numpy(file["images"].astype(np.float32) / 16), torch.from_numpy(
            file["labels"].astype(np.int64)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier with DistributedDataParallel.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    replicas, rank = dist.get_world_size(), dist.get_rank()

    x, y = load()
    data = TensorDataset(x[:-TEST], y[:-TEST])
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, options.batch_size // replicas, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    replica = DistributedDataParallel(model)
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(replica(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {float(total) / len(loader) / replicas:.8f}")

    if rank == 0:
        with torch.no_grad():
            accuracy = (model(x[-TEST:]).argmax(dim=1) == y[-TEST:]).float().mean()
        print(f"test accuracy {float(accuracy):.4f}")
    dist.barrier()  # else gloo may abort in a process whose connections another one closes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
