"""Functions and classes on their way to other processes: by reference, by value, and what peers may name."""
