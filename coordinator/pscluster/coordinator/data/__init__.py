"""Per-worker and distributed datasets, as the coordinator holds them."""
