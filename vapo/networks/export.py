"""Save networks as plain Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from vapo.config.networks import LoraConfig
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic, CriticEnsemble, members_of
from vapo.networks.generation_files import GENERATION_FILE
from vapo.networks.loading import load_tokenizer
from vapo.networks.lora import whole_weights
from vapo.networks.model_configs import quiet
from vapo.networks.tied_embeddings import set_tied
from vapo.networks.written_folders import whole_folder
from vapo.system.distributed import rank


def save_folder(
    model: PreTrainedModel,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    generation: bytes | None = None,
) -> None:
    """Write a model folder that `from_pretrained` loads: `state` as safetensors, config, tokenizer.

    If a part fails, nothing is written. The weights get the config's file permissions, because
    safetensors makes them readable by the owner only. The config says that the embeddings are tied
    only if they are one matrix.

    Args:
        generation: the source's generation_config.json, which is written unchanged. None: the
            model's generation config is written.
    """
    if _has_two_matrices(model, state):
        set_tied(model.config, False)
    with whole_folder(Path(folder)) as aside:
        with quiet():
            model.save_pretrained(aside, state_dict=state)
        tokenizer.save_pretrained(aside)
        if generation is not None:
            (aside / GENERATION_FILE).write_bytes(generation)
        for weights in aside.glob("*.safetensors"):
            shutil.copymode(aside / "config.json", weights)


def check_saving(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Check that a model's config and tokenizer can be saved, by saving them to a temporary folder.

    `path` is the model's folder, for the error. This is called before a training whose result is
    to be saved.

    Raises: UserError: the config or the tokenizer cannot be saved.
    """
    with TemporaryDirectory() as aside:
        parts: dict[str, Any] = {"config.json": config, "tokenizer": tokenizer}
        for name, part in parts.items():
            try:
                part.save_pretrained(aside)
            except Exception as error:  # each class raises its own kinds
                reason = " ".join(str(error).split()) or type(error).__name__
                raise UserError(
                    f"{path}: its {name} can be loaded, but not saved again: {reason:.400}"
                ) from error


def _has_two_matrices(model: PreTrainedModel, state: dict[str, Tensor]) -> bool:
    """Whether a state dict has an output layer's weights that differ from the embedding's."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f"{name}.weight" for name, module in model.named_modules() if module in layers]
    weights = [state[name] for name in names if name in state]
    return layers[1] is not None and len(weights) == 2 and not torch.equal(*weights)


def network_folders(network: Actor | Critic, folder: Path) -> dict[Path, Actor | Critic]:
    """Map each folder to the network that is saved in it.

    An ensemble's critics get the folders 0, 1 and so on in `folder`. Any other network gets
    `folder` itself.
    """
    if isinstance(network, CriticEnsemble):
        return {folder / str(number): member for number, member in enumerate(members_of(network))}
    return {folder: network}


def save_network(
    network: Actor | Critic, tokenizer_path: str, folder: Path, *, lora: LoraConfig | None = None
) -> None:
    """Save a live, maybe sharded, network as a Hugging Face folder, with its adapters merged.

    Every rank must call this, and rank 0 writes. Several critics get a folder each
    (`network_folders`).

    Args:
        tokenizer_path: the folder whose tokenizer is saved with the network.
        lora: the options of the network's adapters; None: it has none.
    """
    for path, member in network_folders(network, folder).items():
        state = {name: tensor.cpu().contiguous() for name, tensor in whole_weights(member, lora)}
        if rank() == 0:
            save_folder(member.model, state, load_tokenizer(tokenizer_path), path)
