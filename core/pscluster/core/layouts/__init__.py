"""Meshes of devices, and how arrays lie on them: geometry only, no arrays and no connections."""
