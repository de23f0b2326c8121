"""Collectives as sends and receives, over any links: no socket, no thread and no clock here.

Every member calls the same function, with arrays of the same element type and with sizes that all of them know. What
is combined, and in which order, depends only on sizes and ranks: two runs give the same bits, and so do all members,
since each element is combined in one place or, for small arrays, in the same order everywhere.

A receive is posted before the sends that its sender may be waiting for, so that no ring of members that all send can
block: the member furthest behind has posted what its predecessor sends next.

    small arrays   recursive doubling: log2(size) rounds of the whole array
    large arrays   a ring, in pieces: each member sends 2 (size - 1) / size of the array, whatever the size
    broadcast      a binomial tree, in pieces
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pscluster.core.geometry.partition import even_ends
from pscluster.core.transport.frames import Buffer, view

Array = npt.NDArray[Any]

Finish = Callable[[Array], object]
"""Changes combined elements in place, such as to divide a sum for a mean."""

Outgoing = memoryview | Iterable[Sequence[memoryview]]
"""What is sent to a member: bytes; or messages of at most `PIECE_BYTES`, made in turn: the buffers of each."""

Incoming = memoryview | Sequence[memoryview]
"""Memory for that: all of it, or for each message."""

Meanwhile = Callable[[], object]
"""Does something else while others receive what they were sent, and send what is awaited."""

PIECE_BYTES = 2 << 20
"""Of a message in a ring or tree. For each, a thread has to be woken, which costs 0.1 to 0.3 ms on busy cores: 40 MiB
between two processes took 118 ms in pieces of 128 KiB, 70 in 512 KiB, 44 in 2 MiB, and as long in larger ones."""

SMALL_BYTES = 1 << 20
"""Up to this size the number of rounds counts more than that of bytes: measured on 2 cores, with 2 and 4 members."""

WINDOW = 3
"""Receives posted ahead on one link."""

_AHEAD = 1
"""Pieces sent before the first is awaited, so that the link is not idle meanwhile. Less than `WINDOW`."""


class Receipt(Protocol):
    """A receive that was posted."""

    def wait(self) -> None:
        """Wait until the message is in its memory. Raise an error if it will not come."""


class Links(Protocol):
    """A member's links to the others. Messages of one member arrive in order; each fills exactly one receive."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, to: int, *buffers: Buffer) -> None:
        """Send a message, which may change once this returns. May wait until the receiver takes earlier ones."""

    def post(self, source: int, memory: memoryview) -> Receipt:
        """Prepare to receive the next message of a member into this memory."""


def all_reduce(links: Links, combine: np.ufunc, array: Array, finish: Finish | None = None) -> Array:
    """Return the combination of all members' arrays, which are flat, contiguous, and of one size."""
    if links.size == 1 or array.nbytes <= SMALL_BYTES:
        return _doubled(links, combine, array, finish)
    out = np.empty_like(array)
    _ring(links, array, out, even_ends(array.size, links.size), combine, finish)
    return out


def reduce_scatter(
    links: Links,
    combine: np.ufunc,
    array: Array,
    ends: Sequence[int],
    finish: Finish | None = None,
    *,
    in_place: bool = False,
) -> Array:
    """Return this member's part of the combination; `ends` are those of all parts, in elements.

    If `in_place`, it is a view of the array, the rest of which is overwritten.
    """
    if links.size == 1:
        return _doubled(links, combine, array, finish)
    out = array if in_place else np.empty_like(array)
    _ring(links, array, out, ends, combine, finish, gather=False)
    part = out[(0, *ends)[links.rank] : ends[links.rank]]
    return part if in_place else part.copy()


def all_gather(links: Links, mine: Array, ends: Sequence[int]) -> Array:
    """Return all members' arrays, one after the other; `ends` are those of each there, in elements."""
    if links.size == 1:
        return mine.copy()
    out = np.empty(ends[-1], mine.dtype)
    start, stop = (0, *ends)[links.rank], ends[links.rank]
    out[start:stop] = mine
    fill_parts(links, out, ends)
    return out


