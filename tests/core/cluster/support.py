"""A cluster, its addresses, and the form of the errors about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from pscluster.core.errors import ConfigurationError

WORKERS = ["worker0:2222", "worker1:2222", "worker2:2222"]
PS = ["ps0:2222", "ps1:2222"]
CLUSTER: dict[str, Any] = {"ps": PS, "worker": WORKERS}
FULL: dict[str, Any] = {"chief": ["chief0:2222"], **CLUSTER, "evaluator": ["evaluator0:2222"]}

addresses = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,10}(\.[a-z]{1,5})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
).flatmap(lambda host: st.integers(1, 65535).map(lambda port: f"{host}:{port}"))


def message_of(call: Callable[[], object]) -> str:
    """The text of the ConfigurationError that the call raises, which must be one readable line."""
    with pytest.raises(ConfigurationError) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 400
    assert "; write, for example, " in text
    return text
