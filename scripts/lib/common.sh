# shellcheck shell=bash
# What every script here shares: messages, children that end with the script, a scratch folder that
# does not outlive it, and the lock of the checkout. Sourced, never run. The caller sets ROOT, the
# root of the checkout, before.

PROGRAM="$(basename -- "$0")"
CACHE="$ROOT/.cache"
SCRATCH="$CACHE/scratch"
SETUP_LOCK=""
TEMPORARY=() # folders to remove at the end, however it comes

say() { printf '%s: %s\n' "$PROGRAM" "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# print_header: the comment that a script begins with.
print_header() { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' -- "$0"; }

# run_child COMMAND...: run it so that a signal to this script is answered at once (bash holds a trap
# back while a command runs in the foreground).
run_child() {
  "$@" </dev/null &
  wait "$!"
}

# end_tree SIGNAL PID: send the signal to all that the process started, then to the process.
end_tree() {
  local child
  for child in $(cat "/proc/$2/task/"*/children 2>/dev/null || true); do
    end_tree "$1" "$child"
  done
  kill -s "$1" "$2" 2>/dev/null || true
}

end_children() {
  local child tries
  for child in $(jobs -p); do
    end_tree TERM "$child"
    for ((tries = 0; tries < 50; tries++)); do
      kill -0 "$child" 2>/dev/null || continue 2
      sleep 0.1
    done
    end_tree KILL "$child"
  done
}

on_exit() {
  trap '' INT TERM HUP
  end_children
  if [[ -n "$SETUP_LOCK" ]]; then rm -rf -- "$SCRATCH"; fi
  rm -rf -- "${TEMPORARY[@]}"
}

# on_signal NAME: clean up, then end by that signal, so that the caller sees what happened.
on_signal() {
  trap - EXIT
  on_exit
  say "interrupted; run it again to go on from here"
  trap - "$1"
  kill -s "$1" "$$"
}

trap on_exit EXIT
trap 'on_signal INT' INT
trap 'on_signal TERM' TERM
trap 'on_signal HUP' HUP

# One set-up at a time in a checkout. Only its holder uses SCRATCH, which it finds empty whatever
# happened to the last holder. Children inherit the lock: a pip that outlives a killed script keeps it.
lock_checkout() {
  command -v flock >/dev/null || die "this needs the flock command (package util-linux)"
  mkdir -p -- "$CACHE"
  exec {SETUP_LOCK}>>"$CACHE/setup.lock"
  if ! flock --nonblock "$SETUP_LOCK"; then
    say "another set-up is at work in this checkout; waiting for it"
    run_child flock "$SETUP_LOCK"
  fi
  rm -rf -- "$SCRATCH"
  mkdir -- "$SCRATCH"
}

unlock_checkout() {
  rm -rf -- "$SCRATCH"
  exec {SETUP_LOCK}>&-
  SETUP_LOCK=""
}
