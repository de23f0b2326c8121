"""The parameter server: its shards, its service, and its process."""
