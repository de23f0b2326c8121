"""Where shards are, how variables are cut, and how that is changed."""
