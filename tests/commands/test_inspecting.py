"""`vapo inspect` and `vapo.inspect`: light, early about mistakes, and one answer for both."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vapo
from tests.commands.test_early_checks import EACH_COMMAND, HEAVY, in_a_process
from tests.config.fits import ROOT
from tests.docs.pages import named_files
from tests.prompts.thinking_chat import OFF, thinking_tokenizer
from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo import cli
from vapo.errors import UserError
from vapo.rollouts.rollout_file import plain_row
from vapo.studies.inspection import text_tokens
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.responses import InspectedResponse

FIXTURES = Path(__file__).parents[1] / "studies/inspection/fixtures"


def rows(num_groups: int = 6) -> list[dict[str, Any]]:
    """Two responses to each prompt; the value rises in the right one."""
    return [
        {
            "prompt": f"{group}=", "response": "1;" if right else "0;", "reward": float(right),
            "group": group, "response_ids": [3 + right, 30, 1],
            "values": [0.5, 0.5 + (0.4 if right else -0.4), 0.9 if right else 0.1],
        }
        for group in range(num_groups)
        for right in (True, False)
    ]  # fmt: skip


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def test_it_prints_and_writes_what_was_found(rollouts: Path, capsys: Any) -> None:
    page, figures = rollouts.parent / "new/page.html", rollouts.parent / "summary.json"
    argv = ["inspect", str(rollouts), "--output", str(page), "--output", str(figures)]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert "responses: 12 in 6 groups" in printed
    assert "12 responses read as the plain form" in printed
    assert printed.endswith(f"{page}\n{figures}\n")
    assert "<html" in page.read_text()
    assert "12 responses read as the plain form" in page.read_text()
    found = json.loads(figures.read_text())
    assert (found["num_responses"], found["num_groups"]) == (12, 6)
    assert found["explained_variance"] > 0.5


def test_python_gets_the_same(rollouts: Path, tmp_path: Path) -> None:
    import pandas  # type: ignore[import-untyped]

    of_path = vapo.inspect(rollouts)
    of_frame = vapo.inspect(pandas.DataFrame(rows()), output=tmp_path / "x.json")
    one, other = of_path.summary(), of_frame.summary()
    assert other["name"] == "DataFrame"
    for found in (one, other):
        del found["name"], found["parts"]
    assert one == other
    assert json.loads((tmp_path / "x.json").read_text())["num_responses"] == 12


MISTAKES = [
    (["--critic", "models/none"], "--critic: models/none: no such model folder"),
    (["--policy", "models/none"], "--policy: models/none: no such model folder"),
    (["--value_truth", "4"], "--value_truth needs --policy MODEL"),
    (["--value_truth", "4", "--policy", "models/checked_steps/policy"],
     "--value_truth needs --verifier NAME"),
    (["--verifier", "math"], "--verifier is for continuations: give --value_truth K"),
    (["--output", "x.pdf"], "--output x.pdf: give a name that ends in .html, .json, .parquet"),
]  # fmt: skip


def test_it_answers_and_says_what_is_wrong_without_torch(rollouts: Path) -> None:
    """One new process for all: without a mistake first, then with each of them."""
    argv = [["inspect", str(rollouts), *rest] for rest in ([], *(rest for rest, _ in MISTAKES))]
    err, modules = in_a_process(json.dumps(argv), code=EACH_COMMAND)
    assert modules
    assert not modules & HEAVY
    small = re.findall("pip install (numpy .*)", (ROOT / "docs/inspect.md").read_text())[0].split()
    own = {"vapo", "yaml", "cython_runtime"}  # PyYAML comes with omegaconf
    used = {name.partition(".")[0] for name in modules} - own - sys.stdlib_module_names
    if_there = {"attr", "cloudpickle"}  # pyarrow and numpy ask for them
    assert {name for name in used if name[0] != "_"} <= {*small, *if_there}
    sound, *lines = err.splitlines()
    assert sound == "code: 0"
    assert lines[1::2] == ["code: 2"] * len(MISTAKES), err
    for line, (_, said) in zip(lines[::2], MISTAKES, strict=True):
        assert said in line


def test_no_such_file(capsys: Any, rollouts: Path) -> None:
    assert cli.main(["inspect", f"{rollouts}x"]) == 2
    assert "no such file or folder; did you mean" in capsys.readouterr().err


def test_verl_s_rollouts_get_a_critic_s_values(tmp_path: Path, capsys: Any) -> None:
    """And a prompt that lost its chat template's special tokens gets it back."""
    from transformers import Qwen2ForTokenClassification

    from tests.studies.inspection.test_critics import classifier, save

    critic = save(classifier(Qwen2ForTokenClassification), tmp_path / "critic")
    tokenizer = tiny_tokenizer()
    row = {"input": "12=", "output": "34", "score": 1.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    found = vapo.inspect(tmp_path / "1.jsonl", critic=critic)
    assert found.findings.sums.num_with_values == 2
    notes = "\n".join(found.notes)
    assert "the values of 2 responses are the critic's" in notes
    assert "the tokens of 2 responses were made of their texts" in notes
    assert tokenizer("34", add_special_tokens=False)["input_ids"] == list(
        found.findings.responses[0].response_ids or ()
    )


def test_rows_of_another_model_s_tokens_are_named(tmp_path: Path, rollouts: Path) -> None:
    """The policy's config and the critic's embedding say how many tokens there are."""
    from transformers import Qwen2ForTokenClassification

    from tests.studies.inspection.test_critics import classifier, save

    critic = save(classifier(Qwen2ForTokenClassification), tmp_path / "critic")
    policy = save_tiny_folder(tmp_path / "policy")
    with rollouts.open("a") as lines:
        lines.write(json.dumps(rows(1)[0] | {"response_ids": [3, 70_000, 1]}) + "\n")
    for model in ((str(policy), None), (None, critic)):
        found = vapo.inspect(rollouts, policy=model[0], critic=model[1])
        (bad,) = found.findings.bad_rows
        assert bad.place == f"{rollouts}, row 13"
        assert bad.reason.startswith("response_ids has 70000, and the model that is given has ")


def test_the_function_for_verl_s_own_values(tmp_path: Path) -> None:
    """docs/inspect.md's `dump_values`, on a batch as verl has it: padded on both sides."""
    scope: dict[str, Any] = {}
    exec(dict(named_files())["dump_values.py"], scope)
    shape = torch.arange(8.0).reshape(2, 4)
    batch = SimpleNamespace(
        batch={
            "prompts": torch.tensor([[0, 0, 5], [6, 7, 8]]),
            "responses": torch.tensor([[9, 10, 1, 0], [11, 12, 13, 1]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]),
            "response_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]),
            "token_level_scores": torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0]]),
            "token_level_rewards": torch.tensor([[-0.5, 0, 1, 0], [0, 0, 0, 0]]),
            **{
                name: shape + n
                for n, name in enumerate(("old_log_probs", "values", "advantages", "returns"))
            },
        },
        non_tensor_batch={"uid": ["a", "b"]},
    )
    scope["dump_values"](batch, tiny_tokenizer(), tmp_path / "x.jsonl", 3)
    first, second = list(ResponseReader(tmp_path / "x.jsonl"))
    assert isinstance(first, InspectedResponse)
    assert isinstance(second, InspectedResponse)
    assert (first.prompt_ids, first.response_ids, first.reward) == ((5,), (9, 10, 1), 1.0)
    assert (first.logprobs, first.values) == ((0.0, 1.0, 2.0), (1.0, 2.0, 3.0))
    assert (first.advantages, first.returns, first.step) == ((2.0, 3.0, 4.0), (3.0, 4.0, 5.0), 3)
    assert second.is_sampled == (True, False, True, True)
    assert first.token_rewards == (-0.5, 0.0, 1.0)
    assert first.group != second.group


