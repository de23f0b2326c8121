"""Synchronous steps: contributions of all replicas, staged, and applied as one update once the step is committed."""
