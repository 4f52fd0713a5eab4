#!/usr/bin/env bash
# Builds the library for aarch64 and runs byte tests under qemu-user: the golden hashes are those of x86-64, NEON gives what the
# portable code gives. For x86-64 machines with Debian's package client; no root needed, nothing is installed.
#
#   tests/aarch64.sh            builds and tests (a few minutes; the first time fetches 250 MB into build/aarch64)
#   tests/aarch64.sh --build    only builds libreplayssm.so, and prints where it is
#
# The Rust compiler is rustup's where rustup has the target (rustup target add aarch64-unknown-linux-gnu), else Debian's with
# Debian's standard library for arm64, of one version. The linker and qemu are the machine's where both work, else Debian's.
# Where that cannot be had, a line "skipped: aarch64: ..." says why, and the status is 0.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
here=$PWD/build/aarch64
root=$here/root
target=aarch64-unknown-linux-gnu
# Lints are checked with this compiler alone, since each one has others.
known=1.96.0
# The kernels have nothing to do with the processor.
export REPLAYSSM_CUDA=off
log=$here/log
mkdir -p "$here/apt/lists/partial" "$here/apt/archives/partial" "$root"
: >"$log"

skip() {
  echo "skipped: aarch64: $1"
  exit 0
}

[ "$(uname -m)" = x86_64 ] || skip "for x86-64 machines; an aarch64 one runs every test as it is"

# What the unpacked compilers, assembler and linker need of their own.
export LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# Debian's packages for amd64 and arm64 in folders of our own: the system's lists and packages stay as they are.
apt=(-o "Dir::State::lists=$here/apt/lists" -o "Dir::Cache=$here/apt" -o APT::Architectures::=amd64 -o APT::Architectures::=arm64
  -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)

fetch_lists() {
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || skip "apt-get and dpkg-deb are not installed"
  [ -e "$here/apt/updated" ] && return
  apt-get "${apt[@]}" update >>"$log" 2>&1 || skip "apt-get update fails: $(grep -m1 '^E:' "$log" || tail -1 "$log")"
  touch "$here/apt/updated"
}

