"""What is said when the next coordinator can't continue what the servers hold."""

from __future__ import annotations

import logging

import pytest

from pscluster.coordinator.job.live_job import continue_job
from pscluster.v1 import node_pb2

MINE = node_pb2.HelloReply(job_id=0xAB, job_name="week", store_id=1, coordinator_number=1, num_servers=2)
EMPTY = node_pb2.HelloReply()
OTHER = node_pb2.HelloReply(job_id=0xCD, job_name="week", store_id=1, coordinator_number=1, num_servers=2)


@pytest.mark.parametrize(
    ("replies", "job_name", "words"),
    [
        ([EMPTY, MINE], "week", "no whole job (ps 0: nothing; ps 1: 'week', id 00000000000000ab); starting a new job"),
        ([OTHER, MINE], "week", "(ps 0: 'week', id 00000000000000cd; ps 1: 'week', id 00000000000000ab)"),
        ([MINE, MINE], "/srv/new/train.py", "dropping job 'week', whose coordinator is gone, from the servers"),
        ([MINE, MINE], "/srv/new/train.py", "since this is job '/srv/new/train.py'"),
    ],
)
def test_a_job_that_is_dropped_is_named(
    replies: list[node_pb2.HelloReply], job_name: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that was not mounted, a script that was moved: the log says why all that the servers hold has gone."""
    request = node_pb2.AttachRequest(job_name=job_name, job_id=1, coordinator_number=1)
    assert continue_job(request, replies) == [0, 0]
    assert (request.job_id, request.coordinator_number) == (1, 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert words in record.getMessage()


def test_a_whole_job_is_continued_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    request = node_pb2.AttachRequest(job_name="week", job_id=1, coordinator_number=1)
    assert continue_job(request, [MINE, MINE]) == [1, 1]
    assert (request.job_id, request.coordinator_number) == (0xAB, 2)
    assert not caplog.records
