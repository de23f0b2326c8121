"""Gradients of functions of global arrays: what is recorded, the rules of the operations, the pass back."""
