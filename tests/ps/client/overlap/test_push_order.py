"""When pushes are sent, steps begin and functions end: over random interleavings of all events."""

from __future__ import annotations

import random

import pytest

from pscluster.ps.client.overlap.push_order import Owner, Push, PushOrder, Sender


def test_a_step_begins_with_few_enough_steps_outstanding() -> None:
    """Steps count, not pushes, and only until the last of their pushes is acknowledged."""
    order, first, second = PushOrder[str](100), Owner(), Owner()
    assert order.may_begin(0)
    assert order.add(first, "a", 1)
    assert not order.add(first, "b", 1)
    assert not order.returned(first)
    assert (order.may_begin(0), order.may_begin(1)) == (False, True)
    order.add(second, "c", 1)
    assert (order.may_begin(1), order.may_begin(2)) == (False, True)
    order.next()
    assert order.acknowledged() == []
    assert not order.may_begin(1)
    order.next()
    assert order.acknowledged() == [first]
    assert order.may_begin(1)


def test_a_large_push_is_added_alone() -> None:
    """One that is larger than the limit waits only for the others."""
    order, owner = PushOrder[str](10), Owner()
    assert order.may_add(owner, 1000)
    order.add(owner, "a", 8)
    assert order.may_add(owner, 2)
    assert not order.may_add(owner, 3)


@pytest.mark.parametrize("seed", range(200))
def test_every_interleaving_keeps_order_and_ends_each_function_once(seed: int) -> None:
    """What is sent is a prefix of what each function has made; it ends once, with its own error, after all of it."""
    rng, order = random.Random(seed), PushOrder[tuple[int, int]](50)
    overlap, functions = rng.choice((0, 1, 2)), 12
    owners = [Owner() for _ in range(functions)]
    number = {id(owner): at for at, owner in enumerate(owners)}
    made, acknowledged = [0] * functions, [list[int]() for _ in owners]
    failed: dict[int, Exception] = {}
    ended = list[int]()
    running = -1
    under_way: Push[tuple[int, int]] | None = None
    is_sent = False  # it was, and its acknowledgement is outstanding

    def end(these: list[Owner]) -> None:
        ended.extend(number[id(owner)] for owner in these)

    def acknowledge(error: Exception | None = None) -> None:
        nonlocal under_way, is_sent
        assert under_way is not None
        if error is None:
            acknowledged[under_way.payload[0]].append(under_way.payload[1])
        else:
            failed[under_way.payload[0]] = error
        by_step = order.sender is Sender.STEP
        end(order.acknowledged(error))
        under_way, is_sent = None, False
        if by_step:
            assert order.go_on() != order.is_empty

    while len(ended) < functions:
        assert (order.sender is Sender.NONE) <= order.is_empty  # whatever is queued has a sender
        assert (order.sender is Sender.UNCLAIMED) <= (is_sent and under_way is not None)
        match rng.choice(("begin", "add", "add", "step", "return", "next", "sent", "claim", "acknowledged", "fail")):
            case "begin" if running + 1 < functions and (running < 0 or owners[running].returned):
                if order.may_begin(overlap):
                    running += 1
                    assert sum(owner.outstanding > 0 for owner in owners) <= overlap
            case "add" if running >= 0 and not owners[running].returned and order.may_add(owners[running], 20):
                if owners[running].error is None:
                    here, before = order.is_empty and rng.random() < 0.5, order.sender
                    if order.add(owners[running], (running, made[running]), 20, here=here):
                        assert before is Sender.NONE
                        under_way = order._queue[0] if here else None
                    made[running] += 1
                    order.claim(Sender.POOL)
            case "step" if running >= 0 and not owners[running].returned and order.may_begin(overlap):
                order.begin_step(owners[running])
                assert owners[running].of_step == 0
            case "return" if running >= 0 and not owners[running].returned:
                if order.returned(owners[running]):
                    end([owners[running]])
                else:
                    order.claim(Sender.POOL)
            case "next" if under_way is None and order.sender is Sender.POOL:
                under_way, over = order.next()
                end(over)
            case "sent" if order.sender is Sender.STEP and not is_sent:
                order.sent()
                is_sent = True
            case "claim":
                assert order.claim(rng.choice((Sender.STEP, Sender.POOL))) <= is_sent
            case "acknowledged" if under_way is not None and order.sender is not Sender.UNCLAIMED:
                if is_sent or order.sender is Sender.POOL:
                    acknowledge()
            case "fail" if under_way is not None and order.sender is not Sender.UNCLAIMED and rng.random() < 0.2:
                acknowledge(ValueError(under_way.payload))
            case _:
                pass
    assert sorted(ended) == list(range(functions))
    assert order.is_empty
    for at, owner in enumerate(owners):
        assert owner.error is failed.get(at)
        assert owner.outstanding == 0
        assert acknowledged[at] == list(range(len(acknowledged[at])))
        assert at in failed or len(acknowledged[at]) == made[at]
