"""A timeline of the last functions, for https://ui.perfetto.dev or chrome://tracing: one function is one row.

Each role records its part all the time (see `pscluster.core.metrics.trace`); the records are collected on request, with
the roles' status. A row has, one within the other:

    STEP                                                      from its schedule to its end
      queue, worker 0 (attempt 1)                             coordinator; worker 0: from sending to outcome
                waits, arguments, run                         worker
                                  pull, ..., push             worker: requests to several servers at once
                                  ps 0, ps 0 + ps 1           the servers that worked on them

A second process, "workers", has a row per worker with the functions that it ran. Where steps overlap (see
`pscluster.worker.steps.overlap`) two more rows have the requests that were made beside them: pulls ahead, and pushes.

Clocks differ between machines. Each role is asked for its time repeatedly; the quickest round trip gives the difference
to within half of that trip. The remaining error could place an answer before its question; so a span that another one
caused is moved and cut to lie within it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from pscluster.coordinator.observability.job_metrics import Attempt
from pscluster.core.errors import from_rpc
from pscluster.core.metrics.trace import BACKGROUND
from pscluster.core.transport.channels import NODE_SERVICE, PeerAddress, open_peer_channel
from pscluster.core.transport.methods import Stub
from pscluster.v1 import node_pb2

ASK_SECONDS = 5.0
_TRIPS = 5  # to measure a clock's offset
_AT_ONCE = 32
_STEPS, _WORKERS = 1, 2  # processes of the trace
_BESIDE = {"pull": 1 << 20, "push": 2 << 20}  # the rows of requests made in the background, beside a worker's own


class Span(NamedTuple):
    begin: float  # by the coordinator's clock
    end: float

    def within(self, outer: Span) -> Span:
        """Return it moved as little as possible to lie within the outer one, and cut if it is longer."""
        length = min(self.end - self.begin, outer.end - outer.begin)
        begin = min(max(self.begin, outer.begin), outer.end - length)
        return Span(begin, begin + length)


@dataclass(frozen=True, slots=True)
class Recorded:
    peer: PeerAddress
    runs: Sequence[node_pb2.Recorded.Run] = ()
    asked: Sequence[node_pb2.Recorded.Asked] = ()
    served: Sequence[node_pb2.Recorded.Served] = ()
    offset: float = 0.0  # to add to its times to get those of this process
    missing: str = ""  # why there are no records

    def span(self, begin: float, end: float) -> Span:
        return Span(begin + self.offset, end + self.offset)


def collect(peers: Sequence[PeerAddress]) -> list[Recorded]:
    """Return the records of all roles, queried at once; empty for those that do not answer."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_ask, peers))


def _ask(peer: PeerAddress) -> Recorded:
    best, offset = float("inf"), 0.0
    with open_peer_channel(peer) as channel:
        node = Stub(channel, NODE_SERVICE)
        try:
            for _ in range(_TRIPS):
                begin = time.monotonic()
                reply = node.status(node_pb2.StatusRequest(), timeout=ASK_SECONDS)
                end = time.monotonic()
                if end - begin < best:
                    best, offset = end - begin, (begin + end) / 2 - reply.clock
            reply = node.status(node_pb2.StatusRequest(recorded=True), timeout=ASK_SECONDS)
        except grpc.RpcError as error:
            return Recorded(peer, missing=str(from_rpc(error, str(peer))))
    return Recorded(
        peer,
        runs=[record.run for record in reply.recorded if record.HasField("run")],
        asked=[record.asked for record in reply.recorded if record.HasField("asked")],
        served=[record.served for record in reply.recorded if record.HasField("served")],
        offset=offset,
    )


