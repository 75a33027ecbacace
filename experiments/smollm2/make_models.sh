#!/usr/bin/env bash
# Makes the models of worked sums on two CPU cores: SmolLM2-135M, its cold start, and the reward
# model that the cold start's own responses teach. A model that is there already is kept.
#   experiments/smollm2/make_models.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
VAPO=${VAPO:-.venv/bin/vapo}

make smollm2
test -f models/worked_sums/policy/model.safetensors ||
    "$VAPO" sft --config conf/worked_sums/sft.yaml "$@"
test -f models/worked_sums/reward_model/model.safetensors ||
    "$VAPO" reward-model --config conf/worked_sums/reward_model.yaml "$@"
