"""What the tests of this folder share: to ask a role for its metrics as Prometheus does."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from pscluster.coordinator.cli.status import ask
from pscluster.coordinator.strategy import ParameterServerStrategy

SECONDS = 30.0


def get(address: str, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> tuple[int, str]:
    """The status of the answer, and its text."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Scraped:
    """What one `/metrics` said."""

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
        """Of the sample with exactly these labels."""
        return self._samples[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """Of all samples of that name, added up."""
        return sum(value for (found, _), value in self._samples.items() if found == name)

    def labels(self, name: str, label: str) -> set[str]:
        """The values that a label has."""
        return {dict(labels)[label] for found, labels in self._samples if found == name}


def scrape(address: str) -> Scraped:
    """The metrics of the role whose metrics are served there."""
    status, text = get(address, "/metrics")
    assert status == 200
    return Scraped(text)


def addresses(strategy: ParameterServerStrategy) -> dict[str, str]:
    """Where each role of a strategy's cluster serves its metrics, by its name such as "ps 0"."""
    found = {"coordinator": strategy.metrics_address}
    for peer in strategy.tasks:
        reply = ask(peer)
        assert not isinstance(reply, str), reply
        found[f"{peer.role} {peer.index}"] = reply.metrics_address
    return found
