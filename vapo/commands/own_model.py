"""A run without a config file: a model, data and a reward become a base config and overrides.

`vapo fit --model M --data D --reward R` and `vapo.fit(model=..., dataset=..., reward=...)`. What is
chosen here is said in one line, and stands in the run's `config.yaml`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from vapo.commands.estimate import estimated
from vapo.commands.python_values import as_overrides
from vapo.config import FitConfig
from vapo.config.data import HuggingfaceSource
from vapo.config.loading import load_config
from vapo.errors import UserError, about
from vapo.networks.loading import load_tokenizer
from vapo.networks.model_folders import check_model_folder
from vapo.prompts.sources import read_records
from vapo.system.installation import root

PROMPTS = ("prompt", "question", "problem", "query", "input", "instruction")
ANSWERS = ("answer", "solution", "ground_truth", "target", "gold", "label", "final_answer")
_MOST_HELD_OUT = 64
_ROOM = 0.9  # of the memory; the rest is for what no arithmetic counts
_ADAPTERS = {
    "actor.lora.rank": 32,
    "actor.optimizer.lr": 1e-5,
    "critic.lora.rank": 32,
    "critic.optimizer.lr": 5e-5,
}
"""Where all weights do not fit; rates as much higher as adapters are trained with."""


@dataclass(frozen=True)
class OwnModel:
    """A base config and what is put over it, with what to say of the choice."""

    files: list[Path]
    overrides: list[str]
    line: str


def own_model(
    model: str,
    data: Any,
    reward: str | Callable[..., Any],
    *,
    heldout: Any = None,
    overrides: Sequence[str] = (),
) -> OwnModel:
    """Choose the base, and read the data's columns.

    Args:
        model: a Hugging Face folder or hub id.
        data: a .jsonl or .parquet file, a folder or hub id of `datasets`; or rows: a `datasets`
            object, a DataFrame, or mappings, which are written below `output_dir`.
        reward: a verifier's name, a function as `folder/file.py:function`, or the function.
        heldout: as `data`; None: a tenth of the training prompts, at most 64, is held out.
        overrides: the user's own `KEY=VALUE`; they win.

    Raises: UserError: no such model, data or column.
    """
    with about("the model"):
        check_model_folder(model, has_tokenizer=True)
    has_gpu = torch.cuda.is_available()
    base = root() / f"conf/scale/own_model_{'gpu' if has_gpu else 'cpu'}.yaml"
    has_template = bool(load_tokenizer(model).chat_template)
    values: dict[str, Any] = {
        "actor.path": model,
        "data.chat_template": has_template,
        "output_dir": _given("output_dir", overrides) or f"runs/{Path(model).name}",
        **_reward(reward),
    }
    if find_spec("vllm") is not None:
        values["rollouts.engine"] = "vllm"
    columns, num_rows = _put_source(values, "train", data, overrides)
    if heldout is not None:
        _put_source(values, "heldout", heldout, overrides)
    else:
        values["data.heldout_size"] = max(1, min(_MOST_HELD_OUT, num_rows // 10))
    adapters = {} if _fits(base, [*as_overrides(values), *overrides]) else _ADAPTERS
    line = (
        f"{'a GPU' if has_gpu else 'no GPU'}: begins with conf/scale/{base.name}"
        f"{', with low-rank adapters to fit its memory' if adapters else ''}; prompts from column "
        f"{columns[0]!r}, answers from {columns[1]!r}, {'the' if has_template else 'no'} chat "
        "template; KEY=VALUE changes any key that --print_config shows"
    )
    return OwnModel([base], [*as_overrides(values | adapters), *overrides], line)


def _given(key: str, overrides: Sequence[str]) -> str | None:
    values = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == key]
    return values[-1] if values else None


def _reward(reward: str | Callable[..., Any]) -> dict[str, Any]:
    if callable(reward) or ":" in reward:
        return {"rewards.verifier": "python", "rewards.function": reward}
    return {"rewards.verifier": reward}


def _put_source(
    values: dict[str, Any], name: str, data: Any, overrides: Sequence[str]
) -> tuple[list[str], int]:
    """Put a source into the config's values; returns its two columns and the number of rows.

    Raises: UserError: no rows, or no column with a known name, nor one among the overrides.
    """
    key = f"data.{name}"
    path = data if isinstance(data, str) else os.fspath(_written(data, key, values["output_dir"]))
    source = HuggingfaceSource(path=path, **_options_given(key, overrides))
    records = [record for _, record in read_records(source, key=key)]
    if not records or not isinstance(records[0], Mapping):
        raise UserError(f"{key}: {path} has no rows with columns")
    values |= {f"{key}.kind": "huggingface", f"{key}.path": path}
    columns = []
    for option, known in (("prompt_column", PROMPTS), ("answer_column", ANSWERS)):
        column = _given(f"{key}.{option}", overrides)
        if column is None:
            column = next((n for n in known if n in records[0]), None)
            if column is None:
                raise UserError(
                    f"{key}.{option}: {path} has none of the columns {', '.join(known)}; its "
                    f"columns are {', '.join(map(str, records[0]))}: set {key}.{option}=ITS_NAME"
                )
            values[f"{key}.{option}"] = column
        columns.append(column)
    return columns, len(records)


def _options_given(key: str, overrides: Sequence[str]) -> dict[str, Any]:
    given = {name: _given(f"{key}.{name}", overrides) for name in ("subset", "split")}
    return {name: value for name, value in given.items() if value is not None}


def _written(rows: Any, key: str, output_dir: str) -> Path:
    """Rows of a program in a file of their own, by their content, so that a run can resume.

    Raises: UserError: a row that is no JSON object; names it.
    """
    if hasattr(rows, "to_dict") and not hasattr(rows, "features"):  # a DataFrame
        rows = rows.to_dict("records")
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise UserError(f"{key}: a path, a hub id, or rows, not {type(rows).__name__}")
    lines = []
    for number, row in enumerate(rows, start=1):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"{key}: row {number} is no object of JSON: {error}") from None
    text = "".join(f"{line}\n" for line in lines).encode()
    path = Path(output_dir, "data", f"{hashlib.blake2b(text, digest_size=6).hexdigest()}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def _fits(base: Path, overrides: Sequence[str]) -> bool:
    """Whether training fits the memory of the first GPU, or of this machine, by arithmetic."""
    config = load_config(FitConfig, [base], overrides)
    _, estimate, *_ = estimated(config, tell=lambda line: None)
    is_on_gpu = torch.cuda.is_available()
    there = torch.cuda.mem_get_info()[1] if is_on_gpu else psutil.virtual_memory().total
    return estimate.peak <= _ROOM * there
