"""How variables are cut and placed, and the copies that evaluations read."""
