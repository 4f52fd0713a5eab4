#!/usr/bin/env bash
# Runs every test, then prints what was skipped, the ten slowest tests and how many passed.
set -uo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
log=build/test.log
mkdir -p build
: >"$log"

count() { grep -cE "^test .* \.\.\. $1" "$log"; }

# What one prints comes when it has ended: its tests, and all that failing ones printed; the log has the rest.
parts=build/test-logs
rm -rf "$parts" && mkdir -p "$parts"
crashed=0 running=0 waiting=0

# Runs a command, whose output and status lie under its name. It leads a process group, so that it can be ended with all that it has started.
one() {
  local part=$parts/$1
  shift
  setsid "$@" </dev/null >"$part" 2>&1 &
  echo $! >"$part.group"
  wait $!
  echo $? >"$part.ending" && rm "$part.group" && mv "$part.ending" "$part.status"
}

# What still runs ends with this script: first the shells, which would go on to the next command.
end() {
  local shells group
  shells=$(jobs -rp)
  [ -z "$shells" ] || kill $shells
  for group in "$parts"/*.group; do
    [ ! -e "$group" ] || kill -- "-$(<"$group")" 2>/dev/null
  done
}
trap end EXIT

tell() {
  local part=$1 name=${1##*/} status
  status=$(cat "$part.status")
  rm "$part.status"
  echo "     Ran $name"
  cat "$part" >>"$log"
  awk '/^(test |error)/ || failures { print } /^failures:$/ { failures = 1 }' "$part"
  if [ "$status" != 0 ] && ! grep -qE '^test .* \.\.\. FAILED' "$part"; then
    echo "ended with status $status, after:"
    tail -20 "$part"
    crashed=$((crashed + 1))
  fi
  case " $stages " in *" $name "*) waiting=$((waiting - 1)) ;; *) running=$((running - 1)) ;; esac
}

some_have_ended() {
  local status found=
  while [ -z "$found" ]; do
    for status in "$parts"/*.status; do
      [ ! -e "$status" ] || { tell "${status%.status}" && found=1; }
    done
    [ -n "$found" ] || sleep 0.2
  done
}

# Two at a time, since many a program has work for one thread for long.
run() {
  while [ "$running" -ge 2 ]; do some_have_ended; done
  running=$((running + 1))
  one "$@" &
}

# Stages with builds of their own go on beside everything else, one after the other.
stages="aarch64 fuzz tsan"
for stage in $stages; do
  waiting=$((waiting + 1))
done
{ for stage in $stages; do one "$stage" "tests/$stage.sh"; done; } &

# Builds test programs, and prints them, one a line, as cargo lists what it has built.
built() {
  "$cargo" test --locked --no-run --message-format=json-render-diagnostics "$@" | python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and message["profile"]["test"]:
        print(message["executable"])'
}
# The program that measures is no part of the library: its tests are built with a feature, and so is the list of kernels, which has its own. All others
# come behind them, and nothing is built while tests run: it would replace the library that they load.
bench=$(built --features bench --test bench) || exit 1
mkdir -p build/emulated
"$cargo" run --locked --quiet --features bench --example kernel_list >build/emulated/kernels || exit 1
programs=$(built) || exit 1
[ -n "$programs" ] || { echo "no test was built"; exit 1; }
programs+=$'\n'$bench

# The longest first.
run "emulated" env PROGRAMS="$programs" tests/emulated/run.sh
while IFS= read -r program; do
  # The harness tells times only behind this switch. Everything is built by now, so it changes nothing that is tested.
  run "$(basename "$program")" env RUSTC_BOOTSTRAP=1 "$program" -Z unstable-options --report-time --show-output
done <<<"$programs"
run "doc tests" "$cargo" test --locked --doc
while [ $((running + waiting)) -gt 0 ]; do some_have_ended; done

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
