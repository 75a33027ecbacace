"""Reports of an experiment: which recorded runs are one row, and what is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from tests.tracking.ready_stores import ready_store
from vapo.commands.report import open_reader, run, write_report
from vapo.errors import UserError
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.runs import Collection
from vapo.sweep.report.table import make_table
from vapo.tracking.opening import open_store
from vapo.tracking.records import InputData, Record
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import locate_store

CONFIG = {
    "seed": 0,
    "algorithm.eps_low": 0.2,
    "algorithm.gamma": 1.0,
    "actor.optimizer.lr": 1e-4,
    "critic.optimizer.lr": 1e-3,
    "critic.init": "reward_model",
    "components.clip_higher.enabled": True,
    "components.token_level_loss.enabled": True,
    "components.value_pretraining.num_iterations": 12,
    "training.num_iterations": 40,
    "trainer.num_threads": 1,
    "checkpoints.resume": "never",
}
TAGS = {"command": "fit", "code": "0.1.0+aaa", "model/actor": "policy (0a0a0a)"}


class Experiment:
    """Runs recorded as `vapo fit` records them, without the training."""

    def __init__(self, folder: Path, name: str) -> None:
        self.uri, self.name = str(folder), name
        store = locate_store(self.uri)
        self.experiment_id = open_store(store, name, lambda _: None)
        self.client = MlflowClient(store.uri)
        self.started = itertools.count(1_700_000_000_000, 60_000)

    def add(
        self,
        name: str,
        score: float | None = 0.5,
        config: Mapping[str, Any] = {},
        *,
        tags: Mapping[str, str] = {},
        status: str = "FINISHED",
        prompts: str = "d1",
        resumed_with: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the id."""
        made = self.client.create_run(
            self.experiment_id, start_time=next(self.started), run_name=name, tags={**TAGS, **tags}
        )
        run_id = str(made.info.run_id)
        sink = MlflowSink(self.client, run_id)
        values = CONFIG | dict(config)
        sink.send([Record("params", {key: str(value) for key, value in values.items()})])
        sink.send([Record("inputs", [InputData("t", "training", prompts, 9, "{}")])])
        if score is not None:
            sink.send([Record("metrics", [(SCORE, 0.1, 1, 0), (SCORE, score, 2, 40)])])
        if resumed_with is not None:
            text = nested(values | dict(resumed_with))
            sink.send([Record("file", text.encode(), "config_resumed.yaml")])
        if status != "RUNNING":
            self.client.set_terminated(run_id, status)
        return run_id

    def read(self, full_system: str | None = None) -> Collection:
        return open_reader(self.uri).experiment(self.name, full_system)


def nested(values: Mapping[str, Any]) -> str:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        block = tree
        for name in parents:
            block = block.setdefault(name, {})
        block[last] = value
    return yaml.safe_dump(tree)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ready_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def experiment(store: Path, request: pytest.FixtureRequest) -> Experiment:
    return Experiment(store, request.node.name)


def scores(collection: Collection) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {row.name: {} for row in collection.rows}
    for record in collection.runs:
        assert record.seed not in found[record.row]
        found[record.row][record.seed] = round(record.score() or 0.0, 3)
    return found


def said(collection: Collection) -> str:
    return "\n".join(collection.notes)


def test_runs_of_one_name_and_different_configs_are_rows_of_their_own(
    experiment: Experiment,
) -> None:
    for seed, score in enumerate([0.50, 0.52]):
        experiment.add(f"vapo seed{seed}", score, {"seed": seed})
    for seed, score in enumerate([0.30, 0.32]):
        lower = {"seed": seed, "algorithm.eps_low": 0.1, "actor.optimizer.lr": 1e-5}
        experiment.add(f"vapo-seed{seed}", score, lower)
    found = experiment.read()
    assert scores(found) == {
        "vapo (eps_low 0.2, actor.optimizer.lr 0.0001)": {0: 0.5, 1: 0.52},
        "vapo (eps_low 0.1, actor.optimizer.lr 1e-05)": {0: 0.3, 1: 0.32},
    }
    assert "2 rows have runs named vapo" in said(found)
    assert "algorithm.eps_low (0.2; 0.1)" in said(found)
    assert "left out" not in said(found).lower()


