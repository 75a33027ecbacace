#!/usr/bin/env bash
# Makes the models of worked sums on two CPU cores: SmolLM2-135M and its cold start. A model that is
# there already is kept.
#   experiments/smollm2/make_models.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
VAPO=${VAPO:-.venv/bin/vapo}

make smollm2
test -f models/worked_sums/policy/model.safetensors ||
    "$VAPO" sft --config conf/worked_sums/sft.yaml \
        rollouts.engine=vllm rollouts.vllm.kv_cache_memory_bytes=268435456 "$@"
