"""Sequence classifiers for architectures for which Transformers has none (LFM2, Granite 4)."""

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


def register_classifier(config: PreTrainedConfig) -> None:
    """Register a sequence classifier of this config's architecture with Transformers' Auto classes.

    The classifier is Transformers' own head on the architecture's backbone. An architecture that
    has a classifier already, or no backbone, is left as it is.
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
    classifier: Any = type(name, (GenericForSequenceClassification, family), members)
    AutoModelForSequenceClassification.register(kind, classifier, exist_ok=True)
