"""Movement of tensors between ranks, and nothing else."""
