"""The scripts of `experiments/gpu/`, with stand-ins for what runs on a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen2ForCausalLM

from tests.config.fits import ROOT
from vapo.config import FitConfig
from vapo.config.loading import load_config

SCRIPTS = ROOT / "experiments/gpu"


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import each other as files of one folder; other folders have such names, too."""
    for name in ("iterations", "recipe", "all", "tables"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(SCRIPTS))


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---- lengths ------------------------------------------------------------------------------------


def test_a_mean_length_is_that_of_all_places_where_a_response_may_end() -> None:
    made = script("made_model")
    p, limit = 0.2, 3
    by_hand = 1 * 0.2 + 2 * 0.8 * 0.2 + 3 * 0.8 * 0.8
    assert made.mean_length(p, limit) == pytest.approx(by_hand)
    for mean in (12.0, 200.0, 276.0):
        assert made.mean_length(made.chance(mean, 512), 512) == pytest.approx(mean)
    assert made.Lengths(9, 0, 512).end_chance() == 0
    with pytest.raises(ValueError, match="a mean of 500 is too near to 512"):
        made.Lengths(9, 0, 512, 500)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chance", [0.0, 0.01])
def test_the_end_token_has_its_chance_after_every_prefix(chance: float, tied: bool) -> None:
    """Of those that a response can have: without an end token."""
    made = script("made_model")
    config = AutoConfig.from_pretrained(ROOT / "models/shapes/qwen2.5_0.5b")
    config.update({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 2048})
    config.update({"eos_token_id": 2045, "tie_word_embeddings": tied})
    config.layer_types = config.layer_types[:2]
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config).eval()
    made.set_end_chance(model, chance)
    with torch.no_grad():
        found = model(torch.randint(2045, (8, 50)), output_hidden_states=True)
    ends = found.logits.softmax(-1)[..., 2045]
    for states in found.hidden_states[:-1]:  # the last one is behind the norm
        assert torch.equal(states[..., 0], torch.full((8, 50), made.SHARED))
    assert float(ends.mean()) == pytest.approx(chance, rel=0.15, abs=1e-8)
    assert float(ends.max()) < 3 * max(chance, 1e-8)


# ---- processes ----------------------------------------------------------------------------------


def ended(code: str, folder: Path, *, limit_s: float = 20, **more: Any) -> Any:
    record = script("gpu_record")
    return record.run_process(
        [sys.executable, "-c", code], folder / "a.log", limit_s=limit_s, **more
    )


def test_how_a_process_ended_is_its_status(tmp_path: Path) -> None:
    assert ended("print(1)", tmp_path).part()["status"] == "done"
    failed = ended("print('why'); raise SystemExit(3)", tmp_path)
    assert failed.part() | {"process_s": 0} == {
        "status": "failed with status 3",
        "process_s": 0,
        "log_end": ["why"],
    }
    begun = time.monotonic()
    late = ended("import time; time.sleep(60)", tmp_path, limit_s=0.3)
    assert late.status == "ended at its limit of time"
    assert time.monotonic() - begun < 20


def test_a_process_is_killed_with_its_children_at_a_line(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\n"
        "for i in range(9): print('iteration', i, flush=True)\n"
        "time.sleep(60)"
    )
    found = ended(code, tmp_path, until=script("recipe").Lines(2))
    assert found.status == "killed"
    child = Path(f"/proc/{found.log.read_text().split()[1]}/stat")
    until = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_result_of_the_same_code_and_setting_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = script("gpu_record")
    record.Result(tmp_path, "a", {"n": (1, 2)}).add("one", {"status": "done"})
    record.Result(tmp_path, "a", {"n": (1, 2)}).add("two", {"status": "done"})
    record.Result(tmp_path, "b", {"n": (1, 2)}).add("one", {"status": "done"})
    assert list(json.loads((tmp_path / "a.json").read_text())["parts"]) == ["one", "two"]
    record.Result(tmp_path, "a", {"n": (1, 3)}).add("two", {"status": "done"})
    contents = json.loads((tmp_path / "a.json").read_text())
    assert list(contents["parts"]) == ["two"]
    monkeypatch.setattr(record, "source", lambda: "other code")
    record.Result(tmp_path, "a", {"n": (1, 3)}).add("three", {"status": "done"})
    assert list(json.loads((tmp_path / "a.json").read_text())["parts"]) == ["three"]
    assert {"date", "command", "commit", "device", "versions"} <= contents.keys()


