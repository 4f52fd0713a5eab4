#!/usr/bin/env bash
# Packs the test programs for a machine that has a GPU, but no Rust: programs that need no other file, and what runs them.
#
#   tests/gpu/pack.sh FOLDER     writes FOLDER/gpu-tests.tar.xz
#
# There:
#
#   mkdir tests && tar -xJf gpu-tests.tar.xz -C tests && tests/run.sh tests
#
# The library inside has kernels if this machine can compile them: REPLAYSSM_CUDA=require makes that certain.
set -euo pipefail
[ $# = 1 ] || { echo "usage: tests/gpu/pack.sh FOLDER" >&2 && exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}
most=$((60 * 1000 * 1000))
names=(across cuda cases delta_cases conv1d decode single life schedule checks lent save exactness readout pairwise position_model faults soak stress)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$cargo" test --locked --no-run --message-format=json-render-diagnostics "${names[@]/#/--test=}" | python3 -c '
import json, os, sys
for message in map(json.loads, sys.stdin):
    for name in message.get("filenames", []):
        if os.path.basename(name) == "libreplayssm.so":
            print("library", name)
    if message.get("executable") and message["profile"]["test"]:
        print(message["target"]["name"], message["executable"])' >"$work/list"
mkdir "$work/tests"
while read -r name program; do
  if [ "$name" = library ]; then
    tests/engines/build.sh "$program" "$work/tests"
    continue
  fi
  "${STRIP:-strip}" --strip-all -o "$work/tests/$name" "$program"
done <"$work/list"
cp tests/gpu/run.sh "$work/tests/"
# Beside them the library, four programs about adapters and the script.
[ "$(find "$work/tests" -type f | wc -l)" = $((${#names[@]} + 6)) ] || { echo "a program was not built" >&2 && exit 1; }

# Tests in Python, in the folders in which they look for each other.
mkdir "$work/tests/python"
cp --parents examples-cpp/adapters/pytorch/*.py tests/engines/*.py tests/gpu/*.py tests/gpu/python.sh include/replayssm.h "$work/tests/python/"

# The programs hold the same kernels: a window over all of them stores those once.
tar -C "$work/tests" -cf - . | xz --lzma2=preset=6,dict=512MiB >"$out/gpu-tests.tar.xz"
size=$(stat -c %s "$out/gpu-tests.tar.xz")
echo "$out/gpu-tests.tar.xz: $size bytes"
[ "$size" -le "$most" ] || { echo "more than $most bytes" >&2 && exit 1; }
