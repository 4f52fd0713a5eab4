#!/usr/bin/env bash
# Runs the tests on the CUDA backend, on a machine with a GPU: the same programs as on the CPU, and the comparison of both backends.
#
#   tests/gpu/run.sh                      builds the programs with cargo and runs them
#   tests/gpu/run.sh FOLDER               runs programs that lie there already, as tests/gpu/pack.sh packs them; needs no cargo
#   tests/gpu/run.sh [FOLDER] NAME...     only these programs
#   tests/gpu/run.sh --sanitize TOOL ...  the comparison of a few models, and short runs of what only makes sense on CUDA, under
#                                         compute-sanitizer: memcheck, racecheck, initcheck, synccheck
#
# Prints a table last: tests that passed, failed and were skipped, seconds. Logs lie in OUT (build/gpu). The status is 0 if no test failed.
#
#   LIMIT=seconds       a program's time, 600 by default
#   PYTHON=program      for tests in Python: tests/gpu/python.sh; skipped where it has no PyTorch with a GPU
#   REPLAYSSM_ACROSS=n  models of the comparison: all by default, 3 random and 3 named ones under the sanitizer
#   REPLAYSSM_SOAK_SECONDS=n  seconds of soak, which stops after so many operations else (REPLAYSSM_SOAK); LIMIT is to be larger
#   REPLAYSSM_CUDA_ROUNDS=n  rounds of a test of cuda: all by default, 6 under the sanitizer
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
all="across cuda cases delta_cases conv1d decode single life schedule checks lent save exactness readout pairwise position_model faults soak stress"
# Programs about the adapters of examples-cpp, in C++.
adapters="vllm_adapter flashinfer_adapter trtllm_adapter genai_adapter"
all+=" $adapters"
limit=${LIMIT:-600}

fail() {
  echo "$1" >&2
  exit 2
}

tool=
if [ "${1:-}" = --sanitize ]; then
  tool=${2:-}
  case $tool in memcheck | racecheck | initcheck | synccheck) ;; *) fail "--sanitize takes memcheck, racecheck, initcheck or synccheck" ;; esac
  shift 2
fi
folder=
# A program may be called as a folder of the repository is.
if [ -d "${1:-}" ] && [[ " $all ggml_cuda pytorch_adapter sglang_adapter transformers_models " != *" $1 "* ]]; then
  folder=$(cd "$1" && pwd)
  shift
fi
programs=${*:-$all}
# Tests in Python, with PyTorch where there is one, and ggml's CUDA backend; not under the sanitizer.
scripts=
for name in ggml_cuda pytorch_adapter sglang_adapter transformers_models; do
  case " ${*:-$name} " in *" $name "*) scripts+=" $name" ;; esac
  programs=${programs//$name/}
done
if [ -n "$tool" ] && [ -n "$*" ] && [ -n "$scripts" ]; then fail "$scripts: not under the sanitizer"; fi
if [ -n "$tool" ]; then scripts=; fi
if [ -n "$tool" ] && [ -z "$*" ]; then programs="across cuda"; fi

out=${OUT:-build/gpu}
if [ -z "$folder" ]; then
  cd "$here/../.." || exit 2
  mkdir -p "$out" && out=$(cd "$out" && pwd)
  folder=$out/programs
  cargo=${CARGO:-cargo}
  command -v "$cargo" >/dev/null || fail "no cargo: name a folder of programs, as tests/gpu/pack.sh makes it"
  mkdir -p "$folder"
  tests=
  for name in $programs; do
    case " $adapters " in *" $name "*) ;; *) tests+=" --test $name" ;; esac
  done
  # shellcheck disable=SC2086 # a word for each program
  "$cargo" test --locked --no-run --message-format=json-render-diagnostics ${tests:---test conv1d} | python3 -c '
import json, os, sys
for message in map(json.loads, sys.stdin):
    links = [name for name in message.get("filenames", []) if os.path.basename(name) == "libreplayssm.so"]
    if message.get("executable") and message["profile"]["test"] and message["target"]["kind"] == ["test"]:
        links = [message["executable"]]
    for path in links:
        link = os.path.join(sys.argv[1], "library" if path.endswith(".so") else message["target"]["name"])
        if os.path.lexists(link):
            os.remove(link)
        os.symlink(path, link)' "$folder" || fail "the programs were not built"
  tests/engines/build.sh "$folder/library" "$folder" || fail "the adapters were not built"
fi
mkdir -p "$out" && out=$(cd "$out" && pwd)

