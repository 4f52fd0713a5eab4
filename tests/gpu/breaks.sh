#!/usr/bin/env bash
# Shows that the tests on a GPU can fail: each named one-line break of the device code turns its test red.
#
#   tests/gpu/breaks.sh               applies each break to a copy of the tree, compiles its kernels and runs its test; needs a GPU
#   tests/gpu/breaks.sh --check       only checks that every break still applies
#   tests/gpu/breaks.sh --pack FOLDER writes FOLDER/gpu-breaks.tar.xz: the broken programs, for a machine that has a GPU, but no Rust
#   tests/gpu/breaks.sh --run FOLDER  runs them there
#
# Kernels are compiled for REPLAYSSM_CUDA_ARCHS (90), those for up to 128 columns alone; the rest is not optimised. A break of one source takes seconds, one of a
# header a minute or two.
#
# A break is: name ~ file ~ Perl substitution ~ test program ~ test that must fail. What needs no GPU is run where it was built.
set -euo pipefail

breaks() {
  cat <<'TABLE'
fold one token fewer~cuda/mamba2/mamba2.cuh~s/at < w\.stop\[warp_of\(\)\]\) take_in\(tile, p, i, half\)/at + 1 < w.stop[warp_of()]) take_in(tile, p, i, half)/~cuda~one_graph
a ring row off by one~cuda/mamba2/mamba2.cuh~s/copy_elements\(record_at\(p\.ring_x, w\.head, at, /copy_elements(record_at(p.ring_x, w.head, at + 1, /~cuda~one_graph
a tag not set~cuda/common/block.cuh~s/if \(lane_index\(\) == 0 && w\.tag_at\[warp_of\(\)\]\)/if (false)/~cuda~one_graph
a convolution does not wait~cuda/conv1d/conv1d.cu~s/  wait_for_dependency\(\);\n//~cuda~dependent
a commit does not wait~cuda/slots/commit.cu~s/  wait_for_dependency\(\);\n//~cuda~dependent
a missing barrier~cuda/conv1d/conv1d.cu~s/  __syncthreads\(\);\n(  const Span)/$1/~cuda~one_graph
a count is believed~cuda/slots/commit.cu~s/count = min\(max\(asked, 0ll\), len\);/count = asked;/~cuda~wrong_arrays
a product and a sum that may be fused~cuda/common/numerics.cuh~s/e\.q = __fmul_rn\(__fmul_rn\(e\.r, e\.r\), p\)/e.q = __fmul_rn(e.r, e.r) * p/, s/__fadd_rn\(lost, e\.q\)/(lost + e.q)/~kernels~the_sources
TABLE
}

# Runs a broken program: its test must fail, and not because there is no GPU.
red() {
  local name=$1 program=$2 test=$3 log=$4
  if timeout --kill-after=10 120 "$program" --show-output "$test" >"$log" 2>&1 </dev/null; then
    grep -E '^skipped: ' "$log" | head -1
    echo "STILL GREEN: $name ($test)"
    return 1
  fi
  grep -q "^test .*$test.* FAILED\|^test .* \.\.\. FAILED" "$log" || { tail -5 "$log" && echo "ENDED OTHERWISE: $name" && return 1; }
  echo "red: $name: $(grep -aA1 'panicked at' "$log" | sed -n 2p | cut -c1-110)"
}

if [ "${1:-}" = --run ]; then
  cd "${2:?a folder}"
  failures=0
  while IFS='~' read -r number name test; do
    red "$name" "./$number" "$test" "$number.log" || failures=$((failures + 1))
  done <list
  [ "$failures" = 0 ]
  exit
fi

mode=run out=
case ${1:-} in
  --check) mode=check ;;
  --pack) mode=pack && mkdir -p "${2:?a folder}" && out=$(cd "$2" && pwd) ;;
esac
cd "$(dirname "$0")/../.."
root=$PWD
copy=$root/build/gpu-breaks
export REPLAYSSM_CUDA=require REPLAYSSM_CUDA_ARCHS=${REPLAYSSM_CUDA_ARCHS:-90}
export REPLAYSSM_KERNEL_CACHE=${REPLAYSSM_KERNEL_CACHE:-$root/build/gpu-breaks-kernels}
compiler=$root/build/nvrtc/nvidia/cuda_nvrtc/lib/libnvrtc.so.12
if [ -z "${REPLAYSSM_NVRTC:-}" ] && [ -e "$compiler" ]; then export REPLAYSSM_NVRTC=$compiler; fi

rm -rf "$copy"
mkdir -p "$copy/programs"
cp -r Cargo.toml Cargo.lock build.rs build-support cbindgen.toml rust-toolchain.toml cuda src tests include "$copy"
# Half of the kernels, none of which these tests use.
perl -0pi -e 's/(        keys\n    \}\n)/        keys.retain(|key| key.columns <= 128);\n$1/' "$copy/src/backend/cuda/instances.rs"
if cmp -s src/backend/cuda/instances.rs "$copy/src/backend/cuda/instances.rs"; then echo "instances.rs has changed" && exit 1; fi

number=0 failures=0
while IFS='~' read -r name file change program test; do
  number=$((number + 1))
  cp "$root/$file" "$copy/$file"
  perl -0pi -e "$change" "$copy/$file"
  if cmp -s "$root/$file" "$copy/$file"; then
    echo "does not apply: $name"
    failures=$((failures + 1))
  elif [ "$mode" != check ]; then
    built=$(cd "$copy" && CARGO_TARGET_DIR=$root/build/gpu-breaks-target "${CARGO:-cargo}" test --locked --no-run \
      --config profile.dev.package.replayssm.opt-level=0 --message-format=json-render-diagnostics --test "$program" </dev/null | python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and message["profile"]["test"]:
        print(message["executable"])')
    if [ "$mode" = run ] || [ "$program" = kernels ]; then
      red "$name" "$built" "$test" "$copy/log" || failures=$((failures + 1))
    else
      "${STRIP:-strip}" --strip-all -o "$copy/programs/$number" "$built"
      echo "$number~$name~$test" >>"$copy/programs/list"
      echo "built: $name"
    fi
  fi
  cp "$root/$file" "$copy/$file"
done < <(breaks)
if [ "$mode" = pack ]; then
  cp tests/gpu/breaks.sh "$copy/programs/"
  tar -C "$copy/programs" -cf - . | xz --lzma2=preset=6,dict=512MiB >"$out/gpu-breaks.tar.xz"
  ls -l "$out/gpu-breaks.tar.xz"
fi
echo "$number breaks, $failures that are not red"
[ "$failures" = 0 ]
