"""Rules between the keys of `data` and `rewards`: sources, mixtures, curricula, verifiers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vapo.config.data import (
    DataConfig,
    FileSource,
    GeneratedSource,
    Mixture,
    MixtureSource,
    ReasoningGymSource,
    all_sources,
    source_name,
    sources_of,
    verifier_blocks,
)
from vapo.config.rewards import REWARD_RANGE, RegexVerifier, SeveralVerifiers, verifier_settings
from vapo.config.rules import Problem, Problems, Rule, bad_pattern


def mixtures_have_sources(config: Any) -> Problems:
    for name in ("train", "heldout"):
        source = getattr(config.data, name)
        if not isinstance(source, Mixture):
            continue
        key, kind = f"data.{name}.sources", f"data.{name}.kind"
        if not source.sources:
            yield Problem(f"{kind} mixture needs sources by name in {key}", (kind,))
        yield from _names_fit_metrics(key, source.sources)
        for part, part_source in source.sources.items():
            if name == "heldout" and part_source.weight != 1:
                yield Problem(
                    f"{key}.{part}.weight has no effect: all held-out prompts are evaluated; leave "
                    "it out"
                )


def _names_fit_metrics(key: str, names: Iterable[str]) -> Problems:
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)):
            yield Problem(
                f"{key}: the name {name!r} becomes part of metric keys: take small letters, "
                "digits and _, a letter first",
                (f"{key}.{name}",),
            )


def several_verifiers_have_names(config: Any) -> Problems:
    rewards, key = config.rewards, "rewards.verifiers"
    if not isinstance(rewards, SeveralVerifiers):
        return
    yield from _names_fit_metrics(key, rewards.verifiers)
    if not rewards.verifiers:
        yield Problem(
            f"rewards.verifier several needs verifiers by name in {key}, as "
            f"{key}.answer.verifier=math {key}.form.verifier=python {key}.form.weight=0.2",
            ("rewards.verifier",),
        )
    elif rewards.deciding not in rewards.verifiers:
        yield Problem(
            f"rewards.correct_by {rewards.correct_by} is not a verifier of {key}: name one of "
            f"{', '.join(rewards.verifiers)}"
        )
    elif not any(block.weight for block in rewards.verifiers.values()):
        yield Problem(f"{key}: all weights are 0, so every reward is 0: give one a weight", (key,))
    largest = max(abs(config.rewards.correct), abs(config.rewards.incorrect))
    for name, block in rewards.verifiers.items():
        if abs(block.weight) * largest * len(rewards.verifiers) > REWARD_RANGE["le"]:
            yield Problem(
                f"{key}.{name}.weight {block.weight:g} times the reward {largest:g} is too large: "
                f"a response's reward is at most {REWARD_RANGE['le']:g} in size"
            )


def templates_have_a_place(config: Any) -> Problems:
    for key, source in all_sources(config.data):
        template = source.prompt_template
        if template is not None and "{prompt}" not in template:
            yield Problem(f"{key}.prompt_template {template!r} must contain {{prompt}}")
    if "{prompt}" not in config.data.prompt_template:
        yield Problem(
            f"data.prompt_template {config.data.prompt_template!r} must contain {{prompt}}, where "
            "the problem goes"
        )
    if config.data.system_prompt is not None and not config.data.chat_template:
        yield Problem(
            "data.system_prompt has no effect without data.chat_template=true: set that, or leave "
            "data.system_prompt out"
        )


_SET_BY_VAPO = {
    **dict.fromkeys(
        ("messages", "conversation"), "the messages are those of the rows, with data.system_prompt"
    ),
    "add_generation_prompt": "prompts always have it",
    **dict.fromkeys(
        (
            *("continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs"),
            *("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
        ),
        "it is an argument of the tokenizer, not of its template",
    ),
    "chat_template": "write the template into chat_template.jinja in the model's folder",
    **dict.fromkeys(
        ("tools", "documents"),
        "prompts here have no tools and documents: describe them in the text of the rows",
    ),
    **dict.fromkeys(
        [f"{role}_token" for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")],
        "it is the tokenizer's",
    ),
}
"""Names that transformers' `apply_chat_template` knows, and why they are no variables to set."""


def template_variables_can_be_set(config: Any) -> Problems:
    data, key = config.data, "data.chat_template_kwargs"
    if data.chat_template_kwargs and not data.chat_template:
        yield Problem(
            f"{key} has no effect without data.chat_template=true: set that, or leave {key} out",
            (key, "data.chat_template"),
        )
    for name in data.chat_template_kwargs:
        if name in _SET_BY_VAPO:
            yield Problem(
                f"{key}.{name} cannot be set: {_SET_BY_VAPO[name]}; leave it out",
                (f"{key}.{name}",),
            )


def files_are_read_as_they_say(config: Any) -> Problems:
    """Check the pattern of answers and the range of pass rates of each source that is a file."""
    for key, source in all_sources(config.data):
        if not isinstance(source, FileSource):
            continue
        if source.answer_pattern is not None:
            why = "needs one group, (...), around the answer's part"
            pattern = f"{key}.answer_pattern", source.answer_pattern
            yield from bad_pattern(*pattern, lambda compiled: compiled.groups == 1, why)
        low, high = source.min_pass_rate, source.max_pass_rate
        keys = (f"{key}.min_pass_rate", f"{key}.max_pass_rate")
        if low is not None and high is not None and low > high:
            yield Problem(f"{keys[0]} {low:g} is above {keys[1]} {high:g}")
        if (low, high) != (None, None) and config.data.heldout is None:
            yield Problem(
                f"{keys[0] if low is not None else keys[1]} with data.heldout null would choose "
                "the held-out prompts by difficulty too: set data.heldout",
                keys,
            )


