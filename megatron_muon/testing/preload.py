"""Imports that every forked rank needs; nothing is installed."""

import importlib
import warnings

import torch
import torch._dynamo
import torch.distributed

from megatron_muon.integration.cpu import import_megatron

torch.set_num_threads(1)
import_megatron()
# What the factory imports when it is first called, as torch.optim imports dynamo. The module warns
# that it is experimental; nothing here uses it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("megatron.core.models.mimo.model.base")
