"""Imports that every forked rank needs; nothing is installed.

Megatron warns ten times on import that optional packages are not there; the start-up block of each
run says so once (see ``integration/capabilities.py``).
"""

import importlib
import logging
import warnings

import torch
import torch._dynamo
import torch.distributed

from megatron_muon.integration.cpu import import_megatron

torch.set_num_threads(1)
_extensions = logging.getLogger("torch.utils.cpp_extension")
_level = _extensions.level
_extensions.setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_megatron()
    # What the factory imports when it is first called, as torch.optim imports dynamo.
    importlib.import_module("megatron.core.models.mimo.model.base")
_extensions.setLevel(_level)
