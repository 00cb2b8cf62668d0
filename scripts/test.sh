#!/usr/bin/env bash
# Run the tests that need no GPU. Makes .venv and the text first if they are not there.
#
# usage: scripts/test.sh [--full] [arguments of pytest]
#   --full  the long matrices too
# Paths in pytest's arguments are taken from the root of the checkout; a -m of yours takes the place
# of the one given here.
set -euo pipefail

# shellcheck source=scripts/lib/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/setup.sh"

selection="not gpu and not full"
arguments=()
for argument in "$@"; do
  case "$argument" in
    --full) selection="not gpu" ;;
    -h | --help)
      print_header
      exit
      ;;
    *) arguments+=("$argument") ;;
  esac
done

ensure_environment
ensure_text
cd -- "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tests interrupt and hang up processes that they start, so neither signal may be ignored: SIGINT is
# for what a shell runs in the background, SIGHUP for what nohup starts.
exec env --default-signal=HUP,INT "$VENV_PYTHON" -m pytest -m "$selection" "${arguments[@]}"
