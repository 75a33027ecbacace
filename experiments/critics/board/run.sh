#!/usr/bin/env bash
# The board's table from its rollouts: trains the networks, scores all critics, draws the picture.
# What was trained is not trained again. First experiments/smollm2/make_models.sh.
#   experiments/critics/board/run.sh
#   SEEDS=0 experiments/critics/board/run.sh "probe, log-probs" "whole network"
# With names of rows of critics.yaml, only these are trained, and no others are scored.
set -euo pipefail
cd "$(dirname "$0")/../../.."
bin=${BIN:-.venv/bin} runs=${RUNS:-runs/board} here=experiments/critics/board
rows=() others=(small_critics.py:{constant,others_mean}
    experiments/smollm2/estimates.py:{milestones,kernel} with_answer.py:evidence_of_the_answer)
for row in "$@"; do rows+=(--rows "$row") others=(); done

"$bin/vapo" critics --config conf/worked_sums/vapo.yaml "output_dir=$runs" --output_dir "$runs/critics" \
    --rollouts $here/train.parquet --heldout $here/test.parquet --grid $here/critics.yaml \
    "${rows[@]}" --seeds "${SEEDS:-0,1,2}" components.value_pretraining.num_iterations=16 \
    --every_n_iterations 16
"$bin/python" $here/score_critics.py --output $here/results.json "$runs/critics/values.parquet" "${others[@]}"
"$bin/python" $here/draw_critics.py
