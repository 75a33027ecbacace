"""The tensor memory of a real minibatch on this CPU, through the real module and Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.config.fits import STATE_TRACKING
from tests.judged import judged_batch
from tests.tiny_model import tiny_tokenizer
from vapo.advantages.estimators import estimate_advantages
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.environments.contract import Verdict
from vapo.studies.estimate.memory_tracker import MemoryTracker
from vapo.training.datamodule import RolloutDataModule
from vapo.training.minibatches import Minibatch, make_minibatches
from vapo.training.module import VapoModule
from vapo.training.strategy import lightning_precision, make_strategy
from vapo.types import FinishReason, Prompt, Rollout

PROMPT_TOKENS, RESPONSE_TOKENS, NUM_ROLLOUTS = 32, 96, 8
VOCAB = 8_000

LAYERS = 2  # of the model that most tests measure, all of which are run


def save_mid_size_model(folder: Path, **options: Any) -> Path:
    """8 M parameters, half of them in embedding and head: layers and logits both weigh."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    Qwen2ForCausalLM(Qwen2Config(**{**settings, **options})).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def mid_size_config(folder: Path, *overrides: str) -> FitConfig:
    return load_config(
        FitConfig,
        STATE_TRACKING,
        [
            f"actor.path={folder}",
            "critic.init=policy",
            f"data.max_prompt_tokens={PROMPT_TOKENS}",
            f"rollouts.max_response_tokens={RESPONSE_TOKENS}",
            "components.group_sampling.num_prompts=2",
            "components.group_sampling.group_size=4",
            f"training.minibatch_size={NUM_ROLLOUTS}",
            f"training.microbatch_tokens={PROMPT_TOKENS + 4 * RESPONSE_TOKENS}",
            "trainer.accelerator=cpu",
            *overrides,
        ],
    )


class _FullRollouts(L.LightningDataModule):
    """Rollouts as long as the config allows."""

    transfer_batch_to_device = RolloutDataModule.transfer_batch_to_device

    def __init__(self, config: FitConfig) -> None:
        super().__init__()
        self.config = config

    def train_dataloader(self) -> DataLoader[Minibatch]:
        module = self.trainer.lightning_module  # type: ignore[union-attr]
        assert isinstance(module, MeasuredModule)
        # of two critics, each has one of the prompts
        prompts = [
            Prompt("made-up", "made up", tuple(range(i, i + PROMPT_TOKENS)), "1") for i in (2, 5)
        ]
        ids = tuple(range(2, 2 + RESPONSE_TOKENS))
        logprobs, reason = (-1.0,) * len(ids), FinishReason.LENGTH
        rollouts = [
            Rollout(prompts[i // 4], ids, "1", logprobs, reason) for i in range(NUM_ROLLOUTS)
        ]
        verdicts = [Verdict(is_correct=i % 2 == 0, reward=i % 2) for i in range(NUM_ROLLOUTS)]
        batch = judged_batch(
            rollouts,
            verdicts,
            group_size=4,
            rewards=self.config.rewards,
            max_response_tokens=RESPONSE_TOKENS,
        )
        with MemoryTracker() as tracker:
            evaluated = module.add_logprobs_and_values(batch, module.phase, with_entropy=True)
        module.measured["log-probs"] = module.resting() + tracker.peak
        estimated = estimate_advantages(evaluated, module.phase, self.config, module.baseline)
        minibatches = make_minibatches(
            estimated,
            num_minibatches=1,
            max_tokens=module.microbatching.tokens,
            pad_id=0,
            layout=module.layout,
            seed=0,
        )
        return DataLoader(minibatches, batch_size=None)  # type: ignore[arg-type]


class MeasuredModule(VapoModule):
    """Notes the bytes at rest, and the peak of a whole training step on top of them."""

    measured: dict[str, float]

    def resting(self) -> int:
        """Weights and optimizer states, in bytes."""
        parameters = sum(p.nbytes for p in self.parameters())
        states = sum(
            value.nbytes
            for optimizer in self.trainer.optimizers
            for state in optimizer.state.values()
            for value in state.values()
        )
        return parameters + states

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> dict[str, float]:
        with MemoryTracker() as tracker:
            metrics = super().training_step(minibatch, batch_idx)
        self.measured["update"] = self.resting() + tracker.peak
        return metrics


def measure(config: FitConfig) -> dict[str, float]:
    """Bytes at the peak of the log-prob passes, and of one optimizer step of both networks."""
    module = MeasuredModule(config, pad_id=0)
    module.measured = {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=make_strategy(config.trainer),
        precision=lightning_precision(config.trainer),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, _FullRollouts(config))
    return module.measured
