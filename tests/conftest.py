"""What all tests share."""

from pathlib import Path

import pytest
from hypothesis import settings

# The first example may import Megatron, and the machine may be busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_prefix() -> str:
    """The prepared text, which scripts/test.sh fetches and prepares."""
    prefix = ROOT / ".cache" / "shakespeare_bytes"
    if not prefix.with_suffix(".idx").exists():
        pytest.fail(f"{prefix}.idx is missing: run scripts/test.sh, which makes it")
    return str(prefix)