def test_the_plain_form_of_a_stored_rollout(tmp_path: Path) -> None:
    """`vapo rollouts --format plain` writes what `vapo inspect` reads, an episode's turns too."""
    stored = {
        "prompt": "1=", "prompt_ids": [3, 4], "response": "2;", "response_ids": [5, 6, 7, 1],
        "reward": 1.0, "group": 2, "answer": "2", "rollout_logprobs": [-0.1, 0.0, -0.2, -0.3],
        "finish_reason": "length", "turn_observed": [0, 1], "turn_sampled": [1, 2],
        "turn_rewards": [0.0, 1.0], "failure": None,
    }  # fmt: skip
    row = plain_row(stored)
    assert row["is_sampled"] == [True, False, True, True]
    assert row["token_rewards"] == [0.0, 0.0, 0.0, 1.0]
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    (one,) = ResponseReader(tmp_path / "x.jsonl")
    (other,) = ResponseReader([stored])
    assert isinstance(one, InspectedResponse)
    assert isinstance(other, InspectedResponse)
    for name in ("prompt", "response", "reward", "prompt_ids", "response_ids", "logprobs",
                 "is_truncated", "is_sampled", "token_rewards", "answer"):  # fmt: skip
        assert getattr(one, name) == getattr(other, name), name
    alone = plain_row(stored | {"turn_observed": None, "turn_sampled": None, "answer": None})
    assert "is_sampled" not in alone
    assert "answer" not in alone


def test_the_policy_s_tokenizer_is_enough(tmp_path: Path) -> None:
    policy = save_tiny_folder(tmp_path / "policy")
    found = vapo.inspect(FIXTURES / "verl/1.jsonl", policy=str(policy))
    assert found.findings.sums.num + found.findings.num_bad_rows == 8
    with pytest.raises(UserError, match=r"--policy: .* no such model folder"):
        vapo.inspect(FIXTURES / "verl", policy=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{enable", "'{enable' is not valid JSON"),
        ("[1]", "is not a JSON object: write"),
        ('{"a": 1}', "give --policy, whose chat template has them"),
    ],
)
def test_variables_of_a_template_that_are_none(
    rollouts: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(rollouts), "--chat_template_kwargs", text]) != 0
    assert re.search(rf"--chat_template_kwargs.*{re.escape(said)}", capsys.readouterr().err)


def test_prompts_of_messages_are_rendered_with_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy"
    tokenizer = thinking_tokenizer()
    save_tiny_folder(policy, tiny_model(vocab_size=len(tokenizer)))
    tokenizer.save_pretrained(policy)
    asked = [{"role": "user", "content": "1?"}]
    row = {"prompt": asked, "response": "1", "reward": 1.0, "group": 0, "response_ids": [1, 2]}
    seen: list[dict[str, Any]] = []
    rendered = text_tokens.render_chat

    def render(*arguments: Any, **options: Any) -> str:
        seen.append(options)
        return rendered(*arguments, **options)

    monkeypatch.setattr(text_tokens, "render_chat", render)
    vapo.inspect([row], policy=str(policy), chat_template_kwargs=OFF)
    assert seen == [{"add_generation_prompt": True, **OFF}]
    with pytest.raises(
        UserError, match=r"^--chat_template_kwargs\.think: .* reads enable_thinking"
    ):
        vapo.inspect([row], policy=str(policy), chat_template_kwargs={"think": False})