# ---- iterations -----------------------------------------------------------------------------


def row(number: int, **more: float) -> dict[str, float]:
    return {
        "progress/iteration": number,
        "time/iteration_s": 10.0 * number,
        "time/rollout_s": 2.0,
        "time/rollout_share": 0.2,
        "rollout/num_response_tokens": 100,
        "rollout/response_length_max": 9,
        "rollout/response_length_min": 3,
    } | {key.replace("_slash_", "/"): value for key, value in more.items()}


def test_our_iterations_are_those_after_the_first_of_the_policy() -> None:
    iterations = script("iterations")
    rows = [row(1), row(2), row(3), row(4, time_slash_evaluation_s=4.0)]
    found = iterations.our_iterations(rows, 1)
    assert [one["seconds"] for one in found] == [30, 36]
    assert found[0]["stages"] == {"iteration": 30.0, "rollout": 2.0}
    assert found[0]["gap"] is None


def test_the_ratios_are_of_the_medians() -> None:
    iterations = script("iterations")

    def parts(*seconds: float) -> list[dict[str, Any]]:
        return [{"iterations": [{"seconds": s, "tokens": 100} for s in seconds]}]

    sides = {
        "GRPO": parts(10, 5, 20),
        "TRL GRPO": parts(20),
        "VAPO": parts(15),
        "VAPO, probe": parts(),
    }
    assert iterations.ratios(sides) == {
        "GRPO's tokens/s to TRL GRPO's": 2.0,
        "seconds of VAPO to GRPO's": 1.5,
    }


STAND_IN = """
import json, pathlib, sys
words = sys.argv[1:]
if words[0].endswith("made_model.py"):
    raise SystemExit
if words[0].endswith("trl_side.py"):
    settings = json.loads(words[1])
    line = {"seconds": 4.0, "tokens": 80, "longest": 5, "shortest": 5, "stages": {}, "gap": None}
    for seconds in range(settings["num_cycles"]):
        with open(settings["report"], "a") as file:
            print(json.dumps(line | {"seconds": 9.0 - seconds}), file=file)
else:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    folder = pathlib.Path(given["output_dir"]) / "run/csv/version_0"
    folder.mkdir(parents=True)
    keys = ["progress/iteration", "time/iteration_s", "rollout/num_response_tokens",
            "rollout/response_length_max", "rollout/response_length_min"]
    lines = [f"{i},{2 * i},80,5,5" for i in range(1, int(given["training.num_iterations"]) + 1)]
    (folder / "metrics.csv").write_text("\\n".join([",".join(keys), *lines]))
"""


