#!/usr/bin/env bash
# Runs every test, then prints what was skipped, the ten slowest tests and how many passed.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
log=build/test.log
# The test harness tells times only behind this switch; it changes nothing that is built.
export RUSTC_BOOTSTRAP=1
cargo test --locked --no-run --quiet || exit 1
cargo test --locked --no-fail-fast -- -Z unstable-options --report-time --show-output 2>&1 | tee "$log" |
  grep -E '^(test |     Running|   Doc-tests|error|---- .* stdout|thread .* panicked|assertion)|panicked at'
status=${PIPESTATUS[0]}
echo
echo "Skipped:"
grep -hE '^skipped: ' "$log" | sort -u || echo "nothing"
echo
echo "Ten slowest tests:"
sed -nE 's/^test (.*) \.\.\. ok <([0-9.]+)s>$/\2 s  \1/p' "$log" | sort -rn | head -10
echo
passed=$(grep -cE '^test .* \.\.\. ok' "$log")
failed=$(grep -cE '^test .* \.\.\. FAILED' "$log")
echo "$passed passed, $failed failed"
exit "$status"
