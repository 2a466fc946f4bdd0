"""Runs as Slurm jobs: what `submit` writes, and what runs inside the job."""
