"""The results, as lines for the terminal and as a page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path


def shown(value: float) -> str:
    """Return a number with about three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass
class Results:
    """A row: the values of each side, by round."""

    key: str
    title: str
    unit: str
    values: dict[str, list[float]]
    goals: tuple[tuple[tuple[str, ...], float], ...]
    higher_is_better: bool
    cpu: dict[str, list[float]]
    """CPU seconds of all of a side's processes for one function, by round."""

    def median(self, side: str) -> float | None:
        """Return the median of the rounds."""
        values = self.values.get(side)
        return statistics.median(values) if values else None

    def cpu_ratio(self, ours: str, peer: str) -> float:
        """Return the peer's CPU time for one function by ours; 0 if ours is too small to measure."""
        mine, theirs = statistics.median(self.cpu[ours]), statistics.median(self.cpu[peer])
        return theirs / mine if mine else 0.0

    def comparisons(self, ours: str) -> list[tuple[str, float, float, float, float]]:
        """Return for each goal with results: the best peer, our ratio to it, the lowest and highest, the goal."""
        comparisons = []
        mine = self.values.get(ours)
        for peers, goal in self.goals:
            measured = [peer for peer in peers if self.values.get(peer)]
            if not mine or not measured:
                continue
            medians = {peer: statistics.median(self.values[peer]) for peer in measured}
            best = (
                max(medians, key=medians.__getitem__)
                if self.higher_is_better
                else min(medians, key=medians.__getitem__)
            )
            pairs = list(zip(mine, self.values[best], strict=False))
            by_round = [a / b if self.higher_is_better else b / a for a, b in pairs]
            middle = statistics.median(mine) / medians[best]
            ratio = middle if self.higher_is_better else 1 / middle
            comparisons.append((best, ratio, min(by_round), max(by_round), goal))
        return comparisons

    def line(self, ours: str) -> str:
        """Return a line for the terminal."""
        sides = ", ".join(f"{name} {shown(statistics.median(v))}" for name, v in self.values.items() if v)
        judged = "; ".join(
            f"{ratio:.2f} x {peer} ({low:.2f}-{high:.2f}; CPU {self.cpu_ratio(ours, peer):.2f}), goal {goal:g}: "
            f"{'reached' if ratio >= goal else 'MISSED'}"
            for peer, ratio, low, high, goal in self.comparisons(ours)
        )
        return f"{self.title} [{self.unit}]: {sides}. {judged}"


@dataclass
class Cost:
    """One of our own costs."""

    title: str
    goal: str
    result: str
    reached: bool

    def line(self) -> str:
        """Return a line for the terminal."""
        return f"{self.title}: {self.result}; goal: {self.goal}: {'reached' if self.reached else 'MISSED'}"


@dataclass
class Report:
    """All results."""

    rows: list[Results] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


