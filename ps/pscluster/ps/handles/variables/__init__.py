"""Variables as users hold them, whole, in shards, and in blocks."""
