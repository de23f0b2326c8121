"""Takes the contributions of replicas to synchronous steps: stages them, decides on server 0, applies what is decided.

What becomes of a contribution is decided in `run`, and what the staged ones make in `combine`. This is the shell:

- One condition guards all runs of a store. It is not held while a step is applied or written: the run is busy then, and
  those that need its state wait for that.
- Server 0 applies a step in the thread that brings the last COMMIT. The record of the decision is a text of the job's
  metadata, put in the same update, so it is logged, replayed and saved in checkpoints together with what was applied.
- The positions of iterators in that record hold for all runs of a job. A restored checkpoint does not replace it.
- The combined update is one of a client that is the run, with the number of steps committed as its sequence: so the
  ledger knows how many steps have been applied, also after a restart, and applies no part of one twice.
- With a log, a contribution is logged before it is acknowledged, and when a segment of the log begins.
- A WAIT, or a COMMIT that waits, is answered after at most `WAIT_SECONDS`, so that no thread is held for a replica that
  never comes.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.fault_points import reach
from pscluster.ps.server.requests import update_checks
from pscluster.ps.server.requests.changes import Change
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.clock import MAX_ITERATORS
from pscluster.ps.server.synchronous.combine import (
    Contribution,
    check_contribution,
    combine,
    difference,
    parts_of_payload,
)
from pscluster.ps.server.synchronous.disagreement import disagreement_of
from pscluster.ps.server.synchronous.run import ContributionDecision, Place, Run
from pscluster.ps.server.synchronous.ticks import WAIT_SECONDS, Ticks
from pscluster.ps.spec import METADATA, SYNCHRONOUS
from pscluster.v1 import ps_pb2

_MOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
"""The most that may be staged. More would take the machine down, with the state of other jobs."""

Write = Callable[[Store, ps_pb2.UpdateRequest, list[Change], Payload, int], ps_pb2.UpdateReply]
"""Applies and logs an update."""


class StepPath:
    """Handles contributions, for the write path. Thread-safe.

    Args:
        write: applies and logs an update.
        log: logs a contribution, if there is a log.
    """

    def __init__(self, write: Write, log: Callable[[Store, Contribution], None]) -> None:
        self._write = write
        self._log = log
        self.ticks = Ticks()

    def contribute(
        self, store: Store, request: ps_pb2.UpdateRequest, changes: list[Change], payload: Payload, total_bytes: int
    ) -> ps_pb2.UpdateReply:
        """Take a contribution whose payload has wholly arrived, or a question about a run."""
        message = request.contribution
        if message.kind not in (_AT_FIRST if store.index == 0 else _AT_OTHERS):
            raise ProtocolError(f"a contribution of kind {message.kind} on ps {store.index}")
        if message.kind in _WITHOUT_ITEMS and request.items:
            raise ProtocolError("updates with a question about a synchronous run")
        if message.kind == ps_pb2.Contribution.TICK:
            return ps_pb2.UpdateReply(boot_id=store.losses.boot_id, state=self.ticks.take(message, request.job))
        self._finish_torn(store, message.run)
        if message.kind == ps_pb2.Contribution.OPEN:
            state = self._open(store, message)
        elif message.kind == ps_pb2.Contribution.WAIT:
            state = self._wait(store, request)
        elif message.kind == ps_pb2.Contribution.REDUCE:
            state = self._reduce(store, request)
        elif message.kind == ps_pb2.Contribution.READY:
            state = self._ready(store, message)
        else:
            check_contribution(changes)
            for change in changes:
                update_checks.checked_ids(change, payload)
            contribution = Contribution(request, changes, payload, total_bytes)
            place = self._stage(store, contribution)
            if place not in (None, Place.ADMITTED):
                state = self._ready(store, message, 0.0)
            elif message.kind == ps_pb2.Contribution.COMMIT:
                state = self._state(store, request, WAIT_SECONDS if message.wait else 0.0)
                state.place = _PLACES[Place.ADMITTED] if message.backup else _State.PLACE_UNSPECIFIED
            else:
                reach("ps.stage_step.before")
                self._log(store, contribution)
                reach("ps.stage_step.after")
                state = ps_pb2.StepState()
        return ps_pb2.UpdateReply(boot_id=store.losses.boot_id, state=state)

    def reach_step(self, store: Store, after: ps_pb2.StepCount) -> None:
        """Apply what is staged of steps before this one, all of which are committed."""
        if not store.runs.has_reached(after.run, after.step):
            self._finish_torn(store, after.run)
            self._settle(store, after.run, after.step, after.epoch)

    def _stage(self, store: Store, contribution: Contribution) -> Place | None:
        """Stage a contribution. With backup, return the replica's place; it is staged only if it is admitted."""
        message = contribution.request.contribution
        self._settle(store, message.run, message.step, message.after)
        runs = store.runs
        with runs.changed:
            run = store.runs.idle(message.run)
            update_checks.admit(store, contribution.request)  # again: the job may have been taken over since
            place = None
            if store.index == 0 and (message.backup or run.backup):
                place = run.place(message.step, message.epoch, message.replica, message.replicas, message.backup)
                if place is not Place.ADMITTED:
                    return place
            decision = run.admit(message.step, message.epoch, message.replica, message.replicas, message.together or 1)
            if decision is ContributionDecision.STAGE:
                if not run.staged:  # a coordinator settles the runs of the one before, before it begins one
                    runs.drop(lambda staged: staged.request.job != contribution.request.job)
                _check_room(contribution, runs.contributions())
                if message.kind == ps_pb2.Contribution.COMMIT:
                    run.ended |= message.ended
                    run.disagreement = run.disagreement or disagreement_of(store, run, message, contribution)
                elif (error := difference([*run.in_order()[:1], contribution])) is not None:
                    raise error  # now: once the step is committed it has to be applied
                run.staged[message.replica] = contribution
                runs.changed.notify_all()
            return place

    def _ready(self, store: Store, message: ps_pb2.Contribution, seconds: float = WAIT_SECONDS) -> ps_pb2.StepState:
        """Return whether a step counts with a replica; if not, once it is committed, or after a while."""
        runs, deadline = store.runs, time.monotonic() + seconds
        with runs.changed:
            while True:
                run = runs.idle(message.run)
                place = run.place(message.step, message.epoch, message.replica, message.replicas, message.backup)
                if place is Place.UNKNOWN:
                    return ps_pb2.StepState(unknown=True)
                state = ps_pb2.StepState(committed=run.applied, place=_PLACES[place])
                if place is Place.ADMITTED or message.step < run.applied:
                    return state
                if run.disagreement:
                    raise MisuseError(run.disagreement)
                if run.ended:
                    state.ended = True
                    return state
                if (left := deadline - time.monotonic()) <= 0:
                    state.missing.extend(run.missing)
                    return state
                runs.changed.wait(left)

    def _reduce(self, store: Store, request: ps_pb2.UpdateRequest) -> ps_pb2.StepState:
        """Take note of what a replica updates. MisuseError if another one does otherwise."""
        message = request.contribution
        self._settle(store, message.run, message.step, message.after)
        with store.runs.changed:
            run = store.runs.idle(message.run)
            update_checks.admit(store, request)  # again: the job may have been taken over since
            decision = run.admit(message.step, message.epoch, message.replica, message.replicas)
            if decision is not ContributionDecision.APPLIED:
                run.disagreement = run.disagreement or disagreement_of(store, run, message)
                run.reducing[message.replica] = message
            if run.disagreement:
                store.runs.changed.notify_all()
                raise MisuseError(run.disagreement)
            return ps_pb2.StepState(committed=run.applied, ended=run.ended)

    def _open(self, store: Store, message: ps_pb2.Contribution) -> ps_pb2.StepState:
        if store.index:
            self._settle(store, message.run, message.step, message.after)
        with store.runs.changed:
            run = store.runs.idle(message.run)
            if message.backup:
                run.open(message.epoch, message.replica, message.replicas, message.backup)
            else:
                run.begin(message.epoch)
            store.runs.changed.notify_all()
            committed = run.applied
        state = ps_pb2.StepState(committed=committed)
        decided = _decision(store)
        if decided.get("run") == message.run:
            state.epoch = int(decided.get("epoch", 0))
            state.before.update(_positions(decided.get("before", {}), message.replica))
        state.after.update(_positions(_known_positions(store, decided), message.replica))
        return state

    def _wait(self, store: Store, request: ps_pb2.UpdateRequest) -> ps_pb2.StepState:
        message = request.contribution
        with store.runs.changed:
            run = store.runs.idle(message.run)
            if message.step >= run.applied:
                run.begin(message.epoch)
                if message.replica not in run.staged:
                    return ps_pb2.StepState(committed=run.applied, unknown=True, ended=run.ended)
        return self._state(store, request, WAIT_SECONDS)

    def _state(self, store: Store, request: ps_pb2.UpdateRequest, seconds: float) -> ps_pb2.StepState:
        """Return what became of a step, on server 0; apply it if all replicas have contributed. Wait, if not."""
        message, runs, deadline = request.contribution, store.runs, time.monotonic() + seconds
        with runs.changed:
            while True:
                run = store.runs.idle(message.run)
                if run.applied > message.step:
                    return ps_pb2.StepState(committed=run.applied)
                run.begin(message.epoch)  # refuses an epoch that is over
                if run.disagreement:
                    raise MisuseError(run.disagreement)
                if run.ended:
                    return ps_pb2.StepState(committed=run.applied, ended=True)
                if run.decided:
                    break
                if (left := deadline - time.monotonic()) <= 0:
                    return ps_pb2.StepState(committed=run.applied, missing=run.missing)
                runs.changed.wait(left)
            update_checks.admit(store, request)  # from now on the job is not taken over until the step is applied
            runs.begin_step(message.run)
        self._apply(store, message.run, run)
        return ps_pb2.StepState(committed=run.applied)

    def _settle(self, store: Store, run_id: int, step: int, epoch: int) -> None:
        """Apply the staged step if it is before this one, and was committed."""
        while True:
            with store.runs.changed:
                run = store.runs.idle(run_id)
                if not run.due(step, epoch):
                    return
                store.runs.begin_step(run_id)
            self._apply(store, run_id, run)

    def _finish_torn(self, store: Store, run_id: int) -> None:
        """Apply a step again that was applied and could not be logged. UnavailableError if it still can't be."""
        with store.runs.changed:
            run = store.runs.idle(run_id)
            if not run.torn:
                return
            store.runs.begin_step(run_id)
        self._apply(store, run_id, run)

    def _apply(self, store: Store, run_id: int, run: Run[Contribution]) -> None:
        """Apply the staged step of a run that is marked busy."""
        contributions, committed, applied = run.in_order(), run.applied + run.together, False
        try:
            reach("ps.step.before")
            combined = combine(contributions)
            request = ps_pb2.UpdateRequest(
                job=store.job,
                incarnation=run_id,
                sequence=committed,
                settled=committed,
                term=contributions[0].request.term,
                items=combined.items,
            )
            if store.index == 0:
                variable, shard = METADATA
                text = _decided(store, run_id, committed, contributions)
                request.items.add(variable=variable, shard=shard, kind=ps_pb2.PUT, nth=1, name=SYNCHRONOUS, text=text)
            if request.items:
                payload, total = parts_of_payload(combined)
                changes = update_checks.changes_of(store, request, total)
                self._write(store, request, changes, payload, total)
            applied = True
            reach("ps.step.after")
        except MisuseError as error:
            run.disagreement = str(error)  # for the other replicas
            raise
        finally:
            store.runs.end_step(run_id, applied=applied)


