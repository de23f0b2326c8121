"""How an array is cut into shards, and what follows from it: rows found by id, slices, and moves to another cut.

All of this is integer arithmetic over whole axes, never over elements, except for `rows`, which takes arrays of ids,
and for orders of rows.
"""
