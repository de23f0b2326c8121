"""Generate the protobuf stubs from proto/, or with --check verify that the committed ones are up to date.

Only messages are generated. Services are read from the descriptors at run time
(pscluster.core.transport.methods), so the stubs do not tie the project to one version of grpcio.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "proto"


def generate(target: Path) -> None:
    sources = sorted(str(path) for path in ROOT.glob("pscluster/v1/*.proto"))
    status = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={target}", f"--pyi_out={target}", *sources])
    if status != 0:
        sys.exit(f"protoc ended with status {status}")


def stale(target: Path) -> list[str]:
    """Return the stubs that differ from those generated in `target`, are missing, or have no source."""
    fresh = {path.relative_to(target): path.read_bytes() for path in target.rglob("*_pb2.py*")}
    committed = {path.relative_to(ROOT): path.read_bytes() for path in ROOT.rglob("*_pb2.py*")}
    return sorted(str(name) for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a stub is stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        if names := stale(Path(folder)):
            sys.exit(f"stale stubs: {', '.join(names)}; run `make proto` and commit what it wrote")


if __name__ == "__main__":
    main()
