"""The coordinator's connections to workers and parameter servers, and the loop that they run on."""
