"""A shard moves while all that can fail does: every pair of failures, each at every moment.

The servers are models that keep what they have saved, and what they know besides. The coordinator is the library's own
`Move`, around which requests and answers get lost, servers die and return, and coordinators die and are replaced.
After each event all servers are sent an update, and read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from tests.conftest import SEARCH

from pscluster.coordinator.moves.decision import ENDS, MAX_ROUNDS, SMALL_BYTES, Move, Rounds, Step, latest
from pscluster.v1 import ps_pb2

SOURCE, TARGET, THIRD = range(3)


@dataclass(frozen=True)
class Held:
    """What a server has saved: which server has the shard, by which placement, and how many updates it had there."""

    placement: int = 0
    owner: int = SOURCE
    updates: int | None = None  # None: the shard is not here

    def placed(self, placement: int, owner: int, me: int) -> Held:
        """After a spec that it is given."""
        if placement <= self.placement:
            return self
        assert owner != me or self.updates is not None, "a server lacks a shard that is its own"
        return Held(placement, owner, self.updates if owner == me else None)


@dataclass
class Server:
    """A parameter server, with a log: updates are saved at once, what it drops only some time later."""

    index: int
    saved: Held
    held: Held = field(init=False)
    up: bool = True
    waiting: bool = False
    frozen: bool = False
    arriving: bool = False
    staged: int | None = None
    tracked: bool = False
    over: bool = False  # of the move
    doubtful: bool = False  # whether a generation with what it has given back may be whole

    def __post_init__(self) -> None:
        self.held = self.saved

    def die(self) -> None:
        """All that is not saved is forgotten."""
        self.__init__(self.index, self.saved)  # type: ignore[misc]
        self.up, self.waiting = False, True

    @property
    def serves(self) -> bool:
        """Whether reads are answered."""
        return self.up and not self.waiting and self.held.updates is not None and not self.arriving

    def update(self) -> None:
        assert self.held.updates is not None
        self.held = replace(self.held, updates=self.held.updates + 1)
        assert self.saved.updates is not None, "the log goes on from a generation that lacks the shard"
        self.saved = replace(self.saved, updates=self.held.updates)

    def save(self) -> None:
        """A generation."""
        self.saved, self.doubtful = self.held, False


class World:
    """One shard, three servers, one move after the other."""

    def __init__(self) -> None:
        """The shard is at home."""
        self.servers = [
            Server(index, Held(0, SOURCE, 0 if index == SOURCE else None)) for index in (SOURCE, TARGET, THIRD)
        ]
        self.acknowledged = 0
        self.move: Move | None = None
        self.source, self.target = SOURCE, TARGET
        self.announced = Held(), False, False  # what servers that attach are told: spec, frozen, arriving
        self.known = 0  # the placement when the move began
        self.owner = SOURCE
        self.next: dict[str, bool] = {}  # how the next step goes, unless it goes well

    # Clients

    def check(self) -> None:
        """Every server is sent an update. Then whoever answers readers has every update that was acknowledged."""
        for server in self.servers:
            if server.serves and not server.frozen:
                server.update()
                self.acknowledged += 1
        for server in self.servers:
            assert not server.serves or server.held.updates == self.acknowledged

    # Servers

    def dies(self, index: int) -> None:
        """A server is killed."""
        self.servers[index].die()

    def saves(self, index: int) -> None:
        """A generation is saved in the background."""
        if self.servers[index].up:
            self.servers[index].save()

    def return_all(self) -> None:
        """Servers are restarted, and their coordinator attaches to them."""
        for server in self.servers:
            if server.waiting:
                server.up, server.waiting = True, False
                spec, frozen, arriving = self.announced
                server.held = server.held.placed(spec.placement, spec.owner, server.index)
                here = server.held.updates is not None
                server.frozen = frozen and server.index == self.source and here
                server.arriving = arriving and server.index == self.target and here

    # The coordinator

    def begin_move(self, to: int) -> None:
        self.source, self.target, self.move = self.owner, to, Move(self.known)
        for server in self.servers:
            server.over = server.tracked = False
        self.announce()

    def owner_at(self, placement: int) -> int:
        """Which server has the shard by this placement of the present move, or before it."""
        return self.target if placement == self.known + 1 else self.source

    def announce(self) -> None:
        """Before each step."""
        assert self.move is not None
        placement = self.move.announced
        spec = Held(placement, self.owner_at(placement))
        self.announced = spec, self.move.frozen, self.move.arriving

    def take_a_step(self, *, arrives: bool = True, answered: bool = True, torn: bool = False) -> None:
        """The next step: the request may get lost, or the answer to it, or what is to be saved is torn."""
        move = self.move
        assert move is not None
        self.announce()
        done, committed = self.do(move.step, torn=torn) if arrives else (False, False)
        if done and answered:
            move.succeeded(committed=committed)
        else:
            move.failed()  # or it is repeated
        if move.step in ENDS:
            assert move.announced in (self.known, self.known + 1, self.known + 2)
            self.announce()
            self.owner, self.known = self.owner_at(move.announced), move.announced
            assert (move.step is Step.MOVED) is (self.owner == self.target)
            self.move = None

    def do(self, step: Step, *, torn: bool = False) -> tuple[bool, bool]:
        """Have servers take a step; return whether they have, and the answer to WITHDRAW."""
        source, target = self.servers[self.source], self.servers[self.target]
        there = [server.up and not server.waiting for server in self.servers]
        here, beyond = there[self.source], there[self.target]
        match step:
            case Step.TRACK if here:
                source.tracked = True
                return True, False
            case Step.COPY if here and beyond and source.tracked:
                target.staged = source.held.updates
                return True, False
            case Step.FREEZE if here and source.tracked:
                source.frozen = True
                if not beyond or target.over:
                    return False, False
                target.staged = source.held.updates
                return True, False
            case Step.COMMIT if beyond and target.staged is not None and not target.over:
                before, target.held = target.held, Held(self.known + 1, self.target, target.staged)
                target.staged = None
                target.save()
                if torn:  # it could not be saved, as far as the server knows; only the next process finds it whole
                    target.held, target.doubtful = before, True
                    return False, False
                target.arriving = True
                return True, False
            case Step.WITHDRAW | Step.DISCARD if beyond:
                target.over, target.staged = True, None
                return True, target.held.placement == self.known + 1
            case Step.PUT_BACK if here:
                source.held = source.held.placed(self.known + 2, self.source, self.source)
                source.save()
                return True, False
            case Step.RELEASE if here:
                source.frozen = source.tracked = False
                return True, False
            case Step.DROP if here:
                source.held = source.held.placed(self.known + 1, self.target, self.source)
                source.frozen = False
                return True, False
            case Step.SERVE if beyond:
                target.arriving = False
                return True, False
            case Step.TELL if all(there):
                assert self.move is not None
                placement = self.move.announced
                for server in self.servers:
                    server.held = server.held.placed(placement, self.owner_at(placement), server.index)
                return True, False
        return False, False

    def another_coordinator(self) -> None:
        """The coordinator dies, and the next one takes all servers, and settles what was under way."""
        for server in self.servers:
            server.up, server.waiting = True, False
            server.frozen = server.tracked = False
            server.staged, server.over = None, True
            if server.doubtful:
                server.save()
        specs = [
            ps_pb2.VariableSpec(id=1, placement=server.held.placement, owners=[server.held.owner])
            for server in self.servers
        ]
        found = latest(specs)[1]
        placement, (owner,) = found.placement, found.owners
        aware = [server for server in self.servers if server.held.placement == placement]
        for server in aware if len(aware) < len(self.servers) else ():
            server.save()
        for server in self.servers:
            server.held = server.held.placed(placement, owner, server.index)
            server.arriving = False
        self.owner, self.known, self.move = owner, placement, None
        self.announced = Held(placement, owner), False, False


def die(*servers: int) -> Callable[[World], None]:
    def event(world: World) -> None:
        for server in servers:
            world.dies(server)

    return event


def all_die(world: World) -> None:
    die(SOURCE, TARGET, THIRD)(world)
    world.another_coordinator()


EVENTS: dict[str, Callable[[World], None]] = {
    "the request is lost": lambda world: world.next.update(arrives=False),
    "the answer is lost": lambda world: world.next.update(answered=False),
    "the generation is torn": lambda world: world.next.update(torn=True),
    "the source dies": die(SOURCE),
    "the target dies": die(TARGET),
    "both die": die(SOURCE, TARGET),
    "the third dies": die(THIRD),
    "the source saves": lambda world: world.saves(SOURCE),
    "the target saves": lambda world: world.saves(TARGET),
    "the coordinator dies": World.another_coordinator,
    "all die": all_die,
    "servers return": World.return_all,
}
"""All servers that died return after three steps, unless they return before."""

STEPS = 14


def run(events: dict[int, list[str]]) -> None:
    """Move the shard there and back, with these events before the steps with these numbers."""
    world = World()
    for number in range(STEPS):
        if world.move is None:
            world.begin_move(TARGET if world.owner == SOURCE else SOURCE)
        for name in events.get(number, ()):
            EVENTS[name](world)
            world.check()
        if number % 3 == 2:
            world.return_all()
            world.check()
        if world.move is not None:
            how, world.next = world.next, {}
            world.take_a_step(**how)
        world.check()
    world.return_all()
    while world.move is not None:
        world.take_a_step()
    assert [server.index for server in world.servers if server.serves and not server.frozen] == [world.owner]
    world.check()


@pytest.mark.parametrize("first", EVENTS)
def test_every_pair_of_failures(first: str) -> None:
    """A shard is served by one server, with every update, and each move is done or undone."""
    failures = 3 if SEARCH > 1 else 2
    for others in itertools.product(EVENTS, repeat=failures - 1):
        for numbers in itertools.combinations_with_replacement(range(STEPS), failures):
            events: dict[int, list[str]] = {}
            for number, name in zip(numbers, (first, *others), strict=True):
                events.setdefault(number, []).append(name)
            try:
                run(events)
            except BaseException as error:
                error.add_note(str(events))
                raise


@pytest.mark.parametrize("second", EVENTS)
def test_a_torn_generation_and_two_failures(second: str) -> None:
    """A target that could not save the shard may have saved it all the same, which the next process finds."""
    for third, number in itertools.product(EVENTS, range(STEPS - 2)):
        run({number: ["the generation is torn"], number + 1: [second], number + 2: [third]})


@pytest.mark.parametrize(
    ("changed", "copied"),
    [
        ([100_000, 60_000, 30_000, 900], 3),  # until little is left
        ([100_000, 100_000, 100_000], 1),  # until a round leaves as much
        ([500], 0),  # a small shard is frozen at once
    ],
)
def test_how_long_a_shard_is_copied_before_it_is_frozen(changed: list[int], copied: int) -> None:
    """A round follows while it is worth while."""
    rounds = Rounds(page_bytes=4096)
    assert [rounds.goes_on(pages) for pages in changed] == [True] * copied + [False] * (len(changed) - copied)


def test_rounds_end() -> None:
    """However large the shard, and however steadily it shrinks."""
    rounds, pages, count = Rounds(SMALL_BYTES), 1 << 40, 0
    while rounds.goes_on(pages):
        pages, count = pages // 2, count + 1
    assert count == MAX_ROUNDS
