"""What a table is known by: the checkpoint that it is of, and a digest of its values."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from pscluster.coordinator.checkpoints.index import SavedVariable


@dataclass(frozen=True, slots=True)
class TableVersion:
    """The values of a table at one moment. Two are the same values if their digests are equal."""

    number: int  # of the checkpoint in its directory; 0 for one made by `Checkpoint.write`
    digest: str  # 32 hexadecimal digits

    @staticmethod
    def of(number: int, variable: SavedVariable) -> TableVersion:
        """Return the version of a variable in a checkpoint: the digest is one of its shards' checksums, in order."""
        shards = sorted(variable.arrays["value"], key=lambda tensor: tensor.shard)
        text = [repr((variable.dtype, variable.partition)), *(shard.checksum for shard in shards)]
        return TableVersion(number, xxhash.xxh3_128_hexdigest("\n".join(text).encode()))

    def __str__(self) -> str:
        return f"{self.number} ({self.digest[:8]})"
