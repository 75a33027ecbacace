"""Typed configuration: schema, the seven components, loading."""

from vapo.config.components import Components
from vapo.config.hyperparameters import Hyperparameters, resolve
from vapo.config.schema import FitConfig, RewardModelConfig, SftConfig

__all__ = [
    "Components",
    "FitConfig",
    "Hyperparameters",
    "RewardModelConfig",
    "SftConfig",
    "resolve",
]
