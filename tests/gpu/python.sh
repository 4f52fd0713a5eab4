#!/usr/bin/env bash
# Runs a test in Python that needs PyTorch and a GPU, then with each of its breaks, which must make it fail. Prints lines as Rust's tests do, for run.sh.
#
#   tests/gpu/python.sh NAME LIBRARY     NAME: pytorch_adapter, sglang_adapter, transformers_models
#
#   PYTHON=program       python3 by default
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
name=${1:-} library=${2:-}
on=--cuda
case $name in
  pytorch_adapter) breaks=("--break") folder=engines ;;
  sglang_adapter) breaks=("--break rings" "--break accepted" "--break flush" "--break bound" "--break null" "--break track") folder=engines ;;
  transformers_models) breaks=("--break Mamba-2") folder=gpu on= ;;
  *) echo "usage: tests/gpu/python.sh pytorch_adapter|sglang_adapter|transformers_models LIBRARY" >&2 && exit 2 ;;
esac

# What is missing, in a line.
missing=$("$python" -c '
import importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        sys.exit(print(name + " is not installed"))
import torch
if not torch.cuda.is_available():
    print("PyTorch has no GPU")' torch $([ "$name" != transformers_models ] || echo transformers) 2>/dev/null) || missing=${missing:-there is no $python}
[ -e "$library" ] || { echo "${library:-LIBRARY} is no file; expected a libreplayssm.so" >&2 && exit 2; }
if [ -n "$missing" ]; then
  printf 'test %s ... ok\nskipped: %s, because %s\n' "$name" "$name" "$missing"
  exit 0
fi

failed=0
script=$root/tests/$folder/$name.py
if said=$("$python" -W ignore "$script" "$library" $on 2>&1); then
  printf '%s\ntest %s ... ok\n' "$said" "$name"
else
  printf 'failures:\n%s\ntest %s ... FAILED\n' "$said" "$name" && failed=1
fi
for words in "${breaks[@]}"; do
  # shellcheck disable=SC2086 # two words
  if said=$("$python" -W ignore "$script" "$library" $on $words 2>&1) || ! grep -qE 'off by|not zero|tokens differ' <<<"$said"; then
    printf 'failures:\n%s\ntest %s with %s, for the right reason ... FAILED\n' "$said" "$name" "$words" && failed=1
  else
    printf '%s\ntest %s with %s ... ok\n' "${said##*$'\n'}" "$name" "$words"
  fi
done
exit $failed
