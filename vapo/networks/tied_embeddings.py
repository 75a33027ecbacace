"""Whether a model's embedding and its output layer are one matrix, by the weights in its folder."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from vapo.networks.model_configs import refusals
from vapo.networks.model_folders import local_folder, weight_files

logger = logging.getLogger(__name__)

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")
_ROWS_AT_A_TIME = 4096


def set_tied(config: PreTrainedConfig, is_tied: bool) -> None:
    """Set `tie_word_embeddings` in a config and in its part for the text model."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if hasattr(part, "tie_word_embeddings"):
            part.tie_word_embeddings = is_tied


def untie_as_saved(path: str, config: PreTrainedConfig) -> None:
    """Set a causal language model's config to untied embeddings if its folder has two matrices.

    This is done only if the two differ, with a warning that names the folder. Transformers loads
    such a folder untied, too. Other programs tie it, which gives another model.
    """
    folder = local_folder(path)
    says_tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    if folder is None or not says_tied:
        return
    files = [file for file in weight_files(folder) if file.is_file()]
    states = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    with refusals(path, "weights"):
        matrices_differ = _matrices_differ(states)
    if matrices_differ:
        set_tied(config, False)
        logger.warning(
            "%s: config.json has tie_word_embeddings=true, and the folder has an embedding and an "
            "output layer that differ: both are read, and what is saved from them says false",
            path,
        )


@lru_cache(maxsize=16)
def _matrices_differ(states: tuple[tuple[str, int, int], ...]) -> bool:
    """Whether weight files have an embedding and an output layer, and the two matrices differ.

    Each file is given as (path, size, time of change), so that a changed file is read again.
    """
    places: dict[str, tuple[str, str]] = {}
    for file, _, _ in states:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                for role, ends in (("in", _EMBEDDINGS), ("out", _OUTPUT_LAYERS)):
                    if name.endswith(ends):
                        places[role] = (file, name)
    if len(places) < 2:
        return False
    with (
        safe_open(places["in"][0], framework="pt") as input_file,
        safe_open(places["out"][0], framework="pt") as output_file,
    ):
        slices: list[Any] = [
            input_file.get_slice(places["in"][1]),
            output_file.get_slice(places["out"][1]),
        ]
        shapes = [tuple(part.get_shape()) for part in slices]
        if shapes[0] != shapes[1]:
            return True
        starts = range(0, shapes[0][0], _ROWS_AT_A_TIME)
        return not all(
            torch.equal(*(part[start : start + _ROWS_AT_A_TIME] for part in slices))
            for start in starts
        )
