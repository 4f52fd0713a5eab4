#!/usr/bin/env bash
# Fuzzes the C interface on the CPU backend, under AddressSanitizer: builds the targets of fuzz/, replays their kept inputs, and goes on from
# them. Needs no cargo-fuzz and no nightly compiler: the sanitizer and the coverage are those of the pinned one, libFuzzer comes with a crate
# and is compiled by the C++ compiler.
#
#   tests/fuzz.sh                        every target, 10 seconds each after its kept inputs
#   tests/fuzz.sh SECONDS [TARGET...]    these targets (blobs, calls, differential), so many seconds each; 0: the kept inputs alone
#   tests/fuzz.sh --minimise TARGET      makes the kept inputs those that are needed for the coverage of the kept and the found ones
#
#   REPLAYSSM_TEST_SEED=n   where chance begins, 1 by default; how far 10 seconds reach depends on the machine all the same
#
# Inputs that reach something new are added to build/fuzz/found/TARGET, those that fail to build/fuzz/failed; the kept ones are
# fuzz/corpus/TARGET. Where it cannot be done, a line "skipped: fuzz: ..." says why, and the status is 0.
#
# With cargo-fuzz and a nightly compiler: `cargo +nightly fuzz run TARGET`.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
out=$PWD/build/fuzz
host=x86_64-unknown-linux-gnu
all=(calls blobs differential)
# The fuzzed backend is the CPU's.
export REPLAYSSM_CUDA=off
# What a descriptor asks for may be more than there is. The rest is for speed: what was freed is watched for some hundred inputs, and of an
# allocation's stack the callers that matter are kept.
export ASAN_OPTIONS=allocator_may_return_null=1:quarantine_size_mb=32:malloc_context_size=6:detect_stack_use_after_return=0

usage() {
  sed -n 's/^#   \(tests.*\)/\1/p' "$0" >&2
  exit 2
}

skip() {
  echo "skipped: fuzz: $1"
  exit 0
}

minimise=
if [ "${1:-}" = --minimise ]; then
  minimise=${2:-}
  set -- 0 "$minimise"
fi
seconds=${1:-10}
[[ $seconds =~ ^[0-9]+$ ]] || usage
targets=("${@:2}")
[ ${#targets[@]} != 0 ] || targets=("${all[@]}")
for target in "${targets[@]}"; do
  case " ${all[*]} " in *" $target "*) ;; *) usage ;; esac
done

[ "$(uname -sm)" = "Linux x86_64" ] || skip "for Linux on x86-64"
command -v "${CXX:-g++}" >/dev/null || skip "there is no C++ compiler, which libFuzzer needs"
libraries=$(rustc --print sysroot)/lib/rustlib/$host/lib
compgen -G "$libraries/librustc-*_rt.asan.a" >/dev/null || skip "the Rust compiler comes without AddressSanitizer"
mkdir -p "$out/failed"
"$cargo" fetch --locked --quiet --manifest-path fuzz/Cargo.toml 2>"$out/log" ||
  skip "the crates that fuzzing needs cannot be fetched: $(tail -1 "$out/log")"

# As cargo-fuzz does, but for comparisons: inputs are not bytes that are compared with numbers.
start=$SECONDS
RUSTC_BOOTSTRAP=1 RUSTFLAGS="--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table" \
  "$cargo" build --release --locked --quiet --manifest-path fuzz/Cargo.toml --target $host --target-dir "$out/target"
echo "fuzz: built in $((SECONDS - start)) s"

# -len_control=0: short inputs are no better than long ones. A case that takes 20 seconds hangs.
fuzzer() {
  "$out/target/$host/release/$1" -artifact_prefix="$out/failed/$1-" -max_len=2048 -len_control=0 -timeout=20 -rss_limit_mb=2048 \
    -print_final_stats=1 -seed="${REPLAYSSM_TEST_SEED:-1}" "${@:2}" </dev/null
}

if [ -n "$minimise" ]; then
  kept=fuzz/corpus/$minimise
  rm -rf "$out/minimised"
  mkdir -p "$out/minimised" "$out/found/$minimise"
  # Edges count, not how often they are taken.
  fuzzer "$minimise" -set_cover_merge=1 -use_counters=0 "$out/minimised" "$kept" "$out/found/$minimise" >"$out/log" 2>&1 || { tail -20 "$out/log"; exit 1; }
  # What has a name was kept for a reason.
  find "$kept" -type f ! -name '*-*' -delete
  cp "$out"/minimised/* "$kept/"
  echo "$kept: $(find "$kept" -type f | wc -l) inputs, $(du -sb --apparent-size "$kept" | cut -f1) bytes"
  exit
fi

# Runs one target; prints what is to be seen, and for a failure what failed and how to see it again.
run() {
  local target=$1 log=$out/$1.log name=$2 begin end status=0 line
  begin=$(date +%s%N)
  fuzzer "$target" "${@:3}" >"$log" 2>&1 || status=$?
  end=$(date +%s%N)
  line="test fuzz $name ..."
  if [ $status = 0 ]; then
    printf '%s ok <%d.%03ds>\n' "$line" $(((end - begin) / 1000000000)) $(((end - begin) / 1000000 % 1000))
    printf 'fuzz: %s: %s executions, coverage %s\n' "$name" "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" \
      "$(sed -n 's/.* cov: \([0-9]*\) ft: \([0-9]*\) .*/\1 edges, \2 features/p' "$log" | tail -1)"
    return
  fi
  echo "$line FAILED"
  grep -vE '^#[0-9]+\s+(NEW|REDUCE|RELOAD|pulse|INITED)' "$log" | tail -60
  sed -n "s|^artifact_prefix=.*Test unit written to \(.*\)|error: fuzz: $target fails on \1; again: $out/target/$host/release/$target \1|p" "$log"
  return 1
}

# A short run begins with the kept inputs alone: those that were found may be thousands.
one() {
  local new=$out/new/$1 from=("fuzz/corpus/$1") status=0
  run "$1" "$1_kept_inputs" -runs=0 "${from[@]}" || return 1
  [ "$seconds" != 0 ] || return 0
  rm -rf "$new"
  mkdir -p "$new" "$out/found/$1"
  [ "$seconds" -lt 60 ] || from+=("$out/found/$1")
  run "$1" "$1" -max_total_time="$seconds" "$new" "${from[@]}" || status=1
  find "$new" -type f -exec mv -t "$out/found/$1" {} +
  return $status
}

# Two at a time; what they print comes in order.
failed=0 pids=()
ended() {
  wait "${pids[$1]}" || failed=1
  cat "$out/printed.$1"
}
for i in "${!targets[@]}"; do
  one "${targets[$i]}" >"$out/printed.$i" 2>&1 &
  pids+=($!)
  [ "$i" = 0 ] || ended $((i - 1))
done
ended $((${#pids[@]} - 1))
exit "$failed"
