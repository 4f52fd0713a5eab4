#!/usr/bin/env bash
# Runs tests of the CUDA backend without a GPU: on a driver whose device executes the kernels' sources on the processor.
#
#   tests/emulated/run.sh               builds the driver and the programs with cargo, and runs what takes a few minutes; a part of it with RACES
#   tests/emulated/run.sh NAME [ARGS]   one program (exactness, readout and soak too), with arguments for its harness
#
#   RACES=1                     finds accesses to shared memory that nothing orders, too (races.h); some ten times as slow
#   KERNELS=REGEX               builds these kernels alone: others are not found
#   PROGRAMS                    test programs that are there, a line each, as is the list of kernels: nothing is built with cargo
#   REPLAYSSM_ACROSS=n          models of the comparison: all by default
#   REPLAYSSM_TEST_SEED=n   another order of blocks, warps and threads
#
# exactness, readout and pairwise take many minutes here, and stay out. Where it cannot be done, a line "skipped: emulated: ..." says why, and the status is 0.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}
out=$PWD/build/emulated${RACES:+-races}
mkdir -p "$out"

skip() {
  echo "skipped: emulated: $1"
  exit 0
}

[ "$(uname -m)" = x86_64 ] || skip "for x86-64 machines"
command -v "${CXX:-g++}" >/dev/null || skip "there is no C++ compiler"
command -v make >/dev/null || skip "there is no make"

names=${1:-across conv1d decode single life cases delta_cases checks lent position_model save faults engines bench}
# The program that measures has kernels of its own.
bench=()
case $names in *bench) bench=(--features bench) ;; esac
if [ -z "${PROGRAMS:-}" ]; then
  "$cargo" run --locked --quiet "${bench[@]}" --example kernel_list >"$out/all-kernels"
  [ ! -s "$out/all-kernels" ] || grep -E -- "${KERNELS:-.}" "$out/all-kernels" >"$out/kernels" || { echo "no kernel matches ${KERNELS:-}" >&2 && exit 2; }
  [ -s "$out/all-kernels" ] || : >"$out/kernels"
fi
[ -s "$out/kernels" ] || skip "the library was built without kernels, as where there is no NVRTC"
tests/emulated/build.sh "$out/kernels" "$out"

# Builds programs, and prints the name and the place of each.
programs_of() {
  "$cargo" test --locked --quiet --no-run --message-format=json-render-diagnostics "$@" | python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and message["profile"]["test"]:
        print(message["target"]["name"], message["executable"])'
}
if [ -n "${PROGRAMS:-}" ]; then
  programs=$(for name in $names; do sed -nE "s,^.*/$name-[0-9a-f]+\$,$name &,p" <<<"$PROGRAMS" | grep . || exit; done) || { echo "not all of '$names' are there" >&2 && exit 1; }
else
  others=$(printf '%s ' $names | sed 's/bench $//')
  # shellcheck disable=SC2046,SC2086 # a word for each program
  programs=$([ -z "$others" ] || programs_of $(printf -- '--test %s ' $others))
  [ ${#bench[@]} = 0 ] || programs+=$'\n'$(programs_of "${bench[@]}" --test bench)
fi

failed=0
# Lines look as cargo's do, with this stage in front of the name.
stage=${RACES:+races} library=$out
run() {
  LD_LIBRARY_PATH=$library "$@" </dev/null 2>&1 | sed -u "s/^test \\(.* \\.\\.\\. \\)/test ${stage:-emulated} \\1/"
}
# A device works on one launch at a time: two programs share the processor. What they print comes in order.
pids=()
ended() {
  wait "${pids[$1]}" || failed=1
  cat "$out/log.$1"
}

export RUSTC_BOOTSTRAP=1
[ $# != 0 ] && [ -z "$stage" ] || "$out/checks" || failed=1
while read -r name program; do
  # The comparison makes rigs of both backends by itself, and two rigs of the CPU elsewhere.
  backend=cuda chosen=("${@:2}")
  [ "$name" != across ] || backend=cpu
  if [ $# -le 1 ]; then
    case $name in
      soak) export REPLAYSSM_SOAK=${REPLAYSSM_SOAK:-3000} ;;
      across)
        echo "skipped: emulated cuda_equals_the_cpu_third_share because two of three shares take half a minute"
        chosen=(cuda_equals_the_cpu_first cuda_equals_the_cpu_second cuda_equals_the_cpu_in few_models)
        ;;
      engines) chosen=(adapter) ;;
      decode)
        chosen=(--skip every_family)
        echo "skipped: emulated every_family because few_ and other tests of decode have all families"
        ;;
      cases)
        # 99 rows, six times.
        chosen=(--skip case_29)
        echo "skipped: emulated case_29_the_same_batch_of_99_rows_gives_one_hash because it takes a minute"
        ;;
      bench)
        chosen=(--skip drift_follows)
        echo "skipped: emulated drift_follows_all_kinds_of_all_families because it is long"
        ;;
      delta_cases)
        chosen=(--skip case_23 --skip case_24)
        echo "skipped: emulated case_23 and case_24 of delta_cases because they are long"
        ;;
      position_model)
        chosen=(a_rewind staggered_flushes without_schedule)
        echo "skipped: emulated any_order_of_operations of two of three schedules because they take a minute"
        ;;
    esac
  fi
  n=${#pids[@]}
  REPLAYSSM_TEST_BACKEND=$backend run "$program" -Z unstable-options --report-time --show-output "${chosen[@]}" >"$out/log.$n" &
  pids+=($!)
  [ "$n" = 0 ] || ended $((n - 1))
done <<<"${programs#$'\n'}"
[ ${#pids[@]} = 0 ] || ended $((${#pids[@]} - 1))

# A few steps once more, with all accesses to shared memory looked at: with the kernels of SPLIT32 for up to 128 columns.
if [ $# = 0 ] && [ -z "${RACES:-}" ]; then
  stage=races library=$out-races
  mkdir -p "$library"
  grep -vE '^[a-z0-9_]+(_256 |_b?f(16|32)_)' "$out/kernels" >"$library/kernels"
  RACES=1 tests/emulated/build.sh "$library/kernels" "$library"
  "$library/checks" || failed=1
  decode=$(sed -n 's/^decode //p' <<<"$programs")
  REPLAYSSM_TEST_BACKEND=cuda run "$decode" -Z unstable-options --report-time --show-output few_of few_gdn_of few_kda_of few_late || failed=1
fi
exit "$failed"
