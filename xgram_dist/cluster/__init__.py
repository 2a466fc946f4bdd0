"""Running on a cluster: Slurm jobs and the preflight check."""
