"""Where a program runs: on several processes (`processes`), and as experiments on this
machine or a cluster (`experiments`, `local`, `slurm`)."""
