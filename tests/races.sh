#!/usr/bin/env bash
# Runs steps of a few tokens on the emulated device while every access to shared memory is looked at: tests/emulated/races.h says for what.
set -euo pipefail
cd "$(dirname "$0")/.."
export RACES=1
# Those of SPLIT32 for up to 128 columns, and what every pool needs.
export KERNELS='^[a-z0-9_]*(split32|tail)[a-z_]*_128 |^(commit|reset|cursors|import|window|rewind|copy|read_cursors|inspect|conv1d|mamba2_tail) '
exec tests/emulated/run.sh decode few_of few_gdn_of few_kda_of few_late
