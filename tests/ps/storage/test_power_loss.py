"""Power failures, with `--fsync` and the log: no acknowledged update is lost, and servers start.

A real server's system calls are recorded while a real coordinator creates and updates variables. Then the power fails
between any two calls, and the server's own code starts from a state that may be left.

PSCLUSTER_SEARCH=100 tries more.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import SEARCH
from tests.ps.storage.power_loss import ACKNOWLEDGED, Machine, build_shim, read_journal
from tests.roles.processes import Roles, make_cluster

from pscluster.core.errors import ConfigurationError
from pscluster.ps.storage.log import reader as log_reader
from pscluster.ps.storage.log import writer as log
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions

ROOT = Path(__file__).resolve().parents[3]
TRIALS = 30

SCRIPT = """
import os, sys
import numpy as np
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable
from tests.ps.storage.power_loss import acknowledgement

journal = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
strategy = ParameterServerStrategy(TFConfigClusterResolver())
coordinator = ClusterCoordinator(strategy)
variables, counts = [], []
for number in range(int(sys.argv[2])):
    with strategy.scope():
        variables.append(Variable(np.zeros(200 * (1 + number)), name=f"v{number}"))
    counts.append(0)
    os.write(journal, acknowledgement(f"v{number}", 0))
    for step in range(12):
        at = step % len(variables)  # most updates are of the first ones: files of the others serve several generations
        variables[at].assign_add(np.ones(200 * (1 + at)))
        counts[at] += 1
        os.write(journal, acknowledgement(f"v{at}", counts[at]))
print("done", flush=True)
"""


def counts_in(folder: Path) -> dict[str, set[float]]:
    """Return what a server has that starts there after another boot: all values of each variable."""
    manager = StateManager(DurabilityOptions(Durability.LOG, folder, 1e6, fsync=False))
    try:
        recovered = manager.restore()
        if recovered is None:
            return {}
        return {
            variable.spec.name: {
                value for shard in variable.shards.values() for value in np.unique(shard.array).tolist()
            }
            for variable in recovered.store.held()[0]
        }
    finally:
        manager.close()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, for what is preloaded")
@pytest.mark.timeout(300)
def test_the_power_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the power fails, the server starts, with all acknowledged updates, and no update in part."""
    state, journal = tmp_path / "state", tmp_path / "journal"
    journal.touch()
    state.mkdir()
    watched = {
        "LD_PRELOAD": str(build_shim(tmp_path)),
        "POWER_LOSS_JOURNAL": str(journal),
        "POWER_LOSS_FOLDER": str(state),
    }
    with Roles(make_cluster(workers=1), tmp_path, {"PSCLUSTER_INSECURE": "1", "PYTHONPATH": str(ROOT)}) as roles:
        roles.worker()
        roles.env |= watched
        server = roles.ps(0, "--durability", "log", "--fsync", "--state-dir", str(state), "--snapshot-seconds", "0.1")
        server.wait_for("serving on")
        for name in watched:
            del roles.env[name]
        coordinator = roles.coordinator(SCRIPT, str(journal), "12")
        assert coordinator.wait() == 0, coordinator.output
    records = read_journal(journal)
    folders = Counter(str(Path(record.path).parent) for record in records if record.kind == b"W")
    folder = Path(folders.most_common(1)[0][0])
    for module in (log, log_reader):
        monkeypatch.setattr(module, "machine_boot_id", lambda: bytes(16))
    first = next(at for at, record in enumerate(records) if record.kind == ACKNOWLEDGED)
    last = max(at for at, record in enumerate(records) if record.kind == ACKNOWLEDGED) + 1
    for trial in range(round(TRIALS * SEARCH)):
        chance = random.Random(trial)
        at = chance.randint(first, last)
        into = tmp_path / "restarted"
        Machine(records[:at]).restart(folder, into, chance)
        acknowledged = {record.path: record.offset for record in records[:at] if record.kind == ACKNOWLEDGED}
        left = sorted(path.name for path in into.iterdir())
        try:
            counts = counts_in(into)
        except ConfigurationError as error:
            pytest.fail(f"trial {trial}, call {at}: {error}; there was {left}")
        for name, count in acknowledged.items():
            assert counts.get(name) in ({float(count)}, {count + 1.0}), f"trial {trial}, call {at}, {name}: {left}"
        shutil.rmtree(into)
