"""A role's metrics: counted where the work is done, read over HTTP and as a trace."""
