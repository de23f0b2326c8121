"""What a module consists of: its parameters and buffers by name, who owns them, and which of them are embeddings.

Names are those of `state_dict()`, without what `torch.compile` puts into them. A tensor that several modules share is
one parameter, under the name that comes first; its other names are aliases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from pscluster.core.errors import MisuseError

_COMPILED = "_orig_mod."


class Owner(NamedTuple):
    """A module that has a tensor, and under which attribute."""

    module: Any
    attribute: str
    name: str
    """Of the module."""

    @property
    def is_embedding(self) -> bool:
        """Whether the tensor is the weight of an embedding."""
        return isinstance(self.module, nn.Embedding | nn.EmbeddingBag) and self.attribute == "weight"


def plain_name(name: str) -> str:
    """Return a parameter's name without what `torch.compile` has put into it."""
    return name.replace(_COMPILED, "")


@dataclass
class Structure:
    """The parameters and persistent buffers of a module."""

    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    owners: dict[str, list[Owner]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Structure:
        """Read a module. Raise MisuseError if a parameter has no shape yet."""
        structure, known = cls(), dict[int, str]()
        for prefix, part in module.named_modules(remove_duplicate=False):
            persistent = {
                name: buffer for name, buffer in part._buffers.items() if name not in part._non_persistent_buffers_set
            }
            for found, tensors in ((structure.parameters, part._parameters), (structure.buffers, persistent)):
                for attribute, tensor in tensors.items():
                    if tensor is not None:
                        structure._add(found, Owner(part, attribute, plain_name(f"{prefix}.")[:-1]), tensor, known)
        return structure

    def _add(self, found: dict[str, Any], owner: Owner, tensor: torch.Tensor, known: dict[int, str]) -> None:
        name = f"{owner.name}.{owner.attribute}".lstrip(".")
        if isinstance(tensor, UninitializedTensorMixin):
            raise MisuseError(
                f"parameter {name!r} has no shape yet: its module is lazy; run a batch through it before it is served, "
                "or give it its sizes"
            )
        first = known.setdefault(id(tensor), name)
        if first != name:
            self.aliases[name] = first
        found.setdefault(first, tensor)
        owners = self.owners.setdefault(first, [])
        if not any(owner.module is other.module and owner.attribute == other.attribute for other in owners):
            owners.append(owner)

    def differences(self, other: Structure) -> list[str]:
        """Return in words which parameters another state of this module has otherwise."""
        now = other.parameters
        found = [f"added {name!r}" for name in now if name not in self.parameters]
        found += [f"removed {name!r}" for name in self.parameters if name not in now]
        return found + [f"replaced {name!r}" for name, of in self.parameters.items() if now.get(name, of) is not of]

    def replace(self, name: str, tensor: Any) -> None:
        """Put another parameter in the place of one, in all modules that have it."""
        self.parameters[name] = tensor
        for owner in self.owners[name]:
            owner.module._parameters[owner.attribute] = tensor
