"""Faults for tests."""
