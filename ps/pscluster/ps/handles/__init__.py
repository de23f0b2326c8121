"""What users hold: variables, optimizers, metrics, lookups; handles that travel by name."""
