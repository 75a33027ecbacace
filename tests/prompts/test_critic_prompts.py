"""The critic's own prompts: what is in them, and what they are refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import fit_config
from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.networks.saved_tokenizers import start_ids
from vapo.prompts.critic_prompts import render, with_critic_prompts
from vapo.prompts.load import PromptSplit, load_prompts
from vapo.types import Prompt

ROWS: list[dict[str, Any]] = [
    {"prompt": f"ab{i}=", "answer": str(i), "hint": f"h{i}", "level": i, "odd": None}
    for i in range(4)
]


def privileged(tmp_path: Path, template: str, *overrides: str) -> tuple[FitConfig, PromptSplit]:
    path = tmp_path / "policy"
    if not path.exists():
        save_tiny_folder(path, tiny_model())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = fit_config(
        tmp_path,
        f"actor.path={path}",
        f"data.train.path={tmp_path / 'rows.jsonl'}",
        "data.heldout_size=1",
        "rollouts.max_response_tokens=100",
        *overrides,
        overlay=json.dumps({"critic": {"prompt": {"kind": "privileged", "template": template}}}),
    )
    tokenizer = tiny_tokenizer()
    return config, with_critic_prompts(load_prompts(config.data, tokenizer), config, tokenizer)


def test_any_column_of_the_row_in_both_sets(tmp_path: Path) -> None:
    _, split = privileged(tmp_path, "{prompt}{hint};{level}{answer}")
    assert (len(split.train), len(split.heldout)) == (3, 1)
    tokenizer = tiny_tokenizer()
    for prompt in [*split.train, *split.heldout]:
        n = prompt.answer
        wanted = tokenizer(f"ab{n}=h{n};{n}{n}", add_special_tokens=False)["input_ids"]
        assert prompt.critic_prompt_ids == (*start_ids(tokenizer), *wanted)
        assert prompt.text == f"ab{n}=", "the policy's is as it was"


def test_off_is_the_policys_prompt(tmp_path: Path) -> None:
    config, _ = privileged(tmp_path, "{answer}")
    config.critic.prompt = fit_config(tmp_path).critic.prompt
    split = load_prompts(config.data, tiny_tokenizer())
    assert with_critic_prompts(split, config, tiny_tokenizer()) is split


def test_what_is_put_in_is_text_and_no_template() -> None:
    hostile = Prompt(
        "file:1", "{answer}{0.__class__} %s", (3,), "{prompt}{x", record={"hint": "\\1 {answer}"}
    )
    found = render(r"{prompt}|{answer}|{hint}|\boxed{} {} {0}", hostile)
    assert found == r"{answer}{0.__class__} %s|{prompt}{x|\1 {answer}|\boxed{} {} {0}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{prompt}{hnt}", r"critic\.prompt\.template has {hnt}, and .*rows.jsonl.* no such column"),
        ("{prompt}{odd}", r"has {odd}, and .*rows.jsonl.* None in that column"),
        ("{prompt}" + "x" * 60, r"rows.jsonl.* tokens, and with a response of 100 .* 128 pos"),
    ],
)
def test_rows_that_do_not_do(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        privileged(tmp_path, template)
