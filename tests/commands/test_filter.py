"""`vapo filter` on a tiny policy: what is written, what a killed or second run finds."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import fit_config
from tests.judged import judged
from tests.tiny_model import save_tiny_folder, tiny_tokenizer
from tests.tracking.ready_stores import ready_store
from vapo.commands import filter
from vapo.commands.early_checks import check_early
from vapo.commands.filter import (
    ResumableParts,
    check_settings,
    default_path,
    histogram_text,
    pass_rate_metrics,
    pass_rate_rows,
    read_histogram,
    sample_pass_rates,
    settings_of,
    settings_path,
)
from vapo.config import FitConfig
from vapo.config.kinds import make
from vapo.config.schema import SourceConfig
from vapo.environments.contract import Verdict
from vapo.errors import UserError
from vapo.prompts.load import load_prompts
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


def settings(config: FitConfig) -> dict[str, Any]:
    return settings_of(config, load_prompts(config.data, tiny_tokenizer()).train, K)


def fill(config: FitConfig, path: Path) -> None:
    train = load_prompts(config.data, tiny_tokenizer()).train
    with Progress(enabled=False) as progress:
        sample_pass_rates(config, train, tiny_tokenizer(), path, settings(config), progress)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    """The file of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    path = folder / "out.jsonl"
    fill(config_of(folder, policy), path)
    assert path.read_bytes().count(b"\n") == 9  # the tenth is held out
    assert not path.with_name("out.jsonl.parts").exists()
    return path


def copy(finished: Path, folder: Path) -> Path:
    path = folder / "copy.jsonl"
    for end in ("", ".settings.json"):
        path.with_name(path.name + end).write_text(
            finished.with_name(f"out.jsonl{end}").read_text()
        )
    return path


