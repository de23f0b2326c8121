"""Parameter servers: shard store, update rules, service; and the client and handles that others use."""
