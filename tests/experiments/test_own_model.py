"""The example of an own model: its words, its reward function, its command and its notebook."""

from __future__ import annotations

import json
import string
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT
from tests.tiny_model import tiny_model
from tests.tracking.ready_stores import ready_store
from vapo import cli
from vapo.networks.new_model import make_tokenizer

FOLDER = ROOT / "experiments/own_model"
NOTEBOOK = ROOT / "docs/free_gpu.ipynb"
SHORT_PRETRAINING = {"components.value_pretraining.num_iterations": 1}
TINY = {
    "components.group_sampling.num_prompts": 4,
    "components.group_sampling.group_size": 2,
    "training.num_iterations": 1,
    "training.minibatch_size": 8,
    "evaluation.k": 1,
    "rewards.num_workers": 1,
    "rollouts.engine": "transformers",
    "rollouts.max_response_tokens": 8,
    "trainer.accelerator": "cpu",
}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_a_response_is_right_if_it_says_the_kind_and_no_more() -> None:
    score = import_module("kind").score
    right = ["A tool", "a tool.", "Tool", " tool\n"]
    wrong = ["", "A food", "An animal or a tool", "tools", "A tool for animals", "A"]
    assert [score(text, "tool", {}) for text in right] == [True] * 4
    assert [score(text, "tool", {}) for text in wrong] == [False] * 6


def test_the_words_are_what_the_script_writes(tmp_path: Path) -> None:
    script = import_module("make_words")
    script.main(tmp_path / "words.jsonl")
    text = (FOLDER / "words.jsonl").read_text()
    assert (tmp_path / "words.jsonl").read_text() == text
    rows = [json.loads(line) for line in text.splitlines()]
    questions = [row["prompt"][-1]["content"] for row in rows]
    assert len(set(questions)) == len(rows) == 400
    counts = Counter(row["answer"] for row in rows)
    assert set(counts) == set(script.WORDS)
    assert max(counts.values()) <= 102, "the best constant answer is right in a quarter"
    examples = [message["content"] for message in rows[0]["prompt"][:-1]]
    assert not set(examples) & set(questions), "a word that is asked for is never an example"


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    folder = tmp_path / "tiny"
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("unsent")
def test_the_command_of_the_readme(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ready_store(tmp_path / "mlruns")
    monkeypatch.chdir(ROOT)
    options = {"--data": "words.jsonl", "--reward": "kind.py:score"}
    named = [part for flag, file in options.items() for part in (flag, str(FOLDER / file))]
    small = [f"{key}={value}" for key, value in {**TINY, **SHORT_PRETRAINING}.items()]
    small += [f"output_dir={tmp_path / 'runs'}", f"tracking.uri={tmp_path / 'mlruns'}"]
    status = cli.main(["fit", "--model", str(chat_model), *named, *small])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "360 training prompts, 40 held out" in printed.out + printed.err
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["score_after"] == 0.0, "a random model names no kind"


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(ROOT)
    ready_store(tmp_path / "mlruns")
    cells = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    small = {**TINY, "output_dir": str(tmp_path / "runs"), "tracking.uri": str(tmp_path / "mlruns")}
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda *objects: shown.extend(objects))
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells:
        exec(compile("".join(cell["source"]), "cell", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", []):
            names["model"] = chat_model
        if "settings" in names:  # later cells add to them
            names["settings"] |= small
        if "probe" in names:
            names["probe"] |= SHORT_PRETRAINING
    printed = capsys.readouterr().out
    assert "VAPO: 0.0% right before, 0.0% after" in printed
    assert "GRPO: 0.0% right before, 0.0% after" in printed
    assert shown, "the report's figures"
    config = names["runs"]["VAPO"].config
    assert (config.actor.lora.rank, config.critic.kind) == (16, "probe")
    assert not names["runs"]["GRPO"].config.algorithm.has_critic
    assert "<html" in names["page"]