def test_rows_come_back_whole_and_a_second_run_pays_nothing(
    tmp_path: Path, policy: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
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
    config.tracking.uri = str(ready_store(tmp_path / "mlruns"))
    monkeypatch.setattr(filter, "sample_pass_rates", None)
    assert filter.run(config, num_responses=K, output=str(path)) == path
    assert path.read_bytes() == before


def test_verdicts_are_counted(tmp_path: Path, policy: Path) -> None:
    config, path = config_of(tmp_path, policy), tmp_path / "out.jsonl"
    prompts = load_prompts(config.data, tiny_tokenizer()).train
    played = []
    for prompt, num_correct in zip(prompts, (0, 1, 4), strict=False):
        verdicts = [Verdict(j < num_correct, 0.0) for j in range(K)]
        response = Rollout(prompt, (2,), "", (0.0,), FinishReason.STOP)
        played += judged([response] * K, verdicts)
    path.write_text(pass_rate_rows(played, 0, K))
    assert read_histogram(path, K) == [1, 1, 0, 0, 1]
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    assert [row["pass_rate"] for row in rows] == [0, 0.25, 1]
    assert [row["prompt_index"] for row in rows] == [0, 1, 2]
    metrics = pass_rate_metrics([1, 1, 0, 0, 1])
    assert metrics["filter/pass_rate_mean"] == pytest.approx(5 / 12)
    assert metrics["filter/never_share"] == metrics["filter/always_share"] == pytest.approx(1 / 3)
    assert metrics["filter/mixed_share"] == pytest.approx(1 / 3)
    extra = {"filter/num_response_tokens": 7.0, "filter/sampling_s": 2.0}
    text = histogram_text([1, 1, 0, 0, 1], metrics | extra).splitlines()
    assert text[2] == "     0.25        1  " + "#" * 40
    assert text[3] == "     0.50        0"


@pytest.mark.parametrize("num_before", [pytest.param(0, marks=pytest.mark.night), 2])
def test_a_killed_run_resumes_to_the_same_file(
    tmp_path: Path, policy: Path, finished: Path, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that are there are not sampled again; the others are those of a run to the end."""
    config, path = config_of(tmp_path, policy), tmp_path / "out.jsonl"
    begun: list[int] = []
    stops_at: int | None = 3 * num_before

    def counted(rollouts: list[Rollout], first: int, k: int) -> str:
        begun.append(first)
        if first == stops_at:
            raise RuntimeError("killed")
        return pass_rate_rows(rollouts, first, k)

    monkeypatch.setattr(filter, "pass_rate_rows", counted)
    with pytest.raises(RuntimeError, match="killed"):
        fill(config, path)
    assert not path.exists()
    other = config_of(tmp_path, policy, "rollouts.temperature=0.5")
    with pytest.raises(UserError, match="has rollouts of other settings"):
        fill(other, path)
    begun.clear()
    stops_at = None
    fill(config, path)
    assert begun == [0, 3, 6][num_before:]
    assert path.read_bytes() == finished.read_bytes()


def _hold(path: Path, ready: Any, release: Any) -> None:
    parts = ResumableParts(path, "{}\n", 1)
    ready.set()
    release.wait(60)
    parts.close()


def test_one_command_at_a_time_writes_a_file(tmp_path: Path) -> None:
    context, path = multiprocessing.get_context("fork"), tmp_path / "out.jsonl"
    ready, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(path, ready, release))
    process.start()
    assert ready.wait(60)
    try:
        with pytest.raises(UserError, match="another command is writing it"):
            ResumableParts(path, "{}\n", 1)
    finally:
        release.set()
        process.join()
    ResumableParts(path, "{}\n", 1).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        ResumableParts(tmp_path / "file" / "out.jsonl", "{}\n", 1)


def test_a_file_belongs_to_its_settings(tmp_path: Path, policy: Path, finished: Path) -> None:
    config, path = config_of(tmp_path, policy), copy(finished, tmp_path)
    for override, message in (
        ("rollouts.temperature=0.5", r"temperature 1\.0, now 0\.5"),
        ("rewards.pattern=([a-z])", r"pattern "),
        ("seed=1", r"seed 0, now 1"),
        ("data.prompt_template={prompt}{prompt}", r"prompts "),
        ("rewards.answer_after=x", r"answer_after None, now 'x'"),
        ("rewards.keep_special_tokens=false", r"keep_special_tokens None, now False"),
    ):
        with pytest.raises(UserError, match=rf"its rows belong to other settings \({message}"):
            check_settings(path, settings(config_of(tmp_path, policy, override)))
    own = settings(config)
    check_settings(path, own)
    settings_path(path).write_text(json.dumps(own | {"answer_after": "x"}))
    with pytest.raises(UserError, match=r"answer_after 'x', now None"):
        check_settings(path, own)
    assert default_path(config, own) == default_path(config, dict(own))
    assert default_path(config, own) != default_path(config, own | {"weights": "other"})
    assert own["weights"] != str(policy)  # of the weights, not of the folder's name


@pytest.mark.slow
def test_a_part_of_the_prompts_is_not_taken_for_all(
    tmp_path: Path, policy: Path, finished: Path
) -> None:
    config, path = config_of(tmp_path, policy), copy(finished, tmp_path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(UserError, match=r"it has 4 of 9 prompts; remove it"):
        filter.run(config, num_responses=K, output=str(path))


def test_a_foreign_file_is_not_touched(tmp_path: Path, policy: Path, finished: Path) -> None:
    config, path = config_of(tmp_path, policy), tmp_path / "mine.jsonl"
    path.write_text("precious\n")
    with pytest.raises(
        UserError, match=r"there is a file without a readable mine\.jsonl\.settings"
    ):
        filter.run(config, num_responses=K, output=str(path))
    assert path.read_text() == "precious\n"
    own = copy(finished, tmp_path)
    own.write_text('{"prompt_index": 0, "num_correct": 1}\n{"x": 1}\n')
    with pytest.raises(UserError, match=r"copy\.jsonl:2: not a row that `vapo filter` wrote"):
        read_histogram(own, K)


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


def test_what_else_lies_beside_the_parts_stays(tmp_path: Path) -> None:
    """Also where the folder is a link to another disk."""
    path, disk = tmp_path / "out.jsonl", tmp_path / "disk"
    for has_link in (False, True):
        if has_link:
            disk.mkdir()
            (tmp_path / "out.jsonl.parts").symlink_to(disk)
        parts = ResumableParts(path, "{}\n", 1)
        (parts.folder / "mine").write_text("mine")
        for name in ("000000.jsonl", ".000000.jsonl.new"):
            (parts.folder / name).write_text("")
        parts.close()
        parts.remove()
        assert [one.name for one in parts.folder.iterdir()] == ["mine"]
        (parts.folder / "mine").unlink()
        ResumableParts(path, "{}\n", 1).remove()
        assert parts.folder.exists() == has_link
