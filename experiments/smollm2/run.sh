#!/usr/bin/env bash
# The comparison of README.md: all runs, table and curves. Cut off at any time, the same command
# goes on: finished runs are kept, others continue from their last checkpoint.
#   experiments/smollm2/run.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
VAPO=${VAPO:-.venv/bin/vapo}
CONFIG=${CONFIG:-conf/recipes/smollm2_gpu.yaml}
GRID=${GRID:-experiments/smollm2/grid.yaml}
OUT=${OUT:-runs/smollm2_comparison}
SEEDS=${SEEDS:-0,1}
JOBS=${JOBS:-2}       # runs at a time, on one GPU
MINUTES=${MINUTES:-25} # then it stops, and says how to go on

timeout --foreground --signal=INT --kill-after=60 "${MINUTES}m" \
  "$VAPO" sweep --config "$CONFIG" --grid "$GRID" --seeds "$SEEDS" --jobs "$JOBS" \
  --sweep_dir "$OUT" "$@" || {
  code=$?
  echo "stopped with code $code; the same command goes on" >&2
  exit "$code"
}
