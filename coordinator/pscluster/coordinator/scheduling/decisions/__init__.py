"""What the scheduler decides: which worker runs which function, and what becomes of each. Pure."""
