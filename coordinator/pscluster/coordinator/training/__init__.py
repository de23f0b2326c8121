"""Training: the loop, what is called along with it, and what it writes."""