def fill_parts(links: Links, out: Array, ends: Sequence[int]) -> None:
    """Fill the parts of all other members with what these have there; `ends` are those of all parts, in elements."""
    if out.nbytes > SMALL_BYTES:
        _ring(links, out, out, ends)
        return
    memory, bounds = view(out), [end * out.itemsize for end in (0, *ends)]
    others = _others(links)
    receipts = [links.post(source, memory[bounds[source] : bounds[source + 1]]) for source in reversed(others)]
    for to in others:
        links.send(to, memory[bounds[links.rank] : bounds[links.rank + 1]])
    for receipt in receipts:
        receipt.wait()


def all_to_all(links: Links, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]) -> None:
    """Send each member its buffer, and receive that of each; this member's own is copied."""
    incoming[links.rank][:] = outgoing[links.rank]
    others = _others(links)
    exchange(links, {to: outgoing[to] for to in others}, {source: incoming[source] for source in others})


def exchange(
    links: Links,
    outgoing: Mapping[int, Outgoing],
    incoming: Mapping[int, Incoming],
    meanwhile: Meanwhile = lambda: None,
) -> None:
    """Send some other members buffers, and receive those of some, whose sizes are known.

    Bytes are cut into messages here; otherwise both sides have cut them in the same way. `meanwhile` is called, once,
    when everything is sent.
    """
    others = _others(links)
    # Predecessors first: the nearest one sends to this member first.
    sources = [source for source in reversed(others) if source in incoming]
    receipts = [links.post(source, piece) for source in sources for piece in _places(incoming[source])]
    for to in others:
        if to in outgoing:
            for buffers in _messages(outgoing[to]):
                links.send(to, *buffers)
    meanwhile()
    for receipt in receipts:
        receipt.wait()


def broadcast(links: Links, memory: memoryview, source: int) -> None:
    """Fill every member's memory with that of the source."""
    size = links.size
    place = (links.rank - source) % size
    # A member at place p receives from p without its lowest bit, and sends to p with each lower bit added, the larger
    # subtree first.
    lowest = place & -place if place else 1 << (size - 1).bit_length()
    distances = [1 << bit for bit in reversed(range(lowest.bit_length() - 1)) if place + (1 << bit) < size]
    children = [(links.rank + distance) % size for distance in distances]
    pieces = _pieces(memory)
    receipts: deque[Receipt] = deque()
    if place:
        parent = (links.rank - lowest) % size
        receipts.extend(links.post(parent, piece) for piece in pieces[:WINDOW])
    for nth, piece in enumerate(pieces):
        if place:
            receipts.popleft().wait()
            if nth + WINDOW < len(pieces):
                receipts.append(links.post(parent, pieces[nth + WINDOW]))
        for child in children:
            links.send(child, piece)


def barrier(links: Links) -> None:
    """Return once every member has called it."""
    distance = 1
    while distance < links.size:
        receipt = links.post((links.rank - distance) % links.size, memoryview(bytearray()))
        links.send((links.rank + distance) % links.size)
        receipt.wait()
        distance *= 2


def _others(links: Links) -> list[int]:
    """Return the other members, the next one first: so not all send to the same one at once."""
    return [(links.rank + step) % links.size for step in range(1, links.size)]


def _messages(memory: Outgoing) -> Iterable[Sequence[memoryview]]:
    return [[piece] for piece in _pieces(memory)] if isinstance(memory, memoryview) else memory


def _places(memory: Incoming) -> Sequence[memoryview]:
    return _pieces(memory) if isinstance(memory, memoryview) else memory


def _pieces(memory: memoryview) -> list[memoryview]:
    """Cut memory into messages; at least one."""
    return [memory[at : at + PIECE_BYTES] for at in range(0, max(len(memory), 1), PIECE_BYTES)]


