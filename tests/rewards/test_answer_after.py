"""`rewards.answer_after`: which part of a response every verifier reads, or that it has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import fit_config, write
from tests.prompts.test_load_prompts import both
from tests.prompts.thinking_chat import OFF, thinking_tokenizer
from tests.rewards.rollouts_for_tests import HOSTILE, rollout, scorer, scorer_of
from tests.rewards.test_reward_model import folder, reference
from vapo.commands.trials import which_part
from vapo.config.kinds import make
from vapo.config.loading import load_config
from vapo.config.schema import (
    DataConfig,
    MixtureSource,
    RewardConfig,
    RewardModelConfig,
    SourceConfig,
)
from vapo.errors import UserError
from vapo.prompts.load import load_prompts
from vapo.rewards.answer_extraction import extract_answer
from vapo.rewards.scorer import VerifierScorer
from vapo.rewards.text_judge import judged_part
from vapo.types import Rollout

__all__ = ["folder"]

END = "</think>"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
OPEN = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("response", "prompt", "part"),
    [
        ("thoughts</think>42", OPEN, "42"),
        ("<think>thoughts\n</think>\n\n42\n", "", "42\n"),
        ("a</think>41</think> 42", OPEN, "42"),
        ("thoughts</think>", OPEN, ""),
        ("</think>42", CLOSED, "42"),
        ("42", CLOSED, "42"),
        (" 42", CLOSED.rstrip(), " 42"),
        ("so 42", OPEN, None),
        ("so 42", "", None),
        ("so 42", f"Is {END} a tag?", None),
        ("so 42 </think", OPEN, None),
        ("", OPEN, None),
        ("", CLOSED, ""),
    ],
)
def test_the_part_that_is_judged(response: str, prompt: str, part: str | None) -> None:
    rewards = RewardConfig(answer_after=END)
    assert judged_part(rewards, response, prompt) == part
    whole = RewardConfig(answer_after=END, without_answer_after="whole")
    assert judged_part(whole, response, prompt) == (response if part is None else part)
    assert judged_part(RewardConfig(), response, prompt) == response
    assert which_part(RewardConfig(), response, prompt) == ""
    said = which_part(rewards, response, prompt)
    if END in response:
        assert said == f"the {len(part or '')} characters after the last '</think>'"
    else:
        assert said.startswith("nothing" if part is None else "all of it")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [({}, None), ({"opens_thoughts": True}, None), (OFF, "42"), ({"enable_thinking": True}, None)],
)
def test_a_prompt_of_a_template_closes_thoughts_or_leaves_them_open(
    tmp_path: Path, arguments: dict[str, Any], part: str | None
) -> None:
    data = both(tmp_path, ["6*7?"], ["z"], chat_template=True, chat_template_kwargs=arguments)
    prompt = load_prompts(data, thinking_tokenizer()).train[0]
    assert judged_part(RewardConfig(answer_after=END), "42", prompt.text) == part


def by_verifier(**fields: Any) -> VerifierScorer:
    """Sources whose names are their verifiers, each with one process."""
    own = {
        "exact": {"verifier": "exact"},
        "regex": {"verifier": "regex", "pattern": r"^(\d+)$"},
        "math": {"verifier": "math"},
        "python": {"verifier": "python", "function": f"{HOSTILE}:is_the_answer"},
    }
    sources = {name: make(MixtureSource, path="x.jsonl", **own[name]) for name in own}
    data = DataConfig(train=make(SourceConfig, kind="mixture", sources=sources))
    rewards = RewardConfig(num_workers=1, **fields)
    return scorer_of(rewards, max_response_tokens=100, data=data)


def of(source: str, text: str, prompt_text: str = OPEN) -> Rollout:
    response = rollout(text)
    prompt = replace(response.prompt, source=source, text=prompt_text)
    return replace(response, prompt=prompt)


def test_every_verifier_reads_the_part(tmp_path: Path) -> None:
    """Each would be right or wrong of the whole in another way."""
    names = ("exact", "regex", "math", "python")
    texts = {
        r"\boxed{41}</think>42": True,
        r"42</think>\boxed{41}": False,
        "</think>42</think>41": False,
        "42": False,
    }
    asked = [of(name, text) for name in names for text in texts]
    closed = [of(name, "42", CLOSED) for name in names]
    with by_verifier(answer_after=END, incorrect=-0.25) as judge:
        judged = judge.score([*asked, *closed])
    found = [one.is_correct for one in judged]
    assert found == [*texts.values()] * len(names) + [True] * len(names)
    unanswered = [one for one in judged if one.response_text == "42" and not one.is_correct]
    assert [(one.reward, one.failure) for one in unanswered] == [(-0.25, None)] * len(names)
    rewards = [one.reward for one in judged if one.prompt.source == "python"]
    assert rewards == [1.0, 5.0, 1.0, -0.25, 1.0], "the function got what stands behind the tag"
    assert [one.response_text for one in judged] == [one.response_text for one in [*asked, *closed]]


def test_a_response_without_it_is_judged_whole_where_the_config_says_so() -> None:
    with scorer("exact", answer_after=END, without_answer_after="whole") as judge:
        whole, part, wrong = judge.score([rollout("42"), rollout("1</think>42"), rollout("41")])
    assert (whole.is_correct, part.is_correct, wrong.is_correct) == (True, True, False)


def test_off_is_the_whole_response() -> None:
    with scorer("exact") as judge:
        assert [r.is_correct for r in judge.score([rollout("42"), rollout("1</think>42")])] == [
            1,
            0,
        ]


def test_votes_are_of_the_parts() -> None:
    """The boxes in the thoughts are the same, the answers are not: 42 twice, 7 once."""
    texts = [rf"\boxed{{1}}</think>{answer}" for answer in (42, r"\boxed{42.0}", 7)]
    texts.append("42")
    with scorer("math", num_workers=1, answer_after=END) as math:
        judged = math.score([rollout(text) for text in texts])
        assert math.votes(judged, group_size=4) == [0, 0, 2, None]


def test_a_reward_model_reads_the_prompt_and_the_part(folder: Path) -> None:
    part = rollout("de fg")
    thought = replace(part, response_text="abc</think>de fg")
    options = {"reward_model_path": str(folder), "answer_after": END, "incorrect": -9.0}
    with scorer("reward_model", **options) as model:
        found, unanswered = model.score([thought, rollout("de fg")])
    assert found.reward == pytest.approx(reference(folder, part), abs=1e-5)
    assert (unanswered.reward, unanswered.is_correct) == (-9.0, False)


def test_without_the_key_math_still_reads_a_new_line_behind_thoughts() -> None:
    for end in (END, "</thinking>", "[/THINK]", "<|channel|>final<|message|>"):
        assert extract_answer(f"maybe 41{end}42") == "42"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rewards.answer_after=' '"], r"rewards\.answer_after is empty"),
        (
            ["rewards.without_answer_after=whole"],
            "whole has no effect without rewards.answer_after",
        ),
        (
            ["rewards.answer_after=x", "environment.kind=function", "environment.function=a:B"],
            "rewards.answer_after says what a verifier reads",
        ),
    ],
)
def test_what_the_config_refuses(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_config(tmp_path, *overrides)
    more = ["data.train.path=x.jsonl", "export_dir=out", "policy_path=p"]
    if "environment" not in " ".join(overrides):
        with pytest.raises(UserError, match=message):
            load_config(RewardModelConfig, [write(tmp_path, "")], [*more, *overrides])
