"""A run without a config file: a model, data and a reward become a base config and overrides.

`vapo fit --model M --data D --reward R`, the same of `vapo try` and `vapo validate`, and
`vapo.fit(model=..., dataset=..., reward=...)`. What is chosen here is said in one line, and stands
in the run's `config.yaml`. Paths, keys and functions are checked before torch is imported.
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
from vapo.config.schema import SourceConfig
from vapo.errors import UserError, about
from vapo.errors.redactor import redacted
from vapo.networks.model_folders import check_model_folder
from vapo.prompts.columns import take
from vapo.prompts.records import read_records
from vapo.system.installation import root
from vapo.system.row_values import value_text
from vapo.system.shown_text import visible

_NO_CHAT_TEMPLATE = (
    "no chat template, so the prompts are plain text (a chat model needs its own, as "
    "chat_template.jinja in its folder)"
)
_AFTER_HASHES = "#### *(.+)"  # as GSM8K's solutions end
_MOST_HELD_OUT = 64
_ROOM = 0.9  # of the memory; the rest is for what no arithmetic counts
_CACHE = 0.15  # of the memory, for vLLM's keys and values
_CPU_CACHE = 2**30  # bytes; what vLLM takes without a GPU
_FEWER = {"rollouts.max_concurrent_sequences": 64}
_ADAPTERS = {"actor.lora.rank": 32, "actor.optimizer.lr": 1e-5}
_PROBE = {"critic.kind": "probe", "critic.probe.lr": 1e-3, "critic.sampled_logprobs.lr": 0.03}
"""What is changed where all weights do not fit; the rates are those that models of language
learned with (docs/critics_without_a_network.md, conf/worked_sums), the adapters' as much higher
as theirs are."""


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
    gpu_gib: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> OwnModel:
    """Choose the base, and read the data's columns.

    Args:
        model: a Hugging Face folder or hub id.
        data: a .jsonl or .parquet file, a folder or hub id of `datasets`; or rows: a `datasets`
            object, a DataFrame, or mappings, which are written below `output_dir`.
        reward: a verifier's name, a function as `folder/file.py:function`, or the function.
        heldout: as `data`; None: a tenth of the training prompts, at most 64, is held out.
        overrides: the user's own `KEY=VALUE`; they win.
        gpu_gib: choose as on a machine with a GPU of so many GiB; None: as on this one.
        tell: is told what takes some seconds.

    Raises: UserError: no such model, data, column, key, verifier or function.
    """
    try:
        values, told = _from_files(model, data, reward, heldout, list(overrides))
        tell("loading torch and transformers, to look at the model ...")
        return _chosen(model, values, told, list(overrides), gpu_gib)
    except UserError as error:
        error.args = (redacted(str(error)),)
        raise


def _from_files(
    model: str, data: Any, reward: str | Callable[..., Any], heldout: Any, overrides: list[str]
) -> tuple[dict[str, Any], str]:
    """The values that no library is asked for, checked, and what to say of the data."""
    with about("the model"):
        check_model_folder(model, has_tokenizer=True)
    values: dict[str, Any] = {
        "actor.path": model,
        "output_dir": f"runs/{Path(model).name}",
        **_reward(reward),
    }
    if find_spec("vllm") is not None:
        values["rollouts.engine"] = "vllm"
    any_data = {"data.train.kind": "huggingface", "data.train.path": model}
    folder = _on_any_base(values | any_data, overrides)
    rows_dir = Path(folder.output_dir).expanduser() / "data"
    told, num_rows = _put_source(values, "train", data, overrides, rows_dir)
    if heldout is not None:
        _put_source(values, "heldout", heldout, overrides, rows_dir)
    elif not any(text.startswith("data.heldout") for text in overrides):
        values["data.heldout_size"] = max(1, min(_MOST_HELD_OUT, num_rows // 10))
    check_functions(_on_any_base(values, overrides))
    return values, told


def _on_any_base(values: dict[str, Any], overrides: list[str]) -> FitConfig:
    """The config on a base that takes these keys: which one it will be, and whether there is a chat
    template, is known once torch and the tokenizer are there.

    Raises: UserError: none takes them; that of the first.
    """
    errors: list[UserError] = []
    for machine, template in product(("cpu", "gpu"), (False, True)):
        more = as_overrides({"data.chat_template": template, **values})
        try:
            return load_config(FitConfig, [_base(machine)], [*more, *overrides])
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _chosen(
    model: str, values: dict[str, Any], told: str, overrides: list[str], gpu_gib: float | None
) -> OwnModel:
    """What the machine and the tokenizer decide, put to the values."""
    import torch

    from vapo.networks.loading import load_tokenizer
    from vapo.system.host_memory import GIB

    if gpu_gib is None and torch.cuda.is_available():
        gpu_gib = torch.cuda.mem_get_info()[1] / GIB
    has_gpu = gpu_gib is not None
    base = _base("gpu" if has_gpu else "cpu")
    has_template = bool(load_tokenizer(model).chat_template)
    values = {"actor.path": model, "data.chat_template": has_template} | values
    if (_given("rollouts.engine", overrides) or values.get("rollouts.engine")) == "vllm":
        # a size in bytes, since no estimate of memory can tell what vLLM would take by itself
        cache = _CPU_CACHE if gpu_gib is None else int(_CACHE * gpu_gib * GIB)
        values["rollouts.vllm.kv_cache_memory_bytes"] = cache
    parts = [f"begins with conf/scale/{base.name}"]
    if gpu_gib is not None:
        saved, said = _what_fits_the_gpu(base, values, overrides, gpu_gib)
        values |= saved
        parts += said
        if "rollouts.engine" not in values and _given("rollouts.engine", overrides) is None:
            parts.append("the engine transformers, which is slow on a GPU: install vllm")
    else:
        parts += _what_is_trained(base, values, overrides)
    parts += [told, "the chat template" if has_template else _NO_CHAT_TEMPLATE]
    parts.append("KEY=VALUE changes any key that --print_config shows")
    line = f"{'a GPU' if has_gpu else 'no GPU'}: {'; '.join(parts)}"
    return OwnModel([base], [*as_overrides(values), *overrides], redacted(line))


def _base(machine: str) -> Path:
    return root() / f"conf/scale/own_model_{machine}.yaml"


def _given(key: str, overrides: Sequence[str]) -> Any:
    """The value that the user's own overrides give a key, or None."""
    return read_overrides(overrides, describe(FitConfig)).value(key)


