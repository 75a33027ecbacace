"""Which weights of the critic are trained: all, all but some by name, or adapters and the head."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.networks.lora import add_adapters
from vapo.system.seeding import derive_seed

_FROZEN, _LORA = "critic.frozen", "critic.lora"


def choose_trained(model: PreTrainedModel, config: FitConfig) -> None:
    """Freeze the critic's weights that are not trained; must come before its optimizer is made.

    Raises: UserError: a text of critic.frozen is in no name, or all weights would be frozen; see
        `lora.add_adapters`.
    """
    options = config.critic
    if options.lora is not None:
        seed = derive_seed(config.seed, "critic lora") % 2**32
        add_adapters(model, options.lora, seed=seed, key=_LORA)
    if options.frozen:
        freeze(model, options.frozen)


def freeze(model: PreTrainedModel, texts: Sequence[str]) -> None:
    """Take from training the parameters whose names contain one of the texts.

    Source: SAO (`self_attn.`).
    Raises: UserError: a text is in no name, or all parameters would be frozen.
    """
    parameters = dict(model.named_parameters())
    unused = [text for text in texts if not any(text in name for name in parameters)]
    if unused:
        raise UserError(
            f"{_FROZEN}: {', '.join(map(repr, unused))} is in no parameter's name of "
            f"{type(model).__name__}; their parts are {', '.join(_parts(list(parameters)))}"
        )
    frozen = [name for name in parameters if any(text in name for text in texts)]
    if len(frozen) == len(parameters):
        raise UserError(
            f"{_FROZEN}: {', '.join(map(repr, texts))} freezes all {len(frozen)} parameters of "
            "the critic, and nothing would be trained: name fewer"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)


def _parts(names: list[str]) -> list[str]:
    """The modules' names in the parameters' names, without numbers, each once."""
    parts = dict.fromkeys(part for name in names for part in name.split(".")[:-1])
    return [f"{part}." for part in parts if not part.isdigit()]
