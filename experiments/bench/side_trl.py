"""TRL's side of `iterations.py`: its own trainers as they are, one iteration a turn.

Runs in TRL's environment; gets the settings as JSON in its first argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from turns import Turns  # beside this file

Settings = dict[str, Any]


class TakesTurns(TrainerCallback):
    """Waits before the first optimizer step of each iteration."""

    def __init__(self, turns: Turns, steps_per_iteration: int) -> None:
        self.turns = turns
        self.steps_per_iteration = steps_per_iteration

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps_per_iteration == 0:
            self.turns.wait()


def ppo(settings: Settings, turns: Turns) -> Any:
    """One call of `train` is many iterations, each with `num_minibatches` optimizer steps."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    num_responses = settings["num_responses"]
    config = PPOConfig(
        **common(settings),
        per_device_train_batch_size=num_responses,
        gradient_accumulation_steps=1,
        num_mini_batches=settings["num_minibatches"],
        num_ppo_epochs=1,
        total_episodes=num_responses * 1000,
        local_rollout_forward_batch_size=settings["forward_rows"],
        num_sample_generations=0,
        response_length=settings["response_tokens"],
        stop_token="eos" if settings["ends"] else None,
        temperature=1.0,
        kl_coef=0.05,
        lam=0.95,
    )
    prompts = [{"input_ids": ids} for ids in settings["prompts"]]
    models = {
        "model": load(AutoModelForCausalLM, settings["policy"], settings),
        "ref_model": load(AutoModelForCausalLM, settings["policy"], settings),
        "reward_model": load(
            AutoModelForSequenceClassification, settings["reward_model"], settings
        ),
        "value_model": load(AutoModelForSequenceClassification, settings["reward_model"], settings),
    }
    count_tokens(models["reward_model"], settings, turns)
    return PPOTrainer(
        args=config,
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            settings["policy"], trust_remote_code=False
        ),
        train_dataset=Dataset.from_list(prompts),
        callbacks=[TakesTurns(turns, 1)],
        **models,
    )


def count_tokens(reward_model: Any, settings: Settings, turns: Turns) -> None:
    """The trainer tells no lengths; what the reward model reads is cut at the end token."""
    counts: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows, width = kwargs["input_ids"].shape
        prompt_tokens = len(settings["prompts"][0])
        if not settings["ends"]:
            counts.append(rows * (width - prompt_tokens))
        else:
            responses = kwargs["input_ids"][:, prompt_tokens:]
            num_ends = (responses == 1).long().cumsum(1)
            counts.append(int((num_ends == 0).sum() + (num_ends[:, -1] > 0).sum()))
        if len(counts) * settings["forward_rows"] >= settings["num_responses"]:
            turns.num_tokens = sum(counts)
            counts.clear()

    reward_model.base_model.register_forward_pre_hook(note, with_kwargs=True)


def grpo(settings: Settings, turns: Turns) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    num_responses, num_minibatches = settings["num_responses"], settings["num_minibatches"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings["policy"], trust_remote_code=False)
    config = GRPOConfig(
        **common(settings),
        per_device_train_batch_size=num_responses // num_minibatches,
        gradient_accumulation_steps=1,
        steps_per_generation=num_minibatches,
        num_generations=settings["group_size"],
        num_iterations=1,
        max_steps=100_000,
        max_completion_length=settings["response_tokens"],
        generation_kwargs=(
            None if settings["ends"] else {"min_new_tokens": settings["response_tokens"]}
        ),
        temperature=1.0,
        beta=0.0,
    )

    def reward(
        completions: list[str], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float]:
        turns.num_tokens = sum(len(ids) for ids in completion_ids)
        return [1.0 if text.strip() == "1" else -1.0 for text in completions]

    prompts = [{"prompt": tokenizer.decode(ids)} for ids in settings["prompts"]]
    return GRPOTrainer(
        model=load(AutoModelForCausalLM, settings["policy"], settings),
        args=config,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[TakesTurns(turns, num_minibatches)],
    )


def common(settings: Settings) -> dict[str, Any]:
    """No saving, no reports, float32 on the CPU, as on the other side."""
    return {
        "output_dir": str(Path(settings["scratch"]) / "trl"),
        "use_cpu": True,
        "bf16": settings["bf16"],
        "gradient_checkpointing": settings["gradient_checkpointing"],
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-6,
        "seed": 0,
    }


def load(kind: Any, path: str, settings: Settings) -> Any:
    options = {"num_labels": 1} if kind is AutoModelForSequenceClassification else {}
    model = kind.from_pretrained(path, dtype=torch.float32, trust_remote_code=False, **options)
    model.config.use_cache = settings["use_cache"]  # `generate` has a setting of its own
    return model


def main() -> None:
    settings: Settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    turns = Turns()
    make = {"ppo": ppo, "grpo": grpo}[settings["system"]]
    make(settings, turns).train()


if __name__ == "__main__":
    main()
