"""One synchronous run on one server: which steps have been applied, and what is staged of the next one. Pure.

The steps of a run are numbered from 0. All replicas contribute to a step, and all that they contribute is applied
together or not at all. Server 0 decides: a replica sends its contributions to the other servers first, which stage
them, and then its COMMIT to server 0, with what that one is to stage. So the COMMITs of all replicas mean that every
contribution is staged, as durably as updates are, and server 0 applies its own part together with the record that the
step is committed. That is the decision. The other servers learn of it from any message about a later step, which says
how many steps are committed, and in which epoch the last one was.

What is staged of step `applied`:

    empty   --a contribution--------------------------------------> staged, under its epoch
    staged  --server 0: the COMMIT of the last replica------------> applied: the next step is open, and empty
    staged  --others: a later step, committed in this epoch-------> applied
    staged  --others: a later step, committed in another epoch----> empty: nothing of that step was for this server
    staged  --a contribution of a later epoch---------------------> empty, then that contribution counts

Before they contribute, replicas may tell server 0 what they update (`reducing`), so that one that does otherwise is
found out before the others wait for it.

An epoch is one attempt of all replicas at the next steps. Before a replica sends anything in a new one it asks server 0
how many steps are committed, and in which epoch (OPEN), which also ends the earlier epochs there; then it tells all
other servers. So no step is committed in an epoch after another one has begun, and what a server has staged when a step
is committed in the same epoch was contributed to that step.

A server that restarts has forgotten its epoch; but before it serves it is told which functions are over, as always, and
refuses what they still send.

On server 0 a step can also end without being applied, until the next epoch: `ended`, since the data of a replica has
ended, or `disagreement`, since two replicas have updated different variables.

With `backup` above 0 a step counts with the first replicas that have computed it, all but so many. Server 0 decides who
they are before any of them sends a contribution to another server:

    asks for the open step, before it is full--> admitted to it, and so is its COMMIT
    asks for the open step, once it is full----> late: its contribution is dropped, and it goes on once the step, for
                                                 which it is not needed, is committed
    asks for an earlier step-------------------> late, unless the step counted with it and the answer was lost

So all that is staged is of replicas that are admitted, and a step is decided once all of these have sent their COMMIT.
Admissions are in memory only. A server 0 that restarts must not admit others beside those it has forgotten, who may
have staged something. So all replicas OPEN every epoch, none is admitted before all have, and one that a server does
not know to have opened is told so, and so are the others from then on: that attempt is over.

Several steps can be committed together, as if they were one: each replica contributes what it makes of all of them.

A step that is applied in memory, and could not be logged, is `torn`: it is neither applied nor staged. Nothing else
happens to the run until it could be applied again, which changes nothing but finds it in the log, or saved.

What may be lost: a server without a log that restarts has an older state, and what was staged is gone. It does not know
such a run any more, and refuses it (`whole`), until a message comes of a step that it has not missed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pscluster.core.errors import ProtocolError, StaleError, UnavailableError
from pscluster.core.limits import MAX_COUNT
from pscluster.ps.spec import MAX_TOGETHER, RESTORE, steps_lost
from pscluster.v1 import ps_pb2

T = TypeVar("T")


class Place(enum.Enum):
    """Whether a step of a run with backup counts with a replica."""

    ADMITTED = enum.auto()
    LATE = enum.auto()
    EARLY = enum.auto()  # not all replicas have opened the epoch
    UNKNOWN = enum.auto()  # some have not, here, and go on as if they had


class ContributionDecision(enum.Enum):
    """What becomes of a contribution."""

    STAGE = enum.auto()
    DUPLICATE = enum.auto()  # it is staged already
    APPLIED = enum.auto()  # a duplicate, on server 0: its step has been applied


@dataclass(slots=True)
class Run(Generic[T]):
    """The state of one run. Contributions are of any type."""

    server: int
    applied: int = 0  # how many steps
    whole: bool = True  # False: this server may have lost steps, since it restarted without a log
    epoch: int = 0
    replicas: int = 0  # that contribute to a step of this epoch
    together: int = 1  # how many steps are committed with the open one, itself included
    staged: dict[int, T] = field(default_factory=dict)  # by replica, of step number `applied`
    reducing: dict[int, ps_pb2.Contribution] = field(default_factory=dict)  # by replica, on server 0
    ended: bool = False
    disagreement: str = ""
    backup: int = 0  # of the replicas, how many a step is done without
    forgotten: bool = False  # with backup: a replica had opened this epoch before a restart
    opened: set[int] = field(default_factory=set)  # with backup: the replicas that have opened this epoch here
    admitted: set[int] = field(default_factory=set)  # with backup: those that the open step counts with
    counted: dict[int, int] = field(
        default_factory=dict
    )  # with backup: the last step of this epoch that did, by replica
    late: dict[int, int] = field(default_factory=dict)  # and the last one that did not, and should have
    dropped: dict[int, int] = field(default_factory=dict)  # by replica, how many steps it was late for
    torn: bool = False  # the staged step is applied, at least in part, and may be in no log

    @property
    def complete(self) -> bool:
        """Return whether all replicas that are needed have contributed to the open step."""
        return self.replicas > 0 and len(self.staged) == self.replicas - self.backup

    @property
    def decided(self) -> bool:
        """Return whether the open step is to be applied, on the server that decides."""
        return self.complete and not self.ended and not self.disagreement

    @property
    def missing(self) -> list[int]:
        """Return the replicas that have not contributed to the open step."""
        full = 0 < self.backup == self.replicas - len(self.admitted)
        needed = sorted(self.admitted) if full else range(self.replicas)
        return [replica for replica in needed if replica not in self.staged]

    def in_order(self) -> list[T]:
        """Return what is staged, by replica."""
        return [self.staged[replica] for replica in sorted(self.staged)]

    def due(self, step: int, epoch: int) -> bool:
        """Take note that all steps before `step` are committed, the last one in this epoch.

        Return whether the staged step must be applied before anything else. StaleError if this server may not have what
        was contributed to those steps.
        """
        if step <= self.applied:
            self.whole = True  # from here on
            return False
        if not self.whole or self.server == 0:
            raise steps_lost(self.server, self.applied, step)
        if self.staged and epoch == self.epoch:
            return True
        self._clear()
        self.applied = step
        return False

    def admit(self, step: int, epoch: int, replica: int, replicas: int, together: int = 0) -> ContributionDecision:
        """Decide on a contribution to so many steps, after `due`. A later epoch begins with it.

        StaleError if it is of an earlier epoch, ProtocolError if it contradicts the others.
        """
        self._check_epoch(epoch)
        if step < self.applied:
            if self.server == 0:
                return ContributionDecision.APPLIED
            # No replica goes on before it has the answer to what it stages. So this is a late copy, whose answer is not
            # read, or server 0 does not know of steps that it has decided.
            raise StaleError(
                f"ps {self.server} has applied {self.applied} synchronous steps, and ps 0 knows of {step}: it has "
                f"restarted with an older state. {RESTORE}"
            )
        self._begin(epoch, replica, replicas)
        if replica in self.staged:
            return ContributionDecision.DUPLICATE
        if together:
            self._agree(together)
        return ContributionDecision.STAGE

    def _agree(self, together: int) -> None:
        if together > MAX_TOGETHER or (self.backup and together > 1):
            raise ProtocolError(f"{together} synchronous steps in one contribution, with {self.backup} as backup")
        if self.staged and together != self.together:
            raise ProtocolError(f"a contribution to {together} synchronous steps, and another one to {self.together}")
        self.together = together

    def _begin(self, epoch: int, replica: int, replicas: int) -> None:
        if not 0 <= replica < replicas <= MAX_COUNT:
            raise ProtocolError(f"a contribution of replica {replica}, of {replicas}; the limit is {MAX_COUNT}")
        if epoch > self.epoch:
            self.begin(epoch)
        if self.replicas not in (0, replicas):
            raise ProtocolError(f"a contribution of one of {replicas} replicas, in an epoch of {self.replicas}")
        self.replicas = replicas

    def open(self, epoch: int, replica: int, replicas: int, backup: int) -> None:
        """Take note that a replica has begun an epoch of a run with backup."""
        self._check_epoch(epoch)
        self._begin(epoch, replica, replicas)
        self._check_backup(backup)
        self.backup = backup
        self.opened.add(replica)

    def place(self, step: int, epoch: int, replica: int, replicas: int, backup: int) -> Place:
        """Decide whether a step counts with a replica that has computed it, in a run with backup on server 0."""
        self._check_epoch(epoch)
        self._begin(epoch, replica, replicas)
        self.forgotten |= replica not in self.opened
        if self.forgotten:
            return Place.UNKNOWN
        self._check_backup(backup)
        if len(self.opened) < replicas:
            return Place.EARLY
        if step == self.applied and (replica in self.admitted or len(self.admitted) < replicas - backup):
            self.admitted.add(replica)
            return Place.ADMITTED
        if step < self.applied and self.counted.get(replica) == step:
            return Place.ADMITTED
        if step <= self.applied and self.late.get(replica) != step:
            self.late[replica] = step
            self.dropped[replica] = self.dropped.get(replica, 0) + 1
        return Place.LATE

    def _check_backup(self, backup: int) -> None:
        if not 0 < backup < self.replicas or (self.opened and backup != self.backup):
            raise ProtocolError(f"{self.replicas} replicas with {backup} of them as backup; it was {self.backup}")

    def begin(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun: what earlier ones have staged is dropped."""
        self._check_epoch(epoch)
        if epoch > self.epoch:
            self.epoch, self.replicas, self.backup = epoch, 0, 0
            self.forgotten = False
            self.opened.clear()
            self.counted.clear()
            self.late.clear()
            self._clear()

    def _check_epoch(self, epoch: int) -> None:
        if self.torn:
            raise UnavailableError(f"ps {self.server} has yet to log synchronous step {self.applied}; try again")
        if epoch < self.epoch:
            raise StaleError("this attempt at a synchronous step is over: another one has begun")

    def end_step(self) -> None:
        """Count the staged step as applied."""
        self.counted.update(dict.fromkeys(self.admitted, self.applied))
        self.applied += self.together
        self.torn, self.whole = False, True
        self._clear()

    def drop(self) -> None:
        """Drop what is staged: it will never be committed."""
        if not self.torn:
            self._clear()

    def _clear(self) -> None:
        self.staged.clear()
        self.reducing.clear()
        self.admitted.clear()
        self.ended, self.disagreement, self.together = False, "", 1
