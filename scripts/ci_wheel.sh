#!/usr/bin/env bash
# Run the quickstart as an installed package runs it: from the wheel in WORK/dist, in a new environment
# that borrows only its dependencies from PYTHON's, in an empty folder.
#
# usage: scripts/ci_wheel.sh PYTHON WORK TOKENS
set -euo pipefail

python="$1" work="$2" tokens="$3"
environment="$work/venv/bin/python"
packages=(-c 'import sysconfig; print(sysconfig.get_path("purelib"))')

"$python" -m venv --without-pip "$work/venv"
"$python" -m pip --disable-pip-version-check --python "$environment" \
  install --quiet --no-deps --no-index "$work"/dist/*.whl
"$python" "${packages[@]}" >"$("$environment" "${packages[@]}")/dependencies.pth"

mkdir -- "$work/empty"
cd -- "$work/empty"
"$environment" -c '
import pathlib, sys
import megatron_muon

origin = pathlib.Path(megatron_muon.__file__)
if not origin.is_relative_to(sys.prefix):
    sys.exit(f"megatron_muon was imported from {origin}, which is not the wheel")
'
exec "$environment" -m megatron_muon.tools.quickstart --data-prefix "$tokens" --work-dir . --steps 20
