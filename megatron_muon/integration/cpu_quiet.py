"""Messages that say only that there is no GPU; the rows silence these, word for word, and no other.

On the CPU the user has asked for exactly that, and some of them come once a layer or once a rank.
"""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass
from typing import Any

from megatron_muon.integration.patching import Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSilence:
    """A row that keeps a logger from saying one message.

    Attributes:
        logger: Name of the logger.
        message: How the message begins.
        why: As for every row.
        needed_by: As for every row.
    """

    logger: str
    message: str
    why: str
    needed_by: str

    @property
    def target(self) -> str:
        """What is changed."""
        return f"logger {self.logger}: {self.message!r}"

    def apply(self) -> Undo:
        """Add a filter to the logger."""
        logger = logging.getLogger(self.logger)
        is_other = _OtherMessages(self.message)
        logger.addFilter(is_other)
        return lambda: logger.removeFilter(is_other)


class _OtherMessages(logging.Filter):
    """Lets every record pass but those whose text begins in one way."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginning)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningSilence:
    """A row that keeps one ``UserWarning`` from being shown.

    Attributes:
        module: The module, or the package, that the warning is reported at.
        message: How the warning begins.
        why: As for every row.
        needed_by: As for every row.
    """

    module: str
    message: str
    why: str
    needed_by: str

    @property
    def target(self) -> str:
        """What is changed."""
        return f"UserWarning of {self.module}: {self.message!r}"

    def apply(self) -> Undo:
        """Put a filter before those that are there."""
        message = re.compile(re.escape(self.message))
        module = re.compile(rf"{re.escape(self.module)}(\.|\Z)")
        silence = ("ignore", message, UserWarning, module, 0)
        # warnings.filterwarnings() would take an equal filter of the user's away.
        _filters().insert(0, silence)

        def undo() -> None:
            # It is gone already where it was put in force inside catch_warnings(), now left.
            _filters()[:] = [entry for entry in _filters() if entry is not silence]

        return undo


def _filters() -> list[Any]:
    return warnings.filters  # type: ignore[return-value]  # typeshed calls it a Sequence


_NOT_INSTALLED = "its GPU kernels would not be used on the CPU"

IMPORT_SILENCES = (
    LogSilence(
        logger="torch.utils.cpp_extension",
        message="No CUDA runtime is found",
        why="nothing is built for CUDA",
        needed_by="core/tensor_parallel/random.py:_get_share_storage",
    ),
    WarningSilence(
        module="megatron",
        message="Transformer Engine and Apex are not installed",
        why=_NOT_INSTALLED,
        needed_by="core/optimizer/optimizer.py",
    ),
    WarningSilence(
        module="megatron",
        message="Apex is not installed",
        why=_NOT_INSTALLED,
        needed_by="core/models/backends.py",
    ),
    WarningSilence(
        module="megatron",
        message="Only transformer-engine>=1.7.0 supports MoE experts",
        why=_NOT_INSTALLED,
        needed_by="core/extensions/transformer_engine_spec_provider.py",
    ),
)
"""In force while Megatron is imported."""

SILENCES = (
    *IMPORT_SILENCES,
    LogSilence(
        logger="megatron.core.tensor_parallel.random",
        message="CPU RNG state changed within GPU RNG context",
        why="on the CPU both are one generator, so every dropout would say it",
        needed_by="core/tensor_parallel/random.py:CudaRNGStatesTracker.fork",
    ),
    WarningSilence(
        module="torch.utils.data.dataloader",
        message="'pin_memory' argument is set as true but no accelerator is found",
        why="Megatron always asks for pinned memory",
        needed_by="training/datasets/data_samplers.py:build_pretraining_data_loader",
    ),
)
"""In force while the stand-in is."""
