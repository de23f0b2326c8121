"""Optimizer update rules: pure functions on arrays.

`rule` has the base class, `rules` and `ftrl` the rules; `kernels` applies them to shards and to rows.
"""