# Fetches packages, and those of their dependencies that are not installed, and unpacks them.
unpack() {
  rm -f "$here"/apt/archives/*.deb
  apt-get "${apt[@]}" install --yes --download-only --reinstall --no-install-recommends "$@" >>"$log" 2>&1 ||
    skip "apt-get cannot fetch $*: $(grep '^E:' "$log" | tail -1)"
  for package in "$here"/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  rm -f "$here"/apt/archives/*.deb
}

# ---- A C compiler that links for aarch64, and qemu ----

# Whether a program that they build runs.
runs() {
  printf '#include <math.h>\nint main(int n, char **v) { (void)v; return sin(n) < 0; }\n' >"$here/try.c"
  "$gcc" "${sysroot[@]}" "$here/try.c" -o "$here/try" -lm >>"$log" 2>&1 && "${qemu[@]}" "$here/try" >>"$log" 2>&1
}

choose() {
  gcc=$(command -v aarch64-linux-gnu-gcc || true) sysroot=()
  qemu=("$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)" -L /usr/aarch64-linux-gnu)
  [ -n "$gcc" ] && [ -n "${qemu[0]}" ] && runs && return
  gcc=$root/usr/bin/aarch64-linux-gnu-gcc sysroot=("--sysroot=$root")
  qemu=("$root/usr/bin/qemu-aarch64-static")
  [ -x "${qemu[0]}" ] || qemu=("$root/usr/bin/qemu-aarch64")
  qemu+=(-L "$root/usr/aarch64-linux-gnu")
  runs
}

if ! choose; then
  fetch_lists
  unpack gcc-aarch64-linux-gnu binutils-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static
  choose || skip "the cross compiler and qemu from the packages do not work: $(tail -1 "$log")"
fi

# ---- A Rust compiler with a standard library for aarch64 ----

needed=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -1)" = "$1" ]; }

fetch_rust() {
  local name version minor
  fetch_lists
  for name in rustc-web rustc; do
    version=$(apt-cache "${apt[@]}" policy "$name" | sed -n 's/^  Candidate: \([0-9].*\)$/\1/p')
    [ -n "$version" ] && at_least "$needed" "$version" && break
    version=
  done
  [ -n "$version" ] || skip "no package has a Rust compiler of version $needed or later, and rustup not the target"
  minor=$(cut -d. -f1,2 <<<"$version")
  local std=libstd-${name/rustc/rust}
  unpack "$name=$version" "$std-dev=$version" "$std-$minor=$version"
  # For the lints. It has a package of its own, which may be missing.
  [ "$name" = rustc ] || (unpack "rust-web-clippy=$version")
  # The standard library for arm64, without the compiler for arm64 that it depends on.
  (cd "$here/apt/archives" && apt-get "${apt[@]}" download "$std-dev:arm64=$version") >>"$log" 2>&1 ||
    skip "apt-get cannot fetch $std-dev:arm64=$version: $(grep '^E:' "$log" | tail -1)"
  dpkg-deb -x "$here"/apt/archives/"$std"-dev_*_arm64.deb "$root"
  rm -f "$here"/apt/archives/*.deb
}

if ! (rustup target list --installed 2>/dev/null || true) | grep -qx "$target"; then
  export RUSTC=$root/usr/bin/rustc
  [ -d "$root/usr/lib/rustlib/$target" ] && "$RUSTC" --version >>"$log" 2>&1 || fetch_rust
  "$RUSTC" --version >>"$log" 2>&1 || skip "the Rust compiler from the packages does not run: $(tail -1 "$log")"
fi
version=$("${RUSTC:-rustc}" --version | cut -d' ' -f2)
echo "aarch64: Rust $version, $("$gcc" --version | head -1), $("${qemu[0]}" --version | head -1)"

# ---- Builds and tests ----

export CARGO_TARGET_DIR=$here/target
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS=${sysroot:+-Clink-arg=$sysroot}

"$cargo" build --release --locked --quiet --lib --target "$target"
library=$CARGO_TARGET_DIR/$target/release/libreplayssm.so
echo "aarch64: $library"
[ "${1:-}" = --build ] && exit

failed=0
# Runs what was built. Its lines look as cargo's do, with the target in front of the name.
run() {
  "${qemu[@]}" "$@" </dev/null 2>&1 | sed -u 's/^test \(.* \.\.\. \)/test aarch64 \1/' || failed=1
}

# A C program against the library: subnormals in a thread that flushes them, and the control word afterwards.
"$gcc" "${sysroot[@]}" -std=c11 -Wall -Wextra -Werror -O1 -Iinclude tests/c/ftz.c "$library" -Wl,-rpath,"$here" -o "$here/ftz"
ln -sf "$library" "$here/$("${gcc%gcc}readelf" -d "$library" | sed -n 's/.*soname: \[\(.*\)\]/\1/p')"
if "${qemu[@]}" "$here/ftz"; then result=ok; else result=FAILED failed=1; fi
echo "test aarch64 flush_to_zero ... $result"

# Other crates are needed to build, not to be fast.
quick=(--config 'profile.dev.package."*".opt-level=0' --config 'profile.dev.package."*".debug=false')
tests=(--lib --test exactness)
programs=$("$cargo" test --locked --quiet --no-run --target "$target" "${quick[@]}" "${tests[@]}" --message-format=json-render-diagnostics |
  python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and message["profile"]["test"]:
        print(message["target"]["name"], message["executable"])')
# Chosen to take a minute or two: the emulated processor is some twenty times slower. Of the library's own tests those of 2^32
# patterns and of 15 million arguments stay out, which are about integers, or the same arithmetic again.
while read -r name program; do
  case $name in
    replayssm) chosen=(--skip split_is_lossless --skip sigmoid_is --skip softplus_is --skip expm1_is --skip log1p_is) ;;
    exactness) chosen=(golden_bytes instruction_sets extend_is_the_recurrence sixteen_bit) ;;
  esac
  RUSTC_BOOTSTRAP=1 run "$program" -Z unstable-options --report-time "${chosen[@]}"
done <<<"$programs"

clippy=$root/usr/bin/cargo-clippy
if [ "$version" = "$known" ] && [ -n "${RUSTC:-}" ] && [ -x "$clippy" ]; then
  PATH=$root/usr/bin:$PATH "$clippy" clippy --locked --quiet --target "$target" --lib -- -D warnings || failed=1
else
  echo "skipped: clippy for aarch64: known to be clean with Rust $known of Debian, this is $version"
fi
exit "$failed"
