"""Server: starts a role from a script, for programs that have one file for all roles.

resolver = TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    Server(resolver).join()
else:
    ...  # the coordinator's part
"""

from __future__ import annotations

from pscluster.coordinator.job.settings import process_options
from pscluster.core import checks
from pscluster.core.cluster.resolvers import ClusterResolver, TFConfigClusterResolver
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.errors import ConfigurationError
from pscluster.core.role.lifecycle import run_role
from pscluster.core.role.listening import listen_address
from pscluster.core.role.options import RoleOptions
from pscluster.core.security.tokens import hide_token
from pscluster.ps.server.main import serve_ps, store_of_environ
from pscluster.worker.main import serve_worker


class Server:
    """A parameter server or worker in this process.

    Args:
        server_or_cluster_def: a resolver or a ClusterSpec; default: TF_CONFIG.
        job_name, task_index: "ps" or "worker", and its index; default: the resolver's task.
        protocol: accepted for compatibility with TensorFlow; only "grpc" exists.
        options: how to serve; default: the environment's credentials, and the task's own address.

    Raises:
        ConfigurationError: the cluster has no such task, or it is neither a "ps" nor a "worker".
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterResolver | ClusterSpec | None = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str = "grpc",
        *,
        options: RoleOptions | None = None,
    ) -> None:
        source = server_or_cluster_def if server_or_cluster_def is not None else TFConfigClusterResolver()
        if isinstance(source, ClusterSpec):
            spec = source
        elif not isinstance(source, ClusterResolver):
            raise TypeError(f"a Server takes a ClusterSpec or a resolver, not {checks.type_of(source)}")
        else:
            spec = source.cluster_spec()
            job_name = job_name or source.task_type
            task_index = source.task_id if task_index is None else task_index
        if not checks.text("protocol", protocol).startswith("grpc"):
            raise ConfigurationError(f"protocol is {protocol!r}, but only 'grpc' is supported")
        if job_name not in ("ps", "worker"):
            raise ConfigurationError(
                f"a Server is a 'ps' or a 'worker', not {job_name!r}: branch on resolver.task_type"
            )
        if task_index is None:
            raise ConfigurationError("a Server needs the index of its task: give task_index, or set TF_CONFIG's task")
        self._role, self._index, self._spec = job_name, task_index, spec
        self._options = options or process_options(job_name)
        self._address = listen_address(spec.task_address(job_name, task_index), self._options)

    @property
    def target(self) -> str:
        """Return the address at which it listens."""
        return f"grpc://{self._address}"

    def join(self) -> None:
        """Serve until SIGTERM, Ctrl-C or, if so configured, the end of the job; then exit with 0. Never returns."""
        hide_token()
        if self._role == "ps":
            own = self._spec.task_address("ps", self._index)
            store = store_of_environ(self._index, own)
            serve = serve_ps(self._index, self._address, self._options, store, own or "")
        else:
            serve = serve_worker(self._index, self._address, self._spec, self._options)
        run_role(self._role, self._index, self._options, serve)
