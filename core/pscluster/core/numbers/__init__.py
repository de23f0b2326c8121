"""Whole numbers and pseudorandom ones: sets of intervals, a hash, and random numbers for any block of an array."""
