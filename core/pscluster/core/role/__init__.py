"""A role's process: its options, servers, signals and end, and what every role answers."""
