"""Layouts to go through in tests."""

import itertools

from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import UNSHARDED, Mesh


def all_layouts(mesh: Mesh, rank: int) -> list[Layout]:
    """Every layout of arrays of this rank on a mesh."""
    found = []
    for specs in itertools.product((UNSHARDED, *mesh.dim_names), repeat=rank):
        named = [spec for spec in specs if spec != UNSHARDED]
        if len(set(named)) == len(named):
            found.append(Layout(specs, mesh))
    return found
