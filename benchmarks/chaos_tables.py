"""Random operations on embedding tables while servers are killed, compared with a dictionary: part of `make chaos`.

    python benchmarks/chaos_tables.py [--operations N] [--seed N] [--kill-every CALLS] [--move-every CALLS]
                                      [--save-every CALLS]

`tests/faults/table_chaos.py` says what is done and what is known of it. Exit code 0: all tables had the values and the
rows that the model has, at each lookup and at the end. What it draws depends on the seed alone; when the faults strike
does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.faults.support import running_job  # noqa: E402 (of the path above)
from tests.faults.table_chaos import TableChaos  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Random operations on embedding tables while servers are killed.")
    parser.add_argument("--operations", type=int, default=1_000_000, help="lookups and updates, of one id each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-every", type=int, default=1000, help="calls, each of which has several operations")
    parser.add_argument("--move-every", type=int, default=700, help="calls")
    parser.add_argument("--save-every", type=int, default=2000, help="calls")
    options = parser.parse_args()
    with (
        running_job(num_ps=2, num_workers=1, durability="log", max_restarts=1_000_000, log_level="ERROR") as job,
        tempfile.TemporaryDirectory(prefix="pscluster-tables-") as folder,
    ):
        chaos, begin = TableChaos(job.strategy, job.cluster, Path(folder), options.seed), time.monotonic()

        def progress() -> None:
            print(f"{time.monotonic() - begin:6.0f} s: {said(chaos)}", flush=True)

        chaos.run(
            options.operations,
            kill_every=options.kill_every,
            move_every=options.move_every,
            save_every=options.save_every,
            progress=progress,
        )
        progress()
        lost = job.strategy.lost_updates()
    print("every row is that of the model" if not lost else f"updates were lost: {lost}")
    return 1 if lost else 0


def said(chaos: TableChaos) -> str:
    """What has happened so far."""
    counts = chaos.counts
    return (
        f"{counts.operations:,} operations in {counts.calls:,} calls, {counts.kills} servers killed, {counts.moves} "
        f"shards moved, {counts.saves} checkpoints, {counts.restores} restores, {counts.dropped:,} rows dropped; the "
        f"model asked {sum(twin.asked for twin in chaos.twins):,} times"
    )


if __name__ == "__main__":
    sys.exit(main())
