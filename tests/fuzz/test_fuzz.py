"""Every decoder, on almost valid inputs, raises only the errors that it documents. `make fuzz` tries more."""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import SEARCH
from tests.fuzz.decoders import Decoder, all_decoders, seeded
from tests.fuzz.mutations import mutated

FOUND = sorted((Path(__file__).parent / "found").iterdir())
NAMES = (
    *("value", "call", "failure", "frames", "packets", "session", "push", "pull", "ps", "node", "worker", "function"),
    *("part", "handle", "index", "tensor", "manifest", "log", "token", "tf_config", "address", "position"),
    *("exchange", "steps", "program", "numbers", "round", "delta", "moves", "newcomer"),
)
INPUTS = 150
ALLOCATES = 16 << 20
"""No input here, whatever it declares, needs more: none is larger than 64 KiB."""


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Decoder]]:
    """All decoders by name; their logs are discarded."""
    logging.disable(logging.CRITICAL)
    yield {decoder.name: decoder for decoder in all_decoders(tmp_path_factory.mktemp("fuzz"))}
    logging.disable(logging.NOTSET)


def made(decoder: Decoder, source: random.Random) -> bytes:
    """An input, in most cases with valid checksums."""
    data = mutated(source, decoder.examples)
    return decoder.fit(data) if source.random() < 0.8 else data


def test_all_are_tried(decoders: Mapping[str, Decoder]) -> None:
    """No decoder is missing here, and every stored finding belongs to one of them."""
    assert set(decoders) == set(NAMES)
    assert {path.name.rpartition("-")[0] for path in FOUND} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "handle"])
def test_valid_inputs_are_taken(decoders: Mapping[str, Decoder], name: str) -> None:
    """The examples are valid: otherwise all inputs made from them would be refused at the first check."""
    decoder = decoders[name]
    for example in decoder.examples:
        refused = decoder.try_(decoder.fit(example))
        assert not refused or name in ("worker", "ps", "moves", "newcomer"), example  # there they depend on each other


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_found_before(decoders: Mapping[str, Decoder], path: Path) -> None:
    """Inputs that were once wrongly accepted are refused."""
    decoders[path.name.rpartition("-")[0]].try_(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_some_inputs(decoders: Mapping[str, Decoder], name: str) -> None:
    """The first inputs of `make fuzz` pass, within a memory limit."""
    decoder = decoders[name]
    tracemalloc.start()
    try:
        for input_number in range(round(INPUTS * SEARCH)):
            data = made(decoder, seeded(name, input_number))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            decoder.try_(data)
            assert tracemalloc.get_traced_memory()[1] - before < ALLOCATES, input_number
    finally:
        tracemalloc.stop()


@given(name=st.sampled_from(NAMES), source=st.randoms(use_true_random=False))
@settings(
    max_examples=round(600 * SEARCH),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_other_inputs(decoders: Mapping[str, Decoder], name: str, source: random.Random) -> None:
    """Other inputs are tried in every run (with CI set: the same), and a finding is reduced."""
    decoders[name].try_(made(decoders[name], source))
