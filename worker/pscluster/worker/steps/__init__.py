"""Step functions of a worker: the steps of `fit` and `evaluate`, steps that overlap, and their results."""
