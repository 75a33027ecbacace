"""The main job, end to end on state tracking: phases, counters, records, resume, export."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.config.fits import ON_STATE_TRACKING
from tests.diagnostics.value_page.reading import page_json, token_ids, unpacked
from tests.integration.commands import (
    ROOT,
    SHORTEST,
    SMALL,
    final_weights,
    fit,
    initial_weights,
    output_options,
    store,
    summary,
    vapo,
)
from tests.recorded_metrics import client_and_run_id, metric_points
from tests.tracking.metric_docs import documented_keys
from vapo.commands.report import open_reader
from vapo.prompts.fingerprint import fingerprint
from vapo.runs.checkpoints import network_state, read_checkpoint
from vapo.runs.manifests import checkpoint_name
from vapo.sweep.identity import code_version
from vapo.sweep.report.rows import identity_facts
from vapo.tracking.prompt_scores import SCORES_NAME, history_of

STEPS_PER_ITERATION = 2  # 8 prompts x 4 responses in minibatches of 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ["--profile", "trainer.peak_tflops=1.0", "checkpoints.keep=9"]
    return fit(tmp_path_factory.mktemp("fit"), *options)


@pytest.fixture(scope="module")
def history(run: Path) -> dict[str, list[tuple[int, float]]]:
    return metric_points(run)


def test_summary_says_what_tools_read(run: Path) -> None:
    contents = summary(run)
    assert 0 <= contents["score_before"] <= 1
    assert 0 <= contents["score_after"] <= 1
    assert contents["num_iterations"] == 5
    best = (run / "checkpoints" / "best.ckpt").resolve().name
    assert checkpoint_name(contents["best_iteration"]) == best
    assert contents["score_best"] >= contents["score_after"]
    assert len(contents["config_hash"]) == 12
    assert {"rollout", "training", "evaluation"} <= contents["stage_seconds"].keys()
    for part in ("rollout", "actor_update", "critic_update", "idle", "tokens/s", "MFU"):
        assert part in contents["profile"]


def test_profile_writes_a_trace_of_one_iteration(run: Path) -> None:
    with gzip.open(run / "trace_rank0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"rollout", "logprobs_values", "advantages", "training"} <= names
    assert "critic_update" in names


def test_stages_fill_the_iteration(history: dict[str, list[tuple[int, float]]]) -> None:
    def values(key: str) -> dict[int, float]:
        return dict(history[key])

    total = values("time/iteration_s")
    stages = ("rollout", "logprobs_values", "advantages", "training", "evaluation")
    others = ("weight_sync", "trace", "value_page", "checkpoint", "idle")
    for step, seconds in total.items():
        parts = [values(f"time/{s}_s").get(step, 0.0) for s in (*stages, *others)]
        assert sum(parts) == pytest.approx(seconds, rel=1e-6)
    updates = values("time/actor_update_s")[2] + values("time/critic_update_s")[2]
    assert 0.5 * values("time/training_s")[2] < updates <= values("time/training_s")[2]
    assert 0 < values("throughput/training_mfu")[2] < 1


def test_phases_follow_each_other(history: dict[str, list[tuple[int, float]]]) -> None:
    assert [value for _, value in history["progress/phase"]] == [0, 0, 1, 1, 1]
    assert [value for _, value in history["progress/iteration"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in history["progress/policy_steps"]] == [0, 0, 2, 4, 6]


def test_one_minibatch_is_one_step(history: dict[str, list[tuple[int, float]]]) -> None:
    """Two optimizers step in the policy phase; the counter counts minibatches, and the policy's
    begin with 1."""
    assert [step for step, _ in history["critic/value_loss"]] == list(range(-3, 7))
    assert [step for step, _ in history["actor/entropy"]] == list(range(1, 7))
    assert [step for step, _ in history["rollout/accuracy"]] == [-2, 0, 2, 4, 6]


def test_first_minibatch_has_ratio_one(history: dict[str, list[tuple[int, float]]]) -> None:
    """Old log-probs are the trainer's own, so before any update the ratio is 1."""
    first_steps = {1, 3, 5}
    for key, expected in (("actor/ratio_max", 1.0), ("actor/clip_fraction_high", 0.0)):
        values = [value for step, value in history[key] if step in first_steps]
        assert values == pytest.approx([expected] * 3, abs=1e-5), key


def test_last_checkpoint_is_the_last(run: Path) -> None:
    state = read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]
    assert int(state["iteration"]) == 5
    assert int(state["policy_iterations"]) == 3
    assert int(state["policy_steps"]) == 6


def test_evaluations(history: dict[str, list[tuple[int, float]]]) -> None:
    """Before the first step, every second policy iteration, after the last."""
    assert [step for step, _ in history["eval/avg_at_k"]] == [0, 4, 6]


