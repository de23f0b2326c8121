"""Manifests that run a cluster on Kubernetes: `pscluster k8s render`."""
