"""Sources that read files, on the workers: in blocks that a worker can hold."""
