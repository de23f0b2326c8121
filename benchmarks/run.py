"""The benchmark: pscluster and its peers, in turn, in one call.

    python benchmarks/run.py [--quick] [--only ROW]... [--rounds N] [--out FILE]

Every side keeps a separate warm cluster: 2 parameter servers, 2 workers and 1 coordinator, each a process, in a
separate network with nothing but loopback. A round asks each side once; a row is as many rounds as `--rounds` says,
and its ratio is that of the medians. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import (
    FRAMEWORKS,
    PEERS,
    REPO,
    Side,
    SideError,
    adopt_orphans,
    can_isolate,
    commit,
    end_orphans,
    machine,
    peers_that_are_there,
)
from report import Cost, Report, Results, write

OURS, TENSORFLOW, RAY, TORCH, DASK, GLOO = "pscluster", "TensorFlow", "Ray", "torch rpc", "Dask", "torch gloo"
NUMPY, NUMPY_2, DTENSOR, DASK_ARRAY = "NumPy", "NumPy, two threads", "torch DTensor", "dask.array"
ALONE, ALONE_2 = "torch, one process", "torch, one process of two threads"
ALONE_PAIR = "torch, two processes that share nothing"  # the limit of two workers
TENSORFLOW_TABLES, TORCHREC = "TensorFlow, without Keras", "TorchRec"
LIMITS = SOCKET, TUNED, BARE = "raw socket", "socket set as ours", "bare gRPC"
NUMPY_PAIR = "NumPy by hand, two processes"
OUR_SCRIPTS = {
    OURS: "pscluster_side.py",
    SOCKET: "socket_side.py",
    TUNED: "tuned_socket_side.py",
    BARE: "grpc_side.py",
    NUMPY: "numpy_side.py",
    NUMPY_2: "numpy_side.py --threads=2",
    NUMPY_PAIR: "numpy_pair_side.py",
}
PEERS_SCRIPTS = {  # and what has to be installed for them
    TENSORFLOW: ("tensorflow_side.py", "tensorflow"),
    RAY: ("ray_side.py", "ray"),
    TORCH: ("torch_rpc_side.py", "torch"),
    DASK: ("dask_side.py", "distributed"),
    GLOO: ("gloo_side.py", "torch"),
    DTENSOR: ("dtensor_side.py", "torch"),
    DASK_ARRAY: ("dask_array_side.py", "dask"),
    ALONE: ("torch_side.py", "torch"),
    ALONE_2: ("torch_side.py --threads=2", "torch"),
    ALONE_PAIR: ("torch_side.py --processes=2", "torch"),
    TENSORFLOW_TABLES: ("tensorflow_recommender_side.py", "tensorflow"),
    TORCHREC: ("torchrec_side.py", "torchrec"),
}
TABLE_IDS, BATCH, VARIABLES = 10_000, 512, 500
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One measurement. `goals`: groups of peers, and the multiple of a group's best result that we must reach."""

    key: str
    title: str
    unit: str
    do: str
    n: dict[str, int]
    goals: tuple[tuple[tuple[str, ...], float], ...]
    measure: Callable[[Any, int], float]
    arguments: dict[str, Any] = field(default_factory=dict)
    higher_is_better: bool = True
    pick_optimizer: bool = False
    slow_to_prepare: bool = False  # left out of the quick run
    moves: int = 0  # bytes that a function must move, if known

    @property
    def sides(self) -> list[str]:
        """The sides that take part."""
        return list(self.n)

    def amount(self, side: str, *, quick: bool, counts: bool) -> int:
        """Return how much of it a side does in a round: whole calls, at least one; few if it does not count."""
        full = max(2, self.n[side] // 5) if quick else self.n[side]
        at_once = self.arguments.get("at_once", 1)
        return max(1, (full if counts else min(full, 4)) // at_once) * at_once


def _rate(per_function: float) -> Callable[[Any, int], float]:
    return lambda seconds, n: n * per_function / seconds


def _quantile(share: float) -> Callable[[Any, int], float]:
    def quantile(times: Any, _: int) -> float:
        ordered = sorted(times)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3

    return quantile


DISPATCH_GOALS = (((TENSORFLOW,), 20.0), ((RAY, TORCH), 3.0))


def _dispatch_rows() -> list[Row]:
    n = {OURS: 20_000, TENSORFLOW: 1_000, RAY: 4_000, TORCH: 8_000, DASK: 500}
    few = {OURS: 2_000, TENSORFLOW: 500, RAY: 1_000, TORCH: 2_000, DASK: 100, BARE: 2_000, SOCKET: 2_000}
    latency = (((TENSORFLOW,), 6.0),)
    return [
        Row("empty", "empty functions", "/s", "empty", n, DISPATCH_GOALS, _rate(1), {"result": False}),
        Row(
            "result",
            "empty functions with a small result",
            "/s",
            "empty",
            n,
            DISPATCH_GOALS,
            _rate(1),
            {"result": True},
        ),
        Row("p50", "schedule to fetch, p50", "ms", "latency", few, latency, _quantile(0.5), higher_is_better=False),
        Row("p99", "schedule to fetch, p99", "ms", "latency", few, latency, _quantile(0.99), higher_is_better=False),
    ]


def _dense_row(do: str, mib: int, n: int) -> Row:
    return Row(
        f"{do}-{mib}",
        f"dense {do}, {mib} MiB",
        "GiB/s",
        do,
        dict.fromkeys((OURS, TENSORFLOW, *LIMITS), n),
        (((TENSORFLOW,), 2.5),),
        _rate(mib * MIB / GIB),
        {"mib": mib},
        slow_to_prepare=mib == 200,
        moves=mib * MIB,
    )


def _dense_rows() -> list[Row]:
    return [_dense_row(do, mib, n) for mib, n in ((1, 600), (40, 60), (200, 12)) for do in ("pull", "push")]


def _sparse_rows() -> list[Row]:
    return [
        Row(
            "many",
            f"read {VARIABLES} variables of 4 KiB",
            "steps/s",
            "many",
            {OURS: 200, TENSORFLOW: 20, BARE: 200, SOCKET: 200},
            (((TENSORFLOW,), 10.0),),
            _rate(1),
            {"variables": VARIABLES},
            moves=VARIABLES * 4096,
        ),
        Row(
            "gather",
            "gather 10 k rows of 64",
            "M rows/s",
            "gather",
            dict.fromkeys((OURS, TENSORFLOW, *LIMITS), 300),
            (((TENSORFLOW,), 3.0),),
            _rate(TABLE_IDS / 1e6),
            {"ids": TABLE_IDS},
            moves=TABLE_IDS * 64 * 4,
        ),
        Row(
            "update",
            "gather 10 k rows of 64 and apply {optimizer}",
            "M rows/s",
            "gather_update",
            dict.fromkeys((OURS, TENSORFLOW, *LIMITS), 150),
            (((TENSORFLOW,), 3.0),),
            _rate(TABLE_IDS / 1e6),
            {"ids": TABLE_IDS},
            pick_optimizer=True,
            moves=2 * TABLE_IDS * 64 * 4,
        ),
        Row(
            "embedding",
            "embedding model, a training step with {optimizer}",
            "examples/s",
            "embedding",
            {OURS: 40, TENSORFLOW: 40},
            (((TENSORFLOW,), 1.5),),
            _rate(BATCH),
            {"batch": BATCH},
            pick_optimizer=True,
        ),
    ]


def _loop_rows() -> list[Row]:
    n = {OURS: 3200, TENSORFLOW: 1600}
    return [
        Row(
            f"loop-{key}",
            f"training loop, steps of 0.3 ms, {packed}",
            "steps/s",
            "loop",
            n,
            (((TENSORFLOW,), 1.0),),
            _rate(1),
            {"packing": packing},
        )
        for key, packed, packing in (("1", "one per function", 1), ("packed", "several per function", 0))
    ]


def _single_rows() -> list[Row]:
    rows = []
    for mib, n in ((64, 6), (400, 2)):
        for push, goal in ((False, 0.9), (True, 0.75)):
            rows.append(
                Row(
                    f"{'assign' if push else 'read'}-{mib}",
                    f"one client, one server: {'assign' if push else 'read'} {mib} MiB",
                    "GiB/s",
                    "single",
                    dict.fromkeys((OURS, *LIMITS), n),
                    (((SOCKET,), goal),),
                    lambda times, _, mib=mib: mib * MIB / GIB / statistics.median(times),
                    {"mib": mib, "push": push},
                    slow_to_prepare=mib == 400,
                    moves=mib * MIB,
                )
            )
    return rows


def _collective_rows(workers: int) -> list[Row]:
    """All-reduces of float32 by as many workers, one after the other."""
    return [
        Row(
            f"all-reduce-{key}-{workers}",
            f"all_reduce of {title}, {workers} workers",
            "/s",
            "all_reduce",
            dict.fromkeys((OURS, GLOO), n),
            (((GLOO,), 1.0),),
            _rate(1),
            {"size": size},
        )
        for key, title, size, n in (
            ("4k", "4 KiB", 4 << 10, 500),
            ("1", "1 MiB", MIB, 200),
            ("40", "40 MiB", 40 * MIB, 15),
        )
    ]


def _torch_rows(workers: int) -> list[Row]:
    """The dense model again, computed by torch on both sides."""
    (row,) = (row for row in _synchronous_rows(workers) if row.key == f"step-dense-{workers}")
    return [replace(row, key=f"step-dense-torch-{workers}", title=f"{row.title}, computed by torch")]


def _synchronous_rows(workers: int) -> list[Row]:
    """Synchronous steps of as many replicas, beside DistributedDataParallel over gloo; and asynchronous ones."""
    rows = []
    for model, title, at_once, n, goal in (
        ("digits", "the digits network", 50, 100, 2.0),
        ("dense", "a dense model of 40 MiB", 20, 20, 1.0),
    ):
        rows.append(
            Row(
                f"step-{model}-{workers}",
                f"synchronous step of {title}, {workers} replicas, {at_once} a call",
                "steps/s",
                "steps",
                dict.fromkeys((OURS, GLOO), n),
                (((GLOO,), goal),),
                _rate(1),
                {"model": model, "at_once": at_once},
            )
        )
    rows.append(
        Row(
            f"step-digits-single-{workers}",
            f"synchronous step of the digits network, {workers} replicas, one a call",
            "steps/s",
            "steps",
            {OURS: 50},
            (),
            _rate(1),
            {"model": "digits", "at_once": 1},
        )
    )
    rows.append(
        Row(
            f"step-digits-async-{workers}",
            f"asynchronous step of the digits network, {workers} workers, each as fast as it can",
            "steps/s a worker",
            "alone",
            {OURS: 100},
            (),
            _rate(1),
            {"model": "digits"},
        )
    )
    return rows


_RECOMMENDERS = (  # tables, their rows, steps, and who takes them beside each other
    (8, 100_000, 200, (ALONE, ALONE_2, ALONE_PAIR, TENSORFLOW_TABLES, TORCHREC)),
    (26, 1_000_000, 80, (ALONE,)),  # 7 GB of tables and slots on each side: so not more than one at a time
    (26, 1_000_000, 80, (TENSORFLOW_TABLES,)),
    (26, 1_000_000, 80, (TORCHREC,)),
)


def _recommender_rows(ps: int, workers: int) -> list[list[Row]]:
    """A model like DLRM, computed by torch, beside one process that has all of it, and beside other clusters.

    Each list of rows needs clusters of its own.
    """
    goals = [((TENSORFLOW_TABLES,), 3.0)]
    if goal := {(2, 2): 1.2, (2, 1): 0.9}.get((ps, workers)):
        goals.append(((ALONE,), goal))
    short = {TENSORFLOW_TABLES: "-tensorflow", TORCHREC: "-torchrec"}
    return [
        [
            Row(
                f"recommend-{tables}-{ps}-{workers}{short.get(beside[0], '')}{'-overlap' * overlap}",
                f"recommender, {tables} tables of {rows:,} x 32, {ps} servers, {workers} workers"
                + ", steps that overlap" * overlap,
                "steps/s",
                "recommend",
                dict.fromkeys((OURS, *beside), n),
                tuple(goal for goal in goals if overlap and goal[0][0] in beside),
                _rate(1),
                {"tables": tables, "rows": rows, "overlap": overlap},
                slow_to_prepare=True,
            )
            for overlap in (0, 1)
        ]
        for tables, rows, n, beside in _RECOMMENDERS
    ]


def _array_rows() -> list[Row]:
    """Programs on global arrays, on two devices."""
    return [
        Row(
            "spmd-train",
            "a step of the DTensor guide's network (784-128-10, batch of 128, Adam) as a program, 10 a call",
            "steps/s",
            "train",
            {OURS: 400, NUMPY: 400, NUMPY_PAIR: 400, DTENSOR: 100, DASK_ARRAY: 20},
            (((DTENSOR, DASK_ARRAY), 1.0), ((NUMPY,), 1.4)),  # 0.7 of twice what one core does
            _rate(1),
            {"at_once": 10},
        ),
        Row(
            "spmd-train-one",
            "the same on two devices of one worker",
            "steps/s",
            "train",
            {OURS: 400, NUMPY: 400, NUMPY_2: 400},
            (((NUMPY,), 1.4),),
            _rate(1),
            {"at_once": 10, "on_one": True},
        ),
        Row(
            "spmd-matmul",
            "a product of matrices of 4,096 x 4,096, sharded over two processes",
            "/s",
            "matmul",
            {OURS: 2, NUMPY_2: 2},
            (((NUMPY_2,), 0.8),),
            _rate(1),
            {"size": 4096},
            slow_to_prepare=True,
        ),
    ]


class Bench:
    """Runs rows, and collects the results."""

    def __init__(self, rounds: int, isolated: bool, peers: set[str], quick: bool) -> None:
        self.rounds = rounds
        self.quick = quick
        self.report = Report()
        self._isolated = isolated
        self.peers = peers

    def _side(self, name: str, ps: int, workers: int, ours: Sequence[str], python: Path | None) -> Side | None:
        """A side that can be started here."""
        if name in OUR_SCRIPTS:
            script, *arguments = ours if name == OURS else OUR_SCRIPTS[name].split()
            arguments += [f"--ps={ps}", f"--workers={workers}"]
            return Side(name, script, *arguments, python=python, isolated=self._isolated)
        script, module = PEERS_SCRIPTS[name]
        if module not in self.peers:
            return None
        script, *arguments = script.split()
        if name in (GLOO, TORCHREC):
            arguments += [f"--workers={workers}"]
        elif name == TENSORFLOW_TABLES:
            arguments += [f"--ps={ps}", f"--workers={workers}"]
        return Side(name, script, *arguments, python=PEERS, isolated=self._isolated)

    def group(
        self,
        rows: Sequence[Row],
        ps: int = 2,
        workers: int = 2,
        ours: Sequence[str] = (OUR_SCRIPTS[OURS],),
        python: Path | None = None,
    ) -> None:
        """Run rows on the same clusters; a side is ended after the last row that it takes part in.

        `ours` is our side's script with its arguments, `python` what runs it.
        """
        rows = [row for row in rows if not (self.quick and row.slow_to_prepare)]
        if not rows:
            return
        if python == FRAMEWORKS and not FRAMEWORKS.exists():
            self.report.notes.append("our side with torch is left out: `make test-frameworks` installs it.")
            return
        names = list(dict.fromkeys(name for row in rows for name in row.sides))
        with contextlib.ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name in names:
                if self.quick and name == DASK:
                    continue  # no goal, and slow
                side = self._side(name, ps, workers, ours, python)
                if side is None:
                    self.report.notes.append(f"{name} is not installed; `make bench-peers` installs it.")
                else:
                    sides[name] = stack.enter_context(side)
            for name, side in list(sides.items()):
                try:
                    side.ready()
                    self.report.versions.update(side.versions)
                except SideError as error:
                    self._lose(sides, name, error)
            for i, row in enumerate(rows):
                self._row(row, sides)
                for name in list(sides):
                    if not any(name in later.sides for later in rows[i + 1 :]):
                        sides.pop(name).close()

    def _lose(self, sides: dict[str, Side], name: str, error: SideError) -> None:
        print(f"{name} is left out from here: {error}", file=sys.stderr)
        self.report.notes.append(f"{name} failed and was left out from there: {str(error).strip().splitlines()[-1]}")
        sides.pop(name).close()

    def _row(self, row: Row, sides: dict[str, Side]) -> None:
        arguments, title = dict(row.arguments), row.title
        mine = {name: side for name, side in sides.items() if name in row.sides}
        if row.pick_optimizer:
            known = [side.ask("optimizer_names") for name, side in mine.items() if name not in LIMITS]
            arguments["optimizer"] = next(name for name in known[0] if all(name in other for other in known))
            title = title.format(optimizer=arguments["optimizer"])
        values: dict[str, list[float]] = {name: [] for name in mine}
        cpu: dict[str, list[float]] = {name: [] for name in mine}
        for trial in range(self.rounds + 1):
            for name, side in list(mine.items()):
                n = row.amount(name, quick=self.quick, counts=trial > 0)
                before, cpu_before = side.loopback_bytes(), side.cpu_seconds()
                try:
                    answer = side.ask(row.do, n=n, **arguments)
                except SideError as error:
                    mine.pop(name)
                    values.pop(name)
                    self._lose(sides, name, error)
                    continue
                moved = side.loopback_bytes() - before
                if self._isolated and row.moves and moved < 0.95 * row.moves * n:
                    raise SystemExit(f"{name}: {title} moved {moved} bytes, not {row.moves} x {n}: it measures nothing")
                if trial:
                    values[name].append(row.measure(answer, n))
                    cpu[name].append((side.cpu_seconds() - cpu_before) / n)
        done = Results(row.key, title, row.unit, values, row.goals, row.higher_is_better, cpu)
        self.report.rows.append(done)
        print(done.line(OURS), flush=True)

    def cost(
        self,
        title: str,
        goal: str,
        do: str,
        cases: dict[str, dict[str, Any]],
        show: Any,
        script: str = "costs.py",
        beside: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
        python: Path | None = None,
    ) -> None:
        """Run a row of our own costs: each case in a new process; the median of some rounds if they are cheap.

        `beside` has scripts of peers, by what has to be installed for them, which are asked the same if it is.
        """
        if python is not None and not python.exists():
            self.report.notes.append(f"{title}: left out: `make test-frameworks` installs torch.")
            return
        answers = {}
        asked: list[tuple[str, str, Path | None, dict[str, Any]]] = []
        asked += [(label, script, python, arguments) for label, arguments in cases.items()]
        for label, (of_peer, arguments) in (beside or {}).items():
            if label in self.peers:
                asked.append((label, of_peer, PEERS, arguments))
        for label, of_case, python, arguments in asked:
            try:
                with Side("costs", of_case, python=python, isolated=self._isolated) as side:
                    side.ready()
                    answers[label] = side.ask(do, timeout=400, **arguments)
            except SideError as error:
                print(f"{title}, {label}: {error}", file=sys.stderr)
                self.report.notes.append(f"{title}, {label}: failed: {str(error).strip().splitlines()[-1]}")
        if answers:
            done = Cost(title, goal, *show(answers))
            self.report.costs.append(done)
            print(done.line(), flush=True)


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values)


def _listed(answers: dict[str, float], unit: str, scale: float = 1.0, digits: int = 1) -> str:
    return ", ".join(f"{label}: {value * scale:,.{digits}f}" for label, value in answers.items()) + f" {unit}"


def _ratio(measured: dict[str, float]) -> str:
    return f"{measured['ratio']:.3f} ± {measured['error']:.3f} x"


def _examples_beside(goal: float, answers: dict[str, dict[str, dict[str, float]]]) -> tuple[str, bool]:
    """What was measured of each way to read examples, and whether all are at least this much of what is beside it."""
    (measured,) = answers.values()
    shown = (
        f"{how}: {comparison['ours']:,.0f} of {comparison['base']:,.0f} examples/s, {_ratio(comparison)}"
        for how, comparison in measured.items()
    )
    return "; ".join(shown), min(comparison["ratio"] for comparison in measured.values()) >= goal


def costs(bench: Bench, wanted: Callable[[str], bool]) -> None:
    """Measure what must not grow."""
    quick = bench.quick

    def cpu(answers: dict[str, Any]) -> tuple[str, bool]:
        values = {label: answer["cpu"] for label, answer in answers.items()}
        return _listed(values, "µs", 1e6), _spread(list(values.values())) <= 1.5

    if wanted("cost-workers"):
        cases = {
            str(w): {"workers": w, "n": 5_000 if quick else 20_000} for w in ((1, 4) if quick else (1, 2, 4, 8, 16))
        }
        bench.cost("coordinator's CPU per function, by workers", "flat (within 1.5 x)", "dispatch", cases, cpu)
    if wanted("cost-queue"):
        sizes = (1_000, 50_000) if quick else (1_000, 10_000, 100_000, 1_000_000)
        cases = {f"{n:,}": {"n": n} for n in sizes}

        def per_function(answers: dict[str, Any]) -> tuple[str, bool]:
            shown, flat = cpu(answers)
            sizes_of = {label: answer["bytes"] for label, answer in answers.items() if label != "1,000"}
            return f"{shown}; {_listed(sizes_of, 'bytes', digits=0)}", flat and max(sizes_of.values()) < 1024

        bench.cost("CPU and memory of a queued function, by queued", "flat; under 1 KiB", "queue", cases, per_function)
    if wanted("cost-server"):
        size = 64 if quick else 256
        budget = size

        def server(answers: dict[str, Any]) -> tuple[str, bool]:
            shown, fits = [], True
            for update, answer in answers.items():
                allowed = 1.3 * answer["copies"] + (budget + answer["kept"] / MIB) / size
                fits &= answer["load"] <= allowed
                shown.append(f"{update}: {answer['load']:.2f} x ({allowed:.2f})")
            constant = max(answer["constant"] for answer in answers.values()) / MIB
            also = f"the variable's {size} MiB under load by 2 workers, above {constant:.0f} MiB when empty"
            return f"{', '.join(shown)} {also}; budget {budget} MiB", fits

        seconds = 2 if quick else 10
        cases = {
            update: {"update": update, "mib": size, "seconds": seconds, "budget": budget}
            for update in ("assign_add", "assign", "Adam")
        }
        bench.cost("a server's memory", "1.3 x with slots, the budget, 64 MiB", "server_memory", cases, server)
    if wanted("cost-client"):
        size = 64 if quick else 256
        cases = {
            "read": {"mib": size, "push": False},
            "assign": {"mib": size, "push": True},
        }
        bench.cost(
            f"a client's memory beyond a tensor of {size} MiB",
            "at most one more",
            "client_memory",
            cases,
            lambda answers: (_listed(answers, "x", digits=2), max(answers.values()) <= 1.0),
        )
    if wanted("cost-clients"):
        cases = {
            str(c): {"clients": c, "mib": 64, "n": 8 if quick else 32} for c in ((1, 4) if quick else (1, 2, 4, 8))
        }
        bench.cost(
            "a server's total bandwidth, by clients",
            "kept (within 0.8 x of one client's)",
            "bandwidth",
            cases,
            lambda answers: (
                _listed(answers, "GiB/s", 1 / GIB, 2),
                min(answers.values()) >= 0.8 * answers.get("1", 0.0),
            ),
        )
    if wanted("cost-lookup"):
        sizes = (100_000, 1_000_000) if quick else (100_000, 1_000_000, 8_000_000)
        cases = {f"{rows:,}": {"rows": rows, "ids": TABLE_IDS, "n": 10 if quick else 50} for rows in sizes}
        bench.cost(
            "a lookup of 10 k rows of 16, by rows of the table",
            "follows the rows asked for (within 2 x)",
            "lookup",
            cases,
            lambda answers: (_listed(answers, "ms", 1e3, 2), _spread(list(answers.values())) <= 2.0),
        )

    if wanted("cost-unchanged"):
        cases = {"kept": {"mib": 40, "keep": 256, "n": 20}, "sent again": {"mib": 40, "keep": 0, "n": 20}}
        bench.cost(
            "a read of 40 MiB that have not changed",
            "not sent again (0.5 x the time)",
            "unchanged",
            cases,
            lambda answers: (
                _listed(answers, "ms", 1e3, 2),
                answers.get("kept", 1.0) <= 0.5 * answers.get("sent again", 0.0),
            ),
        )

    if wanted("cost-durability"):
        seconds = 3.0 if quick else 10.0
        kinds = ("none", "snapshot", "log", "none, again")
        cases = {kind: {"durability": kind.partition(",")[0], "seconds": seconds} for kind in kinds}

        def shares(answers: dict[str, float]) -> tuple[str, bool]:
            base = statistics.mean([answers["none"], answers["none, again"]])
            snapshot, log = answers["snapshot"] / base, answers["log"] / base
            return (
                f"{_listed(answers, '/s')}; snapshot {snapshot:.2f} x, log {log:.2f} x",
                snapshot >= 0.95 and log >= 0.5,
            )

        bench.cost(
            "updates of 8 MiB, by what a server keeps on disk",
            "snapshot 0.95 x, log 0.5 x of none",
            "pushes",
            cases,
            shares,
        )
    if wanted("cost-healing"):
        cases = {kind: {"mib": 200, "durability": kind} for kind in ("snapshot", "log")}
        bench.cost(
            "a server with 200 MiB that was killed: from its port being open, and from its start, to the first update",
            "1 s from its port being open",
            "healing",
            cases,
            lambda answers: (
                ", ".join(
                    f"{kind}: {times['serving']:.2f} s, {times['whole']:.2f} s" for kind, times in answers.items()
                ),
                max(times["serving"] for times in answers.values()) <= 1.0,
            ),
        )
    if wanted("cost-move-1gib"):
        mib, parts = (64, 2) if quick else (1024, 8)
        bench.cost(
            f"{mib:,} MiB of shards that move to another server while training: what training keeps of its rate, the "
            "time of the move, a reader's longest wait",
            "0.7; waits a tenth of the time",
            "move",
            {kind: {"mib": mib, "shards": parts, "durability": kind, "seconds": 3.0} for kind in ("none", "log")},
            lambda answers: (
                "; ".join(
                    f"{kind}: {took['kept']:.2f}, {took['seconds']:.1f} s, {1000 * took['read']:.0f} ms (updates of a "
                    f"shard {took['frozen']:.2f} s)"
                    for kind, took in answers.items()
                ),
                all(took["kept"] >= 0.7 and took["read"] <= took["seconds"] / 10 for took in answers.values()),
            ),
            script="move_costs.py",
        )
    if wanted("cost-cut-1gib"):
        mib, parts = (64, 2) if quick else (1024, 8)
        bench.cost(
            f"{mib:,} MiB of a variable that is resharded while training: seconds for which functions wait",
            "a fifth of the time",
            "cut",
            {kind: {"mib": mib, "shards": parts, "durability": kind, "seconds": 3.0} for kind in ("none", "log")},
            lambda answers: (
                "; ".join(
                    f"{kind}: {took['held']:.2f} of {took['seconds']:.1f} s, in which training keeps {took['kept']:.2f}"
                    for kind, took in answers.items()
                ),
                all(took["held"] <= took["seconds"] / 5 for took in answers.values()),
            ),
            script="move_costs.py",
        )
    if wanted("cost-starts"):
        n = 10 if quick else 50
        cases = {
            f"a {name}": {"role": role, "n": n, "busy": 2} for role, name in (("worker", "worker"), ("ps", "server"))
        }
        bench.cost(
            f"from a process's start to the first function, {n} starts beside two busy loops",
            "95 % within 2 s",
            "starts",
            cases,
            lambda answers: (
                ", ".join(
                    f"{who}: median {times['median']:.2f} s, 95 % within {times['p95']:.2f} s, "
                    f"at most {times['most']:.2f} s"
                    for who, times in answers.items()
                ),
                max(times["p95"] for times in answers.values()) <= 2.0,
            ),
        )
    if wanted("cost-data"):
        bench.cost(
            "a training step on batches of 64 rows, each visited once",
            "0.95 x of a separate loop on each worker",
            "data_path",
            {"": {"batches": 500 if quick else 1000, "rounds": 3 if quick else 25}},
            functools.partial(_examples_beside, 0.95),
        )
    if wanted("cost-parquet"):
        bench.cost(
            "batches of 512 rows of Parquet on one worker",
            "0.7 x of pyarrow alone",
            "parquet",
            {"": {"rows": 1 << 19, "rounds": 3 if quick else 15}},
            functools.partial(_examples_beside, 0.7),
        )
    if wanted("cost-decode"):

        def decoded(answers: dict[str, dict[str, Any]]) -> tuple[str, bool]:
            (measured,) = answers.values()
            shown, reached = _examples_beside(0.9, {"": measured["compared"]})
            return f"{shown}; a decode alone {measured['alone']:.2f} ms", reached

        if "torch" in bench.peers:
            bench.cost(
                "map with 4 processes that decode images, batches of 64, one worker",
                "0.9 x of torch's DataLoader with 4",
                "decoding",
                {"": {"count": 2048, "rounds": 3 if quick else 9}},
                decoded,
                "decode_costs.py",
            )
    if wanted("cost-packing"):

        def packed(answers: dict[str, dict[str, float]]) -> tuple[str, bool]:
            rates = dict(answers["in turn"])
            beside = rates.pop("beside")
            ratio, share = (rates["chosen"] / rates[way] for way in ("one step per function", "no dispatch"))
            return (
                f"{_listed(rates, ' steps/s')}; {ratio:.2f} x one step per function, {share:.3f} x no dispatch; "
                f"of the workers' time {beside:.2f} % outside functions"
            ), beside <= 2

        bench.cost(
            "a training loop with steps of 0.3 ms, by how many a function takes",
            "2 % of the workers' time outside functions, if their size is chosen",
            "packing",
            {"in turn": {"steps": 8000 if quick else 32_000, "rounds": 3 if quick else 9}},
            packed,
        )
    if wanted("cost-telemetry"):

        def nothing(answers: dict[str, dict[str, Any]]) -> tuple[str, bool]:
            (measured,) = answers.values()
            rates = {kind: measured[kind] for kind in ("functions", *MOVES)}
            shown = [
                f"functions {rates['functions']['ours']:,.0f}/s with, {rates['functions']['base']:,.0f}/s without",
                *(f"{kind} {rates[kind]['ours'] / GIB:.2f}, {rates[kind]['base'] / GIB:.2f} GiB/s" for kind in MOVES),
            ]
            idle = f"processor time of all roles while nothing runs: {1000 * measured['idle']:.1f} ms per second more"
            reached = min(comparison["ratio"] for comparison in rates.values()) >= 0.98
            return f"{'; '.join(shown)}; {', '.join(map(_ratio, rates.values()))}; {idle}", reached

        bench.cost(
            "metrics served and scraped every 5 s, and the live page open",
            "0.98 x of none",
            "telemetry",
            {
                "": {
                    "n": 10_000 if quick else 20_000,
                    "mib": 40,
                    "reads": 6,
                    "rounds": 5 if quick else 41,
                    "idle": 2 if quick else 10,
                }
            },
            nothing,
        )

    def by_kind(answers: dict[str, dict[str, dict[str, dict[str, float]]]], judged: str = "token") -> tuple[str, bool]:
        (measured,) = answers.values()
        shown = (
            f"{kind}: "
            + ", ".join(
                f"{name} {comparison['ours']:,.2f} ({_ratio(comparison)})" for name, comparison in rates.items()
            )
            for kind, rates in measured.items()
        )
        return "; ".join(shown), all(comparison["ratio"] >= 0.95 for comparison in measured[judged].values())

    if wanted("cost-security"):
        bench.cost(
            "functions, pulls and pushes, by token and TLS",
            "a token alone 0.95 x of none",
            "security",
            {"": {"functions": 1000 if quick else 3000, "moves": 200, "rounds": 3 if quick else 15}},
            by_kind,
        )
    if wanted("cost-transport"):
        bench.cost(
            "functions, pulls and pushes, over Unix sockets, TLS and TCP",
            "Unix sockets 0.95 x of TCP",
            "transports",
            {"": {"functions": 1000 if quick else 3000, "moves": 200, "rounds": 3 if quick else 15}},
            lambda answers: by_kind(answers, "unix"),
        )
    _step_costs(bench, wanted)
    _array_costs(bench, wanted)
    _trainer_costs(bench, wanted)
    _serve_costs(bench, wanted)


def _step_costs(bench: Bench, wanted: Callable[[str], bool]) -> None:
    """Measure what steps of several replicas cost, with `step_costs.py`."""
    quick = bench.quick

    def kept(answers: dict[str, dict[str, dict[str, float]]]) -> tuple[str, bool]:
        (measured,) = answers.values()
        shown = (f"{how} {rates['ours']:.1f} steps/s, {_ratio(rates)}" for how, rates in measured.items())
        return "; ".join(shown), list(measured.values())[-1]["ratio"] >= 0.8

    for key, disturbance, by, option, value in (
        ("backup", "always takes five times as long to compute", "slow", "backup", 1),
        ("staleness", "pauses for the time of three steps in every twenty", "pauses", "staleness", 4),
    ):
        if wanted(f"cost-{key}"):
            case = {"by": by, "option": option, "value": value, "replicas": 4}
            bench.cost(
                f"steps of four replicas, one of which {disturbance}; {option}={value}",
                "0.8 x of the undisturbed rate",
                "disturbed",
                {"": {**case, "steps": 100 if quick else 200, "rounds": 3 if quick else 7}},
                kept,
                "step_costs.py",
            )
    if wanted("cost-steps"):

        def fits(answers: dict[str, dict[str, float]]) -> tuple[str, bool]:
            shown = (
                f"{replicas} replicas: {of['peak']:.0f} MiB in a server with {of['shards']:.0f} MiB of shards, "
                f"{of['moved']:.0f} MiB a worker"
                for replicas, of in answers.items()
            )
            return "; ".join(shown), all(of["peak"] <= 3 * of["shards"] + 64 for of in answers.values())

        bench.cost(
            "a synchronous step of a dense model of 40 MiB: a server's highest memory, and bytes moved by a worker",
            "3 x its shards and 64 MiB with 8 replicas",
            "step_memory",
            {str(n): {"model": "dense", "replicas": n, "steps": 5} for n in ((2, 8) if quick else (2, 4, 8))},
            fits,
            "step_costs.py",
        )


def _array_costs(bench: Bench, wanted: Callable[[str], bool]) -> None:
    """Measure what operations on global arrays cost, with `spmd_side.py`."""
    if wanted("cost-eager"):

        def eager(answers: dict[str, Any]) -> tuple[str, bool]:
            (of,) = answers.values()
            rate, seconds = statistics.median(of["sent"]), statistics.median(of["waited"])
            return f"{rate:,.0f}/s sent; {seconds * 1e3:.2f} ms waited for", rate >= 5000 and seconds <= 0.5e-3

        bench.cost(
            "operations on small global arrays, one by one",
            "5,000/s sent, 0.5 ms waited for",
            "eager",
            {"": {"n": 1000, "rounds": 3 if bench.quick else 7}},
            eager,
            "spmd_side.py",
        )
    if wanted("cost-relayout"):

        def kept(answers: dict[str, dict[str, float]]) -> tuple[str, bool]:
            (of,) = answers.values()
            share = of["collective"] / of["relayout"]
            return f"{of['relayout'] * 1e3:.1f} ms, {share:.2f} x", share >= 0.7

        bench.cost(
            "relayout of a global array of 40 MiB from rows to columns, beside an all_to_all of the bytes it moves",
            "0.7 x",
            "relayout",
            {"": {"mib": 40, "n": 5, "rounds": 3 if bench.quick else 7}},
            kept,
            "spmd_side.py",
        )


def _trainer_costs(bench: Bench, wanted: Callable[[str], bool]) -> None:
    """Measure what a trainer costs, with `trainer_costs.py`."""
    n = 3 if bench.quick else 9

    def within(answers: dict[str, dict[str, float]]) -> tuple[str, bool]:
        shown = (f"{how}: median {of['median']:.2f} s, at most {of['most']:.2f} s" for how, of in answers.items())
        return "; ".join(shown), max(of["median"] for how, of in answers.items() if how != "ray") <= 2.0

    for key, title, do, more in (
        ("trainer-fit", "Trainer.fit() of a trivial function, two workers", "fit", {"workers": 2}),
        ("trainer-restart", "from a worker's death to its function's next beginning", "restart", {}),
    ):
        if wanted(f"cost-{key}"):
            cases = {
                name: {"backend": backend, "n": n, **more}
                for name, backend in (("in the workers", "numpy"), ("in processes of their own", "torch"))
            }
            beside = {"ray": ("ray_train_side.py", {"n": 3, **more})}
            bench.cost(title, "2 s", do, cases, within, "trainer_costs.py", beside)

    def follows(answers: dict[str, dict[str, float]]) -> tuple[str, bool]:
        (of,) = answers.values()
        rates = _listed({workers: of[f"with {workers}"] for workers in "241"}, "steps/s")
        kept = of["lost"] == of["twice"] == 0
        rows = f"{of['lost']:.0f} rows lost, {of['twice']:.0f} twice"
        shown = f"{rates}; after {of['to 4']:.1f} s and {of['to 1']:.1f} s; {rows}"
        return shown, kept and max(of["to 4"], of["to 1"]) <= 5.0

    if wanted("cost-trainer-elastic"):
        title = "an elastic run that grows from 2 to 4 workers, and shrinks to 1"
        cases = {"": {"seconds": 4.0 if bench.quick else 6.0, "n": 1 if bench.quick else 3}}
        bench.cost(title, "no step lost; the new rate within 5 s", "elastic", cases, follows, "trainer_costs.py")


def _medians(of: dict[str, list[float]], one: str, other: str) -> tuple[dict[str, float], float, str]:
    """Return the medians of what was measured in turn, in ms; by how much `one` exceeds `other`; and the spread."""
    middle = {way: statistics.median(seconds) * 1e3 for way, seconds in of.items()}
    spread = [a / b for a, b in zip(of[one], of[other], strict=True)]
    return middle, middle[one] / middle[other], f"({min(spread):.2f} - {max(spread):.2f} in single rounds)"


def _serve_costs(bench: Bench, wanted: Callable[[str], bool]) -> None:
    """Measure what the adapters of torch, JAX and Keras cost, with `serve_costs.py` and `keras_costs.py`."""

    def added(answers: dict[str, dict[str, list[float]]]) -> tuple[str, bool]:
        shown, ratios = [], []
        for name, of in answers.items():
            middle, ratio, spread = _medians(of, "served", "by hand")
            ratios.append(ratio)
            shown.append(
                f"{name}: {middle['by hand']:.2f} ms by hand, {middle['served']:.2f} ms served, {ratio:.3f} x "
                f"{spread}; of the worker's processor {middle['by hand, cpu']:.2f} and {middle['served, cpu']:.2f} ms"
            )
        return "; ".join(shown), max(ratios) <= 1.03

    rounds = 3 if bench.quick else 25
    if wanted("cost-serve"):
        bench.cost(
            "a step of a served module of torch, beside one written by hand; the recommender's model, one worker",
            "1.03 x",
            "beside",
            {f"{tables} tables": {"tables": tables, "rows": 100_000, "n": 40, "rounds": rounds} for tables in (2, 8)},
            added,
            "serve_costs.py",
            python=FRAMEWORKS,
        )
    for key, of, do, backends in (
        ("jax", "the pytree of a network in JAX", "jax", {"": {}}),
        ("keras", "a Keras model", "keras", {f"{name}, ": {"backend": name} for name in ("jax", "torch")}),
    ):
        if wanted(f"cost-serve-{key}"):
            bench.cost(
                f"a step of {of} that is served, beside one written by hand; one worker",
                "1.03 x",
                do,
                {
                    f"{label}{layers} layers": {**more, "layers": layers, "n": 20, "rounds": rounds}
                    for label, more in backends.items()
                    for layers in (4, 16)
                },
                added,
                "keras_costs.py",
                python=FRAMEWORKS,
            )

    def beside_keras(answers: dict[str, dict[str, list[float]]]) -> tuple[str, bool]:
        shown, ratios = [], []
        for name, of in answers.items():
            middle, ratio, spread = _medians(of, "Keras", "ours")
            ratios.append(ratio)
            shown.append(
                f"{name}: {middle['Keras']:.1f} ms a step in Keras, {middle['ours']:.1f} ms here, {ratio:.2f} x "
                f"{spread}"
            )
        return "; ".join(shown), min(ratios) >= 1.2

    if wanted("cost-keras-fit"):
        bench.cost(
            "an epoch of fit with a Keras model on two workers, beside Keras' own fit in one process",
            "1.2 x",
            "fit",
            {
                backend: {"backend": backend, "workers": 2, "steps": 100, "rounds": 3 if bench.quick else 7}
                for backend in ("jax", "torch")
            },
            beside_keras,
            "keras_costs.py",
            python=FRAMEWORKS,
        )


MOVES = ("pull", "push")
COSTS = (
    "cost-workers",
    "cost-queue",
    "cost-server",
    "cost-client",
    "cost-clients",
    "cost-lookup",
    "cost-unchanged",
    "cost-durability",
    "cost-healing",
    "cost-move-1gib",
    "cost-cut-1gib",
    "cost-starts",
    "cost-data",
    "cost-parquet",
    "cost-decode",
    "cost-packing",
    "cost-telemetry",
    "cost-security",
    "cost-transport",
    "cost-backup",
    "cost-staleness",
    "cost-steps",
    "cost-eager",
    "cost-relayout",
    "cost-trainer-fit",
    "cost-trainer-restart",
    "cost-trainer-elastic",
    "cost-serve",
    "cost-serve-jax",
    "cost-serve-keras",
    "cost-keras-fit",
)


SLOW_COSTS = tuple(key for key in COSTS if key not in ("cost-workers", "cost-lookup", "cost-unchanged"))
"""Left out of the quick run, unless they are named."""


def main() -> int:
    groups = [_dispatch_rows() + _dense_rows() + _sparse_rows() + _loop_rows(), _single_rows()]
    collectives = {workers: _collective_rows(workers) for workers in (2, 4)}
    together = {workers: _synchronous_rows(workers) for workers in (2, 4)}
    with_torch = {workers: _torch_rows(workers) for workers in (2, 4)}
    recommenders = {shape: _recommender_rows(*shape) for shape in ((1, 1), (2, 1), (2, 2))}
    arrays = _array_rows()
    all_groups = (
        *groups,
        *collectives.values(),
        *together.values(),
        *with_torch.values(),
        *itertools.chain.from_iterable(recommenders.values()),
        arrays,
    )
    keys = [row.key for rows in all_groups for row in rows] + list(COSTS)
    parser = argparse.ArgumentParser(description="Measure pscluster beside its peers.")
    parser.add_argument("--quick", action="store_true", help="less of everything, in two minutes")
    parser.add_argument("--only", action="append", metavar="ROW", help=f"one of {', '.join(keys)}; may be repeated")
    parser.add_argument("--rounds", type=int, help="how often each side is asked (default: 7, or 3 with --quick)")
    parser.add_argument("--out", type=Path, help="default: docs/benchmarks.md for a whole run, else nothing is written")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(keys):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(keys)}")
    rounds = options.rounds or (3 if options.quick else 7)
    out = options.out or (None if options.quick or options.only else REPO / "docs" / "benchmarks.md")

    def wanted(key: str) -> bool:
        return key in options.only if options.only else not (options.quick and key in SLOW_COSTS)

    begin, measured = time.monotonic(), commit()  # now: the working tree may change while this runs
    adopt_orphans()
    isolated = can_isolate()
    peers = peers_that_are_there(PEERS, ("tensorflow", "ray", "torch", "distributed", "dask", "torchrec"))
    if not isolated and peers & {"tensorflow", "ray"}:
        # Both listen on all interfaces and run whatever they are sent.
        peers -= {"tensorflow", "ray"}
        print("TensorFlow and Ray listen on all interfaces and can't be isolated here: left out", file=sys.stderr)
    bench = Bench(rounds, isolated, peers, options.quick)
    if not isolated:
        bench.report.notes.append("No network of one's own could be made here; so TensorFlow and Ray were left out.")
    try:
        bench.group([row for row in groups[0] if wanted(row.key)])
        bench.group([row for row in groups[1] if wanted(row.key)], ps=1, workers=1)
        for workers, rows in collectives.items():
            bench.group([row for row in rows if wanted(row.key)], ps=1, workers=workers)
        for workers, rows in together.items():
            bench.group([row for row in rows if wanted(row.key)], workers=workers, ours=["synchronous_side.py"])
        for workers, rows in with_torch.items():
            ours = ["synchronous_side.py", "--torch"]
            bench.group([row for row in rows if wanted(row.key)], workers=workers, ours=ours, python=FRAMEWORKS)
        for (ps, workers), in_turn in recommenders.items():
            for rows in in_turn:
                rows = [row for row in rows if wanted(row.key)]
                bench.group(rows, ps=ps, workers=workers, ours=["recommender_side.py"], python=FRAMEWORKS)
        bench.group([row for row in arrays if wanted(row.key)], ps=1, ours=["spmd_side.py"])
        costs(bench, wanted)
    finally:
        if left := end_orphans():
            print(f"had to be killed at the end: {', '.join(left)}", file=sys.stderr)
    bench.report.facts = {
        "machine": machine(),
        "commit": measured,
        "command": " ".join(["python", "benchmarks/run.py", *(["--quick"] * options.quick), f"--rounds {rounds}"]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "took": f"{time.monotonic() - begin:.0f} s, {rounds} rounds",
    }
    if out is not None:
        write(bench.report, out, OURS)
        print(f"wrote {out.name}")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