def test_scores_of_single_prompts_are_recorded(
    run: Path, history: dict[str, list[tuple[int, float]]]
) -> None:
    """Three batches of the policy, of which the last one counts as the last half; three
    evaluations, whose prompts are the same."""
    client, run_id = client_and_run_id(run)
    recorded = client.get_run(run_id)
    artifact = Path(recorded.info.artifact_uri.removeprefix("file://")) / SCORES_NAME
    text = (run / SCORES_NAME).read_text()
    assert artifact.read_text() == text
    found = history_of(text)
    batches, evaluations = (list(found.of_kind[kind].values()) for kind in ("batch", "evaluation"))
    assert [one.policy_iterations for one in batches] == [0, 1, 2]
    assert [one.policy_steps for one in batches] == [0, 2, 4]
    accuracies = [value for _, value in history["rollout/accuracy"]][2:]
    assert [fmean(one.means.values()) for one in batches] == pytest.approx(accuracies)
    assert {one.num_responses for batch in batches for one in batch.scores} == {4}
    assert all(all(batch.is_new) for batch in batches)
    assert [one.policy_steps for one in evaluations] == [0, 4, 6]
    scores = [value for _, value in history["eval/avg_at_k"]]
    assert [fmean(one.means.values()) for one in evaluations] == pytest.approx(scores)
    assert [value for _, value in history["eval/num_recent_policies"]] == [1, 2]
    assert history["eval/recent_avg_at_k"][-1][1] == pytest.approx(fmean(scores[1:]))
    assert [step for step, _ in history["fresh/accuracy"]] == [2, 4, 6]
    contents = summary(run)
    assert contents["fresh"] == {
        key: values[-1][1] for key, values in history.items() if key.startswith("fresh/")
    }
    assert contents["fresh_accuracy"] == pytest.approx(accuracies[-1])
    assert contents["fresh"]["fresh/num_prompts"] == 8
    assert contents["fresh"]["fresh/num_responses"] == 32
    assert contents["score_recent"] == history["eval/recent_avg_at_k"][-1][1]


def test_logged_metrics_are_the_documented_ones(
    history: dict[str, list[tuple[int, float]]],
) -> None:
    logged = set(history)
    assert logged - documented_keys() == set()
    assert {
        "rollout/reward_mean",
        "rollout/accuracy",
        "rollout/response_length_mean",
        "actor/entropy",
        "critic/value_loss",
        "critic/explained_variance",
        "rollout/logprob_gap_mean",
        "advantage/lambda_policy_mean",
        "time/rollout_s",
        "throughput/rollout_tokens_per_s",
        "memory/rss_gib",
    } <= logged


def test_engine_and_trainer_agree(history: dict[str, list[tuple[int, float]]]) -> None:
    assert max(value for _, value in history["rollout/logprob_gap_mean"]) < 1e-5


def test_value_pages_are_artifacts_of_the_run(run: Path) -> None:
    """At the first and last iteration of each phase, and linked from the run's description."""
    client, run_id = client_and_run_id(run)
    recorded = client.get_run(run_id)
    folder = Path(recorded.info.artifact_uri.removeprefix("file://"))
    pages = {path.stem: path.read_text() for path in folder.glob("value_pages/*.html")}
    assert sorted(pages) == [f"iteration_{i:04d}" for i in (1, 2, 3, 5)]
    for name, page in pages.items():
        data = page_json(page)
        table = json.loads((folder / f"diagnostics/positions_{name}.json").read_text())
        assert data["positions"] == table["columns"]
        assert data["facts"]["phase"] == table["phase"].replace("_", " ")
        assert sum(data["calibration"]["num_tokens"]) == sum(table["columns"]["num_tokens"])
        assert len(data["groups"]) == 6
        measures = {measure["name"]: measure["domain"] for measure in data["measures"]}
        trains_policy = table["phase"] == "policy_optimization"
        assert ("entropy" in measures) == ("advantage" in measures) == trains_policy
        assert not trains_policy or 0.1 < measures["entropy"][1] < 4
    assert recorded.data.tags["value_page"] == "value_pages/iteration_0005.html"
    place = f"#/experiments/{recorded.info.experiment_id}/runs/{recorded.info.run_id}"
    link = f"({place}/artifacts/value_pages?workflowType=machine_learning)"
    note = recorded.data.tags["mlflow.note.content"]
    assert link in note
    first, last = (100 * summary(run)[f"score_{when}"] for when in ("before", "after"))
    assert note.startswith(f"held-out avg@{summary(run)['k']} {first:.1f} % -> {last:.1f} % [")


def test_a_run_records_what_a_report_tells_rows_apart_by(run: Path) -> None:
    client, run_id = client_and_run_id(run)
    recorded = client.get_run(run_id)
    facts = identity_facts(recorded, None, None)
    assert facts["code"] == recorded.data.tags["code"] == code_version()
    assert facts["model/actor"] == fingerprint(ROOT / "models/state_tracking/policy")
    assert facts["model/critic"] == fingerprint(ROOT / "models/state_tracking/reward_model")
    digests = {facts["training prompts"], facts["evaluation prompts"]}
    assert all(len(digest) == 12 for digest in digests)
    assert len(digests) == 2
    assert facts["components.value_pretraining.num_iterations"] == "2"
    assert not {"seed", "output_dir", "tracking.uri", "trainer.num_threads"} & facts.keys()
    resumed = (run / "config.yaml").read_text()
    assert identity_facts(recorded, resumed, None) == facts
    longer = identity_facts(
        recorded, resumed.replace("  num_iterations: 3\n", "  num_iterations: 9\n"), None
    )
    assert longer == facts | {"training.num_iterations": "3, then 9"}
    reader = open_reader(str(store(run.parents[1])))
    collection = reader.chosen([summary(run)["mlflow_run_id"]])
    row = recorded.info.run_name.removesuffix(" seed0")
    assert row.startswith("state_tracking/vapo ")
    assert [(record.row, record.seed) for record in collection.runs] == [(row, 0)]
    assert collection.notes == ()


