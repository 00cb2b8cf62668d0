# shellcheck shell=bash
# Finding a Python to make the environment from. Sourced, never run.

PYTHON_NEEDED="3.12" # megatron-core and emerging-optimizers refuse older ones
# From this minor version on the pinned packages may have no wheels: taken only for want of another.
PYTHON_UNTRIED_MINOR=15

# probe_python COMMAND: 0 and PYTHON_VERSION if an environment can be made from it; otherwise 1 and
# PYTHON_FAULT. It is run, not looked at: the shims of version managers are found and do not run.
probe_python() {
  local answer
  PYTHON_VERSION=""
  PYTHON_FAULT="does not run"
  answer="$(timeout 20 "$1" -I -c '
import sys
version = ".".join(str(part) for part in sys.version_info[:3])
fault = ""
if sys.version_info[:2] < (3, 12):
    fault = "too old"
elif sys.implementation.name != "cpython":
    fault = "not CPython"
else:
    try:
        import ensurepip, venv
    except ImportError as error:
        fault = "its %s module is missing: install the python%d.%d-venv package" % (
            (error.name,) + sys.version_info[:2])
print(version + ";" + fault)
' </dev/null 2>/dev/null)" || return 1
  [[ "$answer" == *";"* ]] || return 1
  PYTHON_VERSION="${answer%%;*}"
  PYTHON_FAULT="${answer#*;}"
  if [[ -n "$PYTHON_FAULT" ]]; then
    PYTHON_FAULT="$PYTHON_VERSION, $PYTHON_FAULT"
    return 1
  fi
}

# Where a Python may be, one a line, the likeliest first. A subshell, for its nullglob.
list_pythons() (
  shopt -s nullglob
  local name home="${HOME:-}"
  for name in python3.12 python3.13 python3.14 python3 python; do
    type -aP "$name" || true
  done
  local folders=(
    "${PYENV_ROOT:-$home/.pyenv}"/versions/*/bin
    "$home"/.pyenv/versions/*/bin
    "$home"/.local/share/uv/python/*/bin
    "${CONDA_PREFIX:-$home/miniconda3}"/bin
    "$home"/.local/bin /usr/local/bin /usr/bin
    /opt/*/bin /opt/*/*/bin
  )
  if type -P uv >/dev/null; then
    UV_PYTHON_DOWNLOADS=never timeout 20 uv python find --no-project ">=$PYTHON_NEEDED" \
      </dev/null 2>/dev/null || true
  fi
  local folder found
  for folder in "${folders[@]}"; do
    found=("$folder"/python3.1[2-9])
    if ((${#found[@]} == 0)); then found=("$folder"/python3); fi
    printf '%s\n' "${found[@]}"
  done
)

# find_python: sets PYTHON and PYTHON_VERSION, or ends the script with one paragraph that says what
# is needed and what there is.
find_python() {
  local candidate rejected="" newer="" newer_version=""
  local -A seen=()
  if [[ -n "${MEGATRON_MUON_PYTHON:-}" ]]; then
    PYTHON="$(type -P -- "$MEGATRON_MUON_PYTHON" || printf '%s' "$MEGATRON_MUON_PYTHON")"
    probe_python "$PYTHON" || die "MEGATRON_MUON_PYTHON is $MEGATRON_MUON_PYTHON ($PYTHON_FAULT), but" \
      "megatron-muon needs Python $PYTHON_NEEDED or newer with its venv module. Set it to such a one, or" \
      "unset it and this script looks for one."
    return
  fi
  while IFS= read -r candidate; do
    # The environment itself may be active; it is no base to make itself from.
    if [[ ! -x "$candidate" || "$candidate" == "$ROOT/.venv/"* || -n "${seen["$candidate"]:-}" ]]; then
      continue
    fi
    seen["$candidate"]=1
    if ! probe_python "$candidate"; then
      rejected+="${rejected:+; }$candidate ($PYTHON_FAULT)"
    elif [[ "$PYTHON_VERSION" =~ ^3\.([0-9]+)\. ]] && ((BASH_REMATCH[1] < PYTHON_UNTRIED_MINOR)); then
      PYTHON="$candidate"
      return
    elif [[ -z "$newer" ]]; then
      newer="$candidate"
      newer_version="$PYTHON_VERSION"
    fi
  done < <(list_pythons)
  PYTHON="$newer"
  PYTHON_VERSION="$newer_version"
  [[ -n "$PYTHON" ]] || die "megatron-muon needs Python $PYTHON_NEEDED or newer with its venv module, and" \
    "there is none on PATH, under pyenv, uv or conda, or in /usr/local and /opt. Found:" \
    "${rejected:-no Python at all}. Install one (for example \`apt install python3.12-venv\`," \
    "\`pyenv install 3.12\` or \`uv python install 3.12\`), or set MEGATRON_MUON_PYTHON to where yours is."
}
