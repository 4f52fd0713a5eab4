#!/usr/bin/env bash
# Builds the library twice as packaging/build.sh does, from copies of the sources in two folders, and compares the bytes, debug information
# included. The environment may hold cargo's and the build's variables: tests/supply.rs sets CARGO_PROFILE_RELEASE_OPT_LEVEL=0 and
# REPLAYSSM_CUDA=off, which takes seconds.
#
#   packaging/reproduce.sh          prints one hash; the status is 1 if there are two, whose libraries then lie in build/reproduce
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/reproduce
rm -rf "$work"
# Of different lengths, and one with a space.
folders=("$work/one" "$work/in another place/of a longer name")
hashes=()
for folder in "${folders[@]}"; do
  mkdir -p "$folder"
  cp -rp Cargo.toml Cargo.lock rust-toolchain.toml build.rs build-support cuda include packaging src tests "$folder"
  "$folder/packaging/build.sh" "$folder/target"
  hashes+=("$(sha256sum <"$folder/target/release/libreplayssm.so" | cut -d' ' -f1)")
done
if [ "${hashes[0]}" != "${hashes[1]}" ]; then
  echo "two builds of the same sources differ: ${hashes[*]}"
  exit 1
fi
rm -rf "$work"
echo "${hashes[0]}"
