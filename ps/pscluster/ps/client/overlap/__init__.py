"""Steps that overlap: rows fetched ahead, and pushes that return at once."""
