"""Steps that all replicas take together, as a worker runs them, and what they compute together."""
