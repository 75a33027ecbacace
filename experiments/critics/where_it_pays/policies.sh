# The policies of the map, into runs/where_it_pays/policies (README.md): about 25 minutes beside
# other work. All of them slip on hard keys alone; the longer a problem, the more rarely, so that
# about half of the responses of every size are right.
set -e
export OMP_NUM_THREADS=1
OUT=runs/where_it_pays
[ -d $OUT/right_policy ] || vapo sft --config conf/checked_steps/sft_1_short_and_right.yaml \
  export_dir=$OUT/right_policy data.max_prompt_tokens=104

# begin with, folder, most steps, fewest steps, share of hard moves that go wrong, batch, steps
policy() {
  [ -d $OUT/$2 ] || vapo sft --config conf/checked_steps/sft_2_with_misconceptions.yaml \
    model_path=$OUT/$1 export_dir=$OUT/$2 \
    data.train.options.max_steps=$3 data.train.options.min_steps=$4 \
    data.heldout.options.max_steps=$3 data.heldout.options.min_steps=$4 \
    data.train.options.misconception_probability=$5 \
    data.train.options.wrong_step_probability=0.0 data.train.options.early_stop_probability=0.0 \
    data.train.num_examples=40000 data.max_prompt_tokens=104 \
    rollouts.max_response_tokens=$((4 * $3 + 6)) batch_size=$6 num_steps=$7
}
policy right_policy policies/6 6 6 0.3 64 600
policy right_policy policies/12 12 12 0.16 64 600
policy right_policy policies/24 24 12 0.08 48 800
policy policies/24 between_24_and_48 48 24 0.04 32 700
policy between_24_and_48 policies/48 48 48 0.04 32 1200 # labels come twice: which step is meant?
