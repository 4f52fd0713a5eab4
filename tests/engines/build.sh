#!/usr/bin/env bash
# Builds the programs that compare the adapters of examples-cpp with fp64, for machines where no Rust test does it.
#
#   tests/engines/build.sh LIBRARY FOLDER     copies the library to FOLDER, and builds the programs beside it
set -euo pipefail
[ $# = 2 ] || { echo "usage: tests/engines/build.sh LIBRARY FOLDER" >&2 && exit 2; }
mkdir -p "$2"
out=$(cd "$2" && pwd)
name=$(objdump -p "$1" | sed -n 's/^ *SONAME *//p')
"${STRIP:-strip}" --strip-unneeded -o "$out/$name" "$1"
ln -sf "$name" "$out/libreplayssm.so"
cd "$(dirname "$0")/../.."
while read -r program source; do
  "${CXX:-c++}" -std=c++17 -O1 -Wall -Wextra -Wpedantic -Werror -Iinclude "tests/engines/$program.cpp" "examples-cpp/adapters/$source.cpp" \
    -L"$out" -lreplayssm -ldl -Wl,-rpath,'$ORIGIN' -o "$out/$program"
done <<'PROGRAMS'
vllm_adapter vllm/selective_state_update
flashinfer_adapter flashinfer/checkpointing_ssu
trtllm_adapter trtllm/selective_scan_update
genai_adapter onnxruntime_genai/varlen_gated_delta_net
PROGRAMS
