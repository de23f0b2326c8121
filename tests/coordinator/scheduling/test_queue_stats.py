"""When the log says that nothing comes back."""

from __future__ import annotations

from pscluster.coordinator.scheduling.queue_stats import QUIET_SECONDS, QuietWatch


def test_silence_is_logged_when_it_has_lasted_long_enough() -> None:
    """Whenever it began, and once: again only in another state, and not sooner than the first time."""
    watch, heard = QuietWatch(0.0), 7.0
    assert not watch.is_quiet(heard + QUIET_SECONDS - 1, heard, busy=True)
    begin = heard + QUIET_SECONDS
    assert watch.is_quiet(begin, heard, busy=True)
    assert watch.is_new(begin, "one waits")
    assert not watch.is_new(begin + QUIET_SECONDS, "one waits")
    assert watch.is_new(begin + QUIET_SECONDS, "two wait")
    assert not watch.is_new(begin + QUIET_SECONDS + 1, "three wait")
    assert watch.is_new(begin + 2 * QUIET_SECONDS, "three wait")


def test_a_job_without_work_is_not_silent() -> None:
    """What counts is the time since there is work, not since a worker last sent anything."""
    watch, later = QuietWatch(0.0), 3600.0
    assert not watch.is_quiet(later, 1.0, busy=False)
    assert not watch.is_quiet(later + 1, 1.0, busy=True)
    assert watch.is_quiet(later + QUIET_SECONDS, 1.0, busy=True)
