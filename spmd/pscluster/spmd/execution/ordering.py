"""The order in which a program does what was recorded: moves that do not depend on each other become neighbours.

Tasks exchange what neighbouring moves need in one message each way, so the gradients of all layers travel together, and
a step waits for others as often as moves depend on each other, and not as often as there are moves. What could be
computed by then, but moves do not need, follows them: it is computed while they are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Recorded = tuple[Any, ...]
"""An instruction as `Recording` has it, with places of arrays."""


def reads_and_writes(instruction: Recorded) -> tuple[Sequence[int], Sequence[int]]:
    """Return the places of the arrays that an instruction reads, and that it makes."""
    match instruction:
        case ("compute" | "call", written, _, read, *_):
            return read, written
        case ("move", read, written):
            return [read], [written]
        case ("fetch", read, _) | ("update", read, _, _, _):
            return [read], []
        case (_, written, *_):
            return [], [written]
    raise AssertionError(f"there is no such instruction: {instruction!r:.100}")


def with_places(instruction: Recorded, of: Callable[[int], int]) -> Recorded:
    """Return an instruction with other places of arrays."""
    match instruction:
        case ("compute" | "call" as name, written, function, read, *rest):
            return name, [*map(of, written)], function, [*map(of, read)], *rest
        case ("move", read, written):
            return "move", of(read), of(written)
        case (name, place, *rest):
            return name, of(place), *rest
    raise AssertionError(f"there is no such instruction: {instruction!r:.100}")


def ordered(code: Sequence[Recorded], is_exchange: Callable[[Recorded], bool]) -> list[Recorded]:
    """Return the instructions in an order in which exchanges come together, as soon as all of them can.

    Updates of variables come last, and then fetches, in their order, which is that of what they return. What an
    instruction reads still comes before it, if it does in `code`.
    """
    last = [[instruction for instruction in code if instruction[0] == name] for name in ("update", "fetch")]
    updates, fetches = last
    code = [instruction for instruction in code if instruction[0] not in ("update", "fetch")]
    exchanges = {nth for nth, instruction in enumerate(code) if is_exchange(instruction)}
    if len(exchanges) < 2:
        return code + updates + fetches
    missing = {written for instruction in code for written in reads_and_writes(instruction)[1]}
    left, result = list(range(len(code))), list[Recorded]()
    while left:
        ready, waiting, together = list[int](), list[int](), list[int]()
        for nth in left:
            read, written = reads_and_writes(code[nth])
            if not missing.isdisjoint(read):
                waiting.append(nth)
            elif nth in exchanges:
                together.append(nth)
            else:
                ready.append(nth)
                missing.difference_update(written)
        needed = {read for nth in together for read in reads_and_writes(code[nth])[0]}
        before = set[int]()
        for nth in reversed(ready):
            read, written = reads_and_writes(code[nth])
            if not together or not needed.isdisjoint(written):
                before.add(nth)
                needed.update(read)
        result += [code[nth] for nth in ready if nth in before]
        for nth in together:
            result.append(code[nth])
            missing.difference_update(reads_and_writes(code[nth])[1])
        result += [code[nth] for nth in ready if nth not in before]
        left = waiting
    return result + updates + fetches
