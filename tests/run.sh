#!/usr/bin/env bash
# Runs every test, then prints what was skipped, the ten slowest tests and how many passed.
set -uo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
log=build/test.log
mkdir -p build
: >"$log"

count() { grep -cE "^test .* \.\.\. $1" "$log"; }

# Builds test programs, and prints them, one a line, as cargo lists what it has built.
built() {
  "$cargo" test --locked --no-run --message-format=json-render-diagnostics "$@" | python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and message["profile"]["test"]:
        print(message["executable"])'
}
programs=$(built) || exit 1
[ -n "$programs" ] || { echo "no test was built"; exit 1; }
# The program that measures is no part of the library: it and its tests are built with a feature, beside all others.
bench=$(built --features bench --test bench) || exit 1
programs+=$'\n'$bench

# Two at a time, since many a program has work for one thread for long. What one prints comes when it has ended: its tests, and all that
# failing ones printed; the log has the rest.
crashed=0 running=0
names=()
parts=build/test-logs
rm -rf "$parts" && mkdir -p "$parts"

tell() {
  local part=$1 status
  status=$(cat "$part.status")
  rm "$part.status"
  echo "     Ran ${names[${part##*/}]}"
  cat "$part" >>"$log"
  awk '/^(test |error)/ || failures { print } /^failures:$/ { failures = 1 }' "$part"
  if [ "$status" != 0 ] && ! grep -qE '^test .* \.\.\. FAILED' "$part"; then
    echo "ended with status $status, after:"
    tail -20 "$part"
    crashed=$((crashed + 1))
  fi
}

one_has_ended() {
  local status
  wait -n
  running=$((running - 1))
  for status in "$parts"/*.status; do
    [ ! -e "$status" ] || tell "${status%.status}"
  done
}

# Starts a command under a name.
run() {
  local part=$parts/${#names[@]}
  [ "$running" -lt 2 ] || one_has_ended
  names+=("$1")
  shift
  { "$@" </dev/null >"$part" 2>&1; echo $? >"$part.status"; } &
  running=$((running + 1))
}

# The longest first.
run "emulated" tests/emulated/run.sh
while IFS= read -r program; do
  # The harness tells times only behind this switch. Everything is built by now, so it changes nothing that is tested.
  run "$(basename "$program")" env RUSTC_BOOTSTRAP=1 "$program" -Z unstable-options --report-time --show-output
done <<<"$programs"
run "aarch64" tests/aarch64.sh
run "tsan" tests/tsan.sh
run "fuzz" tests/fuzz.sh
run "doc tests" "$cargo" test --locked --doc
while [ "$running" -gt 0 ]; do one_has_ended; done

echo
echo "Skipped:"
grep -hE '^skipped: ' "$log" | sort -u || echo "nothing"
echo
echo "Ten slowest tests:"
sed -nE 's/^test (.*) \.\.\. ok <([0-9.]+)s>$/\2 s  \1/p' "$log" | sort -rn | head -10
echo
passed=$(count ok)
failed=$(($(count FAILED) + crashed))
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
