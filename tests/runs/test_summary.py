import json
import math
import subprocess
from dataclasses import replace

import pytest

from vapo.config import FitConfig
from vapo.config.critic import CriticConfig
from vapo.config.functions import names_a_notebooks_function
from vapo.errors import InterruptedRunError, UserError
from vapo.runs.run_dirs import make_run_dir
from vapo.runs.summary import (
    FAILED_EPISODES,
    RunSummary,
    render_summary,
    score_line,
    unjudged,
    write_summary,
)

PLAIN_FIELDS = {
    "k",
    "num_iterations",
    "stage_seconds",
    "total_seconds",
    "mlflow_run_id",
    "mlflow_experiment_id",
    "config_hash",
}


@pytest.fixture
def summary():
    return RunSummary(
        evaluation_before={
            "eval/avg_at_k": 0.61,
            "eval/avg_at_k_ci_low": 0.58,
            "eval/avg_at_k_ci_high": 0.64,
            "eval/maj_at_k": math.nan,
        },
        evaluation_after={"eval/avg_at_k": 0.835},
        k=8,
        num_iterations=60,
        stage_seconds={"rollout": 61.0, "training": 122.0},
        total_seconds=200.5,
        mlflow_run_id="abc",
        mlflow_experiment_id="1",
        tracking_uri="sqlite:////x/mlflow.db",
        config_hash="0123456789ab",
    )


def test_what_was_not_judged_is_a_warning():
    (said,) = unjudged({"eval/failure_rate": 0.59375})
    assert said == "59.4 % of the last evaluation's responses had no verdict, and count as wrong"
    assert unjudged({"eval/failure_rate": 0.0}) == unjudged({}) == []


def test_summary_json(summary, tmp_path):
    path = write_summary(tmp_path, summary)
    assert path == tmp_path / "summary.json"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    data = json.loads(path.read_text())
    assert data["score_before"] == 0.61
    assert data["score_before_ci"] == [0.58, 0.64]
    assert data["score_after"] == 0.835
    assert data["score_after_ci"] is None
    assert data["stage_seconds"] == {"rollout": 61.0, "training": 122.0}
    assert data["total_seconds"] == 200.5
    assert data["mlflow_run_id"] == "abc"
    assert data["config_hash"] == "0123456789ab"
    assert data["num_iterations"] == 60
    assert data["evaluation_before"]["eval/maj_at_k"] is None
    assert set(data["versions"]) >= {"python", "torch", "lightning", "transformers", "vapo"}


def test_a_folder_that_was_deleted_has_no_summary(summary, tmp_path):
    with pytest.raises(InterruptedRunError, match=r"gone/summary\.json .* was deleted or moved"):
        write_summary(tmp_path / "gone", summary)


def test_a_failed_write_leaves_the_old_summary(summary, tmp_path, monkeypatch):
    write_summary(tmp_path, summary)
    summary.stage_seconds = {"rollout": object()}
    with pytest.raises(TypeError):
        write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text())["score_after"] == 0.835


