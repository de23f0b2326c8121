"""The mailbox: every message fills its receive, whichever comes first, and what no receive awaits is bounded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.errors import MemberUnavailableError, MisuseError, ProtocolError, PsClusterError
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.mailbox import Mailbox, Posted

TIMEOUT = 30.0
ROOM = 4096
Reply = worker_pb2.ExchangeReply
CALLED = worker_pb2.Signature(operation="barrier()", digest=1, place="a.py:1")


def make(room: int = ROOM) -> Mailbox:
    """The mailbox of replica 0 of three."""
    waits: list[Mailbox] = []

    def wait(posted: Posted) -> None:
        assert waits[0].wait_for(posted, TIMEOUT), "a receive that is never done"

    mailbox = Mailbox(0, [f"replica {rank}" for rank in range(3)], wait, room)
    waits.append(mailbox)
    return mailbox


def arrive(mailbox: Mailbox, source: int, data: bytes, sequence: int = 1, cuts: Sequence[int] = ()) -> bool:
    """Let a message arrive, in pieces; whether it was taken."""
    arrival = mailbox.arrive(source, sequence, len(data))
    if arrival is None:
        return False
    at = 0
    for cut in (*sorted(cuts), len(data)):
        arrival.memory[at:cut] = data[at:cut]
        at = cut
    mailbox.arrived(source, arrival)
    return True


messages = st.lists(st.binary(max_size=3000), max_size=12)


@settings(max_examples=60)
@given(messages, messages, st.randoms(use_true_random=False))
def test_messages_fill_receives_in_order(first: list[bytes], second: list[bytes], random: Random) -> None:
    """Two sources send while the function posts: each receive gets its message, and no more than the room is kept."""
    order = [1] * len(first) + [2] * len(second)
    random.shuffle(order)  # before there are threads: it may end the example
    mailbox = make()
    mailbox.begin(CALLED)
    most = [0]

    def send(source: int, data: list[bytes]) -> None:
        for message in data:
            assert arrive(mailbox, source, message, cuts=[len(message) // 2])
            most.append(mailbox.kept_bytes)

    threads = [threading.Thread(target=send, args=job, daemon=True) for job in ((1, first), (2, second))]
    for thread in threads:
        thread.start()
    waiting = {1: list(first), 2: list(second)}
    posted = []
    for source in order:
        memory = memoryview(bytearray(len(waiting[source][0])))
        posted.append((mailbox.post(source, memory), memory, waiting[source].pop(0)))
    for receive, memory, expected in posted:
        receive.wait()
        assert memory == expected
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert max(most) <= 2 * ROOM
    assert mailbox.kept_bytes == 0


def test_a_receive_posted_while_its_message_arrives() -> None:
    """A message that began to arrive before its receive was posted is copied when it is whole."""
    mailbox = make()
    mailbox.begin(CALLED)
    arrival = mailbox.arrive(1, 1, 4)
    assert arrival is not None
    memory = memoryview(bytearray(4))
    posted = mailbox.post(1, memory)
    assert not posted.done
    assert not mailbox.wait_for(posted, 0.0)
    arrival.memory[:] = b"abcd"
    mailbox.arrived(1, arrival)
    posted.wait()
    assert bytes(memory) == b"abcd"


def test_a_message_is_received_in_place() -> None:
    """Where the receive was posted first, the message arrives in its memory, with no other in between."""
    mailbox = make()
    mailbox.begin(CALLED)
    memory = memoryview(bytearray(4))
    mailbox.post(1, memory)
    arrival = mailbox.arrive(1, 1, 4)
    assert arrival is not None
    assert arrival.memory is memory


def test_a_disagreement_whose_message_is_whole() -> None:
    """It is not missed where the message was whole before the function looked."""
    mailbox = make()
    mailbox.begin(CALLED)
    posted = mailbox.post(1, memoryview(bytearray(4)))
    mailbox.check_agreed()
    mailbox.announce(1, 1, worker_pb2.Signature(operation="all_gather()", digest=1, place="b.py:2"))
    assert arrive(mailbox, 1, b"abcd")
    posted.wait()
    with pytest.raises(MisuseError, match=r"replica 1 has called all_gather\(\) at b.py:2"):
        mailbox.check_agreed()


def held_back(mailbox: Mailbox, size: int) -> tuple[threading.Thread, list[bool]]:
    """A thread whose message of this size has no room."""
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(arrive(mailbox, 1, bytes(size))))
    thread.start()
    return thread, taken


@pytest.mark.parametrize("size", [ROOM // 2, 2 * ROOM], ids=["no room left", "more than the room"])
def test_a_sender_is_held_back(size: int) -> None:
    """What has no room waits for a receive, for room, or for the end of the function, which drops it."""
    for how in ("post", "close"):
        mailbox = make()
        mailbox.begin(CALLED)
        assert arrive(mailbox, 1, bytes(ROOM - 600))
        thread, taken = held_back(mailbox, size)
        assert arrive(mailbox, 2, bytes(10)), "another source has room of its own"
        assert not taken
        if how == "close":
            mailbox.close()
        else:
            for expected in (ROOM - 600, size):
                mailbox.post(1, memoryview(bytearray(expected)))
        thread.join(TIMEOUT)
        assert taken == [how == "post"]
        assert mailbox.kept_bytes == (0 if how == "close" else 10 + 512)


def test_a_message_that_is_arriving_at_the_end_still_fills_its_memory() -> None:
    """Which therefore nobody may use again."""
    mailbox, memory = make(), bytearray(8)
    mailbox.begin(CALLED)
    mailbox.post(1, memoryview(memory))
    arrival = mailbox.arrive(1, 1, 8)
    assert arrival is not None
    arrival.memory[:4] = b"in t"
    mailbox.close()
    memory[:] = b"other us"
    arrival.memory[4:] = b"late"
    mailbox.arrived(1, arrival)
    assert memory == b"othelate"


def ended(kind: Reply.Kind, messages: int = 0, reason: str = "") -> Reply:
    """How a function has ended."""
    return Reply(kind=kind, messages=messages, reason=reason)


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (ended(Reply.RETURNED), MisuseError, "replica 1 has returned, where replica 0 has called barrier.. at a.py:1"),
        (ended(Reply.FAILED, reason="ValueError: x"), MemberUnavailableError, "replica 1 has failed: ValueError: x"),
        (ended(Reply.MISUSED, reason="replica 2 has called"), MisuseError, "replica 2 has called"),
        (ended(Reply.STOPPED), MemberUnavailableError, "replica 1 was told to stop"),
    ],
    ids=["returned", "failed", "misused", "stopped"],
)
def test_a_source_that_has_ended(reply: Reply, error: type[PsClusterError], words: str) -> None:
    """What it had sent is still received; what it has not is reported at once, also to those that send to it."""
    mailbox = make()
    mailbox.begin(CALLED)
    reply.messages = 2
    first, second, third = (mailbox.post(1, memoryview(bytearray(3))) for _ in range(3))
    assert arrive(mailbox, 1, b"one")
    mailbox.ended(1, reply)
    first.wait()
    assert not mailbox.wait_for(second, 0.0), "it is on its way"
    assert arrive(mailbox, 1, b"two")
    second.wait()
    with pytest.raises(error, match=words):
        third.wait()
    with pytest.raises(error, match=words):
        mailbox.check_target(1)
    mailbox.check_target(2)


def test_a_source_that_broke() -> None:
    """What has arrived whole is received; the rest fails with the reason, even if it had been announced."""
    mailbox = make()
    mailbox.begin(CALLED)
    assert arrive(mailbox, 1, b"one")
    assert mailbox.arrive(1, 1, 3) is not None, "the second breaks off"
    mailbox.broke(1, MemberUnavailableError("it died"))
    mailbox.broke(1, MemberUnavailableError("a later reason"))
    mailbox.post(1, memoryview(bytearray(3))).wait()
    for _ in range(2):
        with pytest.raises(MemberUnavailableError, match="it died"):
            mailbox.post(1, memoryview(bytearray(3))).wait()
        mailbox.ended(1, ended(Reply.RETURNED, messages=5))


def test_signatures_are_compared_whichever_is_first() -> None:
    """Another collective in the same place fails all receives, also those from members that agree."""
    other = worker_pb2.Signature(operation="all_reduce(sum)", layout="int64[]", digest=2, place="b.py:7")
    early = make()
    early.announce(2, 1, other)
    with pytest.raises(MisuseError, match=r"replica 2 has called all_reduce\(sum\) of int64\[\] at b.py:7.*replica 0"):
        early.begin(CALLED)
    late = make()
    late.begin(CALLED)
    posted = late.post(1, memoryview(bytearray(1)))
    late.announce(2, 1, other)
    with pytest.raises(MisuseError, match=r"at a\.py:1"):
        posted.wait()
    with pytest.raises(MisuseError):
        late.check_target(1)


def test_a_source_may_be_ahead() -> None:
    """A source that has begun later collectives is compared in each of them, when this member comes to it."""
    mailbox = make()
    for sequence in (1, 2):
        mailbox.announce(1, sequence, CALLED)
    mailbox.announce(1, 3, worker_pb2.Signature(operation="other()"))
    mailbox.begin(CALLED)
    mailbox.begin(CALLED)
    with pytest.raises(MisuseError, match=r"other\(\)"):
        mailbox.begin(CALLED)


@pytest.mark.parametrize("sequence_and_size", [(2, 3), (1, 4)], ids=["sequence", "size"])
def test_another_message_than_expected(sequence_and_size: tuple[int, int]) -> None:
    """A message of another collective or size is never taken for the one that is awaited."""
    sequence, size = sequence_and_size
    for posted_first in (True, False):
        mailbox = make()
        mailbox.begin(CALLED)
        if posted_first:
            posted = mailbox.post(1, memoryview(bytearray(3)))
            assert not arrive(mailbox, 1, bytes(size), sequence)
        else:
            assert arrive(mailbox, 1, bytes(size), sequence)
            posted = mailbox.post(1, memoryview(bytearray(3)))
        with pytest.raises(ProtocolError, match="of one version"):
            posted.wait()


def test_a_wait_is_woken() -> None:
    """A wait returns early when it is told to, without a message."""
    mailbox = make()
    mailbox.begin(CALLED)
    posted = mailbox.post(1, memoryview(bytearray(1)))
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(mailbox.wait_for(posted, TIMEOUT)))
    thread.start()
    while not results:
        mailbox.wake()
    thread.join(TIMEOUT)
    assert results == [False]
