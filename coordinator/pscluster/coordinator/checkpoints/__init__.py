"""Checkpoints, on the coordinator: when they are made, what is in them, how they are restored.

Nothing is imported here: a process that only reads checkpoints (`serving`) needs neither a job nor a client.
"""
