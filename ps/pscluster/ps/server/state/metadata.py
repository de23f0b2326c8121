"""The metadata of a job: a few texts by name, which server 0 holds.

    put -> checked -> applied under the lock, with its key -> logged -> acknowledged
                  \\-> was applied before, or is late: as with any update, nothing changes

A put travels as an update of the shard `METADATA`: the ledger and the term refuse late copies, so that the put that was
sent last counts. All texts are one shard, with one lock, one count of updates and one count of losses. They are in the
manifest of each generation and in the log; what may be lost is the same as of variables. A checkpoint gets the texts as
its shards are marked, and a restore puts them back as it commits the shards.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_TEXT_BYTES, MAX_TEXTS, check_name
from pscluster.ps.server.state.shard import Shard


class Metadata(Shard):
    """The texts of a job. Those in `texts` never change: under `lock`, others take their place."""

    def __init__(self) -> None:
        super().__init__(np.empty(0, np.uint8))
        self.texts: Mapping[str, str] = {}

    def assign(self, name: str, text: str) -> None:
        """Store a text in place of the one before. ProtocolError if there are too many. Under the lock."""
        texts = {**self.texts, name: text}
        check_texts(texts)
        self.texts = texts


def check_texts(texts: Mapping[str, str]) -> None:
    """Raise ProtocolError if these are not texts of a job's metadata."""
    if len(texts) > MAX_TEXTS:
        raise ProtocolError(f"{len(texts):,} names in a job's metadata; the limit is {MAX_TEXTS}")
    for name, text in texts.items():
        check_name(name, "a name in a job's metadata")
        if not name or (size := len(text.encode())) > MAX_TEXT_BYTES:
            problem = f"{size:,} bytes; the limit is {MAX_TEXT_BYTES:,}" if name else "text without a name"
            raise ProtocolError(f"metadata {name[:80]!r}: {problem}")
