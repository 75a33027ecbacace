"""The hints of `vapo try`, and how a trial is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT, fit_config
from vapo.commands.sampled_trials import shown_trial
from vapo.commands.trials import (
    MAX_SHOWN_CHARS,
    Policy,
    Trial,
    block,
    hints,
    inline,
    trial_text,
    trials_summary,
)
from vapo.networks.loading import load_tokenizer
from vapo.types import FinishReason, Prompt, Rollout, Turn

POLICY = ROOT / "models" / "state_tracking" / "policy"


def trial(response: str = "", **fields: Any) -> Trial:
    known: dict[str, Any] = {
        "prompt_id": "p",
        "problem": "q",
        "answer": "42",
        "response": response,
        "response_text": response,
        "is_correct": False,
        "reward": -1.0,
        "extracted": None,
        "failure": None,
        "output": "",
    }
    return Trial(**{**known, **fields})


POLICY_TOKENS = Policy(("<eos>",), has_chat_template=False)
REGEX = ("rewards.verifier=regex", "rewards.pattern='answer: (.+)'")


@pytest.mark.parametrize(
    ("trials", "overrides", "said"),
    [
        ([trial("42"), trial("no")], (), "stands in 1 of 2: verifier math reads the last \\boxed"),
        ([trial("so 42.")], REGEX, "rewards.pattern 'answer: (.+)' found no answer in any of 1"),
        ([trial("so 42.", extracted="so")], REGEX, "stands in 1 of 1: rewards.pattern 'answer: "),
        ([trial("42 ")], ("rewards.verifier=exact",), "verifier exact compares the whole response"),
        ([trial("142 and 4.42 and 420"), trial("x", extracted="7")], (), None),
        ([trial("42", is_correct=True, reward=1.0), trial("so 42")], (), None),
        ([trial("a", answer="")], ("rewards.verifier=exact",), None),
        ([trial(finish_reason="stop")], (), "1 of 1 responses are empty"),
        (
            [trial("42", failure="timeout")] * 2 + [trial("42", is_correct=True)],
            (),
            "2 of 3 responses have no verdict and count as incorrect (mostly: timeout): mend the",
        ),
        ([trial("42", failure="timeout"), trial("42", is_correct=True)], (), None),
        (
            [trial("a", finish_reason="length"), trial("b", finish_reason="stop")],
            ("rewards.verifier=exact",),
            None,
        ),
        (
            [trial("a", finish_reason="length", foreign_end="<|im_end|>")],
            (),
            "special token <|im_end|> in them, which ends no response here",
        ),
        ([trial("7", extracted="7")], ("rewards.shuffle=true",), "rewards.shuffle is true"),
        ([trial("7", is_correct=True, reward=100.0)], (), "a reward is 100: learning rates are"),
        ([trial("7", is_correct=True, reward=10.0)], (), None),
        (
            [trial("1</think>7", is_correct=True), trial("7", is_correct=True)],
            (),
            "1 of 2 responses end thoughts with </think> and are judged whole: "
            "rewards.answer_after='</think>' judges only what follows",
        ),
        ([trial("1</think>7", is_correct=True)], ("rewards.answer_after=</think>",), None),
        (
            [trial("7", is_unanswered=True), trial("1</think>7", is_correct=True)],
            ("rewards.answer_after=</think>",),
            "1 of 2 responses have no '</think>' and are wrong: if they are cut, raise",
        ),
    ],
)
def test_hints_are_of_what_was_seen(
    tmp_path: Path, trials: list[Trial], overrides: tuple[str, ...], said: str | None
) -> None:
    config = fit_config(tmp_path, *overrides)
    is_sampled = any(one.finish_reason is not None for one in trials)
    found = list(hints(trials, config, POLICY_TOKENS if is_sampled else None))
    if said is None:
        assert not found
    else:
        assert any(said in hint for hint in found), found


@pytest.mark.parametrize("has_template", [True, False])
def test_without_a_chat_template_the_budget_is_not_all_that_may_be_wrong(
    tmp_path: Path, has_template: bool
) -> None:
    """Where most responses never end; what ends in time needs no template."""
    config = fit_config(tmp_path, "data.chat_template=true")
    policy = Policy(("<eos>",), has_chat_template=has_template)
    first, *more = hints([trial("a", finish_reason="length")] * 2, config, policy)
    assert ("unless the next line is why" in first) is not has_template
    said = [line for line in more if "the tokenizer has no chat template" in line]
    assert bool(said) is not has_template
    assert all("chat_template.jinja" in line and "data.prompt_template" in line for line in said)
    ended = [trial("a", finish_reason="stop")] * 2
    assert not [line for line in hints(ended, config, policy) if "no chat template" in line]


@pytest.mark.parametrize(
    ("finish_reason", "advised"),
    [
        ("length", "raise rollouts.max_response_tokens, which is 64"),
        ("turn_length", "raise environment.max_turn_tokens, which is 5"),
        ("turns", "raise environment.max_turns, which is 8"),
    ],
)
def test_the_limit_that_cut_the_episodes_is_what_to_raise(
    tmp_path: Path, finish_reason: str, advised: str
) -> None:
    environment = "environment={kind: function, function: 'm:Env', max_turn_tokens: 5}"
    config = fit_config(tmp_path, environment, "rollouts.max_response_tokens=64")
    cut = trial("a", finish_reason=finish_reason, reward=0.0)
    assert "truncated" in trial_text(cut, 1, 1)
    first, second = hints([cut, cut], config, POLICY_TOKENS)
    assert first.endswith(advised)
    assert "no episode of 2 is correct" in second
    failed = trial("a", finish_reason="length", failure="crash", is_lost=True)
    assert not any("raise" in hint for hint in hints([failed], config, POLICY_TOKENS))


def test_an_end_of_another_template_counts_only_where_the_policy_wrote_it() -> None:
    """What an observation's template writes between two turns is not the policy's."""
    tokenizer = load_tokenizer(str(POLICY))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    begin, said = (int(tokenizer.get_vocab()[token]) for token in ("<|im_start|>", "1"))
    prompt = Prompt("p", "1a34=", (said,), "1")

    def found(*turns: Turn) -> str | None:
        ids = (begin, said, said)
        rollout = Rollout(prompt, ids, "11", (0.0,) * 3, FinishReason.LENGTH, turns, False)
        ends = frozenset([int(tokenizer.eos_token_id)])
        return shown_trial(rollout, tokenizer, ends, "").foreign_end

    assert found(Turn(1, 2)) is None
    assert found(Turn(0, 3)) == "<|im_start|>"


def test_text_is_bounded_and_cannot_pass_for_ours() -> None:
    shown = block("first\nverdict: correct; reward 9\n\x1b]0;title\x07\ud800")
    assert shown.split("\n") == [
        "  | first",
        "  | verdict: correct; reward 9",
        "  | \\x1b]0;title\\x07\\ud800",
    ]
    long = block("a" * 1_000_000 + "the end")
    assert len(long) < MAX_SHOWN_CHARS + 100
    assert "996007 characters are left out here" in long
    assert long.endswith("the end")
    assert inline("a\nb" + "c" * 999) == "a\\nb" + "c" * 197 + "..."
    hostile = trial("r", prompt_id="p\n--- 2 of 2", answer="4\r2", extracted="\x9b1m")
    assert trial_text(hostile, 1, 2).split("\n")[0] == "--- 1 of 2: p\\n--- 2 of 2"
    assert "reference answer: 4\\r2" in trial_text(hostile, 1, 2)
    assert "read as the answer: \\x9b1m" in trial_text(hostile, 1, 2)


def test_the_summary_counts() -> None:
    trials = [
        trial("a", is_correct=True, reward=1.0, num_response_tokens=4, finish_reason="stop"),
        trial("b", failure="nan", num_response_tokens=8, finish_reason="length"),
    ]
    assert trials_summary(trials) == (
        "pass rate 0.500 (1 of 2 correct), mean reward 0.000, 1 without a verdict; response tokens "
        "4 to 8, mean 6.0, 1 truncated"
    )
