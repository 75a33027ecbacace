"""A run without a config file: a model, data and a reward become a base config and overrides.

This serves `vapo fit --model M --data D --reward R`, the same options of `vapo try` and
`vapo validate`, `vapo estimate --model M`, and `vapo.fit(model=..., dataset=..., reward=...)`. One
line says what is chosen here, and the run's `config.yaml` has it. Paths, keys and functions are
checked before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from vapo.commands.file_checks import check_functions
from vapo.commands.guessed_columns import answer_column, prompt_column
from vapo.commands.program_rows import written_rows
from vapo.commands.python_values import as_overrides
from vapo.config import FitConfig
from vapo.config.data import FileSource
from vapo.config.kinds import make
from vapo.config.loading import load_config
from vapo.config.options import describe
from vapo.config.overrides import read_overrides
from vapo.config.schema import SourceConfig, TrainerConfig
from vapo.errors import UserError, about
from vapo.errors.redactor import redacted
from vapo.errors.shown_text import visible
from vapo.files.row_values import value_text
from vapo.networks.model_folders import check_model_folder, folder_with_config
from vapo.prompts.columns import take
from vapo.prompts.records import read_records
from vapo.system.installation import root
from vapo.system.torch_build import check_build_has_gpus

_NO_CHAT_TEMPLATE = (
    "no chat template, so the prompts are plain text (a chat model needs its own, as "
    "chat_template.jinja in its folder)"
)
_AFTER_HASHES = "#### *(.+)"  # as GSM8K's solutions end
_MOST_HELD_OUT = 64
_ROOM = 0.9  # share of the memory; the rest is for what no arithmetic counts
_CACHE = 0.15  # share of the memory for vLLM's keys and values
_CPU_CACHE = 2**30  # bytes; what vLLM takes without a GPU
_FEWER = {"rollouts.max_concurrent_sequences": 64}


@dataclass(frozen=True)
class OwnModel:
    """What `--model`, `--data` and `--reward` stand for: config files and overrides.

    `line` tells the user what was chosen.
    """

    files: list[Path]
    overrides: list[str]
    line: str


def own_model(
    model: str,
    data: Any,
    reward: str | Callable[..., Any] | None,
    *,
    heldout: Any = None,
    overrides: Sequence[str] = (),
    gpu_gib: float | None = None,
    config_is_enough: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> OwnModel:
    """Choose a config for training this model on this data with this reward, to suit this machine.

    The data's rows are read to choose columns, and torch is loaded to look at the model.

    Args:
        model: a Hugging Face folder or hub id.
        data: a .jsonl or .parquet file, a folder or hub id of `datasets`; or rows: a `datasets`
            object, a DataFrame, or mappings, which are written below `output_dir`.
        reward: a verifier's name, a function as `folder/file.py:function`, or the function.
        heldout: as `data`; None: a tenth of the training prompts, at most 64, is held out.
        overrides: the user's `KEY=VALUE`, which win over what is chosen here.
        gpu_gib: choose as on a machine with a GPU of this size; if None, as on this machine.
        config_is_enough: read only the model's config.json, as for an estimate of its memory. The
            model's folder needs neither weights nor a tokenizer, and data and reward may be None.
        tell: called with a line of text before a step that takes some seconds.

    Raises: UserError: the model, the data or a function does not exist, or a column, key or
        verifier is unknown.
    """
    try:
        with about("the model"):
            if config_is_enough:
                folder_with_config(model)
            else:
                check_model_folder(model, has_tokenizer=True)
        values, lines = _from_files(model, data, reward, heldout, list(overrides))
        trainer = _on_any_base(values, list(overrides)).trainer
        if not config_is_enough:  # an estimate is also of other machines
            check_build_has_gpus(trainer)
        tell("loading torch and transformers, to look at the model ...")
        if config_is_enough:  # no memory depends on whether there is a chat template
            values["data.chat_template"] = _on_any_base(values, list(overrides)).data.chat_template
        else:
            _check_device(trainer)
            values["data.chat_template"] = has_template = _has_chat_template(model)
            lines.append("the chat template" if has_template else _NO_CHAT_TEMPLATE)
        # `vapo estimate` itself says what would let a run fit
        return _for_this_machine(
            values, lines, list(overrides), gpu_gib, names_changes=not config_is_enough
        )
    except UserError as error:
        error.args = (redacted(str(error)),)
        raise


def _from_files(
    model: str,
    data: Any,
    reward: str | Callable[..., Any] | None,
    heldout: Any,
    overrides: list[str],
) -> tuple[dict[str, Any], list[str]]:
    """Choose the config's values for this model, data and reward, as far as that needs no torch.

    Raises: UserError: a file, column, key or function does not exist.

    Returns: the values, and a list with one text on the data, empty if `data` is None.
    """
    values: dict[str, Any] = {
        "actor.path": model,
        "output_dir": f"runs/{Path(model).name}",
        **({} if reward is None else _reward(reward)),
    }
    if find_spec("vllm") is not None:
        values["rollouts.engine"] = "vllm"
    any_data = {"data.train.kind": "huggingface", "data.train.path": model}
    on_any_data = _on_any_base(values | any_data, overrides)
    if data is None:
        return values | any_data, []
    rows_dir = Path(on_any_data.output_dir).expanduser() / "data"
    data_line, num_rows = _put_source(values, "train", data, overrides, rows_dir)
    names = (Path(path).name for path in (model, values["data.train.path"]))
    values["tracking.experiment"] = " ".join(names)  # scores on the same data are compared
    if heldout is not None:
        _put_source(values, "heldout", heldout, overrides, rows_dir)
    elif not any(text.startswith("data.heldout") for text in overrides):
        values["data.heldout_size"] = max(1, min(_MOST_HELD_OUT, num_rows // 10))
    check_functions(_on_any_base(values, overrides))
    return values, [data_line]


def _on_any_base(values: dict[str, Any], overrides: list[str]) -> FitConfig:
    """Return the config of these values on the first base config that accepts their keys.

    Which base is right, and whether there is a chat template, is only known once torch and the
    tokenizer are loaded.

    Raises: UserError: no base accepts them. The error is that of the first base.
    """
    errors: list[UserError] = []
    for machine, template in product(("cpu", "gpu"), (False, True)):
        more = as_overrides({"data.chat_template": template, **values})
        try:
            return load_config(FitConfig, [_base(machine)], [*more, *overrides])
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _check_device(trainer: TrainerConfig) -> None:
    from vapo.system.libraries import pick_device

    pick_device(trainer)


def _has_chat_template(model: str) -> bool:
    from vapo.networks.loading import load_tokenizer

    return bool(load_tokenizer(model).chat_template)


def _for_this_machine(
    values: dict[str, Any],
    lines: list[str],
    overrides: list[str],
    gpu_gib: float | None,
    *,
    names_changes: bool,
) -> OwnModel:
    """Return the base config for a GPU or for a CPU, and the overrides for it.

    The overrides are `values`, what suits this machine (vLLM's cache, precision, changes to fit the
    GPU's memory), then `overrides`. `lines` describe earlier choices and are added to the line
    shown to the user. `gpu_gib` is the GPU's memory; None: this machine's GPU, if it has one.
    With `names_changes` the line says what would let a run fit that still does not.
    """
    import torch

    from vapo.networks.precision import has_bfloat16_products
    from vapo.system.host_memory import GIB

    is_old_gpu = False
    if gpu_gib is None and torch.cuda.is_available():
        gpu_gib = torch.cuda.mem_get_info()[1] / GIB
        is_old_gpu = not has_bfloat16_products(torch.device("cuda"))
    has_gpu = gpu_gib is not None
    base = _base("gpu" if has_gpu else "cpu")
    values = dict(values)
    if (_override_value("rollouts.engine", overrides) or values.get("rollouts.engine")) == "vllm":
        # a size in bytes, since no estimate of memory can tell what vLLM would take by itself
        cache = _CPU_CACHE if gpu_gib is None else int(_CACHE * gpu_gib * GIB)
        values["rollouts.vllm.kv_cache_memory_bytes"] = cache
    parts = [f"begins with conf/scale/{base.name}"]
    if is_old_gpu:  # the estimate of memory would count bfloat16
        values["trainer.precision"] = "32-true"
        parts.append("float32 (trainer.precision), since this GPU has no products in bfloat16")
    if gpu_gib is not None:
        changes, reasons = _changes_to_fit_the_gpu(
            base, values, overrides, gpu_gib, names_changes=names_changes
        )
        values |= changes
        parts += reasons
        if (
            "rollouts.engine" not in values
            and _override_value("rollouts.engine", overrides) is None
        ):
            parts.append("the engine transformers, which is slow on a GPU: install vllm")
    else:
        parts += _partial_training(base, values, overrides)
        if not names_changes:  # `vapo estimate`
            parts.append("the memory is this machine's; for a GPU of 80 GB add --gpu_memory_gib 80")
    parts += [*lines, "KEY=VALUE changes any key that --print_config shows"]
    line = f"{'a GPU' if has_gpu else 'no GPU'}: {'; '.join(parts)}"
    return OwnModel([base], [*as_overrides(values), *overrides], redacted(line))


def _base(machine: str) -> Path:
    return root() / f"conf/scale/own_model_{machine}.yaml"


def _override_value(key: str, overrides: Sequence[str]) -> Any:
    """Return the value that the user's overrides set for a key, or None if they do not set it."""
    return read_overrides(overrides, describe(FitConfig)).value(key)


def _reward(reward: str | Callable[..., Any]) -> dict[str, Any]:
    if callable(reward) or ":" in reward or reward.endswith(".py"):
        return {"rewards.verifier": "python", "rewards.function": reward}
    return {"rewards.verifier": reward}


def _put_source(
    values: dict[str, Any], name: str, data: Any, overrides: Sequence[str], rows_dir: Path
) -> tuple[str, int]:
    """Add the keys of a data source to `values`. Return a line on it and its number of rows.

    Args:
        name: `train` or `heldout`.
        data: a path, a hub id, or rows, which are written below `rows_dir`.

    Raises: UserError: there are no rows, or no column has a known name and the overrides name none.
    """
    key = f"data.{name}"
    is_path = isinstance(data, str | os.PathLike)
    path = os.fspath(data if is_path else written_rows(data, key, rows_dir))
    source = _source(path, key, overrides)
    records = [record for _, record in read_records(source, key=key)]
    if not records or not isinstance(records[0], Mapping):
        raise UserError(f"{key}: {path} has no rows with columns")
    values |= {f"{key}.kind": "huggingface", f"{key}.path": path}
    columns = []
    for option, guessed in (("prompt_column", prompt_column), ("answer_column", answer_column)):
        option_key = f"{key}.{option}"
        column = _override_value(option_key, overrides)
        if column is None:
            column = guessed(records[0], place=path, key=option_key)
            values[option_key] = column
        columns.append(column)
    answer = value_text(take(records[0], columns[1], place=path, key=f"{key}.answer_column"))
    if "####" in answer and _override_value(f"{key}.answer_pattern", overrides) is None:
        values[f"{key}.answer_pattern"] = _AFTER_HASHES
        answer = answer.rpartition("####")[2].strip()
    data_line = (
        f"prompts from column {columns[0]!r}, answers from {columns[1]!r} (the first is "
        f"{visible(answer)!r:.40})"
    )
    max_examples = _override_value(f"{key}.num_examples", overrides)
    num_rows = len(records)
    return data_line, min(num_rows, max_examples) if isinstance(max_examples, int) else num_rows


def _source(path: str, key: str, overrides: Sequence[str]) -> FileSource:
    """Return the source at `path`, with the kind, subset and split that the overrides set."""
    kind = _override_value(f"{key}.kind", overrides)
    if kind in ("jsonl", "parquet"):
        source: Any = make(SourceConfig, kind=kind, path=path)
    else:
        subset_and_split = {
            name: _override_value(f"{key}.{name}", overrides) for name in ("subset", "split")
        }
        options = {name: value for name, value in subset_and_split.items() if value is not None}
        source = make(SourceConfig, kind="huggingface", path=path, **options)
    assert isinstance(source, FileSource)
    return source


def _partial_training(base: Path, values: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return a text if the actor trains low-rank adapters only, and one if the critic is smaller.

    The critic is smaller if `critic.layers` limits it to the model's first layers. The config that
    is read is `base` with `values` and then `overrides` applied.
    """
    config = load_config(FitConfig, [base], [*as_overrides(values), *overrides])
    parts = []
    if config.actor.lora is not None:
        parts.append(f"low-rank adapters (actor.lora.rank={config.actor.lora.rank})")
    if config.algorithm.has_critic and config.critic.layers is not None:
        parts.append(f"a critic of the model's first {config.critic.layers} layers (critic.layers)")
    return parts


def _changes_to_fit_the_gpu(
    base: Path,
    values: dict[str, Any],
    overrides: Sequence[str],
    gpu_gib: float,
    *,
    names_changes: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Return changes that let the training fit the GPU, and reasons; both empty if it fits already.

    The first change is fewer responses at a time, if the engine is transformers: it costs nothing
    but speed. If that is not enough, adapters and a probe follow. A critic that the overrides
    configure is not changed.

    Args:
        names_changes: where these do not fit either, the reason names what would.
    """
    from vapo.commands.estimate import peak_bytes
    from vapo.studies.estimate.memory_changes import (
        PROBE,
        adapters,
        changes_phrase,
        changes_that_fit,
    )
    from vapo.system.host_memory import GIB

    def config_and_peak_gib(more: dict[str, Any]) -> tuple[FitConfig, float]:
        config = load_config(FitConfig, [base], [*as_overrides(values | more), *overrides])
        return config, peak_bytes(config) / GIB

    full_config, full_gib = config_and_peak_gib({})
    if full_gib <= _ROOM * gpu_gib:
        return {}, []
    why = (
        "training all weights and sampling "
        f"{full_config.rollouts.max_concurrent_sequences} responses at a time need "
        f"{full_gib:.1f} GiB of the GPU's {gpu_gib:.1f}"
    )
    fewer = _FEWER if full_config.rollouts.engine == "transformers" else {}
    if fewer and config_and_peak_gib(fewer)[1] <= _ROOM * gpu_gib:
        return dict(fewer), [f"fewer responses at a time, because {why}"]
    has_own_critic = any(text.startswith(("critic.", "critic=")) for text in overrides)
    takes_probe = not has_own_critic and full_config.algorithm.has_critic
    changes = fewer | adapters(full_config).values | (PROBE if takes_probe else {})
    names = "low-rank adapters (actor.lora)"
    if takes_probe:
        names += " and a critic without a network (critic.kind=probe)"
    reason = f"{names}, because {why}"
    smallest_config, smallest_gib = config_and_peak_gib(changes)
    if smallest_gib > _ROOM * gpu_gib:
        reason += f"; these still need {smallest_gib:.1f}"
        if names_changes:
            fitting = changes_that_fit(smallest_config, _ROOM * gpu_gib * GIB, peak_bytes)
            reason += f": {changes_phrase(fitting)}"
    return changes, [reason]
