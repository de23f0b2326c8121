"""Optimizer update rules: pure functions on arrays.

`rules` has the rules and the base class for custom ones; `kernels` applies them to shards and to rows.
"""
