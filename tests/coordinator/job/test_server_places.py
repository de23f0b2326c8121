"""Where a server is: which claims move it, and which are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pscluster.coordinator.job.server_places import ServerClaim, ServerPlace, WaitingServers, check_index, moves
from pscluster.core.errors import BusyError, PsClusterError, RefusedError

AWAY = ServerPlace(1, "a:1", store_id=7, is_here=False, boot_id=3)
HERE = replace(AWAY, is_here=True)
CLAIM = ServerClaim(1, "b:2", boot_id=4, store_id=7)


def test_a_server_that_is_away_moves() -> None:
    """One that holds the state is taken where it is, and nothing moves if that is where it was."""
    assert moves(CLAIM, AWAY)
    assert not moves(replace(CLAIM, address="a:1"), AWAY)
    assert moves(replace(CLAIM, store_id=0), replace(AWAY, store_id=0)), "before the job has begun"


def test_a_server_that_is_there_stays() -> None:
    """Another process is told to try again; the process itself may register from anywhere."""
    with pytest.raises(BusyError, match="ps 1 is another process, at a:1, which is in the cluster now"):
        moves(CLAIM, HERE)
    assert not moves(replace(CLAIM, boot_id=3), HERE)


@pytest.mark.parametrize(("store_id", "holds"), [(0, "holds nothing"), (8, "holds the state of another one")])
@pytest.mark.parametrize("place", [HERE, AWAY])
def test_another_state_is_refused(place: ServerPlace, store_id: int, holds: str) -> None:
    """Whether the server is there or not: it would be lost for good otherwise."""
    with pytest.raises(RefusedError, match=f"{holds}.*: start it with the disk, --state-dir and --job-name"):
        moves(replace(CLAIM, store_id=store_id), place)


def test_an_index_that_the_cluster_lacks() -> None:
    """It names the last one."""
    for index in (1, 2, 17):
        check_index(index, 2)
    with pytest.raises(RefusedError, match=r"the task is 18, but the cluster has 2 .* of those, or 2 for one that the"):
        check_index(18, 2)


def test_servers_that_wait_to_be_added() -> None:
    """One process for each index, which holds nothing, and registers again and again."""
    waiting, claim = WaitingServers[str](), replace(CLAIM, store_id=0)
    assert waiting.claim(claim, "first", 0.0)
    assert not waiting.claim(claim, "first", 5.0)
    with pytest.raises(BusyError, match=r"ps 1 is another process, at b:2, which waits to be added"):
        waiting.claim(replace(claim, boot_id=5), "second", 6.0)
    with pytest.raises(RefusedError, match=r"the job has no ps 1 yet, but the process .* holds the state of an older"):
        waiting.claim(CLAIM, "third", 30.0)
    assert (waiting.indices(10.0), waiting.indices(26.0)) == ([1], [])
    assert waiting.claim(replace(claim, boot_id=5), "second", 26.0)
    assert (waiting.take(2, 27.0), waiting.take(1, 27.0), waiting.take(1, 27.0)) == (None, "second", None)


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_events(seed: int) -> None:
    """Processes start, die and register in any order. The task is only ever where its state is."""
    chance = random.Random(seed)
    store_id, place = 7, AWAY
    alive: dict[str, tuple[int, int]] = {}  # by address: boot id and the state that the process holds
    for boot_id in range(100):
        address = chance.choice(["a:1", "b:2", "c:3"])
        if alive.pop(address, None) is None:
            has_state = chance.random() < 0.5 and all(store != store_id for _, store in alive.values())  # it is locked
            alive[address] = boot_id, store_id if has_state else chance.choice([0, 8])
        at, (boot, store) = chance.choice(list(alive.items())) if alive else ("", (0, 0))
        is_here = place.address in alive and alive[place.address][1] == store_id
        place = replace(place, is_here=is_here, boot_id=alive[place.address][0] if is_here else 0)
        if not at:
            continue
        try:
            if moves(ServerClaim(1, at, boot, store), place):
                assert not is_here
                assert store == store_id
                place = replace(place, address=at)
        except PsClusterError:
            assert store != store_id, "whoever holds the state is never refused: it is the only one"
