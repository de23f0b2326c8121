"""A worker's data: sources, pipelines, and reading ahead."""