def test_seeds_of_one_config_are_one_row(experiment: Experiment) -> None:
    """Also where only the place of the run differs, and what it keeps."""
    for seed in range(3):
        where = {"trainer.num_threads": seed + 1, "checkpoints.resume": "auto" if seed else "never"}
        experiment.add(f"vapo-seed{seed}", 0.5 + seed / 100, {"seed": seed, **where})
    found = experiment.read()
    assert scores(found) == {"vapo": {0: 0.5, 1: 0.51, 2: 0.52}}
    assert found.notes == ()


def test_a_run_that_an_older_version_recorded_is_read(experiment: Experiment) -> None:
    run_id = experiment.add("vapo-seed0", None)
    for key, value in (("_score/avg_at_k", 0.5), ("z_progress/policy_steps", 40.0)):
        experiment.client.log_metric(run_id, key, value, step=40)
    (record,) = experiment.read().runs
    assert (record.score(), record.history["progress/policy_steps"]) == (0.5, {40: 40.0})


def test_of_a_run_that_was_done_twice_the_latest_is_taken_and_said(experiment: Experiment) -> None:
    first = experiment.add("vapo-seed0", 0.5)
    second = experiment.add("vapo-seed0", 0.6)
    third = experiment.add("vapo-seed0", 0.7, status="KILLED")
    found = experiment.read()
    assert scores(found) == {"vapo": {0: 0.6}}
    [record] = found.runs
    assert record.run_id == second
    [twice] = [note for note in found.notes if "latest" in note]
    assert twice.startswith(f"vapo, seed 0: 2 runs of the same config, the latest, {second} (")
    assert f"left out: {first} (2023-11-14 22:13 UTC, score 50.0)" in twice
    assert f"{third}, KILLED" in said(found)


@pytest.mark.parametrize(
    ("other", "label"),
    [
        ({"tags": {"code": "0.1.0+bbb"}}, ("code 0.1.0+aaa", "code 0.1.0+bbb")),
        ({"prompts": "d2"}, ("training prompts d1", "training prompts d2")),
        ({"tags": {"model/actor": "policy (0b0b)"}}, ("model/actor 0a0a0a", "model/actor 0b0b")),
        (
            {"config": {"components.clip_higher.enabled": False}},
            ("clip_higher.enabled true", "clip_higher.enabled false"),
        ),
        (
            {"resumed_with": {"training.num_iterations": 80}},
            ("training.num_iterations 40", "training.num_iterations 40, then 80"),
        ),
    ],
    ids=["code", "prompts", "models", "config", "resumed"],
)
def test_what_makes_another_row(
    experiment: Experiment, other: Mapping[str, Any], label: tuple[str, str]
) -> None:
    experiment.add("vapo-seed0", 0.5)
    experiment.add("vapo-seed0", 0.6, **other)
    expected = zip(label, (0.5, 0.6), strict=True)
    assert scores(experiment.read()) == {f"vapo ({text})": {0: score} for text, score in expected}


def test_without_a_digest_of_the_code_the_commit_tells_it_apart(experiment: Experiment) -> None:
    for commit in ("1" * 40, "2" * 40):
        experiment.add("vapo-seed0", tags={"code": "", "git/commit": commit})
    assert list(scores(experiment.read())) == [
        "vapo (code 111111111111)",
        "vapo (code 222222222222)",
    ]


def test_a_resumed_run_of_the_same_config_is_the_same_row(experiment: Experiment) -> None:
    experiment.add("vapo-seed0")
    experiment.add("vapo-seed1", config={"seed": 1}, resumed_with={"trainer.num_threads": 2})
    assert scores(experiment.read()) == {"vapo": {0: 0.5, 1: 0.5}}


