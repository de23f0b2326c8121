"""Preprocessing layers on whole arrays, for steps and `map` functions. `pscluster.coordinator.features` has the names.

Their semantics are those of Keras 3. A layer is made in the script, perhaps adapted there, and used by functions on the
workers. It travels as a handle: its configuration and state are a definition of their own, which each worker gets once,
and of which it makes one layer that all of its functions share. It is the layer as it was when the function was
captured; the worker's cannot be adapted.
"""
