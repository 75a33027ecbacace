"""One VAPO iteration of SmolLM2-135M on a CPU, by stage: where a language model's time goes.

    python experiments/bench/language_model.py [--precision bf16-mixed|32-true] [--repeats 3]

64 responses in groups of 8, of equally many tokens (no token ends one), prompts of random ids. The
product's own module, datamodule, engine and callbacks run under Lightning's Trainer; the first
iteration warms up and is not counted. Run from another checkout's root with PYTHONPATH set to it,
the script times that commit on the same tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import arguments, heading  # beside this file
from one_process import one_process_trainer

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.loading import load_tokenizer
from vapo.prompts.load import PromptReport, PromptSplit
from vapo.prompts.training_set import TrainingSet
from vapo.rewards.scorer import make_scorer
from vapo.rollouts.engines.selection import make_sampler
from vapo.system.libraries import quiet_libraries
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import Recording
from vapo.training.datamodule import actor_access
from vapo.training.module import VapoModule
from vapo.training.parts import Inputs, Sampling, assemble_parts
from vapo.types import Prompt

STAGES = {
    "rollouts": "time/rollout_s",
    "log-probs, values": "time/logprobs_values_s",
    "actor update": "time/actor_update_s",
    "critic update": "time/critic_update_s",
    "weight sync": "time/weight_sync_s",
    "iteration": "time/iteration_s",
}


def make_config(options: argparse.Namespace) -> FitConfig:
    responses = options.num_responses
    overrides = [
        f"actor.path={options.policy}",
        f"trainer.precision={options.precision}",
        f"trainer.num_threads={options.threads}",
        "components.value_pretraining.enabled=false",
        f"components.group_sampling.num_prompts={responses // options.group_size}",
        f"components.group_sampling.group_size={options.group_size}",
        f"rollouts.engine={options.engine}",
        f"rollouts.max_response_tokens={options.response_tokens}",
        f"rollouts.max_concurrent_sequences={responses}",
        f"training.minibatch_size={responses // options.num_minibatches}",
        f"training.microbatch_tokens={options.microbatch_tokens}",
        f"training.num_iterations={options.repeats + 1}",
        "value_pages.every_n_iterations=null",
        *options.override,
    ]
    return load_config(FitConfig, [Path("conf/recipes/smollm2_cpu.yaml")], overrides)


def run(options: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of each counted iteration."""
    quiet_libraries()
    torch.set_num_threads(options.threads)
    config = make_config(options)
    tokenizer = load_tokenizer(config.actor.path)
    draw = random.Random(0)
    prompts = [
        Prompt(f"made-up:{i}", "", tuple(draw.choices(range(100, 20_000), k=50)), "1")
        for i in range(options.num_responses // options.group_size)
    ]
    module = VapoModule(config, pad_id=int(tokenizer.pad_token_id))
    progress = Progress(enabled=False)

    def endless(module: VapoModule) -> Any:
        sampler: Any = make_sampler(config, actor_access(module), tokenizer)
        sampler.end_ids = frozenset({-1})
        return sampler

    iterations: list[dict[str, float]] = []
    marks = [time.process_time()]

    def log(metrics: dict[str, float], **_: Any) -> None:
        if "time/iteration_s" in metrics:
            marks.append(time.process_time())
            iterations.append(dict(metrics) | {"cpu_s": marks[-1] - marks[-2]})

    split = PromptSplit(TrainingSet.of(prompts), [], PromptReport(len(prompts), 0, 0, 0))
    scorer = make_scorer(config)
    inputs = Inputs(tokenizer, split)
    sampling = Sampling(config, inputs, scorer, progress, make_sampler=endless)
    parts = assemble_parts(module, sampling, progress=progress, critic_dir=None)
    logger: Any = SimpleNamespace(log_metrics=log)
    trainer = one_process_trainer(
        [*parts.callbacks, Recording(logger, progress)],
        precision=options.precision,
        num_iterations=options.repeats + 1,
        folder="build/bench",
    )
    with progress:
        trainer.fit(module, parts.datamodule)
    return iterations[1:]


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--policy", default="models/smollm2_135m")
    parser.add_argument("--precision", default="bf16-mixed", choices=["bf16-mixed", "32-true"])
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--num_responses", type=int, default=64)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--num_minibatches", type=int, default=4)
    parser.add_argument("--response_tokens", type=int, default=80)
    parser.add_argument("--microbatch_tokens", type=int, default=2080)
    parser.add_argument("--override", nargs="*", default=[], help="further KEY=VALUE of the config")
    options = parser.parse_args()
    if options.toy:
        options.num_responses, options.group_size, options.response_tokens = 8, 2, 4
    iterations = run(options)
    medians = {
        name: statistics.median(iteration[key] for iteration in iterations)
        for name, key in (*STAGES.items(), ("process CPU", "cpu_s"))
    }
    print(f"{options.precision}, {options.threads} thread(s), median of {options.repeats}, seconds")
    print(heading(tuple(medians)))
    print(f"| {' | '.join(f'{value:.1f}' for value in medians.values())} |")
    print(json.dumps({"gap": iterations[-1].get("rollout/logprob_gap_mean"), **medians}))


if __name__ == "__main__":
    main()
