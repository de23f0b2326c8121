"""A worker's data: sources, pipelines, and what is read ahead of the functions that ask for it."""
