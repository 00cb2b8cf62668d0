"""Run the quickstart on the data that scripts/quickstart.sh prepares."""

import sys
from pathlib import Path

from megatron_muon.tools.quickstart import main

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    defaults = [
        *("--data-prefix", str(ROOT / ".cache" / "shakespeare_bytes")),
        *("--work-dir", str(ROOT / "runs" / "quickstart")),
    ]
    raise SystemExit(main([*defaults, *sys.argv[1:]]))
