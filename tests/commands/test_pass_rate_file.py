"""`vapo filter` on a tiny policy: what is written, what a killed or second run finds."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.judged import judged
from tests.tiny_model import save_tiny_folder, tiny_tokenizer
from vapo.commands.early_checks import check_early
from vapo.commands.filter import (
    PassRateFile,
    _sample,
    default_path,
    render,
    settings_of,
    summary_metrics,
)
from vapo.config import FitConfig
from vapo.config.kinds import make
from vapo.config.schema import SourceConfig
from vapo.environments.contract import Verdict
from vapo.errors import UserError
from vapo.prompts.load import PromptSplit, load_prompts
from vapo.system.progress import Progress
from vapo.types import FinishReason, Rollout

K = 4


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"))


def config_of(folder: Path, policy: Path, *overrides: str) -> FitConfig:
    rows = [
        {"question": f"{i}=", "gold": str(i % 10), "note": f"row {i}", "nested": {"level": i}}
        for i in range(10)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held.jsonl").write_text('{"prompt": "9=", "answer": "9"}\n')
    return fit_config(
        folder,
        f"actor.path={policy}",
        f"data.train.path={folder / 'rows.jsonl'}",
        "data.train.prompt_column=question",
        "data.train.answer_column=gold",
        f"data.heldout.path={folder / 'held.jsonl'}",
        "rollouts.max_response_tokens=3",
        "rollouts.max_concurrent_sequences=6",  # chunks of 3 prompts
        "rewards.verifier=regex",
        "rewards.pattern=([0-9a-m])",
        "rewards.num_workers=1",
        *overrides,
    )


def fill(config: FitConfig, path: Path, *, only_open: bool = False) -> tuple[PromptSplit, int]:
    prompts = load_prompts(config.data, tiny_tokenizer())
    with closing(PassRateFile(path, settings_of(config, prompts.train, K))) as file:
        sampled = len(prompts.train) - len(file.num_correct)
        if sampled and not only_open:
            with Progress(enabled=False) as progress:
                _sample(config, prompts, tiny_tokenizer(), file, progress)
    return prompts, sampled


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    """The file of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    path = folder / "out.jsonl"
    assert fill(config_of(folder, policy), path)[1] == 9  # the tenth is held out
    return path


def copy(finished: Path, folder: Path, *, size: int | None = None) -> Path:
    path = folder / "copy.jsonl"
    path.write_bytes(finished.read_bytes()[:size])
    settings = finished.with_name("out.jsonl.settings.json")
    path.with_name("copy.jsonl.settings.json").write_text(settings.read_text())
    return path


