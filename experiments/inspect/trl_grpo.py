"""A GRPO run of TRL itself on the default task, whose completions `vapo inspect` reads.

    python experiments/inspect/trl_grpo.py --output runs/trl_grpo --num_steps 20
    vapo inspect runs/trl_grpo/completions/completions_0000[12].parquet \\
        --policy models/checked_steps/policy --value_truth 16 --verifier 'regex:;(\\d)$' \\
        --output runs/trl_grpo/page.html

Needs TRL 1.16 beside our own packages: `pip install --no-deps trl==1.16.0`. `--policy` takes any
causal language model with a tokenizer, as models/smollm2_135m.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[2] / "conf/vapo.yaml"


def train(
    *,
    policy: str,
    output: Path,
    num_steps: int,
    num_prompts: int = 8,
    group_size: int = 8,
    max_tokens: int = 48,
    lr: float = 1e-4,
    steps_per_generation: int = 1,
    conversation: bool = False,
) -> None:
    """Train, with a file of completions for each optimizer step in output/completions.

    Args:
        conversation: prompts are lists of messages, as most data sets have them.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from vapo.config import FitConfig
    from vapo.config.data import FileSource, GeneratedSource
    from vapo.config.loading import load_config
    from vapo.config.rewards import RegexVerifier
    from vapo.prompts.sources import read_rows

    config = load_config(FitConfig, [CONFIG], [])
    source = config.data.train
    assert isinstance(source, (FileSource, GeneratedSource))
    assert isinstance(config.rewards, RegexVerifier)
    pattern = config.rewards.pattern
    tokenizer: Any = AutoTokenizer.from_pretrained(policy, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = read_rows(source, key="data.train")[: num_prompts * max(num_steps, 1)]
    prompts: list[Any] = [row.problem for row in rows]
    if conversation:
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    data = Dataset.from_list(
        [{"prompt": text, "answer": row.answer} for text, row in zip(prompts, rows, strict=True)]
    )

    def correct(completions: list[Any], answer: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("answer", answer)  # so that a verifier can judge continuations later
        texts = [
            completion if isinstance(completion, str) else completion[0]["content"]
            for completion in completions
        ]
        matches = [re.search(pattern, text) for text in texts]
        right = [m is not None and m[1] == a for m, a in zip(matches, answer, strict=True)]
        return [
            config.rewards.correct if is_right else config.rewards.incorrect for is_right in right
        ]

    batch = num_prompts * group_size
    options = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=batch // steps_per_generation,
        steps_per_generation=steps_per_generation,
        num_generations=group_size,
        max_completion_length=max_tokens,
        max_steps=num_steps,
        learning_rate=lr,
        beta=0.0,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        seed=0,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        policy, dtype="float32", trust_remote_code=False
    )
    trainer = GRPOTrainer(
        model=model, args=options, processing_class=tokenizer, reward_funcs=correct,
        train_dataset=data,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(output / "policy"))
    tokenizer.save_pretrained(str(output / "policy"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="models/checked_steps/policy")
    parser.add_argument("--output", type=Path, required=True)
    for name, number in (("num_steps", 20), ("num_prompts", 8), ("group_size", 8),
                         ("max_tokens", 48)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--lr", type=float, default=1e-4)
    train(**vars(parser.parse_args()))
