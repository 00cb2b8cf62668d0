"""``python -m megatron_muon``: the command line."""

from megatron_muon.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
