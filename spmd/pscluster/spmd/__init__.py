"""Global arrays: one program on whole arrays, whose blocks lie on the devices of a mesh."""

from pscluster.core.errors import LayoutError as LayoutError
from pscluster.core.errors import MeshError as MeshError
from pscluster.core.errors import PackError as PackError
from pscluster.core.errors import ShardedGatherError as ShardedGatherError
from pscluster.core.errors import TensorLostError as TensorLostError
from pscluster.core.errors import UnsupportedFunctionError as UnsupportedFunctionError
from pscluster.core.layouts.layout import Layout as Layout
from pscluster.core.layouts.mesh import MATCH as MATCH
from pscluster.core.layouts.mesh import UNSHARDED as UNSHARDED
from pscluster.core.layouts.mesh import Mesh as Mesh
from pscluster.spmd import functions as functions  # registers them
from pscluster.spmd import random as random
from pscluster.spmd.creation import arange as arange
from pscluster.spmd.creation import call_with_layout as call_with_layout
from pscluster.spmd.creation import empty as empty
from pscluster.spmd.creation import eye as eye
from pscluster.spmd.creation import full as full
from pscluster.spmd.creation import identity as identity
from pscluster.spmd.creation import linspace as linspace
from pscluster.spmd.creation import ones as ones
from pscluster.spmd.creation import zeros as zeros
from pscluster.spmd.execution.clients import create_distributed_mesh as create_distributed_mesh
from pscluster.spmd.gradients import elementwise as _elementwise  # noqa: F401  # registers rules
from pscluster.spmd.gradients import products as _products  # noqa: F401
from pscluster.spmd.gradients import reductions as _reductions  # noqa: F401
from pscluster.spmd.gradients import shapes as _shapes  # noqa: F401
from pscluster.spmd.gradients.reverse import value_and_grad as value_and_grad
from pscluster.spmd.meshes import P as P
from pscluster.spmd.meshes import barrier as barrier
from pscluster.spmd.meshes import create_mesh as create_mesh
from pscluster.spmd.meshes import default_mesh as default_mesh
from pscluster.spmd.placing import check_layout as check_layout
from pscluster.spmd.placing import copy_to_mesh as copy_to_mesh
from pscluster.spmd.placing import distribute as distribute
from pscluster.spmd.placing import fetch_layout as fetch_layout
from pscluster.spmd.placing import is_dtensor as is_dtensor
from pscluster.spmd.placing import pack as pack
from pscluster.spmd.placing import relayout as relayout
from pscluster.spmd.placing import relayout_like as relayout_like
from pscluster.spmd.placing import unpack as unpack
from pscluster.spmd.tensor import DTensor as DTensor
from pscluster.spmd.tensor import Shard as Shard
from pscluster.spmd.tracing.explain import Explanation as Explanation
from pscluster.spmd.tracing.explain import explain as explain
from pscluster.spmd.tracing.explain import visualize as visualize
from pscluster.spmd.tracing.function import function as function
from pscluster.spmd.tracing.local_map import local_map as local_map
from pscluster.spmd.training import metrics as metrics
from pscluster.spmd.training import optimizers as optimizers
from pscluster.spmd.variables.layout_map import LayoutMap as LayoutMap
from pscluster.spmd.variables.variable import DVariable as DVariable
from pscluster.worker.programs.local.collectives import all_gather as all_gather
from pscluster.worker.programs.local.collectives import axis_index as axis_index
from pscluster.worker.programs.local.collectives import axis_size as axis_size
from pscluster.worker.programs.local.collectives import pmax as pmax
from pscluster.worker.programs.local.collectives import pmean as pmean
from pscluster.worker.programs.local.collectives import pmin as pmin
from pscluster.worker.programs.local.collectives import psum as psum