def test_what_is_not_finished_or_not_evaluated_is_said(experiment: Experiment) -> None:
    experiment.add("vapo-seed0")
    left = {
        state: experiment.add(f"vapo-seed{seed}", config={"seed": seed}, status=state)
        for seed, state in enumerate(["FAILED", "KILLED", "RUNNING"], start=1)
    }
    sft = experiment.add("sft", None, tags={"command": "sft"})
    experiment.add("sweep x", None, tags={"role": "sweep"})
    found = experiment.read()
    assert scores(found) == {"vapo": {0: 0.5}}
    [unfinished] = [note for note in found.notes if note.startswith("Left out, not finished")]
    assert all(f"{run_id}, {state}" in unfinished for state, run_id in left.items())
    [unevaluated] = [note for note in found.notes if "no evaluation" in note]
    assert f"sft ({sft})" in unevaluated
    assert "sweep x" not in said(found)


def test_a_long_list_of_failures_is_counted(experiment: Experiment) -> None:
    experiment.add("vapo-seed0")
    for seed in range(1, 15):
        experiment.add(f"vapo-seed{seed}", None, {"seed": seed}, status="FAILED")
    [note] = experiment.read().notes
    assert note.startswith("Left out, not finished: 14 runs: ")
    assert note.endswith("and 4 more.")


def test_an_experiment_without_a_usable_run_says_why(experiment: Experiment) -> None:
    run_id = experiment.add("vapo-seed0", status="FAILED")
    with pytest.raises(UserError, match=f"no finished run with a recorded evaluation.*{run_id}"):
        experiment.read()


def test_chosen_runs_that_are_not_finished_are_taken_and_said(experiment: Experiment) -> None:
    first = experiment.add("vapo-seed0")
    second = experiment.add("vapo-seed1", 0.4, {"seed": 1}, status="RUNNING")
    nothing = experiment.add("vapo-seed2", None, {"seed": 2}, status="FAILED")
    again = experiment.add("vapo-seed0", 0.9, status="RUNNING")
    ids = [first, second, nothing, again, first]
    found = open_reader(experiment.uri).chosen(ids)
    assert scores(found) == {"vapo": {0: 0.5, 1: 0.4}}, "a finished run goes before a later one"
    assert f"{second}, RUNNING" in said(found)
    assert f"vapo-seed2 ({nothing}, FAILED)" in said(found)
    assert f"left out: {again}" in said(found)


def row_tags(row: str, seed: int, **more: str) -> dict[str, str]:
    return {"role": "row", "row": row, "seed": str(seed), "paper_score": "60", **more}


def add_sweep(
    experiment: Experiment, seeds: Sequence[int], tmp_path: Path, *, iterations: int, digit: str
) -> None:
    """A row of a sweep whose runs start from value pretrainings, each seed from its own."""
    for seed in seeds:
        identity = f"{seed}{digit}" * 6
        experiment.add(
            f"value pretraining of VAPO/{seed}",
            0.1,
            {
                "seed": 1_000_000 + seed,
                "training.num_iterations": 0,
                "components.value_pretraining.num_iterations": iterations,
            },
            tags={"role": "value_pretraining", "identity": identity, "seed": str(seed)},
        )
        task = tmp_path / "runs" / f"value-pretraining-of-vapo-{seed}_{identity}"
        critic = {
            "critic.init": str(task / "fit" / "20250101-000000_x" / "pretrained_critic"),
            "components.value_pretraining.num_iterations": 0,
        }
        fingerprint = {"model/critic": f"{critic['critic.init']} ({identity})"}
        tags = row_tags("VAPO", seed, full_system="true") | fingerprint
        experiment.add(f"VAPO/{seed}", 0.6, {"seed": seed, **critic}, tags=tags)


