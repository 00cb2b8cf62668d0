"""Who owns what and where it lies: pure Python over shapes.

Nothing here imports ``torch.distributed`` or Megatron.
"""
