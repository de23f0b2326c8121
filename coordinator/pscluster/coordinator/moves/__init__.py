"""Shards that move from one parameter server to another, and when they do."""