def _reward(reward: str | Callable[..., Any]) -> dict[str, Any]:
    if callable(reward) or ":" in reward:
        return {"rewards.verifier": "python", "rewards.function": reward}
    return {"rewards.verifier": reward}


def _put_source(
    values: dict[str, Any], name: str, data: Any, overrides: Sequence[str], rows_dir: Path
) -> tuple[str, int]:
    """Put a source into the config's values; returns what to say of it, and the number of rows.

    Raises: UserError: no rows, or no column with a known name, nor one among the overrides.
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
        column = _given(option_key, overrides)
        if column is None:
            column = guessed(records[0], place=path, key=option_key)
            values[option_key] = column
        columns.append(column)
    answer = value_text(take(records[0], columns[1], place=path, key=f"{key}.answer_column"))
    if "####" in answer and _given(f"{key}.answer_pattern", overrides) is None:
        values[f"{key}.answer_pattern"] = _AFTER_HASHES
        answer = answer.rpartition("####")[2].strip()
    told = (
        f"prompts from column {columns[0]!r}, answers from {columns[1]!r} (the first is "
        f"{visible(answer)!r:.40})"
    )
    most = _given(f"{key}.num_examples", overrides)
    return told, min(len(records), most) if isinstance(most, int) else len(records)


def _source(path: str, key: str, overrides: Sequence[str]) -> FileSource:
    """The source with what the overrides say of its kind."""
    kind = _given(f"{key}.kind", overrides)
    if kind in ("jsonl", "parquet"):
        source: Any = make(SourceConfig, kind=kind, path=path)
    else:
        given = {name: _given(f"{key}.{name}", overrides) for name in ("subset", "split")}
        options = {name: value for name, value in given.items() if value is not None}
        source = make(SourceConfig, kind="huggingface", path=path, **options)
    assert isinstance(source, FileSource)
    return source


def _what_is_trained(base: Path, values: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """What is less than all weights of two networks of the model's size, with its keys."""
    config = load_config(FitConfig, [base], [*as_overrides(values), *overrides])
    said = []
    if config.actor.lora is not None:
        said.append(f"low-rank adapters (actor.lora.rank={config.actor.lora.rank})")
    if config.algorithm.has_critic and config.critic.layers is not None:
        said.append(f"a critic of the model's first {config.critic.layers} layers (critic.layers)")
    return said


def _what_fits_the_gpu(
    base: Path, values: dict[str, Any], overrides: Sequence[str], gpu_gib: float
) -> tuple[dict[str, Any], list[str]]:
    """What is changed where the training of all weights does not fit the first GPU, and why.

    Fewer responses at a time where the trainer's own engine keeps their caches, which costs
    nothing but speed; if that is not enough, adapters and a probe, too. A critic of which the
    overrides say anything is left as it is.
    """
    from vapo.commands.estimate import estimated
    from vapo.system.host_memory import GIB

    def needed(more: dict[str, Any]) -> tuple[FitConfig, float]:
        config = load_config(FitConfig, [base], [*as_overrides(values | more), *overrides])
        return config, estimated(config, tell=lambda line: None)[1].peak / GIB

    asked, whole = needed({})
    if whole <= _ROOM * gpu_gib:
        return {}, []
    why = (
        f"training all weights and sampling {asked.rollouts.max_concurrent_sequences} responses at "
        f"a time need {whole:.1f} GiB of the GPU's {gpu_gib:.1f}"
    )
    fewer = _FEWER if asked.rollouts.engine == "transformers" else {}
    if fewer and needed(fewer)[1] <= _ROOM * gpu_gib:
        return dict(fewer), [f"fewer responses at a time, because {why}"]
    has_own_critic = any(text.startswith(("critic.", "critic=")) for text in overrides)
    takes_probe = not has_own_critic and asked.algorithm.has_critic
    saved = fewer | _ADAPTERS | _PROBE if takes_probe else fewer | _ADAPTERS
    names = "low-rank adapters (actor.lora)"
    if takes_probe:
        names += " and a critic without a network (critic.kind=probe)"
    said = f"{names}, because {why}"
    if (less := needed(saved)[1]) > _ROOM * gpu_gib:
        said += f"; these still need {less:.1f}: docs/recipes.md says what to change next"
    return saved, [said]
