"""A folder of text to a Megatron indexed dataset: see megatron_muon.tools.prepare_text."""

import sys

from megatron_muon.tools.prepare_text import main

if __name__ == "__main__":
    sys.exit(main())
