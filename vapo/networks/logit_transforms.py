"""What an architecture does to the logits after its output layer: it scales or caps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from vapo.errors import UserError
from vapo.functional.logit_transforms import LogitTransform


class _Transform(NamedTuple):
    """A config's name, its value that changes nothing, and the kinds of models that mean by it
    what is made of it here: one name can multiply in one architecture and divide in another.
    """

    name: str
    neutral: float | None
    model_types: tuple[str, ...]  # beginnings of them
    make: Callable[[float], dict[str, float]]


_TRANSFORMS = (
    _Transform(
        "final_logit_softcapping", None, ("gemma", "vaultgemma", "nanochat"), lambda x: {"cap": x}
    ),
    _Transform("logit_scale", 1.0, ("cohere2", "cohere"), lambda x: {"scale": x}),
    _Transform("logits_scaling", 1.0, ("granite",), lambda x: {"scale": 1 / x}),
    _Transform("lm_head_multiplier", 1.0, ("falcon_h1",), lambda x: {"scale": x}),
)


def logit_transform(path: str, config: PreTrainedConfig) -> LogitTransform | None:
    """What becomes of a causal language model's logits; None: nothing.

    Raises: UserError: something that the trainer's log-probs would not have.
    """
    text_config = config.get_text_config(decoder=True)
    found: dict[str, float] = {}
    for transform in _TRANSFORMS:
        value: Any = getattr(text_config, transform.name, None)
        if value is None or value == transform.neutral:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not is_number or not text_config.model_type.startswith(transform.model_types):
            raise UserError(
                f"{path}: {transform.name} is {value!r}; what {text_config.model_type} makes of "
                "its logits by it is not computed by the trainer, so this model is not supported"
            )
        found |= transform.make(float(value))
    return LogitTransform(**found) if found else None
