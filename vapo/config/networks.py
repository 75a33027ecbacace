"""The options of the actor, and those of its optimizer and adapters, which the critic has too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omegaconf import MISSING

from vapo.config.kinds import option, section


@dataclass
class OptimizerConfig:
    """Options of AdamW, whose learning rate rises linearly in the warmup and then is constant."""

    lr: float = option(1e-6, "learning rate (paper: actor 1e-6, critic 2e-6)", gt=0)
    warmup_steps: int = option(0, "optimizer steps of linear warmup (paper: not stated)", ge=0)
    weight_decay: float = option(0.0, "AdamW weight decay", ge=0)
    beta1: float = option(0.9, "AdamW beta1", ge=0, lt=1)
    beta2: float = option(0.95, "AdamW beta2", ge=0, lt=1)
    max_grad_norm: float = option(1.0, "gradient norm clip of this network", gt=0)


@dataclass
class LoraConfig:
    """Options of low-rank adapters on frozen weights: W + lora_alpha / rank * B A."""

    rank: int = option(16, "rows of A, columns of B", ge=1)
    lora_alpha: float = option(32.0, "scale: the product is taken lora_alpha / rank times", gt=0)
    target_modules: str = option(
        "all",
        "which linear modules of the decoder layers get one: `all`, or names separated by commas, "
        "as q_proj,v_proj",
    )


@dataclass
class ActorConfig:
    path: str = option(MISSING, "Hugging Face folder or hub id of the initial policy")
    optimizer: OptimizerConfig = section(OptimizerConfig, "the actor's optimizer")
    dtype: Literal["float32", "bfloat16"] = option("float32", "parameter dtype")
    gradient_checkpointing: bool | Literal["auto"] = option(
        False,
        "recompute activations in the backward; auto: only where the memory of one GPU is too "
        "small for them; elsewhere they are recomputed",
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option(
        "auto", "attention kernel; auto takes what transformers chooses, or eager for capped scores"
    )
    lora: LoraConfig | None = option(
        None, "train low-rank adapters instead of the weights (docs/models.md); null: off"
    )