def run_dir_below(tmp_path, monkeypatch):
    """As long as the folder of a run with a default name, seen from the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / f"runs/vapo/20261122-190000_{'x' * 48}"


def test_text_names_scores_record_next_steps_and_ends_with_the_folder(
    summary, tmp_path, monkeypatch
):
    run_dir = run_dir_below(tmp_path, monkeypatch)
    summary.profile = "training 60%, rollout 30%, idle 10%; 40 tokens/s" + ", and more" * 9
    summary.score_best, summary.best_iteration = 0.9, 40
    summary.critic_at_end = 0.5
    text = render_summary(
        summary,
        run_dir,
        recorded="in MLflow's experiment 'x' as 'a name'",
        ablation="components.value_pretraining.enabled=false",
        value_page=f"mlruns/artifacts/{'0' * 32}/artifacts/value_pages/iteration_0060.html",
        other_run=run_dir.with_name("20261122-180000_vapo"),
    )
    lines = text.splitlines()
    shown = str(run_dir.relative_to(tmp_path))
    assert lines[-1] == shown
    (page,) = [line for line in lines if len(line) > 80]
    assert page == f"  mlruns/artifacts/{'0' * 32}/artifacts/value_pages/iteration_0060.html"
    place = lines.index("open first    what the critic expected before each token:")
    assert lines[place + 1] == page
    assert "61.0 %  [58.0, 64.0]  (avg@8, held-out prompts)" in text
    assert "score after   83.5 %" in lines, "what the score is stands once"
    assert "score best    90.0 % after iteration 40 (best.ckpt)" in text
    assert "took          3:20, 60 iterations" in lines, "the profile has the stages"
    assert "time went to  training 60%, rollout 30%, idle 10%; 40 tokens/s" in text
    assert "recorded      in MLflow's experiment 'x' as 'a name'" in lines
    assert lines[lines.index("try next:") + 1 : -2] == [
        f"  R={shown}",
        "  # its charts, in a browser",
        "  vapo ui --run abc --tracking_uri sqlite:////x/mlflow.db",
        "  # its score and curves beside those of the run before it",
        "  BEFORE=runs/vapo/20261122-180000_vapo",
        '  vapo report "$BEFORE" "$R"',
        "  # train once more without value pretraining",
        '  vapo fit --config "$R"/config.yaml components.value_pretraining.enabled=false',
        "  # score the best checkpoint on the held-out prompts once more",
        '  vapo validate --config "$R"/config.yaml --ckpt_path "$R"/checkpoints/best.ckpt',
        "  # write its policy as a folder for Transformers and vLLM",
        '  vapo export "$R"/checkpoints/best.ckpt "$R"/actor',
    ]
    assert "not delivered" not in text


def test_text_without_scores_and_with_lost_records(summary, tmp_path):
    summary.score_before = summary.score_after = None
    summary.undelivered_records = 3
    text = render_summary(summary, tmp_path / "a run", recorded="x")
    assert "vapo fit" not in text
    assert text.count("not measured") == 2
    assert "3:20, 60 iterations (training 2:02, rollout 1:01)" in text
    assert "3 records were not delivered" in text
    assert f"  R='{tmp_path}/a run'\n" in text
    assert '  # send the records that the store has not\n  vapo deliver "$R"\n' in text
    assert '  vapo report ANOTHER_RUN_FOLDER "$R"\n' in text, "there is no run before it"
    assert "critic  " not in text
    assert "score best" not in text
    assert "open first" not in text
    summary.score_best, summary.best_iteration = 0.9, summary.num_iterations
    assert "score best" not in render_summary(summary, tmp_path, recorded="x"), "it is the last one"


@pytest.mark.parametrize(
    ("after_pretraining", "at_end", "row"),
    [
        (
            0.3649,
            0.168,
            "0.36 after value pretraining (its last batches), 0.17 at the end (the last batches)",
        ),
        (None, -0.5, "-0.50 at the end (the last batches)"),
        (0.4, None, "0.40 after value pretraining (its last batches)"),
        (-0.0012, None, "0.00 after value pretraining (its last batches)"),
    ],
)
def test_the_end_says_what_the_critic_knew(summary, tmp_path, after_pretraining, at_end, row):
    knows = replace(summary, critic_after_pretraining=after_pretraining, critic_at_end=at_end)
    text = render_summary(knows, tmp_path, recorded="x")
    rows = " ".join(text.partition("critic  ")[2].partition("took ")[0].split())
    assert rows == f"mean explained variance {row}"
    if after_pretraining is not None:
        held_out = render_summary(replace(knows, critic_was_held_out=True), tmp_path, recorded="x")
        assert "after value pretraining (held-out" in " ".join(held_out.split())
    said = render_summary(summary, tmp_path, recorded="x", value_page="p" * 70)
    first = "open first    its responses and their advantages, token by token:"
    assert f"{first}\n  {'p' * 70}\n" in said
    data = json.loads(write_summary(tmp_path, knows).read_text())
    assert (data["critic_after_pretraining"], data["critic_at_end"]) == (after_pretraining, at_end)


def test_a_run_without_a_better_checkpoint_than_its_start_says_so(summary, tmp_path):
    def said():
        text = render_summary(summary, tmp_path, recorded="x")
        row = text.partition("score best ")[2].partition("took ")[0]
        return " ".join(row.split()), text

    summary.score_best, summary.best_iteration = 0.5, summary.num_iterations
    said_best = "no checkpoint is better than the start, 61.0 %; best.ckpt: 50.0 % after iteration"
    assert said()[0] == f"{said_best} 60"
    summary.score_best, summary.best_iteration = 0.61, 1  # of value pretraining: it is the start
    assert said()[0] == f"{said_best} 1".replace("50.0", "61.0")
    summary.score_best, summary.best_iteration = 0.611, 60
    assert said()[0] == ""
    summary.score_best = summary.best_iteration = None
    row, text = said()
    assert row == "no checkpoint's policy was evaluated"
    assert "checkpoints/last.ckpt" in text
    assert "best.ckpt" not in text


def test_the_commands_take_a_folder_with_a_space_as_one_word(summary, tmp_path):
    summary.score_best, summary.best_iteration = 0.9, 40
    text = render_summary(summary, tmp_path / "a run", recorded="x")
    shell = 'vapo() { for word; do echo "<$word>"; done; }\n'
    typed = shell + text.partition("try next:")[2].partition("run folder:")[0]
    words = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, check=True).stdout
    for name in ("config.yaml", "checkpoints/best.ckpt", "actor"):
        assert f"<{tmp_path}/a run/{name}>\n" in words


def test_no_command_reads_the_config_of_a_run_with_a_notebooks_function(summary, tmp_path):
    text = render_summary(
        summary,
        tmp_path,
        recorded="x",
        ablation="components.value_pretraining.enabled=false",
        config_is_whole=False,
    )
    assert "--config" not in text
    assert "vapo export" in text
    assert not names_a_notebooks_function(FitConfig())
    for function, is_notebooks in (
        ("__main__:score", True),
        ("__handed__:score(most=2)", True),
        ("mine.py:score", False),
    ):
        config = FitConfig(critic=CriticConfig(head_function=function))
        assert names_a_notebooks_function(config) == is_notebooks


def test_run_dirs_are_unique_and_inside(tmp_path):
    made = {make_run_dir(tmp_path / "runs", "vapo +grpo a.b=false seed/0") for _ in range(3)}
    assert len(made) == 3
    for path in made:
        assert path.is_dir()
        assert path.parent == tmp_path / "runs"
        assert path.name[15:].startswith("_vapo-grpo-a.b-false-seed-0")


def test_an_output_dir_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output_dir: cannot make a folder"):
        make_run_dir(tmp_path / "file" / "runs", "x")


@pytest.mark.parametrize(
    ("uri", "command"),
    [
        ("mlruns", "  vapo ui --run abc"),
        ("/data/my runs", "  vapo ui --run abc --tracking_uri '/data/my runs'"),
        (
            "postgresql://me:secret@host/runs",
            "  vapo ui --run abc --tracking_uri postgresql://host/runs",
        ),
        (
            "http://me:secret@127.0.0.1:5000",
            "  http://127.0.0.1:5000/#/experiments/1/runs/abc/model-metrics"
            "?workflowType=machine_learning",
        ),
    ],
)
def test_text_says_how_to_open_the_record(summary, tmp_path, uri, command):
    fields = {key: value for key, value in vars(summary).items() if key in PLAIN_FIELDS}
    made = RunSummary(**fields | {"tracking_uri": uri})
    lines = render_summary(made, tmp_path, recorded="x").splitlines()
    assert command in lines
    assert "secret" not in write_summary(tmp_path, made).read_text()


@pytest.mark.parametrize("name", ["x" * 300, "\u6f22" * 80, "x" * 236])
def test_a_run_name_too_long_for_a_folder_is_its_own_error(name, tmp_path):
    with pytest.raises(UserError) as caught:
        make_run_dir(tmp_path, name)
    message = str(caught.value)
    assert message.startswith("tracking.run_name: ")
    assert f"has {len(name.encode())} bytes in UTF-8" in message
    assert "output_dir" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 234, "\u6f22" * 78])
def test_the_longest_run_name_is_taken_more_than_once(name, tmp_path):
    folders = [make_run_dir(tmp_path, name) for _ in range(2)]
    assert all(folder.is_dir() for folder in folders)


def test_the_score_in_one_line():
    before = {"eval/avg_at_k": 0.526}
    after = {
        "eval/avg_at_k": 0.904,
        "eval/avg_at_k_ci_low": 0.886,
        "eval/avg_at_k_ci_high": 0.923,
    }
    assert score_line(before, after, 8) == "held-out avg@8 52.6 % -> 90.4 % [88.6, 92.3]"
    assert score_line({}, after, 4) == "held-out avg@4 90.4 % [88.6, 92.3]"
    assert score_line(before, before, 8) == "held-out avg@8 52.6 % -> 52.6 %"
    assert score_line(before, {}, 8) is None


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (
            {"rollouts_left_out": 0, FAILED_EPISODES: 6},
            "faults        6 episodes left out: an environment failed",
        ),
        (
            {"rollouts_left_out": 2, FAILED_EPISODES: 1},
            "faults        2 rollouts left out: numbers that are not finite; 1 episodes left",
        ),
        (
            {"rollouts_left_out": 0, "actor_updates_skipped": 3},
            "faults        3 actor updates skipped: numbers that are not finite",
        ),
    ],
)
def test_what_was_left_out_has_its_own_cause(summary, tmp_path, faults, said):
    text = render_summary(replace(summary, faults=faults), tmp_path, recorded="run x")
    assert said in text
    assert ("not finite" in text) == any(n for key, n in faults.items() if key != FAILED_EPISODES)
