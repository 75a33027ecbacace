"""Rows of the comparison on a language model, from the finished runs of a sweep."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.written import to_yaml

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "experiments/smollm2"
MARK = "<!-- results: experiments/smollm2/collect.py writes this table -->"
BASE = ROOT / "conf/worked_sums/vapo.yaml"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SMOLLM2))
    return import_module("collect")


def write_run(folder: Path, metrics: dict[str, list[float]], *overrides: str) -> None:
    (folder / "tracking").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load_config(FitConfig, [BASE], list(overrides))))
    lines = []
    for name, values in metrics.items():
        for step, value in enumerate(values):
            lines.append({"kind": "metrics", "payload": [[name, value, step, step]], "name": ""})
    text = "\n".join(map(json.dumps, [{"kind": "note", "payload": "", "name": ""}, *lines]))
    (folder / "tracking/journal.jsonl").write_text(text)
    summary: dict[str, Any] = {"status": "FINISHED", "total_seconds": 1.0}  # of the last process
    summary |= {"score_before": 0.5, "score_before_ci": [0.4, 0.6]}
    summary |= {"score_after": 0.75, "score_after_ci": [0.7, 0.8]}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.slow
def test_a_row_counts_its_value_pretraining(tmp_path: Path, script: ModuleType) -> None:
    """Two runs: one from a shared value pretraining, one that is still open. What the end did not
    record is not the start's figure."""
    metrics = {
        "rollout/accuracy": [0.5, 0.625],
        "eval/avg_at_k": [0.5, 0.7, 0.75],
        "critic/explained_variance": [0.25, 0.5],
        "truth/explained_within": [0.3, 0.4],
        "truth/mistake_recall": [0.6],
        "time/iteration_s": [600.0, 300.0],
    }
    zero = "components.value_pretraining.num_iterations=0"
    write_run(tmp_path / "policy", metrics, "seed=2", zero, "training.num_iterations=16")
    times = {"time/iteration_s": [900.0]}
    write_run(tmp_path / "first", times, "components.value_pretraining.num_iterations=4")
    done = {"row": "VAPO", "seed": 2, "state": "finished", "run_dir": str(tmp_path / "policy")}
    (tmp_path / "sweep.json").write_text(
        json.dumps(
            {
                "value_pretrainings": [{"identity": "ab", "run_dir": str(tmp_path / "first")}],
                "runs": [
                    {**done, "needs": "ab"},
                    {"row": "GRPO", "seed": 2, "state": "waiting", "run_dir": None, "needs": None},
                ],
            }
        )
    )
    (row,) = [script.row_of(*run) for run in script.finished(tmp_path)]
    assert row == {
        "system": "VAPO",
        "seed": 2,
        "before": 0.5,
        "before_low": 0.4,
        "before_high": 0.6,
        "after": 0.75,
        "after_low": 0.7,
        "after_high": 0.8,
        "responses": (4 + 16) * 64,
        "hours": 0.5,
        "accuracy": [0.5, 0.625],
        "scores": [0.5, 0.7, 0.75],
        "explained_variance_after_pretraining": 0.25,
        "truth_explained_within": 0.3,
        "truth_explained_within_at_the_end": 0.4,
        "truth_mistake_recall": 0.6,
        "truth_mistake_recall_at_the_end": None,
    }
    assert "| VAPO | 2 | 50.0 [40.0, 60.0] | 75.0 [70.0, 80.0] | 1,280 | 0.50 | 0.25 |" in (
        script.table([row])
    )


@pytest.mark.parametrize(
    ("name", "page_of_means"),
    [
        ("results", SMOLLM2 / "comparisons.md"),
        ("results_h200", SMOLLM2 / "comparisons.md"),
        ("results_group_sizes_cpu", ROOT / "docs/language_model.md"),
    ],
)
def test_the_pages_show_every_row(script: ModuleType, name: str, page_of_means: Path) -> None:
    rows = json.loads((SMOLLM2 / f"{name}.json").read_text(encoding="utf-8"))
    assert page_of_means in script.PAGES
    for path, table in ((page_of_means, script.means), (script.PAGE_OF_RUNS, script.table)):
        page = path.read_text(encoding="utf-8")
        assert script.with_table(page, table(rows), name=name) == page
        assert script.with_table(page, table(rows[:-1]), name=name) != page


def test_seeds_that_differ_much_are_shown_in_place_of_an_interval(script: ModuleType) -> None:
    """The interval of the second would begin at 56 and end at 108; that on fresh prompts is one.
    One system's runs have four batches more than the other's, which are not compared."""
    scores = {"A": (0.82, 0.80, 0.84), "B": (0.885, 0.701, 0.881)}
    accuracies = {"A": [0.0] * 8 + [0.75] * 8 + [0.25] * 4, "B": [0.0] * 8 + [0.8125] * 8}
    rows = [
        {
            "system": name,
            "seed": seed,
            "before": 0.5,
            "after": after,
            "accuracy": accuracies[name],
        }
        for name, all_seeds in scores.items()
        for seed, after in enumerate(all_seeds)
    ]
    lines = script.means(rows, against="A").splitlines()
    assert lines[2] == "| A | 3 | 82.0 [77.0, 87.0] | 32.0 [27.0, 37.0] |  |  |"
    assert lines[3].startswith(
        "| B | 3 | 82.2, median 88.1 (88.5, 70.1, 88.1) "
        "| 32.2, median 38.1 (38.5, 20.1, 38.1) | +0.2 ["
    )
    assert lines[3].endswith("| +6.2 [+6.2, +6.2] |")
    assert lines[0].endswith("| the same on fresh prompts, batches 9 to 16 |")


