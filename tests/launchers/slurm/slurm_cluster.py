"""A real Slurm on this machine: munged, slurmctld, and two nodes, each with its own network; for the tests.

Nothing of the machine's own configuration is used or changed. It takes root, Slurm's and munge's daemons, and network
namespaces.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.faults.namespaces import COORDINATOR, Network
from tests.faults.namespaces import missing as missing_network
from tests.waiting import until

NODES = ("n1", "n2")
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")

_CONF = """
ClusterName=pscluster-test
SlurmctldHost={host}({controller})
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
SlurmdTimeout=10
KillWait=30
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if absent := [name for name in _DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"Slurm needs {', '.join(absent)}: as root, apt-get install slurm-wlm munge"
    return missing_network()


@contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Start the daemons, and return the environment for Slurm's commands; afterwards nothing is left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pscluster-slurm-")))
        folder.chmod(0o755)  # munge's clients reach its socket
        network = stack.enter_context(Network(NODES))
        host = socket.gethostname()
        conf = _CONF.format(folder=folder, host=host, controller=network.address(COORDINATOR))
        hosts = Path("/etc/hosts").read_text()
        for number, node in enumerate(NODES):
            conf += (
                f"NodeName={node} NodeHostname={host} NodeAddr={network.address(node)} Port={26818 + number} CPUs=6\n"
            )
            hosts += f"{network.address(node)} {node}\n"
            (folder / f"spool-{node}").mkdir()
        (folder / "controller").mkdir()
        (folder / "slurm.conf").write_text(conf)
        (folder / "hosts").write_text(hosts)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

        def start(command: Sequence[str]) -> None:
            log = stack.enter_context((folder / "daemons.log").open("ab"))
            process = subprocess.Popen(
                command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)

        names = {"key-file": "key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
        munge = [f"--{flag}={folder / name}" for flag, name in names.items()]
        start(["munged", "--foreground", "--force", *munge, f"--seed-file={folder / 'seed'}"])
        until((folder / "munge.sock").exists, "munged listens", (folder / "daemons.log").read_text)
        start(["slurmctld", "-D"])
        for node in NODES:  # the nodes' names are known to the nodes only; `ip netns exec` would hide the cgroups
            mount = f"mount --bind {folder / 'hosts'} /etc/hosts && exec slurmd -D -N {node}"
            namespace = f"/run/netns/{network.command(node)[-1]}"
            start(["nsenter", f"--net={namespace}", "unshare", "--mount", "sh", "-c", mount])

        def idle() -> int:
            done = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%T"],
                env={**os.environ, **env},
                capture_output=True,
                text=True,
            )
            return done.stdout.split().count("idle")

        until(lambda: idle() == len(NODES), "both nodes are idle", (folder / "daemons.log").read_text)
        yield env
