"""Starting and watching runs: torchrun on this machine, job arrays of Slurm on a cluster."""
