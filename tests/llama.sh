#!/usr/bin/env bash
# Builds a part of llama.cpp, from the sources that tests/ggml.sh fetches, for tests/ggml/llama.rs: build/ggml/libllama.a as it is, and
# libllama-patched.a, the files that examples-cpp/adapters/ggml/llama_cpp.patch changes, to be linked in front of it. Two architectures of
# models, no tokenizer, no sampler: what is left out are stubs. A minute and a half on two cores, once.
#
# Where that cannot be had, a line "skipped: ggml because ..." says why, and the status is 0.
set -euo pipefail
cd "$(dirname "$0")/.."
here=build/ggml
adapter=examples-cpp/adapters/ggml
CXX=${CXX:-c++}
said=$(tests/ggml.sh) || { echo "$said" && exit 1; }
command -v patch >/dev/null || said="skipped: llama.cpp because there is no patch"
if [ -n "$said" ]; then
  echo "$said"
  # Skipped, with its reason.
  exit 0
fi

exec 9>"$here/lock"
if command -v flock >/dev/null; then flock 9; fi
made_of=$(cat packaging/ggml.txt tests/llama.sh "$adapter/llama_cpp.patch" "$adapter/llama_hook.h" && echo "$CXX")
[ -f "$here/libllama.a" ] && [ "$made_of" = "$(cat "$here/llama-made-of" 2>/dev/null)" ] && exit 0
rm -rf "$here"/libllama*.a "$here/llama-made-of" "$here/llama"
mkdir -p "$here"/llama/{stock,patched}

# The longest first.
sources="llama-model llama-context llama-graph llama-model-loader llama-vocab llama-kv-cache models/qwen35 models/nemotron-h llama-batch
  llama-adapter llama-memory-recurrent llama-arch models/mamba-base models/delta-net-base llama llama-memory-hybrid llama-memory llama-mmap
  llama-hparams llama-impl llama-io llama-cparams"
changed=$(sed -n 's/^+++ b\/src\/\(.*\)\.cpp$/\1/p' "$adapter/llama_cpp.patch")
cp -r "$here/source/llama/src" "$here/llama/src"
patch --quiet --strip=1 --directory="$here/llama" <"$adapter/llama_cpp.patch"
printf '#pragma once\n#define LLAMA_VERSION "0"\n#define LLAMA_COMMIT "none"\n' >"$here/llama/llama-version.h"
flags="-std=gnu++17 -O0 -pthread -w -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -DGGML_SCHED_MAX_COPIES=4 -DGGML_USE_CPU -I$adapter -I$here/llama -I$here/source/include
  -I$here/source/src -I$here/source/llama/include"
# stock/FILE, patched/FILE, or ggml/FILE: the list of backends, which ggml.sh leaves out
compile() {
  local from=$3/source/llama/src to=$3/llama/stock
  case $1 in
    patched/*) from=$3/llama/src to=$3/llama/patched ;;
    ggml/*) from=$3/source/src ;;
  esac
  # shellcheck disable=SC2086
  $CXX $2 -I"$from" -c "$from/${1#*/}.cpp" -o "$to/$(basename "$1").o"
}
export -f compile
export CXX
# shellcheck disable=SC2086
if ! { printf 'stock/%s\n' $sources && printf 'patched/%s\n' $changed && printf 'ggml/%s\n' ggml-backend-reg ggml-backend-dl; } |
  xargs -P "${JOBS:-2}" -I{} bash -c 'compile "$@"' compile {} "$flags" "$here" >"$here/llama/log" 2>&1; then
  echo "llama.cpp does not compile:"
  tail -20 "$here/llama/log"
  exit 1
fi
# What the linker misses is what was left out; none of it is called.
echo 'int main() { return 0; }' >"$here/llama/empty.cpp"
"$CXX" -w "$here/llama/empty.cpp" "$here"/llama/stock/*.o "$here/libggml.a" -pthread -Wl,--no-demangle -o "$here/llama/empty" >"$here/llama/log" 2>&1 || true
sed -n "s/.*undefined reference to .\([A-Za-z0-9_.]*\)'.*/\1/p" "$here/llama/log" | sort -u |
  awk 'BEGIN { print "#include <stdio.h>\n#include <stdlib.h>" }
    { printf "void stub_%d(void) __asm__(\"%s\");\nvoid stub_%d(void) { fputs(\"%s was called\\n\", stderr); abort(); }\n", NR, $1, NR, $1 }' >"$here/llama/stubs.c"
"${CC:-cc}" -c "$here/llama/stubs.c" -o "$here/llama/stock/stubs.o"
ar rcs "$here/libllama-patched.a" "$here"/llama/patched/*.o
ar rcs "$here/llama/libllama.a" "$here"/llama/stock/*.o
mv "$here/llama/libllama.a" "$here/libllama.a"
rm -rf "$here/llama"
echo "$made_of" >"$here/llama-made-of"
