#!/usr/bin/env bash
# Train a small GPT with Muon under Megatron-Core on this machine's processor, tensor parallel 2 x data
# parallel 2, on Shakespeare's plays. Makes what it needs first: .venv, the text and its tokens.
#
# usage: scripts/quickstart.sh [arguments of scripts/quickstart.py; --help lists them once it is set up]
set -euo pipefail

# shellcheck source=scripts/lib/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/setup.sh"

# The driver explains its arguments itself, but that is no reason to install anything.
if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]] && ! environment_is_current "$(wanted_stamp)"; then
  print_header
  exit
fi

ensure_environment
ensure_text
# Four processes share the machine's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV_PYTHON" "$ROOT/scripts/quickstart.py" "$@"
