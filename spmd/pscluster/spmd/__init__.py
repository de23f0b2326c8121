"""Global arrays: one program on whole arrays, whose blocks lie on the devices of a mesh."""

from pscluster.core.errors import LayoutError as LayoutError
from pscluster.core.errors import MeshError as MeshError
from pscluster.core.layouts.layout import Layout as Layout
from pscluster.core.layouts.mesh import MATCH as MATCH
from pscluster.core.layouts.mesh import UNSHARDED as UNSHARDED
from pscluster.core.layouts.mesh import Mesh as Mesh
