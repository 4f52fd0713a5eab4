#!/usr/bin/env bash
# Threads of the library and of its callers under ThreadSanitizer: tests/stress.rs in fewer rounds, since what is found does not depend on who
# comes first; and that a race is found where there is one.
#
#   tests/tsan.sh             builds and runs: less than a minute on two cores, with the standard library, which is built once
#   tests/tsan.sh --breaks    breaks what threads agree on in the library, one thing after the other: each must be found; some minutes
#
# The standard library is built with ThreadSanitizer too, from the pinned toolchain's rust-src, which rustup adds: without, its locks would not
# be seen, and what they protect would look like races. So there is nothing to suppress. RUSTC_BOOTSTRAP makes the pinned compiler take the
# switches for it. Nothing is optimised; other targets and their dependencies are not built.
#
# Where it cannot be done, a line "skipped: tsan: ..." says why, and the status is 0.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
out=$PWD/build/tsan
target=x86_64-unknown-linux-gnu
mkdir -p "$out"
log=$out/log
: >"$log"

skip() {
  echo "skipped: tsan: $1"
  exit 0
}

# What two threads agree on, broken: name, file, a change of perl's.
breaks() {
  cat <<'TABLE'
a handle is there before its object~src/ffi/handles.rs~s/fetch_add\(LIVE, Ordering::Release\)/fetch_add(LIVE, Ordering::Relaxed)/
a call enters a handle without looking~src/ffi/handles.rs~s/state\.fetch_add\(1, Ordering::AcqRel\)/state.fetch_add(1, Ordering::Relaxed)/
a call leaves a handle unseen~src/ffi/handles.rs~s/fetch_sub\(1, Ordering::AcqRel\)/fetch_sub(1, Ordering::Relaxed)/
a loop begins before its work is there~src/backend/cpu/threads.rs~s/number << 32 \| OPEN, Release/number << 32 | OPEN, Relaxed/
a loop ends before its work is seen~src/backend/cpu/threads.rs~s/gate\.fetch_sub\(1, AcqRel\)/gate.fetch_sub(1, Relaxed)/
TABLE
}

[ "$(uname -m)" = x86_64 ] || skip "for x86-64 machines"
[ -e "$(rustc --print target-libdir)/librustc-stable_rt.tsan.a" ] || skip "the compiler has no ThreadSanitizer"
if [ ! -e "$(rustc --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock" ]; then
  timeout --foreground 120 rustup component add rust-src >>"$log" 2>&1 || skip "the compiler has no rust-src, and rustup cannot add it"
fi

# ---- Builds the library, and what it needs, once for all; what comes of it is told by cargo ----

