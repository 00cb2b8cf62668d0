"""Imports that every forked rank needs; nothing is installed."""

import torch
import torch.distributed  # noqa: F401

from megatron_muon.integration.cpu import import_megatron

torch.set_num_threads(1)
import_megatron()
