"""The log of updates, after a generation: written, read back, and its format."""
