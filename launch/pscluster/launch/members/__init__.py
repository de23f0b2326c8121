"""What runs on the workers: the training function, in a process of its own if need be, and what it knows of its run."""
