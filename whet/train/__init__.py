"""Training: data, schedules, optimizers, checkpoints, and the loop that uses them."""