HOW = """\
Every system has two parameter servers, two workers and one coordinator, each a process, that communicate over TCP on
loopback; torch's RPC has no servers, and may use shared memory, as it does by default. The clusters are warm, and are
asked in turn, round after round, so that a disturbance affects all of them. A ratio is that of the medians, above 1 if
pscluster is ahead (for times it is inverted); in brackets are the lowest and highest ratio of a single round. The CPU
ratio is the CPU time that all processes of the peer took for one function, divided by ours: on a machine that is also
doing other work it is the steadier of the two. Every process does arithmetic on one thread. Nothing is timed before the
workers have run it; TensorFlow's functions are traced by then.

- **Empty functions**: scheduled, joined, and fetched if they have a result. Ray calls two actors, in the row without a
  result with `num_returns=0`; torch calls two workers with `rpc_async`.
- **Dense pull and push**: each function reads, or adds to, a whole variable that is cut in two, one half per server;
  both workers at once. The bytes that cross loopback are counted, in case a graph optimiser omits the transfer.
- **Sparse rows**: random ids of a table of a million rows; the same optimizer on both sides.
- **Embedding model**: a million rows of 32, 26 uniform ids and 13 numbers per example, hidden layers of 256 and 128,
  batches of 512; ours in NumPy, TensorFlow's a traced function with its own gradients and kernels.
- **Training loop**: an epoch of `fit` over a separate dataset on each worker, each step a multiplication of two
  matrices; compared with functions that TensorFlow's coordinator schedules, joins and fetches, of one step each, or 16
  in a loop.
- **One client, one server**: a worker reads or assigns one tensor.
- **all_reduce**: sums of float32 among the workers, one after the other, beside torch's over gloo, among as many
  processes.
- **Synchronous steps**: a network of two layers, ours in NumPy, with its parameters on two servers, and one of torch
  with DistributedDataParallel over gloo; a replica has the same batch in every step: 64 examples, with Adam (digits),
  or 4, with SGD (40 MiB). The dense model is there again with our step computed by torch as well, so that what is
  compared is the training and not NumPy's arithmetic. A synchronous step is one of all replicas; in the asynchronous
  row each worker takes its own.
- **Recommender**: like DLRM, an id of each table and 13 numbers per example, batches of 512, dense layers on the
  products of all pairs of rows, Adagrad; computed by torch with one thread a worker, 20 steps a function, beside one
  process of torch with its sparse gradients. All steps of all workers count.
- **The raw socket**: the same bytes between as many servers and workers, over a Python socket from each worker to each
  server, with nothing else (`socket_side.py`) but the row's arithmetic: no variables, no checks, no once-only updates,
  nothing kept for a restart, and the same warm memory each time. A dense push is added, by NumPy, once it has all
  arrived; an assignment is stored in place as it arrives; rows are updated by Adagrad if the row says so. For
  "schedule to fetch" it is a byte there and back, without a queue or a function. Its connections have the kernel's
  settings; with those of our data plane (`tuned_socket_side.py`) it is the limit of what Python can do.
- **Bare gRPC** is the same with Python's gRPC (`grpc_side.py`). Ours uses its data plane; see
  [Performance](performance.md#the-data-plane).
- Clients cache nothing (`PSCLUSTER_READ_CACHE_MIB=0`), unless the row says so: rows are about moving bytes.
"""


def write(report: Report, path: Path, ours: str) -> None:
    """Write the page."""
    facts = report.facts
    peers = list(dict.fromkeys(name for row in report.rows for name in row.values if name != ours))
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`; do not edit it. `make bench-peers` installs the peers that can be installed.",
        "",
        f"- Machine: {facts['machine']}",
        f"- Commit: {facts['commit']}, {facts['date']}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in sorted(report.versions.items()))}",
        f"- Command: `{facts['command']}` ({facts['took']})",
        *(f"- {note}" for note in report.notes),
        "",
        "## Beside the peers",
        "",
        f"| work | unit | {ours} | {' | '.join(peers)} | ratio | CPU ratio | goal | |",
        f"| --- | --- | ---: | {' | '.join('---:' for _ in peers)} | --- | --- | --- | --- |",
    ]
    for row in report.rows:
        medians = {name: row.median(name) for name in (ours, *peers)}
        cells = [shown(value) if value is not None else "" for value in medians.values()]
        judged = row.comparisons(ours)
        ratios = "<br>".join(f"{ratio:.2f} x {peer} ({low:.2f}-{high:.2f})" for peer, ratio, low, high, _ in judged)
        cpus = "<br>".join(f"{row.cpu_ratio(ours, peer):.2f} x" for peer, *_ in judged)
        goals = "<br>".join(f"{goal:g} x" for *_, goal in judged)
        verdicts = "<br>".join("reached" if ratio >= goal else "missed" for _, ratio, _, _, goal in judged)
        lines.append(f"| {row.title} | {row.unit} | {' | '.join(cells)} | {ratios} | {cpus} | {goals} | {verdicts} |")
    lines += ["", "## What must not grow", "", "| cost | result | goal | |", "| --- | --- | --- | --- |"]
    lines += [f"| {c.title} | {c.result} | {c.goal} | {'reached' if c.reached else 'missed'} |" for c in report.costs]
    lines += ["", "## How it is measured", "", HOW]
    path.write_text("\n".join(lines))
