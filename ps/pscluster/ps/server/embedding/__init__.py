"""The rows of an `EmbeddingTable` on a server: found by their ids, made, dropped, read and changed."""
