#!/usr/bin/env bash
# Builds the library for others' machines, without a trace of this one's folders.
#
#   packaging/build.sh DIR          DIR/release/libreplayssm.so, as the system's linker makes it
#   packaging/build.sh DIR 2.28     the same for systems with glibc 2.28 or newer, linked by Zig (pinned from PyPI into build/)
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1
export REPLAYSSM_GLIBC=${2:-} REPLAYSSM_ZIG_PYTHON=$PWD/build/zig/bin/python3
zig_version=$(sed -n 's/^ziglang==\([^ ]*\).*/\1/p' packaging/zig.txt)

# Sources of crates lie in folders of their registry; each becomes `crates` in panic messages.
cargo=${CARGO:-cargo}
"$cargo" fetch --locked --quiet
flags="\"--remap-path-prefix=$PWD=.\""
for folder in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/; do
  flags+=", \"--remap-path-prefix=${folder%/}=crates\""
done
arguments=(rustc --release --locked --lib --target-dir "$dir" --config "build.rustflags=[$flags]")

if [ -n "$REPLAYSSM_GLIBC" ]; then
  if [ ! -e build/zig/installed-$zig_version ]; then
    python3 -m venv build/zig
    build/zig/bin/pip install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes -r packaging/zig.txt
    touch build/zig/installed-$zig_version
  fi
  arguments+=(-- -C "linker=$PWD/packaging/zig-cc")
fi
env -u RUSTFLAGS -u CARGO_ENCODED_RUSTFLAGS "$cargo" "${arguments[@]}"
