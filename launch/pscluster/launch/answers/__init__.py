"""What members of a run ask together and are told: reports, barriers, broadcasts, and where they find each other."""