export RUSTC_BOOTSTRAP=1 REPLAYSSM_CUDA=off CARGO_INCREMENTAL=0
flags=(-Zsanitizer=thread -C opt-level=0 -C debug-assertions=on)
"$cargo" fetch --locked --quiet -Zbuild-std --target "$target" >>"$log" 2>&1 || skip "the standard library's crates cannot be fetched"
built=$(RUSTFLAGS="${flags[*]}" "$cargo" build --locked --quiet --lib --target "$target" --target-dir "$out/target" \
  -Zbuild-std=std,panic_unwind,test -Zbuild-std-features=panic-unwind --config 'profile.dev.package."*".debug=false' \
  --message-format=json-render-diagnostics | python3 -c '
import json, os, shlex, sys
used = {"crc32fast", "cudarc", "half", "libc", "miniz_oxide", "thiserror"}
std = {"core", "alloc", "std", "panic_unwind", "compiler_builtins", "proc_macro", "test"}
crates, variables = {}, []
for message in map(json.loads, sys.stdin):
    if message["reason"] == "build-script-executed" and message["package_id"].startswith("path+") and "replayssm@" in message["package_id"]:
        variables = message["env"] + [["OUT_DIR", message["out_dir"]]]
    elif message["reason"] == "compiler-artifact":
        for path in message["filenames"]:
            if path.endswith(".rlib") and "/%s/" % sys.argv[1] in path:
                name = message["target"]["name"]
                crates.setdefault(name, path)
                # libc and others are there twice: those of the standard library come first.
                if name in used and "/rustlib/" not in message["manifest_path"] and not "rustc-dep" in json.dumps(message["features"]):
                    crates[name] = path
missing = (used | std | {"replayssm"}) - crates.keys()
assert not missing, missing
quoted = lambda names: " ".join("--extern " + shlex.quote(("noprelude:" if name in std else "") + name + "=" + crates[name]) for name in names)
print("crates=(-L dependency=%s -Z unstable-options %s %s)" % (shlex.quote(os.path.dirname(crates["std"])), quoted(sorted(std)), quoted(sorted(used))))
print("library=" + shlex.quote(crates["replayssm"]))
for name, value in variables:
    print("export %s=%s" % (name, shlex.quote(value)))' "$target")
eval "$built"
edition=$(sed -n 's/^edition = "\(.*\)"$/\1/p' Cargo.toml)

# Macros are programs of this machine, in a folder of their own.
compile() {
  rustc --edition "$edition" --target "$target" --cap-lints allow -C debuginfo=line-tables-only "${flags[@]}" "${crates[@]}" \
    -L "dependency=$out/target/debug/deps" "$@"
}

# A program, in this script's process group; 66 is what a finding ends it with.
run() { TSAN_OPTIONS=exitcode=66 REPLAYSSM_TEST_ROUNDS=3 timeout --foreground --kill-after=10 300 "$@" </dev/null; }

# Two threads count without an atomic, and neither ends before the other has: of a thread that has ended, not all is remembered.
cat >"$out/race.rs" <<'RUST'
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
static mut COUNT: u64 = 0;
static DONE: AtomicU32 = AtomicU32::new(0);
fn main() {
    let add = || {
        unsafe { COUNT += 1 };
        DONE.fetch_add(1, Relaxed);
        while DONE.load(Relaxed) < 2 {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| _ = scope.spawn(add)));
}
RUST
compile --crate-type bin -o "$out/race" "$out/race.rs"
status=0
run "$out/race" >>"$log" 2>&1 || status=$?
if grep -q 'FATAL: ThreadSanitizer' "$log"; then skip "it does not run here: $(grep -m1 'FATAL: ThreadSanitizer' "$log")"; fi

if [ "${1:-}" != --breaks ]; then
  failed=0
  if [ "$status" = 66 ] && grep -q "data race .*race.rs" "$log"; then result=ok; else result=FAILED failed=1; fi
  echo "test tsan a_race_is_found ... $result"
  compile --test --extern "replayssm=$library" -o "$out/stress" tests/stress.rs
  # Valgrind knows nothing of programs like this one.
  run "$out/stress" -Z unstable-options --report-time --skip valgrind 2>&1 | sed -u 's/^test \(.* \.\.\. \)/test tsan \1/' || failed=1
  exit "$failed"
fi

# ---- Breaks ----

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)
IFS=. read -r major minor patch <<<"$version"
export CARGO_PKG_VERSION=$version CARGO_PKG_VERSION_MAJOR=$major CARGO_PKG_VERSION_MINOR=$minor CARGO_PKG_VERSION_PATCH=$patch
copy=$out/copy
found=0 total=0
while IFS='~' read -r name file change; do
  total=$((total + 1))
  rm -rf "$copy"
  mkdir "$copy"
  cp -rp src tests Cargo.toml "$copy"
  perl -0pi -e "$change" "$copy/$file"
  if cmp -s "$file" "$copy/$file"; then
    echo "does not apply: $name"
    continue
  fi
  compile --crate-name replayssm --crate-type rlib --out-dir "$copy" "$copy/src/lib.rs"
  compile --test --extern "replayssm=$copy/libreplayssm.rlib" -o "$copy/stress" "$copy/tests/stress.rs"
  status=0
  run "$copy/stress" --skip valgrind >"$copy/log" 2>&1 || status=$?
  if grep -q 'data race' "$copy/log"; then
    echo "found: $name"
    found=$((found + 1))
  else
    echo "NOT FOUND: $name (status $status)"
  fi
done < <(breaks)
echo "tsan: $found of $total are found"
[ "$found" = "$total" ] && [ "$total" != 0 ]
