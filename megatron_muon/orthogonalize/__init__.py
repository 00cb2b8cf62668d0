"""Mathematics on plain tensors: no process groups, no Megatron."""
