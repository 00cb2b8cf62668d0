"""The errors a user can meet.

Each carries one plain message: what was wrong, which parameter or flag, what was expected and what
to do about it. The launcher prints such a message by itself, without a traceback; any other
exception keeps its traceback.
"""


class MuonError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(MuonError, ValueError):
    """A flag, a setting or an input of the user is wrong."""


class UnsupportedError(MuonError, NotImplementedError):
    """The combination is legal, but this version cannot run it."""


class PlanError(MuonError, RuntimeError):
    """The ownership plan, the layout in use or the state of another rank does not fit."""


class HostError(MuonError, ImportError):
    """Python, torch, megatron-core or another host package is missing or not a known version."""


class NonFiniteGradientError(MuonError, ArithmeticError):
    """Gradients with inf or NaN in more steps in a row than the user allows."""


class CheckpointError(MuonError, RuntimeError):
    """A checkpoint is torn, incomplete or of another model, or could not be written."""