def test_sides_run_in_processes_and_every_one_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours takes 4 and 6 s for 80 tokens after its first iteration, the other side 8 and 7."""
    record, iterations = script("gpu_record"), script("iterations")
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    peer = tmp_path / "python"
    peer.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    peer.chmod(0o755)
    monkeypatch.setattr(iterations, "SCRATCH", tmp_path)
    monkeypatch.setattr(iterations, "vapo", lambda *words: [str(peer), *words])
    monkeypatch.setattr(iterations, "command", lambda *_, **__: [str(peer), "made_model.py"])
    words = ["--toy", "--case", "equal", "--sides", "GRPO", "TRL GRPO", "--iterations", "2"]
    iterations.main([*words, "--peer_python", str(peer), "--out", str(tmp_path / "out"), "seed=3"])
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == f"iterations_equal_{record.device_slug()}.json"
    contents = json.loads(path.read_text())
    seconds = {
        name: [one["seconds"] for part in parts for one in part["iterations"]]
        for name, parts in contents["parts"].items()
    }
    assert seconds == {"GRPO": [4, 6], "TRL GRPO": [8, 7]}
    expected = ((80 / 4 + 80 / 6) / 2) / ((80 / 8 + 80 / 7) / 2)
    assert contents["ratios"] == {"GRPO's tokens/s to TRL GRPO's": round(expected, 3)}
    assert contents["parts"]["GRPO"][0]["asked"][-1] == "seed=3"
    assert "equal: GRPO's tokens/s to TRL GRPO's: 1.56" in capsys.readouterr().out


def test_a_side_that_fails_is_named_and_the_others_figures_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's last line and status say so, and with them the row of `all.py`."""
    everything, record, iterations = script("all"), script("gpu_record"), script("iterations")
    figures = {"seconds": 4.0, "tokens": 80, "stages": {}, "gap": None}
    done = {"status": "done", "iterations": [figures]}
    failed = {"status": "failed with status 1", "iterations": []}
    made = record.Ended("done", 1.0, None, tmp_path / "log")
    monkeypatch.setattr(iterations, "run_process", lambda *_, **__: made)
    monkeypatch.setattr(iterations, "run_ours", lambda *_: done)
    monkeypatch.setattr(iterations, "run_trl", lambda *_: failed)
    words = ["--toy", "--case", "equal", "--sides", "GRPO", "TRL GRPO", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        iterations.main(words)
    assert ended.value.code == 1
    said = "not done: equal, TRL GRPO: failed with status 1"
    assert capsys.readouterr().err.splitlines() == [said]
    (path,) = tmp_path.glob("*.json")
    (part,) = json.loads(path.read_text())["parts"]["GRPO"]
    assert part["iterations"] == [figures]

    made.log.write_text(f"figures\n{said}\n")
    ends = iter([record.Ended("failed with status 1", 60.0, None, made.log), made])
    pieces = {name: everything.Piece(("x",), 1, 9) for name in ("a", "b")}
    rows = everything.run_all(pieces, 9, lambda *_: next(ends))
    assert rows == [f"a: failed with status 1, 1.0 minutes; {said}", "b: done, 0.0 minutes"]


def overrides_and_files(words: list[str]) -> tuple[list[Path], list[str]]:
    files = [Path(words[i + 1]) for i, word in enumerate(words) if word == "--config"]
    return files, [word for word in words if "=" in word and not word.startswith("--")]


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(("case", "side"), [("equal", "GRPO"), ("drawn", "VAPO"), ("verl", "PPO"),
                                            ("equal", "VAPO, probe")])  # fmt: skip
def test_the_config_of_a_side_is_valid_and_has_the_cases_sizes(
    monkeypatch: pytest.MonkeyPatch, case: str, side: str, on_gpu: bool
) -> None:
    iterations = script("iterations")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(iterations, "has_gpu", lambda: on_gpu)
    chosen = iterations.CASES[case]
    words = iterations.our_command(
        iterations.OURS[side], chosen, Path("models/m"), Path("o/r"), 4, ["seed=7"]
    )
    config = load_config(FitConfig, *overrides_and_files(words))
    groups = config.components.group_sampling
    assert groups.num_prompts * groups.group_size == 256 == chosen.num_responses
    assert (config.seed, config.training.num_iterations, config.rollouts.engine) == (
        *(7, 4),
        "vllm" if on_gpu else "transformers",
    )
    assert (config.algorithm.kl.coef > 0) == (side == "PPO"), "verl's run has a reference"
    assert config.training.minibatch_size == 64


# ---- recipes --------------------------------------------------------------------------------


def test_every_recipe_is_its_own_config_with_other_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = script("recipe")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    for name, one in recipe.RECIPES.items():
        words = recipe.chosen(one, tmp_path, tmp_path / "runs", [])
        if one.config is None:
            assert words[:2] == ["--model", str(tmp_path)]
            continue
        assert (ROOT / one.config).exists()
        config = load_config(FitConfig, *overrides_and_files(words))
        written = load_config(FitConfig, [ROOT / one.config], [])
        train: Any = config.data.train
        assert train.path == str(tmp_path / "problems.jsonl"), name
        assert config.rewards == written.rewards
        assert config.components.group_sampling == written.components.group_sampling
        assert config.training.minibatch_size == written.training.minibatch_size
        assert config.rollouts == written.rollouts
        assert config.environment.is_used == one.has_turns


def test_memory_stands_beside_the_estimate() -> None:
    recipe = script("recipe")
    expected = recipe.estimate("x\npeak: 15.7 GiB, in the stage actor update. Prompts")
    assert expected == {"peak_gib": 15.7, "stage": "actor update"}
    part = {"iterations": [{"allocated_gib": 12.0}, {"allocated_gib": 17.27}, {}]}
    assert recipe.memory(part, expected)["measured_to_estimated"] == 1.1
    assert recipe.memory({"iterations": [{}]}, None) == {"estimated": None}


# ---- everything -----------------------------------------------------------------------------


def test_what_no_longer_fits_is_not_begun_and_a_shorter_piece_is(tmp_path: Path) -> None:
    everything, record = script("all"), script("gpu_record")
    now, begun = [0.0], []
    log = tmp_path / "a.log"
    log.write_text("figures\n")

    def call(name: str, piece: Any, minutes: float) -> Any:
        begun.append((name, round(minutes, 2)))
        now[0] += 60 * 4
        return record.Ended("done", 240.0, None, log)

    pieces = {
        name: everything.Piece(("x",), least, 9)
        for name, least in (("a", 1), ("b", 3), ("c", 3), ("d", 0.5))
    }
    rows = everything.run_all(pieces, 9, call, lambda: now[0])
    assert begun == [("a", 9), ("b", 5), ("d", 1)]
    assert rows[2] == "c: not begun, 1.0 minutes left"


def test_checkpoints_and_evaluations_are_no_part_of_an_iterations_seconds() -> None:
    """A checkpoint is written after its iteration, whose successor waits for it."""
    row = {"time/iteration_s": 10.0, "time/evaluation_s": 2.0, "time/checkpoint_s": 0.5}
    assert script("gpu_record").iteration_seconds(row) == 7.5
    row |= {"rollout/num_response_tokens": 4.0, "rollout/response_length_max": 2.0}
    row |= {"rollout/response_length_min": 2.0}
    for iterations in (
        script("iterations").our_iterations([row, row], 0),
        script("recipe").iterations([row]),
    ):
        assert [one["seconds"] for one in iterations] == [7.5]
        assert iterations[0]["stages"]["checkpoint"] == 0.5


def test_every_piece_is_a_command_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    everything, iterations = script("all"), script("iterations")
    for piece in everything.PIECES.values():
        assert piece.least_minutes < piece.most_minutes
        for word in piece.command[1:]:
            if word.startswith(("/", "tests/")):
                assert (ROOT / word).exists(), word
        if piece.command[1].endswith("iterations.py"):
            with pytest.raises(SystemExit):  # known options; no GPU is here
                iterations.main(list(piece.command[2:]))
            assert "there is no GPU here" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not all scripts ask for a GPU themselves, and what they write would stand among results."""
    everything = script("all")
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(everything, "run_all", lambda *_: pytest.fail("a piece was begun"))
    with pytest.raises(SystemExit):
        everything.main(["--only", "profile of training"])
    assert "there is no GPU here" in capsys.readouterr().err


def test_profiles_are_written_beside_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's elsewhere, and each piece is called as its script can be."""
    everything, record = script("all"), script("gpu_record")
    commands: list[list[str]] = []
    monkeypatch.setattr(
        everything, "run_process", lambda command, *_, **__: commands.append(command)
    )
    for name in ("profile of training", "profile of decoding"):
        for toy in (False, True):
            options = argparse.Namespace(toy=toy, peer_python=None)
            everything.run(name, everything.PIECES[name], 1, options)
    device = record.device_slug()
    assert [command[2:] for command in commands] == [
        ["--out", str(record.RESULTS / f"training_steps_{device}.json")],
        ["--out", str(record.SCRATCH / f"training_steps_{device}.json"), "--toy"],
        ["--out", str(record.RESULTS / f"decoding_steps_{device}.json")],
        ["--out", str(record.SCRATCH / f"decoding_steps_{device}.json"), "--tiny"],
    ]


def test_smollm2s_piece_is_the_comparison_within_its_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own options, and those that every such piece gets."""
    everything = script("all")
    commands: list[list[str]] = []
    monkeypatch.setattr(
        everything, "run_process", lambda command, *_, **__: commands.append(command)
    )
    options = argparse.Namespace(toy=True, peer_python=None)
    everything.run("SmolLM2", everything.PIECES["SmolLM2"], 6.5, options)
    ((_, path, *arguments),) = commands
    monkeypatch.syspath_prepend(str(Path(path).parent))
    read = import_module("compare").parsed(arguments)
    assert (read.jobs, read.minutes, read.toy) == (16, 6.5, True)
    assert read.grid.name == "comparison.yaml"
    assert read.seeds == "0,1,2,3,4,5,6,7"


# ---- tables ---------------------------------------------------------------------------------

MADE = {
    "date": "2030-01-02 03:04 UTC",
    "command": "python experiments/gpu/iterations.py",
    "commit": "abc",
    "device": "A GPU",
    "versions": {"torch": "9", "trl": "8", "numpy": "7"},
    "parts": {
        "GRPO": [
            {
                "status": "done",
                "device_peak_gib": 20.0,
                "iterations": [
                    {"seconds": s, "tokens": 1000, "gap": 0.01, "mfu": 0.25,
                     "stages": {"rollout": s / 2, "actor_update": 1.0}}
                    for s in (4.0, 5.0, 10.0)
                ],
            }
        ],
        "TRL GRPO": [{"status": "failed with status 1", "iterations": []}],
    },
    "ratios": {"GRPO's tokens/s to TRL GRPO's": 1.5},
}  # fmt: skip
TABLE = """\
### All responses of equal length

A GPU; torch 9, trl 8; 2030-01-02 03:04 UTC, commit abc: `python experiments/gpu/iterations.py`

| side | seconds an iteration | tokens/s | sampling | log-probs, values | actor | critic | sync | MFU of the updates | gap, nats | device memory, GiB |
|---|---|---|---|---|---|---|---|---|---|---|
| GRPO | 5.0 | 200 | 2.5 |  | 1.0 |  |  | 25.0% | 0.0100 | 20.0 |
| TRL GRPO: failed with status 1 |  |  |  |  |  |  |  |  |  |  |

- GRPO's tokens/s to TRL GRPO's: **1.50**"""  # noqa: E501


def test_a_table_is_made_of_a_file(tmp_path: Path) -> None:
    tables = script("tables")
    (tmp_path / "iterations_equal_h200.json").write_text(json.dumps(MADE))
    (tmp_path / "smollm2_vllm.json").write_text("[]")
    assert tables.sections(tables.read(tmp_path)) == TABLE
    (tmp_path / "iterations_equal_h200.json").rename(tmp_path / "iterations_verl_h200.json")
    verl = tables.sections(tables.read(tmp_path))
    assert "| verl, as published | 66.3 |  | 17.8 | 11.1 | 20.8 | 16.5 |  |  |  |  |" in verl


def test_a_recipes_row_has_its_policys_iterations_after_the_first() -> None:
    tables = script("tables")
    iterations = [
        {"seconds": s, "gap": 0.002, "is_policy": p, "stages": {"rollout": 1.0}}
        for s, p in ((50, 0), (40, 1), (7, 1), (9, 1))
    ]
    memory = {"allocated_peak_gib": 16.0, "estimated": {"peak_gib": 15.7, "stage": "x"}}
    part = {"status": "done", "first": {"device_peak_gib": 30.0}, "iterations": iterations}
    found = tables.recipe_row("r", part | {"memory": memory, "is_resumed": True})
    assert found == "| `r` | 8.0 | 1.0 |  |  |  |  | 0.0020 | 16.0 | 15.7 | 30.0 | yes |"


def test_the_page_has_the_tables_of_the_recorded_results() -> None:
    tables = script("tables")
    page = tables.PAGE.read_text()
    text = tables.sections(tables.read(tables.RESULTS))
    assert tables.with_results(page, text) == page, "run experiments/gpu/tables.py"
    with pytest.raises(ValueError, match="lacks the marks"):
        tables.with_results("no marks", text)
