"""Save networks as plain Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config.networks import LoraConfig
from vapo.networks.actor_critic import Actor, Critic, CriticEnsemble, members_of
from vapo.networks.loading import load_tokenizer
from vapo.networks.lora import whole_weights
from vapo.system.distributed import rank


def save_folder(
    model: PreTrainedModel,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
) -> None:
    """Write weights (safetensors), config and tokenizer, as `from_pretrained` loads them.

    The weights get the config's file permissions; safetensors writes them for the owner alone.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    for weights in Path(folder).glob("*.safetensors"):
        shutil.copymode(Path(folder) / "config.json", weights)


def save_network(
    network: Actor | Critic, tokenizer_path: str, folder: Path, *, lora: LoraConfig | None = None
) -> None:
    """Save a live, maybe sharded, network, its adapters merged. Every rank calls it; 0 writes.

    Several critics get a folder each, named by their numbers from 0.
    """
    if isinstance(network, CriticEnsemble):
        for number, member in enumerate(members_of(network)):
            save_network(member, tokenizer_path, folder / str(number), lora=lora)
        return
    state = {name: tensor.cpu().contiguous() for name, tensor in whole_weights(network, lora)}
    if rank() == 0:
        save_folder(network.model, state, load_tokenizer(tokenizer_path), folder)
