"""Functions: the queue, the connections to workers and servers, and results."""
