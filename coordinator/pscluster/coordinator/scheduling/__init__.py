"""Functions on workers: the scheduler, the connections to workers and servers, and results."""
