"""Jobs on a Slurm cluster, through Slurm's command line tools."""
