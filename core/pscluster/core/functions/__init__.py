"""How functions and classes reach other processes: by reference, by value, and what peers may name."""
