"""The assembly: Megatron's layer-wise optimizer with Muon inside."""
