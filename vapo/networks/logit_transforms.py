"""Read in a model's config how its architecture scales or caps the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from vapo.errors import UserError
from vapo.functional.logit_transforms import LogitTransform


class _Transform(NamedTuple):
    """What the key `name` of a model's config does to the logits.

    `make` turns the key's value into arguments of `LogitTransform`. One key can multiply in one
    architecture and divide in another, so `make` is right only for a `model_type` that begins with
    one of `model_types`. `neutral` is the value of the key that changes nothing.
    """

    name: str
    neutral: float | None
    model_types: tuple[str, ...]
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
    """Return how a causal language model scales or caps its logits; None: it does neither.

    Args:
        path: the model's folder, for the error.

    Raises: UserError: the config changes logits in a way that the trainer does not compute.
    """
    text_config = config.get_text_config(decoder=True)
    scale_and_cap: dict[str, float] = {}
    for transform in _TRANSFORMS:
        value: Any = getattr(text_config, transform.name, None)
        if value is None or value == transform.neutral:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_number = is_number and 0 < value < math.inf
        if not is_number or not text_config.model_type.startswith(transform.model_types):
            raise UserError(
                f"{path}: {transform.name} is {value!r}; what {text_config.model_type} makes of "
                "its logits by it is not computed by the trainer, so this model is not supported"
            )
        scale_and_cap |= transform.make(float(value))
    return LogitTransform(**scale_and_cap) if scale_and_cap else None