def test_a_page_without_a_place_for_the_table(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="with '<!-- end of results -->' after it"):
        script.with_table(f"# A page\n\n{MARK}\n", "")


def test_the_effects_of_the_losss_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand on four rows of two seeds; and the page's table is that of the recorded runs."""
    monkeypatch.syspath_prepend(str(SMOLLM2))
    effects = import_module("effects")
    scores = {("group", 0): 0.5, ("group, LM", 0): 0.53, ("group", 1): 0.6, ("group, LM", 1): 0.61}
    rows = [
        {
            "system": name,
            "seed": seed,
            "after": score,
            "scores": [0.4, score, 0.9],
            "accuracy": [0.0] * 8 + [score] * 8 + [1.0],
        }
        for (name, seed), score in scores.items()
    ]
    for figure in effects.FIGURES:
        assert effects.differences(rows, "LM loss", figure) == pytest.approx([3.0, 1.0])
    assert effects.moves([{"scores": [0.4, 0.7, 0.75]}, {"scores": [0.4, 0.7]}]) == (
        pytest.approx([5.0])
    )
    recorded = json.loads((SMOLLM2 / "results_loss_parts.json").read_text())
    assert effects.table(recorded) in (SMOLLM2 / "comparisons.md").read_text()


def test_a_difference_counts_seeds_and_held_out_prompts(tmp_path: Path, script: ModuleType) -> None:
    """Two seeds of 4 prompts, one response to each: differences 1, 0, 0, 0 and 1, 0, 0, 0.
    Over seeds alone they would not spread. By hand: MS_P = 2 (9/16 + 3/16) / 3 = 1/2, t_3 = 3.182,
    half = 3.182 sqrt(1/2 / 8) = 79.56 points around 25."""

    def row(system: str, seed: int, correct: str) -> dict[str, Any]:
        (tmp_path / "prompt_scores.jsonl").write_text(
            json.dumps(
                {
                    "kind": "evaluation",
                    "policy_iterations": 20,
                    "policy_steps": 80,
                    "prompts": ["d", "c", "b", "a"],
                    "correct": [int(digit) for digit in correct],
                    "responses": 1,
                }
            )
        )
        heldout = script.heldout_scores(tmp_path)
        assert heldout["heldout_correct"] == correct[::-1]
        after = sum(map(int, correct)) / 4
        about = {"system": system, "seed": seed, "before": 0.0, "after": after}
        return {**about, "accuracy": [after], **heldout}

    rows = [row("A", 0, "1100"), row("A", 1, "0110"), row("B", 0, "0100"), row("B", 1, "0110")]
    rows[3] = row("B", 1, "0010") | {"after": 0.25}
    rows[1] = row("A", 1, "1010")
    line = script.means(rows, against="B").splitlines()[2]
    assert line.startswith("| A | 2 | 50.0 [")
    assert "| +25.0 [-54.6, +104.6] | +25.0 [+25.0, +25.0] |" in line
    assert script.heldout_scores(tmp_path / "nothing") == {}


def test_the_page_shows_the_recorded_noise_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one system's record changed the page lacks its row."""
    monkeypatch.syspath_prepend(str(SMOLLM2))
    gradient_noise = import_module("gradient_noise")
    records = json.loads((SMOLLM2 / "gradient_noise.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/language_model.md").read_text(encoding="utf-8")
    assert gradient_noise.table(records) in page
    records[1]["needed"] += 1
    assert gradient_noise.table(records) not in page


def test_the_noise_of_a_gradient_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts with two responses each: gradients 1 and 3, and 4 and 0.

    |G|^2 over pairs of prompts: 2 x 2 = 4. E|g|^2 = (1 + 9 + 16 + 0) / 4, and of groups of two
    2 x 2 and 2 x 2. In one number for each response the variances are 2.5, and 2 x (4 - 4)."""
    monkeypatch.syspath_prepend(str(SMOLLM2))
    gradient_noise = import_module("gradient_noise")
    single, pairs = gradient_noise.Noise(1), gradient_noise.Noise(2)
    for noise in (single, pairs):
        noise.add(torch.tensor([[1.0], [3.0]]))
        noise.add(torch.tensor([[4.0], [0.0]]))
    assert single.signal() == pairs.signal() == 4.0
    assert (single.variance(), pairs.variance()) == (2.5, 0.0)
    ratio, low, high = gradient_noise.share(pairs, single)
    assert ratio == pytest.approx(8 / 6.5)
    # without the first prompt 8 / 8, without the second 8 / 5
    half = 1.96 * (0.5 * 2 * 0.3**2) ** 0.5
    assert (low, high) == pytest.approx((ratio - half, ratio + half))


def test_the_oracle_of_worked_sums_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others: of four steps three are right, of three sums two, and of one answer all.

    Half a count is added to either side. Two steps left, in the sum: 2.5 / 4 of this sum, 3.5 / 5
    of the next step, 1.5 / 2 of the answer."""
    monkeypatch.syspath_prepend(str(SMOLLM2))
    oracle = import_module("task_oracle")
    rows = [
        ["2 on sum", "1 off"],
        ["2 on sum", "1 on sum", "answer on"],
        ["2 on sum", "1 on copy", "answer off 0"],
    ]
    chances = oracle.oracle_chances(rows, [False, True, False])[0]
    # the others: sums right, right, right; steps right, right, right, wrong; answer right
    assert chances[0] == pytest.approx(3.5 / 4 * 3.5 / 5 * 1.5 / 2)
    assert chances[1] == pytest.approx(0.5 / 2), "one other token after a mistake, and wrong"