_Kind = ps_pb2.Contribution
_State = ps_pb2.StepState
_WITHOUT_ITEMS = _Kind.OPEN, _Kind.WAIT, _Kind.REDUCE, _Kind.TICK, _Kind.READY
_AT_FIRST = *_WITHOUT_ITEMS, _Kind.COMMIT
_AT_OTHERS = _Kind.STAGE, _Kind.OPEN
_PLACES = {Place.ADMITTED: _State.ADMITTED, Place.LATE: _State.LATE, Place.EARLY: _State.EARLY}


def _check_room(new: Contribution, staged: list[Contribution]) -> None:
    """Raise MisuseError if this contribution does not fit beside what is staged."""
    if (size := new.total_bytes + sum(contribution.total_bytes for contribution in staged)) > _MOST_BYTES:
        raise MisuseError(
            f"contributions to synchronous steps would take {size:,} bytes, more than half of the machine's memory: "
            "distribute the variables over more servers"
        )


def _decision(store: Store) -> dict[str, Any]:
    """Return the last decision that this server has recorded; {} if there is none."""
    text = store.directory.metadata.texts.get(SYNCHRONOUS, "{}")
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _known_positions(store: Store, decided: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the positions of all iterators after a decision, by replica; {} if it was one of another job."""
    known: Mapping[str, Any] = decided.get("after", {}) if decided.get("job") == store.job else {}
    return known


def _decided(store: Store, run_id: int, steps: int, contributions: list[Contribution]) -> str:
    """Return the record that this many steps of a run are committed, with the positions of all iterators."""
    known = _known_positions(store, _decision(store))
    after, before_last = dict(known), dict(known)  # of those that take no part
    for contribution in contributions:
        replica, new = str(contribution.replica), contribution.request.contribution.positions
        # Several steps at once, or steps without this replica, have moved them since its last contribution.
        moved = itertools.islice(contribution.request.contribution.before.items(), MAX_ITERATORS)
        if before := known.get(replica, {}) | {str(key): at for key, at in moved}:
            before_last[replica] = before
        kept = {key: at for key, at in known.get(replica, {}).items() if int(key) not in new}
        kept |= {str(key): at for key, at in new.items()}
        if kept:
            after[replica] = dict(list(kept.items())[-MAX_ITERATORS:])
    decided = {
        "job": store.job,
        "run": run_id,
        "steps": steps,
        "epoch": contributions[0].request.contribution.epoch,
        "before": before_last,
        "after": after,
    }
    return json.dumps(decided, separators=(",", ":"))


def _positions(by_replica: object, replica: int) -> Iterator[tuple[int, int]]:
    if isinstance(by_replica, Mapping):
        for key, at in by_replica.get(str(replica), {}).items():
            yield int(key), int(at)
