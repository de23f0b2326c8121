"""A job: how its coordinator attaches to the servers, what it keeps there, and what was lost."""
