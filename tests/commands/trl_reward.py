"""A reward function as one writes it for TRL. Its process imports nothing else."""

from __future__ import annotations

from typing import Any


def ends_in_a_digit(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    """As one writes it for TRL."""
    assert all(columns["prompts"]), columns
    assert set(solution) <= {"2", "4", "6", "8"}
    return [float(text[-1:].isdigit()) for text in completions]
