#!/usr/bin/env bash
# Critics side by side on three tasks, three seeds each: rollouts, then every critic of the grid.
# A second start trains only what is missing. Results go to experiments/critics/TASK.
#   experiments/critics/run.sh [TASK ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
vapo=${VAPO:-.venv/bin/vapo}
runs=${RUNS:-runs/critics}
here=experiments/critics
base=(--config conf/state_tracking/vapo.yaml)
mkdir -p "$runs"

compare() { # TASK NUM ITERATIONS PROMPTS MINIBATCH CONFIG_AND_OVERRIDES...
    local task=$1 num=$2 iterations=$3 prompts=$4 minibatch=$5
    shift 5
    local where=("output_dir=$runs/$task" "tracking.uri=${STORE:-mlruns}" tracking.experiment=critics)
    $vapo rollouts "$@" "${where[@]}" --num "$num" --output "$runs/$task.parquet"
    $vapo critics "$@" "${where[@]}" --rollouts "$runs/$task.parquet" \
        --grid conf/sweep/critics.yaml --seeds 0,1,2 --output_dir "$runs/$task" \
        "components.value_pretraining.num_iterations=$iterations" \
        components.value_pretraining.min_iterations=1 \
        "components.group_sampling.num_prompts=$prompts" "training.minibatch_size=$minibatch" \
        --every_n_iterations "$((iterations / 6))"
    mkdir -p "$here/$task"
    cp "$runs/$task"/{table.md,table.csv,curves.png} "$here/$task/"
}

for task in "${@:-state_tracking short long_state_tracking}"; do
    for name in $task; do
        case $name in
        state_tracking) compare "$name" 4096 24 16 16 "${base[@]}" ;;
        short) # two to four swaps
            compare "$name" 4096 24 16 16 "${base[@]}" \
                data.train.options.max_steps=4 data.heldout.options.max_steps=4 \
                data.train.num_examples=1024 data.heldout.num_examples=32
            ;;
        long_state_tracking)
            compare "$name" 1024 30 4 4 --config conf/long_state_tracking/vapo.yaml critic.optimizer.lr=1e-3
            ;;
        *) echo "unknown task $name" >&2; exit 2 ;;
        esac
    done
done
