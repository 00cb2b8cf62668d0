# shellcheck shell=bash
# The environment: .venv at the root of the checkout, from requirements.lock, with the package itself
# installed from the checkout. Sourced, never run; needs common.sh and python.sh.
#
# Its own notes are in .venv/.megatron-muon:
#   made     this set-up made the folder, so it may make it anew
#   base     `python -m venv` came to its end
#   pending  an installation has begun and has not come to its end
#   stamp    the digests of what is installed; written last

VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
VENV_NOTES="$VENV/.megatron-muon"

# Two lines, for the lock and for pyproject.toml. They hold the paths, so a checkout that was moved is
# seen, and an environment that points to where it was is mended.
wanted_stamp() { sha256sum -- "$ROOT/requirements.lock" "$ROOT/pyproject.toml"; }

# environment_is_current STAMP
environment_is_current() {
  [[ -x "$VENV_PYTHON" && -f "$VENV_NOTES/stamp" && "$(<"$VENV_NOTES/stamp")" == "$1" ]]
}

# ensure_environment: afterwards VENV_PYTHON runs with everything installed. It costs one sha256sum when
# that is so already.
ensure_environment() {
  local wanted
  wanted="$(wanted_stamp)"
  if environment_is_current "$wanted"; then return; fi
  lock_checkout
  # Another run may have done the work while this one waited.
  if ! environment_is_current "$wanted"; then install_environment "$wanted"; fi
  unlock_checkout
}

install_environment() {
  local wanted="$1" installed="" began="$SECONDS"
  ensure_venv
  mkdir -p -- "$VENV_NOTES"
  if [[ -f "$VENV_NOTES/stamp" ]]; then installed="$(<"$VENV_NOTES/stamp")"; fi
  if [[ -e "$VENV_NOTES/pending" ]]; then drop_half_installed; fi
  : >"$VENV_NOTES/pending"
  rm -f -- "$VENV_NOTES/stamp"

  if [[ "${installed%%$'\n'*}" != "${wanted%%$'\n'*}" ]]; then
    say "installing the packages of requirements.lock into .venv (about 3 GB to download if they are" \
      "new here; some minutes, once)"
    pip_install --no-deps --only-binary :all: --requirement "$ROOT/requirements.lock" ||
      die "the installation failed; the reason is above. It needs the network this first time, and 10" \
        "GB of disk free while it installs, 5 GB stay. What is already installed stays: run it again to go" \
        "on from here."
  fi
  pip_install --no-deps --no-index --no-build-isolation --editable . ||
    die "megatron-muon itself could not be installed; the reason is above"

  printf '%s\n' "$wanted" >"$SCRATCH/stamp"
  rm -f -- "$VENV_NOTES/pending"
  mv -f -- "$SCRATCH/stamp" "$VENV_NOTES/stamp"
  say "the environment is ready ($((SECONDS - began)) s)"
}

# ensure_venv: an environment with a pip that works, new or as found. One that this set-up did not make
# is used if it can be, and never removed.
ensure_venv() {
  local version=""
  if [[ -L "$VENV" ]]; then
    die "$VENV is a link to $(readlink -f -- "$VENV"): installing into it would change the checkout that it" \
      "belongs to. Remove the link and run this again, or run the scripts there."
  fi
  if [[ -e "$VENV_NOTES/base" || ! -e "$VENV_NOTES/made" ]] && [[ -x "$VENV_PYTHON" ]]; then
    version="$("$VENV_PYTHON" -I -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' \
      </dev/null 2>/dev/null || true)"
    if [[ "$version" =~ ^3\.([0-9]+)$ ]] && ((BASH_REMATCH[1] >= ${PYTHON_NEEDED#3.})); then return; fi
  fi
  if [[ -e "$VENV" && ! -e "$VENV_NOTES/made" && -n "$(ls -A -- "$VENV")" ]]; then
    die "$VENV is there, made by something else, and cannot be used (${version:+Python $version; }it must" \
      "hold Python $PYTHON_NEEDED or newer with pip). Move it away and run this again."
  fi
  find_python
  say "making .venv with Python $PYTHON_VERSION ($PYTHON)"
  rm -rf -- "$VENV"
  mkdir -p -- "$VENV_NOTES"
  : >"$VENV_NOTES/made"
  run_child "$PYTHON" -m venv "$VENV" || die "$PYTHON -m venv failed; the reason is above"
  : >"$VENV_NOTES/base"
}

# drop_half_installed: what an installation that was cut off left behind. pip writes a package's RECORD
# last, and would take one without it for installed; a leading ~ is how it names what it is removing.
drop_half_installed() {
  local packages info
  packages="$("$VENV_PYTHON" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  for info in "$packages"/*.dist-info; do
    if [[ ! -e "$info/RECORD" ]]; then rm -rf -- "$info"; fi
  done
  rm -rf -- "$packages"/~*
}

# pip_install ARGUMENTS...: in the root of the checkout, talkative on a terminal only. Temporary files
# go where they are removed even if pip cannot do it.
pip_install() {
  local quiet=(--quiet --quiet)
  if [[ -t 2 ]]; then quiet=(); fi
  run_child env --chdir="$ROOT" -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PIP_NO_COMPILE \
    TMPDIR="$SCRATCH" "$VENV_PYTHON" -I -m pip --disable-pip-version-check --no-input \
    install "${quiet[@]}" "$@"
}