def test_actor_is_bitwise_unchanged_by_value_pretraining(run: Path) -> None:
    pretrained = read_checkpoint(run / "checkpoints/iteration_000002")
    actor, critic = (network_state(pretrained, network) for network in ("actor", "critic"))
    for name, tensor in initial_weights("actor").items():
        assert torch.equal(tensor, actor[name]), name
    start = initial_weights("critic")
    changed = [name for name, tensor in start.items() if not torch.equal(tensor, critic[name])]
    assert len(changed) == len(critic)


@pytest.mark.slow
def test_pretrained_critic_starts_another_run(run: Path, tmp_path: Path) -> None:
    saved = run / "pretrained_critic"
    second = fit(
        tmp_path,
        f"critic.init={saved}",
        "components.value_pretraining.enabled=false",
        "training.num_iterations=1",
        "critic.optimizer.lr=1e-12",
        small=SHORTEST,
    )
    start, end = load_file(saved / "model.safetensors"), final_weights(second, "critic")
    for name, tensor in start.items():
        torch.testing.assert_close(end[name], tensor, rtol=0, atol=1e-6)


def test_export_loads_in_plain_transformers(run: Path, tmp_path: Path) -> None:
    checkpoint = str(run / "checkpoints/last.ckpt")
    for network, auto in (
        ("actor", AutoModelForCausalLM),
        ("critic", AutoModelForSequenceClassification),
    ):
        folder = tmp_path / network
        result = vapo("export", checkpoint, str(folder), "--network", network)
        assert result.returncode == 0, result.stderr
        again = vapo("export", checkpoint, str(folder), "--network", network)
        assert again.returncode == 2
        assert "is not empty (it has config.json): give a new folder" in again.stderr
        model = auto.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder)("3a12").input_ids
        state = model.state_dict()
        for name, tensor in final_weights(run, network).items():
            assert torch.equal(state[name], tensor), name


def test_validate_repeats_the_last_evaluation(run: Path, tmp_path: Path) -> None:
    """And writes a page of the checkpoint's critic, not of the one that the run began with."""
    page = tmp_path / "page.html"
    result = vapo(
        "validate",
        *ON_STATE_TRACKING,
        *SMALL,
        *("--ckpt_path", str(run / "checkpoints/last.ckpt")),
        *("--value_page", str(page)),
    )
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(": ") for line in result.stdout.splitlines() if ": " in line)
    assert float(lines["eval/avg_at_k"]) == pytest.approx(summary(run)["score_after"], abs=1e-4)
    data = page_json(page.read_text(encoding="utf-8"))
    assert data["facts"]["critic"] == str((run / "checkpoints/last.ckpt").resolve())
    assert data["facts"]["prompts"] == "16 held-out ones, 2 responses each"
    folder = ROOT / "models/state_tracking"
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model")
    critic.load_state_dict(final_weights(run, "critic"))
    group = data["groups"][0]
    prompt = tokenizer(group["prompt"]).input_ids
    for response in group["responses"]:
        ids = token_ids(response)
        with torch.no_grad():
            states = critic.model(torch.tensor([prompt + ids])).last_hidden_state
            values = critic.score(states)[0, len(prompt) - 1 : -1, 0]
        shown = unpacked(response["columns"]["value"], len(ids))
        torch.testing.assert_close(shown, values, atol=1e-5, rtol=0)


def kill_after(pattern_count: int, command: list[str]) -> None:
    """Start a fit and kill it once so many iterations have been printed."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += line.startswith("iteration")
        if seen >= pattern_count:
            break
    time.sleep(0.3)  # somewhere in the next iteration
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.kills  # tests/runs/test_kill_points.py kills one that is forked
@pytest.mark.parametrize("iterations_before_kill", [1, 3])
def test_killed_and_resumed_equals_uninterrupted(
    run: Path, history: dict[str, Any], tmp_path: Path, iterations_before_kill: int
) -> None:
    """In value pretraining (1) and in the policy phase (3): the weights are bit-identical."""
    command = [sys.executable, "-u", "-m", "vapo", "fit", *ON_STATE_TRACKING]
    kill_after(iterations_before_kill, [*command, *SMALL, *output_options(tmp_path)])
    resumed = fit(tmp_path, "--ckpt_path", "last")
    assert len(list((tmp_path / "runs").iterdir())) == 1, "resumes in the same folder"
    for network in ("actor", "critic"):
        expected = final_weights(run, network)
        for name, tensor in final_weights(resumed, network).items():
            assert torch.equal(tensor, expected[name]), (network, name)
