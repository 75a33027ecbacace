"""Our side of `iterations.py`: the product's module and datamodule, one iteration a turn.

As `vapo fit` builds them, but for what TRL's side does not do either: no evaluation, no
checkpoint, and metrics are computed and then dropped. Gets the settings as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from one_process import one_process_trainer  # beside this file
from turns import Turns

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.loading import load_tokenizer
from vapo.prompts.load import PromptReport, PromptSplit
from vapo.prompts.training_set import TrainingSet
from vapo.rewards.scorer import make_scorer
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.source import RolloutSource
from vapo.system.libraries import quiet_libraries
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import Recording
from vapo.training.module import VapoModule
from vapo.training.parts import Inputs, Sampling, assemble_parts
from vapo.types import IterationStart, Prompt, RolloutBatch

ROOT = Path(__file__).parents[2]
STATE_TRACKING = ROOT / "conf/state_tracking/vapo.yaml"
Settings = dict[str, Any]


class EndlessSampler(TransformersSampler):
    """No token ends a response, so that both sides sample equally many."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.end_ids = frozenset({-1})


class TurnTakingSource(RolloutSource):
    """Waits before the rollouts of each iteration."""

    turns: Turns

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        self.turns.wait()
        batch, metrics = super().next_batch(start, last=last)
        self.turns.num_tokens = int(batch.response_mask.sum())
        return batch, metrics


def make_config(settings: Settings) -> FitConfig:
    num_responses, group_size = settings["num_responses"], settings["group_size"]
    overrides = [
        f"actor.path={settings['policy']}",
        f"rollouts.max_response_tokens={settings['response_tokens']}",
        f"rollouts.max_concurrent_sequences={num_responses}",
        f"components.group_sampling.num_prompts={num_responses // group_size}",
        f"components.group_sampling.group_size={group_size}",
        f"training.minibatch_size={num_responses // settings['num_minibatches']}",
        "training.num_iterations=100000",
        # TRL's too: the policy, and with it the lengths, stay what they are
        "actor.optimizer.lr=1e-6",
        "critic.optimizer.lr=1e-6",
        "trainer.accelerator=cpu",
        f"trainer.precision={'bf16-mixed' if settings['bf16'] else '32-true'}",
    ]
    if settings["system"] == "ppo":
        overrides += [
            f"critic.reward_model_path={settings['reward_model']}",
            "rewards.verifier=reward_model",
            f"rewards.reward_model_path={settings['reward_model']}",
            "algorithm.kl.coef=0.05",
            "algorithm.kl.placement=reward",
        ]
    else:
        overrides += [
            "rewards.verifier=exact",
            "algorithm.kl.coef=0",
            "components.token_level_loss.enabled=true",  # as TRL's default loss has it
        ]
    files = [STATE_TRACKING, ROOT / f"conf/algorithm/{settings['system']}.yaml"]
    return load_config(FitConfig, files, [*overrides, *settings.get("overrides", [])])


def main() -> None:
    settings: Settings = json.loads(sys.argv[1])
    quiet_libraries()
    torch.set_num_threads(settings["threads"])
    config = make_config(settings)
    tokenizer = load_tokenizer(config.actor.path)
    prompts = [Prompt(f"made-up:{i}", "", tuple(p), "1") for i, p in enumerate(settings["prompts"])]
    module = VapoModule(config, pad_id=int(tokenizer.pad_token_id))
    progress = Progress(enabled=False)
    split = PromptSplit(TrainingSet.of(prompts), [], PromptReport(len(prompts), 0, 0, 0))
    sampling = Sampling(
        config,
        Inputs(tokenizer, split),
        make_scorer(config),
        progress,
        make_sampler=lambda module: (TransformersSampler if settings["ends"] else EndlessSampler)(
            module.actor.model,
            tokenizer,
            max_concurrent_sequences=config.rollouts.max_concurrent_sequences,
            device="cpu",
        ),
    )

    def in_turns(module: VapoModule) -> RolloutSource:
        source = TurnTakingSource(config, sampling(module).collection, module.lineage, progress)
        source.turns = Turns()
        return source

    parts = assemble_parts(module, in_turns, progress=progress, critic_dir=None)
    logger: Any = SimpleNamespace(log_metrics=lambda *args, **options: None)
    trainer = one_process_trainer(
        [*parts.callbacks, Recording(logger, progress)],
        precision=config.trainer.precision,
        num_iterations=100_000,
        folder=settings["scratch"],
    )
    with progress:
        trainer.fit(module, parts.datamodule)


if __name__ == "__main__":
    main()
