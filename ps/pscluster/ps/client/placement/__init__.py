"""Where shards are, how variables are cut, and how both change."""
