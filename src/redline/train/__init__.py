"""The training step, the loop around it, optimisers, schedules, precision and checkpoints."""
