"""The rows of a shipped task, read as the config's source of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vapo.config.data import SourceConfig
from vapo.config.kinds import make
from vapo.prompts.generators import generated_records


def generate(task: str, options: Mapping[str, Any]) -> list[Any]:
    source = make(SourceConfig, kind="procedural", task=task, options=options, num_examples=1)
    return [record for _, record in generated_records(source, "data.train")]
