"""A random two-layer policy with a one-character tokenizer, as a Hugging Face folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from vapo.networks.new_model import make_tokenizer
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.types import Prompt, Rollout

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz=;"


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(ALPHABET)


def tiny_model(*, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen2ForCausalLM:
    """Wide initial weights, so that next-token distributions are far from flat."""
    torch.manual_seed(0)
    settings = {**SIZES, "vocab_size": len(tiny_tokenizer())}
    model = Qwen2ForCausalLM(Qwen2Config(**{**settings, **options}))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def save_tiny_folder(folder: Path, model: PreTrainedModel | None = None) -> Path:
    (model or tiny_model()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def ragged_prompts(num: int, *, longest: int = 24, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    rows = [
        tuple(draw.randrange(2, len(ALPHABET) + 2) for _ in range(draw.randint(1, longest)))
        for _ in range(num)
    ]
    return [Prompt(f"made-up:{i}", f"problem {i}", ids, "1") for i, ids in enumerate(rows)]


def sample(
    model: PreTrainedModel,
    prompts: list[Prompt],
    *,
    group_size: int = 4,
    rows: int = 8,
    seed: int = 7,
    **settings: Any,
) -> list[Rollout]:
    from tests.rollouts.playing import sample_all  # which uses this file

    sampler = TransformersSampler(
        model, tiny_tokenizer(), max_concurrent_sequences=rows, device="cpu"
    )
    settings = {"max_response_tokens": 32, **settings}
    return sample_all(
        sampler, prompts, group_size=group_size, settings=SamplingSettings(**settings), seed=seed
    )


@torch.no_grad()
def full_forward_logits(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """[T, V]: the logits that predict each response token, by one unpadded forward, no cache."""
    ids = [*rollout.prompt.prompt_ids, *rollout.response_ids]
    logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits[len(rollout.prompt.prompt_ids) - 1 : -1]
