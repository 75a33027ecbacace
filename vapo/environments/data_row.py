"""What an environment is given of a prompt."""

from __future__ import annotations

from typing import Any

from vapo.system.process import derive_seed
from vapo.types import Prompt


def data_row(prompt: Prompt) -> dict[str, Any]:
    """What an environment is given of a prompt: all columns of its row, and a seed of its own.

    The same for every episode of the prompt, in training and evaluation of every run.
    """
    return {
        **prompt.record,
        **prompt.metadata,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "id": prompt.prompt_id,
        "seed": derive_seed(0, "environment", prompt.source, prompt.prompt_id) % 2**31,
    }
