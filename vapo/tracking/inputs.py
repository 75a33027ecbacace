"""Describes a run's inputs for MLflow: prompts, models and config values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.schema import TrackingConfig
from vapo.config.written import flatten_written, written_tree
from vapo.prompts.fingerprint import fingerprint, prompts_digest
from vapo.prompts.load import PromptSplit
from vapo.tracking.records import InputData
from vapo.types import Prompt


def dataset_inputs(config: FitConfig, prompts: PromptSplit) -> list[InputData]:
    """Return the training and held-out prompts as MLflow data sets, with digests of their texts.

    A mixture gives one data set for each of its sources.
    """
    data = written_tree(config)["data"]
    train = data["train"]
    parts = {"train": ("", train)}  # of a mixture each source, by its name in the record
    if train["kind"] == "mixture":
        parts = {f"train: {name}": (name, source) for name, source in train["sources"].items()}
    sets: list[tuple[str, str, Mapping[str, Any], Sequence[Prompt]]] = [
        ("training", name, source, [p for p in prompts.train if p.source == part])
        for name, (part, source) in parts.items()
    ]
    sets.append(("evaluation", "heldout", data["heldout"] or train, prompts.heldout))
    return [
        InputData(
            name=f"{source.get('task') or source.get('path') or source['kind']} ({name})",
            context=context,
            digest=prompts_digest(values),
            num_rows=len(values),
            source=json.dumps(source, default=str),
        )
        for context, name, source, values in sets
    ]


def model_tags(config: FitConfig, critic_path: str | None) -> dict[str, str]:
    """Return the tags `model/actor` and `model/critic`: paths, with fingerprints if local."""
    paths = {"actor": config.actor.path, "critic": critic_path}
    return {
        f"model/{name}": f"{config.from_environment.text_of(path)} "
        f"({fingerprint(path) or 'not a local folder'})"
        for name, path in paths.items()
        if path is not None
    }


def recorded_tracking(config: FitConfig | SftConfig | RewardModelConfig) -> TrackingConfig:
    """Return the config's block `tracking`, with credentials removed from its tags."""
    return replace(config.tracking, tags=written_tree(config)["tracking"]["tags"])


def params(config: FitConfig) -> dict[str, Any]:
    """Return the config's values by dotted key, without credentials, `tracking` and `output_dir`.

    The entry `_differs` lists what differs from the config files' values, or in a sweep from the
    sweep's base. It is first, because MLflow lists params by name.
    """
    flat: Mapping[str, Any] = flatten_written(config)
    bookkeeping = ("tracking.", "output_dir")
    values = {key: value for key, value in flat.items() if not key.startswith(bookkeeping)}
    differs = config.tracking.tags.get("differs") or config.sources.differences()
    return {"_differs": differs, **values}
