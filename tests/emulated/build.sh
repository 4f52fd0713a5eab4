#!/usr/bin/env bash
# Builds a libcuda.so.1 whose device is emulated: it runs the kernels of cuda/ on the processor; and a program that checks the emulation.
# What has not changed is not compiled again.
#
#   tests/emulated/build.sh KERNELS OUT [CUDA]
#   RACES=1 tests/emulated/build.sh ...     accesses to shared memory that nothing orders are found, too (races.h)
#
# KERNELS is a list that the example kernel_list has printed, OUT the folder of the library, CUDA that of the kernels' sources (cuda).
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: tests/emulated/build.sh KERNELS OUT [CUDA]" >&2 && exit 2; }
mkdir -p "$2"
kernels=$(realpath "$1") out=$(realpath "$2") cuda=$(realpath "${3:-$(dirname "$0")/../../cuda}")
cd "$(dirname "$0")"
here=$PWD cxx=${CXX:-g++}

# No contraction: fma is what says fma. -mfma makes those one instruction where the processor has it.
common="-std=c++17 -O2 -fPIC -ffp-contract=off -fno-strict-aliasing -fno-exceptions -fvisibility=hidden -Wall -Wextra -I$here"
! grep -qw fma /proc/cpuinfo || common+=" -mfma -mavx2"
# Of the kernels: parameters that only some instances use, and the unrolling that only nvcc knows.
quiet="-Wno-unused-parameter -Wno-unused-function -Wno-unknown-pragmas -Wno-unused-variable"
# Of sanitizers only the calls at every access. Where they are in a line is asked of debug information.
watched=
if [ -n "${RACES:-}" ]; then
  common+=" -DREPLAYSSM_RACES -g1"
  watched="-fsanitize=kernel-address --param asan-instrumentation-with-call-threshold=0 --param asan-stack=0 --param asan-globals=0"
fi

{
  echo "all: libcuda.so.1 checks"
  objects="driver.o machine.o races.o"
  while read -r name source arch _ _ defines; do
    objects+=" $name.o"
    echo "$name.o: Makefile"
    # shellcheck disable=SC2086 # a word for each macro
    echo "	$cxx $common $quiet $watched -MMD -MP -D__CUDA_ARCH__=${arch}0 -DKERNEL=$name -DSHARED=shared_$name -DSOURCE='<$source>' -I$cuda" \
      "${defines:+$(printf -- '-D%s ' $defines)}-c $here/kernel.cpp -o \$@"
  done <"$kernels"
  echo "libcuda.so.1: $objects"
  echo "	$cxx -shared -Wl,-soname,libcuda.so.1 -Wl,-z,defs -o \$@ \$^ -ldl"
  echo "checks: checks.o machine.o races.o"
  echo "	$cxx -o \$@ \$^ -ldl"
  for object in driver machine races checks; do
    echo "$object.o: Makefile"
    echo "	$cxx $common $([ "$object" != checks ] || echo "$watched") -MMD -MP -I. -c $here/$object.cpp -o \$@"
  done
  echo "-include *.d"
} >"$out/Makefile.new"
awk '{ printf "KERNEL(\"%s\", %s, %s, 0x%s)\n", $1, $3, $4, $5 }' "$kernels" >"$out/kernels.inc.new"
# Times of files say what is to be compiled.
for file in Makefile kernels.inc; do
  if cmp -s "$out/$file.new" "$out/$file"; then rm "$out/$file.new"; else mv "$out/$file.new" "$out/$file"; fi
done
env -u MAKEFLAGS make --no-print-directory --silent -C "$out" -j"$(nproc)"
