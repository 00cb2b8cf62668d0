"""What is in a checkpoint, how it gets there and back."""
