"""Reads of the parameter servers: what is asked of which server, and kept copies."""
