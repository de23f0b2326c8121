"""The training loop: `ClusterCoordinator.fit`, and its pieces for users' own loops."""