def curricula_are_schedules(config: Any) -> Problems:
    for key, source in all_sources(config.data):
        if not isinstance(source, GeneratedSource) or not source.curriculum:
            continue
        curriculum_key, stages = f"{key}.curriculum", source.curriculum
        starts = [stage.from_iteration for stage in stages]
        levels = [stage.level for stage in stages if stage.level is not None]
        if key.startswith("data.heldout"):
            yield Problem(f"{curriculum_key}: held-out prompts stay the same, they have no stages")
        if config.data.heldout is None:
            yield Problem(
                f"{curriculum_key} changes the training prompts: set data.heldout",
                (curriculum_key,),
            )
        if starts[0] != 0 or starts != sorted(set(starts)):
            yield Problem(
                f"{curriculum_key}: from_iteration begins with 0 and rises, it is {starts}"
            )
        if any(number < 0 for number in (*starts, *levels)):
            yield Problem(f"{curriculum_key}: levels are counted from 0")
        if levels and not isinstance(source, ReasoningGymSource):
            yield Problem(
                f"{curriculum_key}: `level` is reasoning_gym's; give `options`",
                (curriculum_key, f"{key}.kind"),
            )


def sources_agree(config: Any) -> Problems:
    """Check the size of the held-out part, and that sources of one name have one verifier.

    A mixture to train on and a held-out mixture may have sources of one name.
    """
    data = config.data
    if data.heldout is not None and data.heldout_size != DataConfig().heldout_size:
        yield Problem(
            f"data.heldout_size {data.heldout_size} has no effect beside data.heldout: set "
            "data.heldout=null to split the held-out prompts off the training source"
        )
    if data.heldout is None and data.heldout_size < len(sources_of(data, "train")):
        yield Problem(
            f"data.heldout_size {data.heldout_size} is below the number of data.train.sources"
        )
    source_of_name: dict[str, tuple[str, dict[str, Any]]] = {}
    for key, source in all_sources(config.data):
        if not isinstance(source, MixtureSource):
            continue
        settings = verifier_settings(source)
        other_key, other = source_of_name.setdefault(source_name(key), (key, settings))
        if other != settings:
            yield Problem(
                f"{key} and {other_key} have one name but different verifiers: rename one",
                (f"{key}.verifier", f"{other_key}.verifier"),
            )


def one_training_source(config: Any) -> Problems:
    if isinstance(config.data.train, Mixture):
        yield Problem("data.train.kind mixture: this command reads demonstrations of one source")


def no_curriculum(config: Any) -> Problems:
    for key, source in sources_of(config.data, "train").items():
        if isinstance(source, GeneratedSource) and source.curriculum:
            yield Problem(f"{key}.curriculum is for `vapo fit`: this command has no iterations")


def verifiers_can_be_made(config: Any) -> Problems:
    """Check the pattern of each regex verifier of `rewards` and of a mixture's sources."""
    for block, settings in verifier_blocks(config):
        if isinstance(settings, RegexVerifier):
            why = "needs a group, (...), around the answer's part"
            pattern = f"{block}.pattern", settings.pattern
            yield from bad_pattern(*pattern, lambda compiled: compiled.groups > 0, why)


def answers_stand_after_a_text(config: Any) -> Problems:
    rewards, key = config.rewards, "rewards.answer_after"
    if rewards.answer_after is not None and not rewards.answer_after.strip():
        yield Problem(f"{key} is empty: give the text that ends the thoughts, or null")
    if rewards.answer_after is None and rewards.without_answer_after != "wrong":
        fallback_key = "rewards.without_answer_after"
        yield Problem(
            f"{fallback_key} {rewards.without_answer_after} has no effect without {key}: set "
            f"{key}, or {fallback_key}=wrong",
            (fallback_key, key),
        )
    if rewards.answer_after is None and isinstance(rewards, SeveralVerifiers):
        for name, block in rewards.verifiers.items():
            if block.reads_thoughts:
                thoughts_key = f"rewards.verifiers.{name}.reads_thoughts"
                yield Problem(
                    f"{thoughts_key} has no effect without {key}, because every verifier then "
                    f"reads the whole response: set {key}, or {thoughts_key}=false",
                    (thoughts_key, key),
                )


def rewards_tell_right_from_wrong(config: Any) -> Problems:
    rewards, budget = config.rewards, config.rollouts.max_response_tokens
    if rewards.correct <= rewards.incorrect:
        yield Problem(
            f"rewards.correct {rewards.correct:g} must be above rewards.incorrect "
            f"{rewards.incorrect:g}"
        )
    ramp_tokens = rewards.overlong.ramp_tokens(budget)
    if rewards.overlong.soft_punishment and ramp_tokens >= budget:
        yield Problem(
            f"rewards.overlong.cache_tokens {ramp_tokens} must be below "
            f"rollouts.max_response_tokens {budget}, or every response is punished"
        )


DATA_RULES: tuple[Rule, ...] = (
    mixtures_have_sources,
    several_verifiers_have_names,
    templates_have_a_place,
    template_variables_can_be_set,
    files_are_read_as_they_say,
    curricula_are_schedules,
    sources_agree,
    verifiers_can_be_made,
    answers_stand_after_a_text,
    rewards_tell_right_from_wrong,
)
