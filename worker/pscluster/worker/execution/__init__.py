"""Runs the functions that a coordinator sends, and returns their outcomes."""