def _doubled(links: Links, combine: np.ufunc, array: Array, finish: Finish | None) -> Array:
    """Combine whole arrays with one partner per round. Members beyond a power of two first join one below it."""
    rank, size = links.rank, links.size
    power = 1 << (size.bit_length() - 1)
    result = array.copy()
    if rank >= power:
        receipt = links.post(rank - power, view(result))
        links.send(rank - power, view(array))
        receipt.wait()
        return result
    other = np.empty_like(result)
    joined = rank + power < size

    def receive(receipt: Receipt, source: int) -> None:
        receipt.wait()
        # The lower rank's first: both partners get the same bits, even of NaNs and of zeros with a sign.
        first, second = (result, other) if rank < source else (other, result)
        combine(first, second, out=result)

    if joined:
        receive(links.post(rank + power, view(other)), rank + power)
    distance = 1
    while distance < power:
        partner = rank ^ distance
        receipt = links.post(partner, view(other))
        links.send(partner, view(result))
        receive(receipt, partner)
        distance *= 2
    if finish is not None:
        finish(result)
    if joined:
        links.send(rank + power, view(result))
    return result


def _ring(
    links: Links,
    array: Array,
    out: Array,
    ends: Sequence[int],
    combine: np.ufunc | None = None,
    finish: Finish | None = None,
    *,
    gather: bool = True,
) -> None:
    """Combine the members' arrays around a ring, then pass the combined parts around it; either may be left out.

    `out` may be the array itself: each element of it is read before it is overwritten.

    The array is cut into one part per member. In step t a member sends part rank - t - 1 to the next one, and receives
    the part before that. In the first size - 1 steps it combines what it receives with its own; after them it has its
    own part, of number rank, of the result. In the others it receives parts of the result in place.

    All parts are cut into the same number of pieces, and the pieces of all steps are one sequence. A piece can be sent
    once the same piece of the step before has been received.
    """
    rank, size = links.rank, links.size
    starts = (0, *ends)
    longest = max(end - start for start, end in zip(starts, ends, strict=False))
    count = max(1, -(-longest * out.itemsize // PIECE_BYTES))
    first = 0 if combine is not None else size - 1
    total = ((2 * (size - 1) if gather else size - 1) - first) * count
    to, source = (rank + 1) % size, (rank - 1) % size
    most = -(-longest // count)
    slots = [np.empty(most, out.dtype) for _ in range(WINDOW)] if combine is not None else []
    posted: deque[tuple[Receipt, int, int]] = deque()

    def piece(step: int, which: int) -> tuple[int, int]:
        """Return where a piece of the part sent in a step begins and ends."""
        part = (rank - step - 1) % size
        length = ends[part] - starts[part]
        return starts[part] + length * which // count, starts[part] + length * (which + 1) // count

    def post(nth: int) -> None:
        step, which = first + nth // count, nth % count
        start, stop = piece(step + 1, which)
        target = slots[nth % WINDOW][: stop - start] if step < size - 1 else out[start:stop]
        posted.append((links.post(source, view(target)), start, stop))

    def take(nth: int) -> None:
        receipt, start, stop = posted.popleft()
        receipt.wait()
        step = first + nth // count
        if combine is not None and step < size - 1:
            combined = out[start:stop]
            combine(slots[nth % WINDOW][: stop - start], array[start:stop], out=combined)
            if finish is not None and step == size - 2:
                finish(combined)
        if nth + WINDOW < total:
            post(nth + WINDOW)

    for nth in range(min(WINDOW, total)):
        post(nth)
    ahead = min(_AHEAD, count - 1)
    for nth in range(total):
        step, which = first + nth // count, nth % count
        start, stop = piece(step, which)
        links.send(to, view((array if step == 0 else out)[start:stop]))
        if nth >= ahead:
            take(nth - ahead)
    for nth in range(total - ahead, total):
        take(nth)