sanitizer=
if [ -n "$tool" ]; then
  for path in "${COMPUTE_SANITIZER:-}" "$(command -v compute-sanitizer)" /usr/local/cuda*/bin/compute-sanitizer; do
    [ -x "$path" ] && sanitizer=$path && break
  done
  [ -n "$sanitizer" ] || fail "compute-sanitizer is not installed; COMPUTE_SANITIZER may name it"
  export REPLAYSSM_ACROSS=${REPLAYSSM_ACROSS:-3} REPLAYSSM_CUDA_ROUNDS=${REPLAYSSM_CUDA_ROUNDS:-6}
fi

# What runs ggml's CUDA backend compiles it.
ggml_cuda() {
  local why=
  [ -x "$here/ggml_cuda.sh" ] || why="it is run in the repository"
  [ -n "$(command -v "${NVCC:-nvcc}" || ls /usr/local/cuda/bin/nvcc 2>/dev/null)" ] || why="there is no nvcc"
  if [ -n "$why" ]; then
    printf 'test ggml_cuda ... ok\nskipped: ggml_cuda because %s\n' "$why"
  else
    OUT=$out/ggml-cuda "$here/ggml_cuda.sh" "$1" && echo "test ggml_cuda ... ok"
  fi
}
export -f ggml_cuda
export here out

table=
failures=0
for name in $programs $scripts; do
  program=$folder/$name log=$out/$name${tool:+-$tool}.log
  case " $scripts " in *" $name "*) program=$folder/python/tests/gpu/python.sh && [ -x "$program" ] || program=$here/python.sh ;; esac
  [ "$name" = ggml_cuda ] || [ -x "$program" ] || fail "$program is no program"
  # These make contexts of both backends by themselves.
  backend=cuda tests=
  case $name in
    across) backend=cpu tests=cuda_equals ;;
    # Exactly sized memory; not those that need most of the device's.
    cuda) backend=cpu tests="graph dependent wrong aligned streams_share green" ;;
  esac
  set -- "$program" --show-output
  # shellcheck disable=SC2086 # a word for each test
  [ -z "$tool" ] || set -- "$sanitizer" --tool "$tool" --error-exitcode 9 "$program" --show-output --test-threads=1 $tests
  case " $adapters " in
    *" $name "*)
      # Told to break something, they must see it.
      set -- bash -c '"${@:2}" && echo "test $1 ... ok"' run "$name" ${tool:+"$sanitizer" --tool "$tool" --error-exitcode 9} "$program"
      [ -n "$tool" ] || set -- bash -c '"$@" && ! said=$("${@: -1}" break 2>&1) && grep -q "^a state differs" <<<"$said" && echo "test broken ... ok"' run "$@"
      ;;
  esac
  case " $scripts " in *" $name "*) set -- "$program" "$name" "$folder/libreplayssm.so" ;; esac
  [ "$name" != ggml_cuda ] || set -- bash -c 'ggml_cuda "$1"' run "$folder/libreplayssm.so"
  echo "     Running $name"
  start=$SECONDS
  REPLAYSSM_TEST_BACKEND=$backend timeout --kill-after=10 "$limit" "$@" </dev/null >"$log" 2>&1
  status=$?
  seconds=$((SECONDS - start))
  # A test that prints "skipped: " counts as skipped. Its name may be followed by what the test printed.
  ok=$(grep -c '^test .* \.\.\. ok' "$log")
  failed=$(grep -c '^test .* \.\.\. FAILED' "$log")
  skipped=$(grep -c '^skipped: ' "$log")
  [ "$skipped" -le "$ok" ] || skipped=$ok
  note=
  if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
    failed=1
    case $status in 124 | 137) note="ran longer than $limit s" ;; 9) note="the sanitizer found something" ;; *) note="ended with status $status" ;; esac
    tail -20 "$log"
  elif [ "$failed" != 0 ]; then
    # What failing tests printed, and the names.
    awk '/^failures:$/ { failures = 1 } failures' "$log" | head -60
  elif [ "$ok" = 0 ]; then
    failed=1 note="ran no test"
  elif [ "$backend" = cpu ] && grep -qE '^skipped: .* because (context_desc|this library)' "$log"; then
    failed=$skipped skipped=0 ok=$((ok - failed)) note="there is no CUDA backend"
  fi
  failures=$((failures + failed))
  table+=$(printf '%-24s %7d %7d %8d %8d  %s' "$name${tool:+ ($tool)}" $((ok - skipped)) "$failed" "$skipped" "$seconds" "$note")$'\n'
done

echo
grep -hE '^skipped: ' "$out"/*.log | sort -u
echo
printf '%-24s %7s %7s %8s %8s\n' program passed failed skipped seconds
printf '%s' "$table"
[ "$failures" = 0 ]
