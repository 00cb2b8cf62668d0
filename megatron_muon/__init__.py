"""Muon as a first-class distributed optimizer for Megatron-Core.

``install()`` makes Megatron's own API build it; ``python -m megatron_muon run SCRIPT`` does so for
a script that is not to be changed. The names below are the public surface; they are imported on
first use, so that importing the package costs nothing and works before torch is installed.
"""

import importlib
import sys

if sys.version_info < (3, 12):  # noqa: UP036  (this is where an older Python learns why)
    _message = (
        "megatron-muon needs Python 3.12 or newer, as megatron-core does; this is Python "
        "%d.%d at %s." % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    if sys.argv[:1] == ["-m"]:  # python -m megatron_muon: a line is enough
        sys.stderr.write("megatron-muon: error: %s\n" % _message)
        sys.exit(2)
    raise ImportError(_message)

__version__ = "0.1.0"

_PUBLIC = {
    "install": "megatron_muon.integration.install",
    "uninstall": "megatron_muon.integration.install",
    "Muon": "megatron_muon.optimizer.flat",
    "zeropower_via_newtonschulz5": "megatron_muon.optimizer.flat",
    "adjust_lr_wd_for_muon": "megatron_muon.optimizer.flat",
    "MuonConfig": "megatron_muon.optimizer.config",
    "LayerWiseMuonOptimizer": "megatron_muon.optimizer.layer_wise",
    "MuonDistMeta": "megatron_muon.bookkeeping.dist_meta",
    "normalize_range": "megatron_muon.bookkeeping.dist_meta",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError("module 'megatron_muon' has no attribute %r" % name)
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
