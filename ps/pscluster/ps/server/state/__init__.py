"""What a server holds: the store with its directory, shards and metadata, and the memory of applied updates."""
