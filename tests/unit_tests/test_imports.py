"""Imports point one way, as the design says: checked in the source, not by importing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_muon"

MAY_IMPORT = {
    "errors": set(),
    "bookkeeping": set(),
    "orthogonalize": {"bookkeeping"},
    "collectives": {"bookkeeping"},
    "checkpoint": {"orthogonalize"},
    "offload": {"bookkeeping"},
    "optimizer": {"checkpoint", "orthogonalize", "collectives", "offload", "bookkeeping"},
    "integration": {
        *("optimizer", "checkpoint", "orthogonalize", "collectives", "offload", "bookkeeping"),
    },
    # What the planner plans has to be what a run plans, and what a run refuses it refuses; it needs
    # no torch and starts no Megatron.
    "planner": {"integration.fused", "optimizer.compatibility", "bookkeeping"},
    # The harness trains with the program that tools holds.
    "testing": {
        *("integration", "optimizer", "checkpoint", "orthogonalize", "collectives"),
        *("bookkeeping", "tools.pretrain_gpt"),
    },
    "tools": {
        *("planner", "testing", "integration", "optimizer", "checkpoint", "bookkeeping"),
    },
    "__main__": {"tools"},
}
"""What each part may import of the package; its own part, and `errors`, every part may."""

PARTS = tuple(f"megatron_muon.{part}" for part in MAY_IMPORT)

FORBIDDEN = {
    "bookkeeping": ("torch.distributed", "megatron", "emerging_optimizers"),
    "orthogonalize": ("torch.distributed", "megatron"),
    "collectives": ("megatron", "emerging_optimizers"),
    "planner": ("torch", "megatron", "emerging_optimizers"),
}
"""What a part may not import of others."""


def imported(source, module):
    """Yield every module or name a source imports or reads by attribute, in full."""
    package = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: -node.level]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def wrong_imports(source, module):
    """Return the imports of a module that the design forbids, as text."""
    part = module.split(".")[1]
    wrong = []
    for name in imported(source, module):
        allowed = tuple(f"megatron_muon.{p}." for p in {part, "errors", *MAY_IMPORT[part]})
        if name.startswith(PARTS) and not f"{name}.".startswith(allowed):
            wrong.append(f"{module} imports {name}")
        for banned in FORBIDDEN.get(part, ()):
            if name == banned or name.startswith(f"{banned}."):
                wrong.append(f"{module} imports {name}")
    return wrong


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("megatron_muon", *path.relative_to(PACKAGE).with_suffix("").parts))
        yield name.removesuffix(".__init__"), path


def test_every_part_has_a_rule():
    parts = {name.split(".")[1] for name, _ in modules() if "." in name}
    assert parts <= set(MAY_IMPORT), "a new part needs a rule here and in the design"


def test_imports_point_one_way():
    wrong = [
        line
        for name, path in modules()
        if "." in name
        for line in wrong_imports(path.read_text(), name)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megatron_muon.bookkeeping.plan", "import torch.distributed as dist"),
        ("megatron_muon.bookkeeping.plan", "from torch import distributed"),
        ("megatron_muon.bookkeeping.plan", "import torch\ntorch.distributed.get_rank()"),
        ("megatron_muon.bookkeeping.plan", "from megatron.core import mpu"),
        ("megatron_muon.bookkeeping.plan", "from megatron_muon.collectives import shards"),
        ("megatron_muon.bookkeeping.plan", "from ..optimizer import muon"),
        ("megatron_muon.bookkeeping.plan", "def f():\n    import megatron.core"),
        ("megatron_muon.orthogonalize.update", "from torch.distributed import all_reduce"),
        ("megatron_muon.orthogonalize.update", "from megatron_muon.collectives import shards"),
        ("megatron_muon.collectives.shards", "import megatron_muon.orthogonalize.update"),
        ("megatron_muon.collectives.shards", "from megatron.core import mpu"),
        ("megatron_muon.optimizer.muon", "from megatron_muon.integration import install"),
        ("megatron_muon.optimizer.muon", "from megatron_muon.testing import ranks"),
        ("megatron_muon.integration.install", "from megatron_muon.tools import cli"),
        ("megatron_muon.integration.install", "from megatron_muon.testing import ranks"),
        ("megatron_muon.testing.ranks", "from megatron_muon import tools"),
        ("megatron_muon.testing.ranks", "import megatron_muon.tools.cli"),
        ("megatron_muon.planner.job", "import torch"),
        ("megatron_muon.planner.job", "from megatron_muon.integration.names import is_expert"),
        ("megatron_muon.planner.muon_flags", "from megatron_muon.optimizer.config import FLAGS"),
        ("megatron_muon.optimizer.muon", "from megatron_muon.planner import job"),
        ("megatron_muon.errors", "from megatron_muon.bookkeeping import plan"),
    ],
)
def test_a_wrong_import_is_seen(module, line):
    assert wrong_imports(line, module)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megatron_muon.bookkeeping.plan", "import torch\nfrom megatron_muon.errors import X"),
        ("megatron_muon.bookkeeping.plan", "from megatron_muon.bookkeeping.matrix import Y"),
        ("megatron_muon.bookkeeping.plan", "from .matrix import Y"),
        ("megatron_muon.optimizer.muon", "import torch.distributed as dist"),
        ("megatron_muon.integration.install", "from megatron_muon.optimizer import muon"),
        ("megatron_muon.testing.ranks", "from megatron_muon.integration import install"),
    ],
)
def test_a_right_import_is_not(module, line):
    assert wrong_imports(line, module) == []


def test_importing_the_package_imports_neither_torch_nor_megatron():
    program = (
        "import sys, megatron_muon, megatron_muon.errors, megatron_muon.tools.cli\n"
        "print([name for name in ('torch', 'megatron', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == "[]"
