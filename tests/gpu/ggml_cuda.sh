#!/usr/bin/env bash
# The adapter of examples-cpp/adapters/ggml on ggml's CUDA backend, beside ggml's own CUDA operators: on a machine with a GPU, nvcc and a C++
# compiler. Fetches ggml as tests/ggml.sh does (where build/ggml/source is carried along, nothing is fetched), applies ggml_cuda.patch to a
# copy, and compiles what the comparison needs for this GPU alone: a minute on 16 cores. Operators that it does not need are stubs.
#
#   tests/gpu/ggml_cuda.sh LIBRARY          LIBRARY: a libreplayssm.so with kernels for this GPU, as `make lib` leaves it in target/release
#   tests/gpu/ggml_cuda.sh --build LIBRARY  compiles and links, and runs nothing
#
#   OUT=folder      where everything goes (build/ggml-cuda)
#   NVCC=path       nvcc, if it is neither in PATH nor in /usr/local/cuda/bin; NVCC_FLAGS: more flags for it
#   CUDA_ARCH=sm_90 the architecture, if nvidia-smi cannot say it
#   JOBS=n          compilers at a time (as many as there are cores)
#
# The status is 0 if everything agrees and every named break is noticed.
set -euo pipefail
run=true
[ "${1:-}" != --build ] || { run=false && shift; }
[ $# = 1 ] && [ ! -f "$1" ] && echo "$1 is no file; expected a libreplayssm.so" >&2 && exit 2
[ $# = 1 ] || { echo "usage: tests/gpu/ggml_cuda.sh [--build] LIBRARY" >&2 && exit 2; }
library=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/../.."
JOBS=${JOBS:-$(nproc)}
export JOBS
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "no nvcc: NVCC may name it" >&2 && exit 2; }
[ -n "${CUDA_ARCH:-}" ] || command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: CUDA_ARCH may name the architecture, as sm_90" >&2 && exit 2; }
arch=${CUDA_ARCH:-sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)}
out=${OUT:-build/ggml-cuda}
adapter=$PWD/examples-cpp/adapters/ggml

said=$(tests/ggml.sh) || { echo "$said" && exit 1; }
[ -z "$said" ] || { echo "$said" && exit 1; }
rm -rf "$out"/{objects,lib,source,stubs,stubs.c,missing,ggml_cuda_adapter}
mkdir -p "$out/objects" "$out/lib"
out=$(cd "$out" && pwd)
cp -r build/ggml/source "$out/source"
patch --quiet --strip=1 --directory="$out/source" <"$adapter/ggml_cuda.patch"

# The backend itself and the operators of the comparison, as llama.cpp compiles them.
flags=(-O2 -std=c++17 "-arch=$arch" -use_fast_math -extended-lambda -DGGML_CUDA_USE_GRAPHS -DGGML_CUDA_NO_VMM -DGGML_SCHED_MAX_COPIES=4
  -D_GNU_SOURCE -D_XOPEN_SOURCE=600 "-I$out/source/include" "-I$out/source/src" -Xcompiler -w -w)
read -ra more <<<"${NVCC_FLAGS:-}"
start=$SECONDS
printf '%s\n' ggml-cuda ssm-scan gated_delta_net getrows cpy |
  xargs -P "$JOBS" -I{} "$nvcc" "${flags[@]}" "${more[@]}" -c "$out/source/src/ggml-cuda/{}.cu" -o "$out/objects/{}.o"
"${CXX:-c++}" -std=c++17 -O1 -g -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -DGGML_ADAPTER_ON_CUDA -Iinclude "-I$adapter" \
  -isystem "$out/source/include" -c tests/engines/ggml_adapter.cpp -o "$out/objects/program.o"

# The library under both names that linking and loading need.
ln -s "$library" "$out/lib/libreplayssm.so"
soname=$(readelf -d "$library" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
ln -sf "$library" "$out/lib/$soname"
# Nothing here multiplies matrices: where there is no cuBLAS to link with, the backend does without.
echo 'int main() { return 0; }' >"$out/empty.cpp"
libraries=(-lcublas)
"$nvcc" "${more[@]}" "$out/empty.cpp" -lcublas -o "$out/empty" 2>"$out/missing" || libraries=()
link() {
  "$nvcc" "-arch=$arch" "${more[@]}" "$@" "$out"/objects/*.o build/ggml/libggml.a "-L$out/lib" -lreplayssm "-Xlinker=-rpath=$out/lib" \
    "${libraries[@]}" -ldl -lpthread -o "$out/ggml_cuda_adapter"
}
# What the linker misses are the operators that were left out; none of them is called.
link -Xlinker=--no-demangle >"$out/missing" 2>&1 || true
sed -n "s/.*undefined reference to .\([A-Za-z0-9_.]*\)'.*/\1/p" "$out/missing" | sort -u >"$out/stubs"
if grep -q '^replayssm' "$out/stubs"; then grep '^replayssm' "$out/stubs" && exit 1; fi
{
  echo '#include <stdio.h>'
  echo '#include <stdlib.h>'
  awk '{ printf "void stub_%d(void) __asm__(\"%s\");\nvoid stub_%d(void) { fputs(\"%s was called\\n\", stderr); abort(); }\n", NR, $1, NR, $1 }' "$out/stubs"
} >"$out/stubs.c"
"${CC:-cc}" -c "$out/stubs.c" -o "$out/objects/stubs.o"
link || { tail -20 "$out/missing" && exit 1; }
echo "ggml_cuda: compiled for $arch in $((SECONDS - start)) s, $(wc -l <"$out/stubs") operators left out"
$run || exit 0

failed=0
"$out/ggml_cuda_adapter" || failed=1
for what in ssm_scan gated_delta_net drafts_of_ssm_scan drafts_of_gated_delta_net; do
  if said=$("$out/ggml_cuda_adapter" break "$what" 2>&1); then
    echo "ggml_cuda: a break was not noticed: $what"
    failed=1
  elif [ "$(tail -1 <<<"$said")" != "an output differs from ggml's" ]; then
    echo "ggml_cuda: the break of $what ended in another way: $said"
    failed=1
  else
    echo "ggml_cuda: noticed: a break of $what"
  fi
done
"$out/ggml_cuda_adapter" time || failed=1
exit $failed
