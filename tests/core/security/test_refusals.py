"""Refused calls: which are answered, which are held, whose connections are closed, and what is logged."""

from __future__ import annotations

from pscluster.core.security.refusals import (
    ALL_BURST,
    BURST,
    HOLD_SECONDS,
    MAX_HELD,
    MAX_STALE,
    PER_SECOND,
    REPORT_SECONDS,
    UNKNOWN_SESSIONS,
    Refusals,
)


def exhausted(address: str = "10.0.0.1") -> Refusals:
    """Refusals with an address that has used up its answers at time 0."""
    refusals = Refusals(True, 0.0)
    assert all(refusals.refused(f"ipv4:{address}:1", 0.0) for _ in range(BURST))
    return refusals


def test_beyond_its_answers_a_connection_is_held_and_closed() -> None:
    """It is held for a second, or until there are many; other connections, and later calls, are answered."""
    refusals = exhausted()
    assert not refusals.refused("ipv4:10.0.0.1:1", 0.0)
    assert refusals.refused("ipv4:10.0.0.2:1", 0.0)
    assert not refusals.refused("ipv4:10.0.0.2:1", 0.0, is_large=True)
    refusals.accepted("ipv4:10.0.0.2:1")
    assert refusals.due(HOLD_SECONDS / 2) == set()
    assert refusals.due(HOLD_SECONDS) == {"ipv4:10.0.0.1:1"}
    assert refusals.due(HOLD_SECONDS) == set()
    later = 1.0
    answers = [refusals.refused("ipv4:10.0.0.1:2", later) for _ in range(MAX_HELD + 1 + int(PER_SECOND))]
    assert sum(answers) == PER_SECOND
    assert refusals.due(later) == {"ipv4:10.0.0.1:2"}


def test_all_addresses_together_have_a_bound() -> None:
    """Many addresses together get no more answers than a few."""
    refusals = Refusals(True, 0.0)
    assert sum(refusals.refused(f"ipv4:10.0.{n >> 8}.{n & 255}:1", 0.0) for n in range(2 * ALL_BURST)) == ALL_BURST


def test_who_is_accepted_is_not_closed() -> None:
    """A call accepted while another is held keeps the connection open."""
    refusals = exhausted()
    assert not refusals.refused("ipv4:10.0.0.1:1", 0.0)
    refusals.accepted("ipv4:10.0.0.1:1")
    assert refusals.due(HOLD_SECONDS) == set()
    assert not refusals.pending


def test_an_unknown_session_is_told_so_whatever_its_neighbours_do() -> None:
    """Otherwise a restarted role's client could never begin another one, if other callers share its address."""
    refusals = exhausted()
    told = [refusals.refused("ipv4:10.0.0.1:9", 0.0, unknown_session=True) for _ in range(UNKNOWN_SESSIONS + 1)]
    assert told == [True] * UNKNOWN_SESSIONS + [False]
    refusals.forget_absent(set())
    assert refusals.refused("ipv4:10.0.0.1:9", 0.0, unknown_session=True)


def test_where_nothing_can_be_closed_all_is_answered() -> None:
    """Unix sockets have no names, some systems no list of descriptors, and a role that stops holds nothing."""
    without, over = Refusals(False, 0.0), exhausted()
    assert all(without.refused("ipv4:10.0.0.1:1", 0.0) for _ in range(BURST + 1))
    assert all(over.refused("unix:", 0.0) for _ in range(BURST + 1))
    over.refused("ipv4:10.0.0.1:3", 0.0)
    assert over.close() == {"ipv4:10.0.0.1:3"}
    assert over.refused("ipv4:10.0.0.1:3", 0.0)


def test_reports() -> None:
    """Once a minute the addresses and the number are logged; the count never falls."""
    refusals = exhausted()
    assert refusals.report(0.0) == (
        f"refused {BURST:,} calls without a valid proof of the cluster token: {BURST:,} from 10.0.0.1"
    )
    for index in range(7):
        refusals.refused(f"ipv4:10.0.1.{index}:1", 1.0)
    assert refusals.report(1.0) == ""
    assert refusals.report(REPORT_SECONDS).endswith(", 2 from 2 other addresses")
    refusals.refused("ipv4:10.0.2.1:1", 1.0)
    assert refusals.report(2 * REPORT_SECONDS).startswith("refused 1 call without")
    assert refusals.report(9 * REPORT_SECONDS) == ""
    assert refusals.total == BURST + 8


def test_sessions_of_before_a_restart_are_not_reported() -> None:
    """Each client's first calls after a role's restart are refused, and no attack; many more in a minute may be one."""
    refusals = Refusals(True, 0.0)
    for client in range(MAX_STALE):
        refusals.refused(f"ipv4:10.0.0.1:{client}", 1.0, unknown_session=True)
    assert (refusals.report(1.0), refusals.total) == ("", MAX_STALE)
    refusals.refused("ipv4:10.0.0.2:1", 1.0)
    assert refusals.report(2.0).endswith(": 1 from 10.0.0.2")
    assert refusals.report(2 * REPORT_SECONDS) == "", "those of the first minute are forgotten"
    for call in range(MAX_STALE + 1):
        refusals.refused(f"ipv4:10.0.0.3:{call}", 3 * REPORT_SECONDS, unknown_session=True)
    assert refusals.report(3 * REPORT_SECONDS).endswith(f": {MAX_STALE + 1} from 10.0.0.3")
