"""The optimizers' state: what a rank holds of it, and its way into a checkpoint and back."""
