"""Where a program runs: on several processes (`processes`) or machines (`agent`), and as experiments on this
machine or a cluster (`experiments`, `local`, `slurm`)."""
