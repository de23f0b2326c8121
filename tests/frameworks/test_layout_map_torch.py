"""LayoutMap on torch's weights."""

from __future__ import annotations

import numpy as np
import torch

from pscluster import spmd
from pscluster.spmd import Layout, LayoutMap


def test_weights_of_torch() -> None:
    """A module's own `state_dict`, or the module."""
    kernel = Layout(["batch", None], spmd.create_mesh([("batch", 8)]))
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2))
    kernels = LayoutMap(kernel.mesh)
    kernels[r"0\.weight"] = kernel
    for state in (kernels.apply(module.state_dict()), kernels.apply(module)):
        assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert state["0.weight"].layout == kernel
        np.testing.assert_array_equal(state["1.weight"].full(), module[1].weight.detach().numpy())
