"""Synchronous training: the strategy whose replicas step together, and the values of replicas."""
