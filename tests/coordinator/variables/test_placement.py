"""Placement: which server gets which shard, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.coordinator.variables.placement import Load, ShardPlacer, ShardToPlace
from pscluster.core.errors import ConfigurationError
from pscluster.core.geometry.partition import Block, Partition

I1 = np.dtype(np.int8)
F32 = np.dtype(np.float32)


def rows(*sizes: int) -> Partition:
    """A variable whose shards have these numbers of elements."""
    ends = tuple(np.cumsum(sizes).tolist())
    return Partition((ends[-1],), (ends,))


def test_by_bytes_the_emptiest_server_is_next() -> None:
    """A large shard keeps its server free of small ones until the others have caught up."""
    placer = ShardPlacer(3)
    assert placer.place("table", rows(100), F32) == (0,)
    assert placer.place("a", rows(10, 10, 10), F32) == (1, 2, 1)
    assert placer.place("b", rows(200), I1) == (2,)
    assert placer.place("c", rows(1), F32) == (1,)
    assert placer.loads == (Load(1, 400), Load(3, 84), Load(2, 240))


def test_by_bytes_ties_go_to_fewer_shards_then_to_the_first() -> None:
    """Shards without bytes are spread by number, and equal servers are filled from the first on."""
    placer = ShardPlacer(3)
    assert placer.place("empty", rows(0, 0, 0, 0), F32) == (0, 1, 2, 0)
    assert placer.place("w", rows(1, 1, 1), F32) == (1, 2, 0)


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), max_size=20), st.integers(1, 5))
@settings(deadline=None)
def test_by_bytes_stays_balanced(variables: list[list[int]], num_ps: int) -> None:
    """No server is ahead of another by more than the largest shard, and the account adds up."""
    placer, again = ShardPlacer(num_ps), ShardPlacer(num_ps, "bytes")
    for index, sizes in enumerate(variables):
        owners = placer.place(str(index), rows(*sizes), I1)
        assert owners == again.place(str(index), rows(*sizes), I1)
        assert len(owners) == len(sizes)
    held = [load.nbytes for load in placer.loads]
    sizes = [size for variable in variables for size in variable]
    assert max(held) - min(held) <= max(sizes, default=0)
    assert sum(held) == sum(sizes)
    assert sum(load.shards for load in placer.loads) == len(sizes)


def test_round_robin_counts_all_shards() -> None:
    """As TensorFlow's: one counter over the shards of all variables, whatever their size."""
    placer = ShardPlacer(3, "round_robin")
    assert placer.place("a", rows(1000, 1), F32) == (0, 1)
    assert placer.place("b", Partition.whole(()), F32) == (2,)
    assert placer.place("c", rows(1, 1, 1, 1), F32) == (0, 1, 2, 0)


def test_a_policy_of_the_users_own() -> None:
    """It sees each shard with its place and size and what the servers hold by then, and decides."""
    seen: list[tuple[ShardToPlace, tuple[Load, ...]]] = []

    def policy(shard: ShardToPlace, loads: tuple[Load, ...]) -> Any:
        seen.append((shard, loads))
        return np.int64(1) if shard.variable == "hot" else 0

    placer = ShardPlacer(2, policy)
    assert placer.place("hot", Partition.even((3, 2), (2,)), F32) == (1, 1)
    assert placer.place("cold", Partition.whole(()), F32) == (0,)
    assert seen[1] == (
        ShardToPlace("hot", 1, 2, Block((2, 0), (3, 2)), F32, nbytes=8, ordinal=1),
        (Load(), Load(1, 16)),
    )
    assert seen[2][0].ordinal == 2
    assert seen[2][1] == (Load(), Load(2, 24))


@pytest.mark.parametrize("answer", [2, -1, 1.0, None, True, "0"])
def test_a_wrong_answer_places_nothing(answer: Any) -> None:
    """The error names variable, shard, answer and range, and the account is as it was."""
    placer = ShardPlacer(2, lambda shard, loads: 0 if shard.shard == 0 else answer)
    with pytest.raises(ConfigurationError, match=rf"'w', shard 1.*returned {answer!r}\..*in 0\.\.1"):
        placer.place("w", rows(1, 1), F32)
    assert placer.loads == (Load(), Load())


def test_known_places_enter_the_account() -> None:
    """Adopted shards weigh like placed ones, and released ones no more; the round robin ignores both."""
    placer = ShardPlacer(2)
    placer.adopt(rows(10, 5), I1, (0, 0))
    assert placer.loads == (Load(2, 15), Load())
    assert placer.place("w", rows(1, 20), I1) == (1, 1)
    placer.release(rows(10, 5), I1, (0, 0))
    assert placer.loads == (Load(), Load(2, 21))

    turns = ShardPlacer(2, "round_robin")
    turns.adopt(rows(1), I1, (0,))
    assert turns.place("w", rows(1, 1), I1) == (0, 1)


def test_placers_that_can_not_be() -> None:
    """No servers, an unknown name, or no function: each is said."""
    with pytest.raises(ConfigurationError, match="num_ps is 0"):
        ShardPlacer(0)
    with pytest.raises(ConfigurationError, match=r"'random'.*'bytes', 'round_robin'"):
        ShardPlacer(2, "random")
    with pytest.raises(ConfigurationError, match="not 3"):
        ShardPlacer(2, 3)  # type: ignore[arg-type]
