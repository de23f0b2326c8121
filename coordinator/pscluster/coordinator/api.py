"""The public names of `pscluster.coordinator`, which imports them from here at first use."""

from __future__ import annotations

from pscluster.coordinator import features as features  # modules are not in __all__
from pscluster.coordinator import sources as sources
from pscluster.coordinator.checkpoints.checkpoint import Checkpoint
from pscluster.coordinator.checkpoints.manager import CheckpointManager, RestoredFrom
from pscluster.coordinator.checkpoints.saved import SavedVariables
from pscluster.coordinator.checkpoints.sidecar import SidecarEvaluator
from pscluster.coordinator.dashboard import Dashboard
from pscluster.coordinator.data.data_part import DataPart
from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorker, PerWorkerDataset, PerWorkerIterator
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.moves.plan import Plan
from pscluster.coordinator.observability.progress_line import ProgressLine
from pscluster.coordinator.queue.cluster_coordinator import ClusterCoordinator
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.server import Server
from pscluster.coordinator.serving import ServingTable, export_delta
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.synchronous.per_replica import PerReplica
from pscluster.coordinator.synchronous.strategy import SynchronousStrategy
from pscluster.coordinator.training import callbacks as callbacks
from pscluster.coordinator.training.history import History
from pscluster.coordinator.variables.partitioners import (
    FixedShardsPartitioner,
    HashPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    ModuloPartitioner,
    Partitioner,
)
from pscluster.core import errors as errors
from pscluster.core.cluster.kubernetes import KubernetesClusterResolver
from pscluster.core.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from pscluster.core.cluster.slurm import SlurmClusterResolver
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.context import exact_reads, experimental_get_current_worker_index
from pscluster.core.ids import VERSION
from pscluster.ps import initializers as initializers
from pscluster.ps import table_policies as table_policies
from pscluster.ps.handles import metrics as metrics
from pscluster.ps.handles import optimizers as optimizers
from pscluster.ps.handles.indexing import IndexedSlices
from pscluster.ps.handles.rows.lookup import (
    embedding_bag,
    embedding_lookup,
    embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)
from pscluster.ps.handles.rows.table import EmbeddingTable
from pscluster.ps.handles.variables.sharded import ShardedVariable
from pscluster.ps.handles.variables.variable import Variable
from pscluster.worker.collectives.replica import ReplicaContext, replica_context
from pscluster.worker.data.per_worker import InputContext
from pscluster.worker.per_worker_variable import PerWorkerVariable
from pscluster.worker.strategy import ReduceOp
from pscluster.worker.synchronous.losses import compute_average_loss, scale_regularization_loss

__version__ = VERSION

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "ClusterCoordinator",
    "ClusterResolver",
    "ClusterSpec",
    "Dashboard",
    "DataPart",
    "DistributedDataset",
    "EmbeddingTable",
    "FixedShardsPartitioner",
    "HashPartitioner",
    "History",
    "IndexedSlices",
    "InputContext",
    "KubernetesClusterResolver",
    "LocalCluster",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ModuloPartitioner",
    "ParameterServerStrategy",
    "Partitioner",
    "PerReplica",
    "PerWorker",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerVariable",
    "Plan",
    "ProgressLine",
    "ReduceOp",
    "RemoteValue",
    "RemoteValueStatus",
    "ReplicaContext",
    "RestoredFrom",
    "SavedVariables",
    "Server",
    "ServingTable",
    "ShardedVariable",
    "SidecarEvaluator",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "SynchronousStrategy",
    "TFConfigClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
    "Variable",
    "compute_average_loss",
    "embedding_bag",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "exact_reads",
    "experimental_get_current_worker_index",
    "export_delta",
    "replica_context",
    "safe_embedding_lookup_sparse",
    "scale_regularization_loss",
]
