"""Rows of tables by id: tables that grow, lookups, and their plans."""
