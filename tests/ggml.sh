#!/usr/bin/env bash
# Fetches ggml and builds its CPU backend into build/ggml/libggml.a, for tests/ggml.rs; llama.sh builds what is beside it. The source is the archive of llama-cpp-python,
# pinned by version and hash (packaging/ggml.txt); nothing of it is committed. About a minute on two cores, once. JOBS: compilers at a time.
#
# Where that cannot be had, a line "skipped: ggml because ..." says why, and the status is 0.
set -euo pipefail
cd "$(dirname "$0")/.."
here=build/ggml
CC=${CC:-cc}
CXX=${CXX:-c++}
mkdir -p "$here"
log=$here/log

skip() {
  echo "skipped: ggml because $1"
  exit 0
}

# One at a time, should two tests call this.
exec 9>"$here/lock"
if command -v flock >/dev/null; then flock 9; fi

[ "$(uname -m)" = x86_64 ] || skip "its sources are listed here for x86-64 alone"

# The instructions that engines build it with, where this processor has them.
flags="-O1 -pthread -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -DGGML_SCHED_MAX_COPIES=4 -w"
for flag in avx2 fma f16c bmi2; do
  if grep -qw "$flag" /proc/cpuinfo; then flags+=" -m$flag"; fi
done
# What the library in build/ was made of; anything else builds it again.
made_of=$(cat packaging/ggml.txt tests/ggml.sh && echo "$CC $CXX $flags")
[ -f "$here/libggml.a" ] && [ "$made_of" = "$(cat "$here/made-of" 2>/dev/null)" ] && exit 0
rm -f "$here/libggml.a" "$here/made-of"

if ! cmp -s packaging/ggml.txt "$here/source/pinned.txt" || [ ! -d "$here/source/llama" ]; then
  python3 -c 'import ensurepip' 2>/dev/null || skip "Python cannot install packages here"
  python3 -m venv "$here/venv"
  pip=("$here/venv/bin/pip" --quiet --disable-pip-version-check --retries 2)
  rm -rf "$here/archive"
  backend=(-r packaging/ggml-backend.txt)
  # Telling name and version of an archive needs CMake too, though nothing is built.
  command -v cmake >/dev/null || backend+=(-r packaging/cmake.txt)
  "${pip[@]}" install --no-deps --only-binary=:all: --require-hashes "${backend[@]}" >"$log" 2>&1 &&
    PATH="$PWD/$here/venv/bin:$PATH" "${pip[@]}" download --no-deps --no-binary=llama-cpp-python --no-build-isolation --require-hashes -d "$here/archive" \
      -r packaging/ggml.txt >>"$log" 2>&1 || {
    # Something else under that name is no reason to skip.
    if grep -q 'DO NOT MATCH THE HASHES' "$log"; then cat "$log" && exit 1; fi
    skip "it cannot be fetched: $(grep -v '^ *$' "$log" | tail -1)"
  }
  # The folder has its name when all of it is there.
  rm -rf "$here/unpacked" "$here/source"
  mkdir "$here/unpacked"
  tar -xzf "$here"/archive/*.tar.gz -C "$here/unpacked" --strip-components=4 --wildcards --no-wildcards-match-slash \
    '*/vendor/llama.cpp/ggml/CMakeLists.txt' '*/vendor/llama.cpp/ggml/include' '*/vendor/llama.cpp/ggml/src/*.*' \
    '*/vendor/llama.cpp/ggml/src/ggml-cpu' '*/vendor/llama.cpp/ggml/src/ggml-cuda'
  mkdir "$here/unpacked/llama"
  tar -xzf "$here"/archive/*.tar.gz -C "$here/unpacked/llama" --strip-components=3 --wildcards --no-wildcards-match-slash \
    '*/vendor/llama.cpp/include' '*/vendor/llama.cpp/src'
  cp packaging/ggml.txt "$here/unpacked/pinned.txt"
  mv "$here/unpacked" "$here/source"
  rm -rf "$here/archive" "$here/venv"
fi

src=$here/source/src
version=$(sed -n 's/^set(GGML_VERSION_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\))$/\2/p' "$here/source/CMakeLists.txt" | paste -sd.)
rm -rf "$here/objects"
mkdir -p "$here/objects"
printf '#pragma once\n#define GGML_VERSION "%s"\n#define GGML_COMMIT "none"\n' "$version" >"$here/objects/ggml-version.h"
flags+=" -I$here/objects -I$here/source/include -I$src -I$src/ggml-cpu"

# The longest first, two at a time.
sources="ggml-cpu/ops.cpp ggml-quants.c ggml-cpu/ggml-cpu.c ggml-cpu/arch/x86/quants.c ggml-cpu/arch/x86/repack.cpp ggml-cpu/binary-ops.cpp
  ggml-cpu/unary-ops.cpp ggml-cpu/repack.cpp ggml-cpu/vec.cpp ggml-backend-meta.cpp gguf.cpp ggml-backend.cpp ggml-cpu/tiled/tiled.cpp
  ggml-cpu/tiled/tiled-kernel.cpp ggml.c ggml-cpu/ggml-cpu.cpp ggml-cpu/quants.c ggml-cpu/traits.cpp ggml-cpu/hbm.cpp ggml-cpu/amx/amx.cpp
  ggml-cpu/amx/mmq.cpp ggml-alloc.c ggml-threading.cpp ggml.cpp ggml-opt.cpp"
compile() {
  case $1 in
    *.c) compiler="$CC -std=gnu11" ;;
    *) compiler="$CXX -std=gnu++17" ;;
  esac
  # shellcheck disable=SC2086
  $compiler $2 -c "$3/$1" -o "$4/objects/${1//\//_}.o"
}
export -f compile
export CC CXX
# shellcheck disable=SC2086
if ! printf '%s\n' $sources | xargs -P "${JOBS:-2}" -I{} bash -c 'compile "$@"' compile {} "$flags" "$src" "$here" >"$log" 2>&1; then
  echo "ggml $version does not compile:"
  tail -20 "$log"
  exit 1
fi
ar rcs "$here/libggml.part" "$here"/objects/*.o
rm -rf "$here/objects"
mv "$here/libggml.part" "$here/libggml.a"
echo "$made_of" >"$here/made-of"