@dataclass(slots=True)
class _Trace:
    """Events, in microseconds from the first."""

    origin: float
    events: list[dict[str, Any]] = field(default_factory=list)

    def name(self, kind: str, name: str, process: int, row: int = 0, sort_index: int | None = None) -> None:
        self.events.append({"ph": "M", "name": f"{kind}_name", "pid": process, "tid": row, "args": {"name": name}})
        if sort_index is not None:
            arguments = {"sort_index": sort_index}
            self.events.append({"ph": "M", "name": f"{kind}_sort_index", "pid": process, "tid": row, "args": arguments})

    def slice(self, name: str, span: Span, process: int, row: int, **arguments: Any) -> None:
        # Round begin and end to whole nanoseconds, not the length: adjacent spans must not seem to overlap.
        begin, end = (round((moment - self.origin) * 1e9) for moment in span)
        event = {"ph": "X", "name": name, "cat": "step", "pid": process, "tid": row}
        self.events.append({**event, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": arguments})


def events_of(attempts: Sequence[Attempt], roles: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Return a trace's events in the JSON format of Chrome: metadata, and complete ("X") events that nest by row."""
    by_function: defaultdict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_function[attempt.function].append(attempt)
    workers = {role.peer.index: role for role in roles if role.peer.role == "worker"}
    runs: defaultdict[tuple[int, int], list[tuple[Span, node_pb2.Recorded.Run]]] = defaultdict(list)
    asked: defaultdict[tuple[int, int], list[node_pb2.Recorded.Asked]] = defaultdict(list)
    for index, worker in workers.items():
        for run in worker.runs:
            runs[index, run.function].append((worker.span(run.received, run.end), run))
        for request in worker.asked:
            if not request.what.endswith(BACKGROUND):
                asked[index, request.function].append(request)
    served = {
        (request.session, request.nth): role.span(request.begin, request.end)
        for role in roles
        if role.peer.role == "ps"
        for request in role.served
    }
    trace = _Trace(min((attempt.scheduled for attempt in attempts), default=0.0))
    trace.name("process", "steps", _STEPS, sort_index=_STEPS)
    trace.name("process", "workers", _WORKERS, sort_index=_WORKERS)
    for index, worker in sorted(workers.items()):
        trace.name("thread", str(worker.peer), _WORKERS, index + 1, index)
        for label, row in _BESIDE.items():
            _add_beside(trace, worker, label, row + index)
    for function_id, tries in sorted(by_function.items()):
        tries.sort(key=lambda attempt: attempt.sent)
        whole = Span(min(attempt.scheduled for attempt in tries), tries[-1].end)
        name = tries[-1].name
        trace.name("thread", f"step {function_id}", _STEPS, function_id, function_id)
        trace.slice(name, whole, _STEPS, function_id, function=function_id, attempts=len(tries), ended=tries[-1].how)
        before = whole.begin
        for attempt in tries:
            trace.slice("queue", Span(before, max(attempt.sent, before)), _STEPS, function_id)
            there = Span(max(attempt.sent, before), attempt.end)
            before = there.end
            title = f"worker {attempt.worker}"
            trace.slice(title, there, _STEPS, function_id, attempt=attempt.number, ended=attempt.how)
            known = [other.worker for other in tries].count(attempt.worker)
            timed_run = _best(runs[attempt.worker, function_id], there, only=known == 1)
            if timed_run is not None:
                role = workers[attempt.worker]
                _add_run(trace, role, name, there, timed_run, asked[attempt.worker, function_id], served)
    return trace.events


def _best(
    runs: Sequence[tuple[Span, node_pb2.Recorded.Run]], there: Span, *, only: bool
) -> tuple[Span, node_pb2.Recorded.Run] | None:
    """Return the last run whose middle is in this span, if any: the clock may be slightly wrong.

    If this is the `only` attempt on that worker, return its last run: the clock's error may exceed a short function's
    duration, and a run left over from an earlier job has ended before.
    """
    inside = [run for run in runs if only or there.begin <= (run[0].begin + run[0].end) / 2 <= there.end]
    return max(inside, key=lambda run: run[0].end, default=None)


def _add_run(
    trace: _Trace,
    worker: Recorded,
    name: str,
    there: Span,
    timed_run: tuple[Span, node_pb2.Recorded.Run],
    asked: Iterable[node_pb2.Recorded.Asked],
    served: Mapping[tuple[str, int], Span],
) -> None:
    """Add a worker's records of a function, within the attempt as the coordinator saw it."""
    span, run = timed_run
    moved, row = span.within(there), run.function
    scale = (moved.end - moved.begin) / ((span.end - span.begin) or 1.0)

    def here(begin: float, end: float) -> Span:
        """Map the worker's times in proportion, so that nested spans stay nested."""
        return Span(*(moved.begin + (time - run.received) * scale for time in (begin, end)))

    for phase, begin, end in (("waits", run.received, run.begin), ("arguments", run.begin, run.ready)):
        if end > begin:
            trace.slice(phase, here(begin, end), _STEPS, row)
    running = here(run.ready, run.end)
    facts = {"thread": run.thread, "ended": run.how, "data_wait_ms": round(run.waited * 1e3, 3)}
    trace.slice("run", running, _STEPS, row, **facts)
    # By the worker's clock alone: its functions ran one after another.
    ran = worker.span(run.ready, run.end)
    trace.slice(name, ran, _WORKERS, worker.peer.index + 1, function=run.function, **facts)
    mine = [(here(request.begin, request.end), request) for request in asked]
    inside = sorted(
        (timed for timed in mine if running.begin <= timed[0].begin <= running.end), key=lambda timed: timed[0]
    )
    for call in _calls(inside):
        outer = Span(min(span.begin for span, _ in call), max(span.end for span, _ in call)).within(running)
        requests = [
            {"server": request.server, "ms": round((span.end - span.begin) * 1e3, 3), "sent_bytes": request.sent}
            | {"received_bytes": request.received}
            for span, request in call
        ]
        trace.slice(call[0][1].what, outer, _STEPS, row, requests=requests)
        answers = [
            (request.server, served[request.session, request.nth].within(span).within(outer))
            for span, request in call
            if (request.session, request.nth) in served
        ]
        for title, busy in together(answers):
            trace.slice(title, busy, _STEPS, row)


def _add_beside(trace: _Trace, worker: Recorded, label: str, row: int) -> None:
    """Add the requests of one kind that a worker has made in the background, one call after the other."""
    there = sorted(
        (
            (worker.span(request.begin, request.end), request)
            for request in worker.asked
            if request.what == label + BACKGROUND and request.begin + worker.offset >= trace.origin
        ),
        key=lambda timed: timed[0],
    )
    if there:
        trace.name("thread", f"{worker.peer}, {label}", _WORKERS, row, worker.peer.index)
    for call in _calls(there):
        whole = Span(min(span.begin for span, _ in call), max(span.end for span, _ in call))
        requests = [{"server": request.server, "function": request.function} for _, request in call]
        trace.slice(label, whole, _WORKERS, row, requests=requests)


def _calls(
    requests: Sequence[tuple[Span, node_pb2.Recorded.Asked]],
) -> Iterator[list[tuple[Span, node_pb2.Recorded.Asked]]]:
    """Group requests: those that overlap are one call's, to several servers at once; or of several threads."""
    call: list[tuple[Span, node_pb2.Recorded.Asked]] = []
    end = 0.0
    for span, request in requests:
        if call and span.begin >= end:
            yield call
            call = []
        call.append((span, request))
        end = max(span.end, end) if len(call) > 1 else span.end
    if call:
        yield call


def together(answers: Sequence[tuple[int, Span]]) -> Iterator[tuple[str, Span]]:
    """Yield which servers worked at the same time, and from when to when: spans that do not overlap, in order."""
    times = sorted({time for _, span in answers for time in span})
    for begin, end in itertools.pairwise(times):
        busy = sorted({server for server, span in answers if span.begin <= begin and end <= span.end})
        if busy:
            yield " + ".join(f"ps {server}" for server in busy), Span(begin, end)


def write(path: str | os.PathLike[str], attempts: Sequence[Attempt], roles: Sequence[Recorded]) -> None:
    """Write the trace to a file. OSError if it can't be written."""
    missing = {str(role.peer): role.missing for role in roles if role.missing}
    trace = {"traceEvents": events_of(attempts, roles), "displayTimeUnit": "ms", "otherData": {"missing": missing}}
    Path(path).write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
