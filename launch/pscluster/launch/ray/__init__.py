"""The launcher for Ray: `RayCluster` runs each task of a cluster in an actor of its own."""
