"""The launcher for Slurm: `pscluster slurm` writes and submits a job script that starts all roles as one job step."""
