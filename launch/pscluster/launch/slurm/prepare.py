"""What the job script runs first, on the job's first node: certificates for its nodes, and a clean start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from pscluster.core.cluster.node_list import expand_nodes, wrong_variable
from pscluster.core.role.process import main_of
from pscluster.core.security.certificates import make_certificates
from pscluster.launch.slurm.job_script import CLUSTER, EXIT_CODE, TLS

_NODES = "SLURM_JOB_NODELIST"


@click.command("prepare")
@click.option("--insecure", is_flag=True)
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
def prepare(run: Path, insecure: bool) -> None:
    """Make RUN ready for a start of its job, also after a requeue, which may be on other nodes."""
    text = os.environ.get(_NODES)
    if text is None:
        raise wrong_variable(_NODES, None, "only a job has it: submit the script with sbatch", "n[01-03]")
    hosts = expand_nodes(text, _NODES)
    for name in (EXIT_CODE, CLUSTER):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / TLS, ignore_errors=True)
    if not insecure:
        make_certificates(run / TLS, hosts)
        (run / TLS / "ca.key").unlink()  # nothing else is to be signed: a requeue makes a new CA


if __name__ == "__main__":
    main_of(prepare)
