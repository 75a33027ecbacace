"""conf/data/*.yaml on small files with the columns of the data sets; texts and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.prompts.tokenizers_for_tests import character_tokenizer
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.prompts.load import PromptSplit, load_prompts
from vapo.rewards.verifiers import make_math

DATA = ROOT / "tests" / "data"
FEW = "data.train.num_examples=9"  # of the default task, which is trained on
DAPO_START = "Solve the following math problem step by step. The last line of your response "
DAPO_END = '\n\nRemember to put your answer on its own line after "Answer:".'


def config(*names: str, overrides: list[str]) -> FitConfig:
    files = [ROOT / "conf" / "vapo.yaml", *(ROOT / "conf" / "data" / name for name in names)]
    return load_config(FitConfig, files, overrides)


def load(*names: str, overrides: list[str], chat: bool = False) -> PromptSplit:
    return load_prompts(config(*names, overrides=overrides).data, character_tokenizer(chat=chat))


def test_every_ready_config_is_tested_here() -> None:
    source = Path(__file__).read_text()
    for path in (ROOT / "conf" / "data").glob("*.yaml"):
        assert f'"{path.name}"' in source, path.name


def test_gsm8k() -> None:
    split = load(
        "gsm8k.yaml",
        overrides=[
            f"data.train.path={DATA / 'gsm8k_train.jsonl'}",
            f"data.heldout.path={DATA / 'gsm8k_test.jsonl'}",
        ],
    )
    assert [p.answer for p in split.train] == ["52", "1,400", "-2"]
    assert [p.answer for p in split.heldout] == ["60"]
    assert split.heldout[0].text == (
        "Two buses seat 30 people each. How many seats is that?\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    math = make_math()
    assert math(r"so \boxed{1400}", split.train[1].answer, {}).is_correct
    assert not math(r"so \boxed{1}", split.train[1].answer, {}).is_correct


def test_gsm8k_answer_without_the_mark_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    good = (DATA / "gsm8k_train.jsonl").read_text().splitlines()[0]
    path.write_text(good + "\n" + '{"question": "1+1?", "answer": "It is 2."}\n')
    with pytest.raises(
        UserError, match=r"train\.jsonl:2: data\.train\.answer_pattern .* in 'It is 2\.'"
    ):
        load("gsm8k.yaml", overrides=[f"data.train.path={path}"])


def test_math_500() -> None:
    overrides = [FEW, f"data.heldout.path={DATA / 'math_500.jsonl'}"]
    split = load("math_500.yaml", overrides=overrides)
    assert [p.answer for p in split.heldout] == [r"\frac{1}{2}", "(3,0)"]
    assert split.heldout[0].text.startswith("Compute $\\frac{1}{3}")
    assert split.heldout[0].text.endswith("\\boxed{}.")
    math = make_math()
    assert math(r"\boxed{0.5}", split.heldout[0].answer, {}).is_correct
    assert math(r"\boxed{(3, 0)}", split.heldout[1].answer, {}).is_correct


def test_dapo_math_17k_is_a_chat_list_and_has_duplicates() -> None:
    overrides = [f"data.train.path={DATA / 'dapo_math_17k.parquet'}", "data.heldout_size=1"]
    split = load("dapo_math_17k.yaml", overrides=overrides, chat=True)
    both = [*split.train, *split.heldout]
    assert sorted(p.answer for p in both) == ["12", "31", "47"]
    assert all(p.text.startswith(f"<|user|>{DAPO_START}") for p in both)
    assert all(p.text.endswith(f"{DAPO_END}<|end|><|assistant|>") for p in both)
    assert (split.report.rows.duplicates, split.report.rows.contradictions) == (4, 1)
    assert "left out 4 duplicates (1 of them with another answer)" in split.report.describe()


def test_dapo_math_17k_for_a_model_without_a_chat_template() -> None:
    split = load(
        "dapo_math_17k.yaml",
        "aime_2024.yaml",
        overrides=[
            f"data.train.path={DATA / 'dapo_math_17k.parquet'}",
            f"data.heldout.path={DATA / 'aime_2024.jsonl'}",
            "data.train.prompt_column=prompt.0.content",
            "data.chat_template=false",
        ],
    )
    assert [p.answer for p in split.train] == ["12", "31", "47"]
    # trained and evaluated on one wording
    for prompt in [*split.train, *split.heldout]:
        assert prompt.text.startswith(DAPO_START)
        assert prompt.text.endswith(DAPO_END)
        assert prompt.text.count("Solve the following") == 1


@pytest.mark.parametrize(
    ("name", "file", "answers", "response"),
    [
        ("aime_2024.yaml", "aime_2024.jsonl", ["033", "025"], "so 210 + 33 it is\n\nAnswer: 33"),
        ("aime_2025.yaml", "aime_2025.jsonl", ["7"], "Answer: $7$"),
    ],
)
def test_aime(name: str, file: str, answers: list[str], response: str) -> None:
    overrides = [FEW, f"data.heldout.path={DATA / file}"]
    chosen = config(name, overrides=overrides)
    split = load_prompts(chosen.data, character_tokenizer())
    assert [p.answer for p in split.heldout] == answers
    math = make_math()
    assert math(response, answers[0], {}).is_correct
    assert not math("Answer: 34", answers[0], {}).is_correct
    evaluation = chosen.evaluation
    assert (evaluation.k, evaluation.temperature, evaluation.top_p) == (32, 1.0, 0.7)
    assert evaluation.num_prompts is None
