"""Imports that every forked rank needs; nothing is installed."""

import importlib

import torch
import torch._dynamo
import torch.distributed

from megatron_muon.integration.cpu import import_megatron

torch.set_num_threads(1)
import_megatron()
# What the factory imports when it is first called, as torch.optim imports dynamo.
importlib.import_module("megatron.core.models.mimo.model.base")
