"""Every touch on Megatron: seams, flags, the CPU stand-in and the launcher."""
