"""A replica's part in synchronous steps."""
