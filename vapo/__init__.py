"""VAPO (arXiv 2504.05118): value-based reinforcement learning for reasoning models."""

__version__ = "0.1.0"