def test_rows_come_back_whole_and_a_second_run_pays_nothing(
    tmp_path: Path, policy: Path, finished: Path
) -> None:
    config, path = config_of(tmp_path, policy), copy(finished, tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt_index"] for row in rows] == list(range(9))
    for i, row in enumerate(rows):
        assert (row["question"], row["gold"]) == (f"{i}=", str(i))
        assert (row["note"], row["nested"]) == (f"row {i}", {"level": i})
        assert row["pass_rate"] == row["num_correct"] / K
    # the same columns and keys of the config read the new file
    data = config.data
    data.train.path = str(path)  # type: ignore[attr-defined]
    again = load_prompts(data, tiny_tokenizer()).train
    assert [p.text for p in again] == [f"{i}=" for i in range(9)]
    assert again[4].metadata["nested"] == {"level": 4}
    before = path.read_bytes()
    data.train.path = str(tmp_path / "rows.jsonl")  # type: ignore[attr-defined]
    assert fill(config, path)[1] == 0
    assert path.read_bytes() == before


def test_verdicts_are_counted(tmp_path: Path, policy: Path) -> None:
    config, path = config_of(tmp_path, policy), tmp_path / "out.jsonl"
    prompts = load_prompts(config.data, tiny_tokenizer()).train
    with closing(PassRateFile(path, settings_of(config, prompts, K))) as file:
        for i, num_correct in enumerate((0, 1, 4)):
            verdicts = [Verdict(j < num_correct, 0.0) for j in range(K)]
            response = Rollout(prompts[i], (2,), "", (0.0,), FinishReason.STOP)
            file.append(i, prompts[i], judged([response] * K, verdicts))
        assert file.histogram() == [1, 1, 0, 0, 1]
    assert [json.loads(x)["pass_rate"] for x in path.read_text().splitlines()] == [0, 0.25, 1]
    metrics = summary_metrics([1, 1, 0, 0, 1])
    assert metrics["filter/pass_rate_mean"] == pytest.approx(5 / 12)
    assert metrics["filter/never_share"] == metrics["filter/always_share"] == pytest.approx(1 / 3)
    assert metrics["filter/mixed_share"] == pytest.approx(1 / 3)
    extra = {"filter/num_response_tokens": 7.0, "filter/sampling_s": 2.0}
    text = render([1, 1, 0, 0, 1], metrics | extra).splitlines()
    assert text[2] == "     0.25        1  " + "#" * 40
    assert text[3] == "     0.50        0"


@pytest.mark.parametrize("keep", [0.3, 0.97])
def test_a_killed_run_resumes_to_the_same_file(
    tmp_path: Path, policy: Path, finished: Path, keep: float
) -> None:
    """Cut anywhere, in a line too; the responses are those of an uninterrupted run."""
    config, size = config_of(tmp_path, policy), int(finished.stat().st_size * keep)
    cut = copy(finished, tmp_path, size=size)
    _, sampled = fill(config, cut)
    assert sampled == 9 - finished.read_bytes()[:size].count(b"\n")
    assert 0 < sampled < 9
    assert cut.read_bytes() == finished.read_bytes()


def test_a_file_belongs_to_its_settings(tmp_path: Path, policy: Path, finished: Path) -> None:
    config, path = config_of(tmp_path, policy), copy(finished, tmp_path)
    for override, message in (
        ("rollouts.temperature=0.5", r"temperature 1\.0, now 0\.5"),
        ("rewards.pattern=([a-z])", r"pattern "),
        ("seed=1", r"seed 0, now 1"),
        ("data.prompt_template={prompt}{prompt}", r"prompts "),
    ):
        with pytest.raises(UserError, match=rf"its rows belong to other settings \({message}"):
            fill(config_of(tmp_path, policy, override), path, only_open=True)
    prompts = load_prompts(config.data, tiny_tokenizer()).train
    settings = settings_of(config, prompts, K)
    assert default_path(config, settings) == default_path(config, dict(settings))
    other = settings | {"weights": "other"}
    assert default_path(config, settings) != default_path(config, other)
    assert settings["weights"] != str(policy)  # of the weights, not of the folder's name
    with (
        closing(PassRateFile(path, settings)),
        pytest.raises(UserError, match="another `vapo filter` is writing it"),
    ):
        PassRateFile(path, settings)


def test_a_foreign_file_is_not_touched(tmp_path: Path, policy: Path, finished: Path) -> None:
    config, path = config_of(tmp_path, policy), tmp_path / "mine.jsonl"
    path.write_text("precious\n")
    with pytest.raises(
        UserError, match=r"there is a file without a readable mine\.jsonl\.settings"
    ):
        fill(config, path, only_open=True)
    assert path.read_text() == "precious\n"
    own = copy(finished, tmp_path)
    own.write_text('{"prompt_index": 0, "num_correct": 1}\n{"x": 1}\n')
    with pytest.raises(UserError, match=r"copy\.jsonl:2: not a row that `vapo filter` wrote"):
        fill(config, own, only_open=True)


def test_what_filter_does_not_do_is_said_first(tmp_path: Path, policy: Path) -> None:
    config = config_of(tmp_path, policy)
    check_early("filter", config, {})
    config.rewards.shuffle = True
    with pytest.raises(UserError, match=r"rewards\.shuffle would make"):
        check_early("filter", config, {})
    config.trainer.devices = 2
    with pytest.raises(UserError, match="vapo filter is one process"):
        check_early("filter", config, {})
    config.data.train = make(SourceConfig, kind="mixture")
    with pytest.raises(UserError, match="filter one source at a time"):
        check_early("filter", config, {})


def test_an_environment_is_a_setting_where_it_is_used(tmp_path: Path, policy: Path) -> None:
    assert "environment" not in settings_of(config_of(tmp_path, policy), [], K)
    episodes = ("environment.kind=function", "environment.function=games:Guess")
    options = ((), ("environment.max_turns=3",), ("environment.args={highest: 9}",))
    found = [settings_of(config_of(tmp_path, policy, *episodes, *more), [], K) for more in options]
    texts = {json.dumps(settings["environment"], sort_keys=True) for settings in found}
    assert len(texts) == 3
    same = config_of(tmp_path, policy, *episodes, "environment.max_processes=2")
    assert settings_of(same, [], K) == found[0]
