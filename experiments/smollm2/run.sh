#!/usr/bin/env bash
# The comparison on worked sums: all runs, two at a time on two cores, and after each end
# of the sweep the rows of the finished ones in results.json. Cut off at any time, the same command
# goes on: finished runs are kept, others continue from their last checkpoint.
#   ROWS=VAPO SEEDS=0 experiments/smollm2/run.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
VAPO=${VAPO:-.venv/bin/vapo}
OUT=${OUT:-runs/worked_sums_comparison}
SEEDS=${SEEDS:-0,1,2}
JOBS=${JOBS:-2}
rows=()
test -z "${ROWS:-}" || rows=(--rows "$ROWS")

collect() { "$(dirname "$VAPO")/python" experiments/smollm2/collect.py "$OUT"; }
trap collect EXIT
"$VAPO" sweep --config conf/worked_sums/vapo.yaml --grid experiments/smollm2/grid.yaml \
    --seeds "$SEEDS" --jobs "$JOBS" --sweep_dir "$OUT" "${rows[@]}" \
    rollouts.engine=vllm rollouts.vllm.kv_cache_memory_bytes=268435456 "$@"
