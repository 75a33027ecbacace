"""Sequence classifiers of architectures for which Transformers has none (LFM2, Granite 4, ...)."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

CLASSIFIER = "ForSequenceClassification"


def know_classifier(config: PreTrainedConfig) -> None:
    """Let Transformers' Auto classes know a sequence classifier of this config's architecture.

    It is Transformers' own head on the backbone. Where there is no such backbone, they go on
    knowing none.
    """
    kind = type(config)
    backbone: Any = MODEL_MAPPING.get(kind, None)
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or backbone is None:
        return
    family = next(
        base
        for base in backbone.__mro__[1:]
        if issubclass(base, PreTrainedModel) and base is not PreTrainedModel
    )
    name = backbone.__name__.removesuffix("Model") + CLASSIFIER
    members = {
        "__module__": family.__module__,
        "base_model_prefix": family.base_model_prefix,
        "config_class": kind,
    }
    made: Any = type(name, (GenericForSequenceClassification, family), members)
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)  # a kind of its own
