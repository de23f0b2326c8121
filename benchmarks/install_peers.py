"""Make the environment of the systems that we compare with: benchmarks/install_peers.py DIRECTORY.

Each is installed separately, so that one that is unavailable here does not prevent the others.
"""

import subprocess
import sys
import venv
from pathlib import Path

PEERS = (
    "tensorflow-cpu==2.21.0",
    "torch==2.13.0",
    "ray[train]",
    "dask[array,distributed]",
    "tensordict torchmetrics pyre-extensions tqdm",  # of TorchRec, which requires GPUs' libraries, too
    "--no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0",
)


def main() -> int:
    where = Path(sys.argv[1])
    python = where / "bin" / "python"
    if not python.exists():
        venv.create(where, with_pip=True)
    missing = []
    for requirement in PEERS:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirement.split()]
        if subprocess.run(command).returncode:
            missing.append(requirement)
    print(f"installed: {', '.join(peer for peer in PEERS if peer not in missing) or 'nothing'}")
    if missing:
        print(f"could not be installed, and will be left out: {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