def test_seeds_of_a_sweeps_row_are_one_row_though_each_starts_from_its_own_critic(
    experiment: Experiment, tmp_path: Path
) -> None:
    killed = {"role": "abandoned", "identity": "0a" * 6}
    experiment.add("value pretraining of VAPO/0", None, {}, tags=killed, status="KILLED")
    add_sweep(experiment, [0, 1, 2], tmp_path, iterations=12, digit="a")
    found = experiment.read()
    assert scores(found) == {"VAPO": {0: 0.6, 1: 0.6, 2: 0.6}}
    assert found.full_system == "VAPO"
    assert [row.paper_score for row in found.rows] == [60]
    assert {record.row for record in found.pretrainings} == {"value pretraining of VAPO"}
    [note] = found.notes
    assert note.startswith("Left out, not finished: value pretraining of VAPO/0 (")


@pytest.mark.slow
def test_sweeps_with_other_value_pretrainings_are_told_apart_and_no_full_system_is_guessed(
    experiment: Experiment, tmp_path: Path
) -> None:
    add_sweep(experiment, [0, 1], tmp_path, iterations=12, digit="a")
    add_sweep(experiment, [0, 1], tmp_path, iterations=24, digit="b")
    found = experiment.read()
    names = [f"VAPO (value_pretraining.num_iterations {n})" for n in (12, 24)]
    assert scores(found) == {name: {0: 0.6, 1: 0.6} for name in names}
    assert found.full_system is None
    assert "--full_system" in said(found)
    assert experiment.read(names[0]).full_system == names[0]
    with pytest.raises(UserError, match=r"--full_system VAPO: not a row; rows: VAPO \(value"):
        experiment.read("VAPO")


def test_many_differences_still_make_names_that_differ(experiment: Experiment) -> None:
    for value in (1, 2):
        changed = {f"algorithm.key_{i}": (value if i == 9 else i * value) for i in range(1, 10)}
        experiment.add("vapo-seed0", config=changed)
    experiment.add("vapo-seed0", config={"algorithm.key_9": 2})
    names = list(scores(experiment.read()))
    assert len(set(names)) == 3
    assert names[0].startswith("vapo (key_1 1, key_2 2, key_3 3, 6 more, ")
    assert names[2].startswith("vapo (key_1 not set, ")


def test_the_report_has_the_rows_and_what_is_left_out(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment.add("vapo-seed0", 0.5)
    experiment.add("vapo-seed0", 0.3, {"algorithm.gamma": 0.9})
    failed = experiment.add("vapo-seed1", config={"seed": 1}, status="FAILED")
    run(experiment=experiment.name, tracking_uri=experiment.uri, output_dir=tmp_path / "out")
    for text in (capsys.readouterr().out, (tmp_path / "out/table.md").read_text()):
        assert "| vapo (gamma 1.0) | 1 | 50.0 |" in text
        assert "| vapo (gamma 0.9) | 1 | 30.0 |" in text
        assert f"Left out, not finished: vapo-seed1 ({failed}, FAILED)." in text
    assert failed in (tmp_path / "out/report.html").read_text()


@pytest.mark.slow
def test_more_runs_than_a_page_of_the_store(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vapo.sweep.report.runs._PAGE", 2)
    for seed in range(5):
        experiment.add(f"vapo-seed{seed}", config={"seed": seed})
    assert len(experiment.read().runs) == 5


def test_two_runs_of_one_row_and_seed_never_reach_the_table(
    experiment: Experiment, tmp_path: Path
) -> None:
    experiment.add("vapo-seed0", 0.5)
    found = experiment.read()
    doubled = Collection("t", found.rows, [*found.runs, *found.runs])
    refused: list[Callable[[], object]] = [
        lambda: make_table(doubled),
        lambda: write_report(doubled, tmp_path),
    ]
    for attempt in refused:
        with pytest.raises(ValueError, match="two runs of row vapo and seed 0"):
            attempt()
