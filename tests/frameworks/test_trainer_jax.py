"""An unchanged script of several JAX processes under the trainer, also if one of them is killed."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from tests.roles.processes import run

SCRIPT = """
    import jax
    import jax.numpy as jnp
    import numpy as np

    if __name__ == "__main__":
        jax.distributed.initialize()
        from jax.experimental import multihost_utils
        gathered = multihost_utils.process_allgather(jnp.asarray([float(jax.process_index() + 1)]))
        print(f"{jax.process_count()} processes, sum {float(np.sum(gathered))}\\n", end="", flush=True)
        jax.distributed.shutdown()
"""

DRIVER = """
    import os, runpy, signal, sys
    from pathlib import Path
    from pscluster.launch import RunConfig, ScalingConfig, Trainer, get_context

    script, folder = sys.argv[1:]

    def train():
        if get_context().world_rank == 1 and not Path(folder, "died").exists():
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        runpy.run_path(script, run_name="__main__")

    if __name__ == "__main__":
        Trainer(train, scaling=ScalingConfig(workers=2), run=RunConfig("jax", folder), backend="jax").fit()
"""


def test_a_script_of_jax_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    command = (sys.executable, str(tmp_path / "driver.py"))
    code, output = run(str(tmp_path / "script.py"), str(tmp_path), command=command, JAX_PLATFORMS="cpu")
    assert code == 0, output
    assert output.count("2 processes, sum 3.0") == 2
    assert (tmp_path / "died").exists()
