"""When pushes are sent, steps begin and functions end: over random interleavings of all events."""

from __future__ import annotations

import random

import pytest

from pscluster.ps.client.push_order import Owner, PushOrder


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
    assert order.sent() == []
    assert not order.may_begin(1)
    order.next()
    assert order.sent() == [first]
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
    made, sent = [0] * functions, [list[int]() for _ in owners]
    failed: dict[int, Exception] = {}
    ended = list[int]()
    running, sending = -1, None

    def end(these: list[Owner]) -> None:
        ended.extend(number[id(owner)] for owner in these)

    while len(ended) < functions:
        match rng.choice(("begin", "add", "add", "step", "return", "next", "sent", "fail")):
            case "begin" if running + 1 < functions and (running < 0 or owners[running].returned):
                if order.may_begin(overlap):
                    running += 1
                    assert sum(owner.outstanding > 0 for owner in owners) <= overlap
            case "add" if running >= 0 and not owners[running].returned and order.may_add(owners[running], 20):
                if owners[running].error is None:
                    order.add(owners[running], (running, made[running]), 20)
                    made[running] += 1
            case "step" if running >= 0 and not owners[running].returned and order.may_begin(overlap):
                order.begin_step(owners[running])
                assert owners[running].of_step == 0
            case "return" if running >= 0 and not owners[running].returned:
                if order.returned(owners[running]):
                    end([owners[running]])
            case "next" if sending is None:
                push, over = order.next()
                end(over)
                sending = push
            case "sent" if sending is not None:
                sent[sending.payload[0]].append(sending.payload[1])
                end(order.sent())
                sending = None
            case "fail" if sending is not None and rng.random() < 0.2:
                error = failed[sending.payload[0]] = ValueError(sending.payload)
                end(order.sent(error))
                sending = None
            case _:
                pass
    assert sorted(ended) == list(range(functions))
    assert order.is_empty
    for at, owner in enumerate(owners):
        assert owner.error is failed.get(at)
        assert owner.outstanding == 0
        assert sent[at] == list(range(len(sent[at])))
        assert at in failed or len(sent[at]) == made[at]
