"""Gradients on their way to the servers: optimizers as users hold them, and their plans."""
