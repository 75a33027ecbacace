"""Rules between the keys of `data`: sources, mixtures, curricula."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vapo.config.data import (
    DataConfig,
    FileSource,
    GeneratedSource,
    Mixture,
    MixtureSource,
    PromptSource,
    ReasoningGymSource,
)
from vapo.config.patterns import pattern_of, shown_pattern
from vapo.config.problem import Problem, Rule
from vapo.config.rewards import verifier_settings

_SETS = ("train", "heldout")


def sources_of(data: DataConfig, name: str) -> dict[str, PromptSource]:
    """The sources of `train` or `heldout` by their dotted keys; of a mixture, all its parts."""
    source = getattr(data, name)
    if source is None:
        return {}
    if not isinstance(source, Mixture):
        return {f"data.{name}": source}
    return {f"data.{name}.sources.{part}": s for part, s in source.sources.items()}  # type: ignore[misc]


def source_name(key: str) -> str:
    """A source's name in its mixture; empty for `data.train` and `data.heldout`."""
    return key.partition(".sources.")[2]


def _all_sources(data: DataConfig) -> Iterator[tuple[str, PromptSource]]:
    for name in _SETS:
        yield from sources_of(data, name).items()


def _of_files(data: DataConfig) -> Iterator[tuple[str, FileSource]]:
    for key, source in _all_sources(data):
        if isinstance(source, FileSource):
            yield key, source


def mixtures_have_sources(config: Any) -> Problem | None:
    for name in _SETS:
        source = getattr(config.data, name)
        if not isinstance(source, Mixture):
            continue
        key, kind = f"data.{name}.sources", f"data.{name}.kind"
        if not source.sources:
            return Problem((kind,), f"{kind} mixture needs sources by name in {key}")
        for part, part_source in source.sources.items():
            if not re.fullmatch(r"[a-z][a-z0-9_]*", str(part)):
                return Problem(
                    (f"{key}.{part}",),
                    f"{key}: the name {part!r} becomes part of metric keys: take small letters, "
                    "digits and _, a letter first",
                )
            if name == "heldout" and part_source.weight != 1:
                own = f"{key}.{part}.weight"
                return Problem((own,), f"{own} has no effect: all held-out prompts are evaluated")
    return None


def templates_have_a_place(config: Any) -> Problem | None:
    for key, source in _all_sources(config.data):
        own, template = f"{key}.prompt_template", source.prompt_template
        if template is not None and "{prompt}" not in template:
            return Problem((own,), f"{own} {template!r} must contain {{prompt}}")
    return None


def answer_pattern_has_a_group(config: Any) -> Problem | None:
    for key, source in _of_files(config.data):
        pattern, own = source.answer_pattern, f"{key}.answer_pattern"
        if pattern is None:
            continue
        compiled = pattern_of(own, pattern)
        if isinstance(compiled, str):
            return Problem((own,), compiled)
        if compiled.groups != 1:
            shown = shown_pattern(pattern)
            return Problem(
                (own,), f"{own} {shown} needs one group, (...), around the answer's part"
            )
    return None


def pass_rates_are_a_range(config: Any) -> Problem | None:
    for key, source in _of_files(config.data):
        low, high = source.min_pass_rate, source.max_pass_rate
        keys = (f"{key}.min_pass_rate", f"{key}.max_pass_rate")
        if low is not None and high is not None and low > high:
            return Problem(keys, f"{keys[0]} {low:g} is above {keys[1]} {high:g}")
        if (low, high) != (None, None) and config.data.heldout is None:
            return Problem(
                keys,
                f"{keys[0] if low is not None else keys[1]} with data.heldout null would choose "
                "the held-out prompts by difficulty too: set data.heldout",
            )
    return None


def curricula_are_schedules(config: Any) -> Problem | None:
    for key, source in _all_sources(config.data):
        if not isinstance(source, GeneratedSource) or not source.curriculum:
            continue
        own, stages = f"{key}.curriculum", source.curriculum
        starts = [stage.from_iteration for stage in stages]
        if key.startswith("data.heldout"):
            return Problem((own,), f"{own}: held-out prompts stay the same, they have no stages")
        if config.data.heldout is None:
            return Problem((own,), f"{own} changes the training prompts: set data.heldout")
        if starts[0] != 0 or starts != sorted(set(starts)):
            return Problem((own,), f"{own}: from_iteration begins with 0 and rises, it is {starts}")
        if any(s < 0 or (level is not None and level < 0) for s, level in _numbers(stages)):
            return Problem((own,), f"{own}: levels are counted from 0")
        is_gym = isinstance(source, ReasoningGymSource)
        if not is_gym and any(stage.level is not None for stage in stages):
            return Problem(
                (own, f"{key}.kind"), f"{own}: `level` is reasoning_gym's; give `options`"
            )
    return None


def _numbers(stages: list[Any]) -> list[tuple[int, int | None]]:
    return [(stage.from_iteration, stage.level) for stage in stages]


def heldout_size_is_used(config: Any) -> Problem | None:
    data = config.data
    if data.heldout is None or data.heldout_size == DataConfig().heldout_size:
        return None
    return Problem(
        ("data.heldout_size", "data.heldout"),
        f"data.heldout_size {data.heldout_size} has no effect beside data.heldout: set "
        "data.heldout=null to split the held-out prompts off the training source",
    )


def heldout_rows_suffice(config: Any) -> Problem | None:
    data = config.data
    if data.heldout is not None or data.heldout_size >= len(sources_of(data, "train")):
        return None
    return Problem(
        ("data.heldout_size", "data.train.sources"),
        f"data.heldout_size {data.heldout_size} is below the number of data.train.sources",
    )


def source_verifiers_agree(config: Any) -> Problem | None:
    """The verdicts of a source that is trained on and held out come from one verifier."""
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for key, source in _all_sources(config.data):
        name = source_name(key)
        if not isinstance(source, MixtureSource):
            continue
        settings = verifier_settings(source)
        other_key, other = seen.setdefault(name, (key, settings))
        if other != settings:
            return Problem(
                (f"{key}.verifier", f"{other_key}.verifier"),
                f"{key} and {other_key} have one name but different verifiers: rename one",
            )
    return None


def one_training_source(config: Any) -> Problem | None:
    if not isinstance(config.data.train, Mixture):
        return None
    return Problem(
        ("data.train.kind",),
        "data.train.kind mixture: this command reads demonstrations of one source",
    )


def no_curriculum(config: Any) -> Problem | None:
    for key, source in sources_of(config.data, "train").items():
        if isinstance(source, GeneratedSource) and source.curriculum:
            own = f"{key}.curriculum"
            return Problem((own,), f"{own} is for `vapo fit`: this command has no iterations")
    return None


DATA_RULES: tuple[Rule, ...] = (
    mixtures_have_sources,
    templates_have_a_place,
    answer_pattern_has_a_group,
    pass_rates_are_a_range,
    curricula_are_schedules,
    heldout_size_is_used,
    heldout_rows_suffice,
    source_verifiers_agree,
)
