"""A role's metrics: updated where the work is done, read over HTTP and as a trace."""
