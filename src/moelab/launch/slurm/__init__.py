"""Speaking to Slurm: its commands, what they say of jobs, and lists of nodes."""
