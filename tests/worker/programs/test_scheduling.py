"""The order of jobs: whatever depends on what, each is done once, after what it needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pscluster.worker.programs import scheduling
from pscluster.worker.programs.scheduling import Action, Job, Kind, arranged


@st.composite
def graphs(draw: st.DrawFn) -> list[Job]:
    """Jobs that need earlier ones."""
    jobs: list[Job] = []
    for nth in range(draw(st.integers(0, 60))):
        needs = draw(st.sets(st.integers(0, nth - 1), max_size=3)) if nth else set[int]()
        is_long = draw(st.booleans())
        jobs.append(Job(draw(st.sampled_from([60.0, 500.0] if is_long else [1.0, 30.0])), tuple(needs), is_long))
    return jobs


@given(graphs(), st.integers(0, 3))
def test_each_job_is_done_once_after_what_it_needs(jobs: list[Job], helpers: int) -> None:
    """Here, or by another thread, whose end is awaited; and none is done far ahead of one that is not."""
    done, handed = set[int](), set[int]()
    for kind, job in arranged(jobs, helpers):
        if kind is Kind.WAIT:
            handed.remove(job)
        else:
            assert done.issuperset(jobs[job].needs)
            assert job not in done | handed
            assert kind is Kind.DO or (jobs[job].is_long and helpers)
        (handed if kind is Kind.HAND else done).add(job)
    assert done == set(range(len(jobs)))
    assert not handed


def test_two_devices_compute_at_the_same_time() -> None:
    """Each a long product, short functions of it, and another product: all of it in the shadow of the products."""
    jobs = [Job(100.0, (), is_long=True), Job(100.0, (), is_long=True)]
    jobs += [Job(10.0, (nth,)) for nth in (0, 1, 2, 3)]
    jobs += [Job(100.0, (4,), is_long=True), Job(100.0, (5,), is_long=True)]
    assert arranged(jobs, 1) == [
        Action(Kind.HAND, 0),
        Action(Kind.DO, 1),
        Action(Kind.DO, 3),
        Action(Kind.DO, 5),
        Action(Kind.HAND, 7),  # the thread is about to have the first one
        Action(Kind.WAIT, 0),
        Action(Kind.DO, 2),
        Action(Kind.DO, 4),
        Action(Kind.DO, 6),
        Action(Kind.WAIT, 7),
    ]


def test_a_job_that_nothing_can_be_done_beside_is_not_handed_over() -> None:
    """It would take longer."""
    chain = [Job(100.0, (nth - 1,) if nth else (), is_long=True) for nth in range(5)]
    assert arranged(chain, 3) == [Action(Kind.DO, nth) for nth in range(5)]


def test_jobs_are_not_done_far_ahead() -> None:
    """However urgent the others are: their results would be kept until the end."""
    count = 3 * scheduling.AHEAD
    jobs = [Job(1.0, ()) for _ in range(count)]
    jobs += [Job(100.0, (nth,), is_long=True) for nth in range(count)]
    order = [job for kind, job in arranged(jobs, 1) if kind is not Kind.WAIT]
    assert all(job < scheduling.AHEAD + min(order[nth:]) for nth, job in enumerate(order))
