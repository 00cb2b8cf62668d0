# shellcheck shell=bash
# All of the set-up, and ROOT, the root of the checkout. Sourced, never run, by scripts that
# `set -euo pipefail`.

ROOT="$(dirname -- "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")")"
# shellcheck source=scripts/lib/common.sh
source "$ROOT/scripts/lib/common.sh"
# shellcheck source=scripts/lib/python.sh
source "$ROOT/scripts/lib/python.sh"
# shellcheck source=scripts/lib/environment.sh
source "$ROOT/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/text.sh
source "$ROOT/scripts/lib/text.sh"
