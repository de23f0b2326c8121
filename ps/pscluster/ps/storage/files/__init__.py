"""Files of a server's state: generations, safetensors, old bytes kept for snapshots, and where checkpoints may be."""
