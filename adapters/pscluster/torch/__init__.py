"""PyTorch modules whose parameters are on the parameter servers. PyTorch is imported only once it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pscluster.torch.checkpoints import load_checkpoint as load_checkpoint
    from pscluster.torch.optimizers import optimizer_from as optimizer_from
    from pscluster.torch.schedules import schedule as schedule
    from pscluster.torch.served import ServedModule as ServedModule
    from pscluster.torch.serving import serve as serve

_HOMES = {
    "ServedModule": "served",
    "load_checkpoint": "checkpoints",
    "optimizer_from": "optimizers",
    "schedule": "schedules",
    "serve": "serving",
}

__all__ = ["ServedModule", "load_checkpoint", "optimizer_from", "schedule", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
