"""Asking a role for its metrics as Prometheus does, for the tests of this folder."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from pscluster.coordinator.observability.status_client import StatusClient
from pscluster.coordinator.strategy import ParameterServerStrategy

SECONDS = 30.0


def get(address: str, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> tuple[int, str]:
    """Return the answer's status and text."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Scraped:
    """The answer of one `/metrics`."""

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            self.kinds[family.name] = family.type
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self._samples, f"{key} comes twice"
                self._samples[key] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """The value of the sample with exactly these labels."""
        return self._samples[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """The sum of all samples of that name."""
        return sum(value for (sample, _), value in self._samples.items() if sample == name)

    def labels(self, name: str, label: str) -> set[str]:
        """The values of a label."""
        return {dict(labels)[label] for sample, labels in self._samples if sample == name}


def scrape(address: str) -> Scraped:
    """The metrics of the role that serves them there."""
    status, text = get(address, "/metrics")
    assert status == 200
    return Scraped(text)


def addresses(strategy: ParameterServerStrategy) -> dict[str, str]:
    """The address at which each role of a strategy's cluster serves its metrics, by its name such as "ps 0"."""
    by_role = {"coordinator": strategy.metrics_address}
    with contextlib.closing(StatusClient(strategy.tasks)) as client:
        for peer, reply in client.ask(explained=True).items():
            assert not isinstance(reply, str), reply
            by_role[peer.task] = reply.metrics_address
    return by_role
