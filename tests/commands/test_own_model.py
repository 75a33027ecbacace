"""`vapo fit --model --data --reward`, and `vapo.fit(model=..., dataset=..., reward=...)`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch

import vapo
from tests.commands.trl_reward import ends_in_a_digit
from tests.integration.commands import store
from tests.integration.commands import vapo as command
from tests.tiny_model import save_tiny_folder
from vapo.cli import main
from vapo.commands.estimate import estimate_config
from vapo.commands.own_model import own_model
from vapo.config import FitConfig
from vapo.config.critic import ProbeCritic
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.system.host_memory import GIB

ROWS = [{"question": f"{a}b{a}=", "solution": str(2 * a)} for a in range(1, 5)] * 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_folder(tmp_path_factory.mktemp("own_model") / "tiny"))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return str(path)


def config_of(*args: Any, **options: Any) -> FitConfig:
    chosen = own_model(*args, **options)
    return load_config(FitConfig, chosen.files, chosen.overrides)


def test_columns_and_held_out_prompts_are_chosen(model: str, file: str):
    chosen = own_model(model, file, "exact")
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    train: Any = config.data.train
    assert (train.prompt_column, train.answer_column) == ("question", "solution")
    assert (config.data.heldout, config.data.heldout_size) == (None, 4)
    assert (config.rewards.verifier, config.actor.path) == ("exact", model)
    assert config.output_dir == "runs/tiny"
    assert config.tracking.experiment == f"tiny {Path(file).name}", "other data is elsewhere"
    assert "own_model_cpu.yaml" in chosen.line
    assert "'question', answers from 'solution' (the first is '2'); no chat template" in chosen.line
    assert "the prompts are plain text (a chat model needs its own, as chat_temp" in chosen.line


def test_the_users_own_keys_win(model: str, file: str, tmp_path: Path):
    own = ["data.heldout_size=7", "data.train.answer_column=question", "rollouts.temperature=0.5"]
    config = config_of(model, file, "exact", overrides=own)
    train: Any = config.data.train
    assert (config.data.heldout_size, train.answer_column) == (7, "question")
    assert config.rollouts.temperature == 0.5
    config = config_of(model, file, "exact", heldout=file)
    heldout: Any = config.data.heldout
    assert (heldout.path, heldout.prompt_column) == (file, "question")


@pytest.mark.parametrize(
    "rows", [ROWS, datasets.Dataset.from_list(ROWS), pd.DataFrame(ROWS)], ids=["list", "hf", "df"]
)
def test_rows_of_a_program_are_written_once(model: str, rows: Any, tmp_path: Path):
    own = [f"output_dir={tmp_path / 'runs'}"]
    config_of(model, rows, "exact", overrides=own)
    (written,) = (tmp_path / "runs/data").iterdir()
    before = written.stat().st_mtime_ns
    config = config_of(model, rows, "exact", overrides=own)
    assert [*(tmp_path / "runs/data").iterdir()] == [written]
    assert written.stat().st_mtime_ns == before  # another process may be reading it
    train: Any = config.data.train
    assert train.path == str(written)
    assert [json.loads(line) for line in written.read_text().splitlines()] == ROWS


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("nowhere.jsonl", r"data.train.path: there is no file nowhere.jsonl"),
        ([{"text": "1", "answer": "1"}], r"data.train.prompt_column: .* has none of the columns "
         r"prompt, question, .*; its columns are text, answer: set data.train.prompt_column="),
        ([{"prompt": "1"}], r"data.train.answer_column: .* its columns are prompt: set"),
        ([{"prompt": "1", "answer": "1"}, {"prompt": b"1"}],
         r"data.train: row 2: column 'prompt' has bytes, which JSON cannot hold: convert it"),
        ([], r"data.train: .* has no rows"),
        (7, r"data.train: a path, a hub id, or rows, not int"),
    ],
)  # fmt: skip
def test_data_that_does_not_do_is_one_error(model: str, data: Any, said: str, tmp_path: Path):
    with pytest.raises(UserError, match=said):
        own_model(model, data, "exact", overrides=[f"output_dir={tmp_path}"])


@pytest.fixture
def short_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, bool]]:
    """A GPU of 10 GiB. All weights need 9 GiB and a byte, with adapters and a probe 9 GiB."""
    asked = []

    def fake_estimate(config: FitConfig, **_: Any) -> Any:
        has_adapters, reads_actor = config.actor.lora is not None, config.critic.reads_actor
        asked.append((config.rollouts.max_concurrent_sequences, has_adapters, reads_actor))
        whole = not (has_adapters and reads_actor)
        return config, SimpleNamespace(peak=9 * GIB + whole), None, None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10 * GIB))
    monkeypatch.setattr("vapo.commands.estimate.estimate_config", fake_estimate)
    monkeypatch.setattr("vapo.commands.own_model.find_spec", lambda name: None)
    monkeypatch.setattr("vapo.commands.own_model.check_build_has_gpus", lambda trainer: None)
    return asked


def test_adapters_and_a_probe_are_trained_where_all_weights_do_not_fit(
    model: str, file: str, short_gpu: list[tuple[int, bool, bool]]
):
    chosen = own_model(model, file, "exact")
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    assert config.actor.lora is not None
    assert isinstance(config.critic, ProbeCritic)
    assert config.critic.sampled_logprobs is not None
    assert (
        "low-rank adapters (actor.lora) and a critic without a network (critic.kind=probe), "
        "because training all weights and sampling 256 responses at a time need 9.0 GiB of the "
        "GPU's 10.0;"
    ) in chosen.line
    assert short_gpu == [(256, False, False), (64, False, False), (64, True, True)]


@pytest.mark.parametrize(
    ("has_bfloat16", "expected"), [(True, "bf16-mixed"), (False, "32-true")], ids=["new", "T4"]
)
def test_memory_is_estimated_in_the_precision_that_the_gpu_has(
    model: str, file: str, short_gpu: list[Any], monkeypatch: pytest.MonkeyPatch,
    has_bfloat16: bool, expected: str,
):  # fmt: skip
    """A T4 multiplies in float32 and float16 alone; states in float32 take twice the memory."""
    estimated = []

    def fake_estimate(config: FitConfig, **_: Any) -> Any:
        name = config.trainer.precision
        estimated.append("bf16-mixed" if name == "auto" else name)  # as the estimate for a GPU
        return config, SimpleNamespace(peak=GIB), None, None

    monkeypatch.setattr("vapo.commands.estimate.estimate_config", fake_estimate)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bfloat16)
    chosen = own_model(model, file, "exact")
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    assert estimated == [expected]
    assert config.trainer.precision == ("auto" if has_bfloat16 else "32-true")
    said = "float32 (trainer.precision), since this GPU has no products in bfloat16"
    assert (said in chosen.line) is not has_bfloat16


def test_what_is_less_than_all_weights_is_said_on_a_cpu(model: str, file: str):
    chosen = own_model(model, file, "exact")
    shown = "low-rank adapters (actor.lora.rank=16); a critic of the model's first 2 layers"
    assert f"own_model_cpu.yaml; {shown} (critic.layers); prompts from" in chosen.line
    whole = own_model(model, file, "exact", overrides=["actor.lora=null", "critic.layers=null"])
    assert "own_model_cpu.yaml; prompts from" in whole.line


def test_the_choice_for_another_machines_gpu(model: str, file: str, short_gpu: list[Any]):
    """As `vapo estimate --model ... --gpu_memory_gib N` asks for it."""
    for overrides, is_said in ((), True), (("rollouts.engine=transformers",), False):
        line = own_model(model, file, "exact", gpu_gib=11, overrides=overrides).line
        assert ("the engine transformers, which is slow on a GPU: install vllm" in line) == is_said
    assert "because training all weights" in own_model(model, file, "exact", gpu_gib=10).line
    assert "because training all weights" not in own_model(model, file, "exact", gpu_gib=11).line


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "algorithm.advantage_estimator=leave_one_out",
            "components.value_pretraining.enabled=false",
            "components.decoupled_gae.enabled=false",
            "components.length_adaptive_gae.enabled=false",
        ],
        ["critic={layers: 1}"],
    ],
    ids=["no critic", "a critic of one's own"],
)
def test_adapters_alone_where_no_probe_is_wanted(
    model: str, file: str, short_gpu: list[Any], overrides: list[str]
):
    chosen = own_model(model, file, "exact", overrides=overrides)
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    assert config.actor.lora is not None
    assert config.critic.kind == "network"
    assert "a critic without a network" not in chosen.line


@pytest.mark.parametrize(("engine", "num"), [("transformers", 64), ("vllm", 256)])
def test_fewer_responses_at_a_time_come_first_where_the_trainer_keeps_their_caches(
    model: str, file: str, short_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, engine: str,
    num: int,
):  # fmt: skip
    def fake_estimate(config: FitConfig, **_: Any) -> Any:
        peak = 9 * GIB + (config.rollouts.max_concurrent_sequences > 64)
        return config, SimpleNamespace(peak=peak), None, None

    monkeypatch.setattr("vapo.commands.estimate.estimate_config", fake_estimate)
    chosen = own_model(model, file, "exact", overrides=[f"rollouts.engine={engine}"])
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    assert config.rollouts.max_concurrent_sequences == num
    assert (config.actor.lora is None) == (engine == "transformers")
    assert ("fewer responses at a time, because training all" in chosen.line) == (
        engine == "transformers"
    )


@pytest.mark.parametrize(
    ("gpu_gib", "overrides", "cache"),
    [
        (80.0, [], 12 * GIB),
        (None, [], GIB),
        (80.0, ["rollouts.vllm.kv_cache_memory_bytes=4096"], 4096),
    ],
    ids=["a GPU", "no GPU", "one's own"],
)
def test_vllms_cache_has_a_size_that_the_memorys_estimate_can_count(
    model: str, file: str, monkeypatch: pytest.MonkeyPatch, gpu_gib: float | None,
    overrides: list[str], cache: int,
):  # fmt: skip
    """The estimate that decides what is trained was refused without it, wherever vLLM was."""
    monkeypatch.setattr("vapo.commands.own_model.find_spec", lambda name: name)
    chosen = own_model(model, file, "exact", gpu_gib=gpu_gib, overrides=overrides)
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    rollouts: Any = config.rollouts
    assert rollouts.vllm.kv_cache_memory_bytes == cache
    _, estimate, *_ = estimate_config(config, model, tell=lambda line: None)
    assert estimate.stages["sampling"]["vLLM KV cache"] == cache


@pytest.mark.parametrize("overrides", [["training.minibatch_size=128"], ["critic.kind=probe"]])
def test_keys_of_the_gpus_base_are_not_those_of_the_cpus(
    model: str, file: str, short_gpu: list[Any], overrides: list[str]
):
    """Whose groups are smaller, and whose critic has layers of its own."""
    chosen = own_model(model, file, "exact", overrides=overrides)
    assert "own_model_gpu.yaml" in chosen.line
    load_config(FitConfig, chosen.files, chosen.overrides)


def test_a_chat_models_own_keys_are_taken(file: str, tmp_path: Path):
    folder = save_tiny_folder(tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    config = config_of(str(folder), file, "exact", overrides=["data.system_prompt=Be brief."])
    assert (config.data.chat_template, config.data.system_prompt) == (True, "Be brief.")


def test_what_fits_is_trained_whole(
    model: str, file: str, short_gpu: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10 * GIB + 2))
    chosen = own_model(model, file, "exact")
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    assert (config.actor.lora, config.critic.reads_actor) == (None, False)
    assert "GiB" not in chosen.line


def test_a_critic_of_ones_own_stays_and_what_is_still_needed_is_said(
    model: str, file: str, short_gpu: list[Any]
):
    chosen = own_model(model, file, "exact", overrides=["critic.layers=1"])
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    assert (config.actor.lora is not None, config.critic.layers) == (True, 1)
    assert "(actor.lora), because training all weights and sampling " in chosen.line
    assert (
        "these still need 9.0: what would fit is critic.kind=probe critic.probe.lr=0.001 "
        "critic.sampled_logprobs.lr=0.03 critic.layers=null (9.0 GiB);"
    ) in chosen.line


def test_the_end_of_a_worked_solution_is_the_answer(model: str, tmp_path: Path):
    rows = [{"question": "6*7", "label": "easy", "answer": "6 times 7 is 42\n#### 42"}] * 20
    config = config_of(model, rows, "math", overrides=[f"output_dir={tmp_path}"])
    train: Any = config.data.train
    assert (train.answer_column, train.answer_pattern) == ("answer", "#### *(.+)")


def test_a_heldout_set_of_the_overrides_and_fewer_rows(model: str, file: str):
    own = ["data.heldout.kind=jsonl", f"data.heldout.path={file}"]
    own += ["data.heldout.prompt_column=question", "data.heldout.answer_column=solution"]
    assert config_of(model, Path(file), "exact", overrides=own).data.heldout is not None
    few = config_of(model, file, "exact", overrides=["data.train.num_examples=20"])
    assert few.data.heldout_size == 2


def test_rows_go_where_the_run_goes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLACE", str(tmp_path))
    own = ["output_dir=${oc.env:PLACE}/runs"]
    train: Any = config_of(model, ROWS, "exact", overrides=own).data.train
    assert Path(train.path).parent == tmp_path / "runs/data"


def test_a_password_in_an_address_is_not_shown(model: str):
    with pytest.raises(UserError) as error:
        own_model(model, "https://me:pa55word@host/x.jsonl", "exact")
    assert "pa55word" not in str(error.value)


@pytest.mark.slow
def test_a_function_of_trl_trains_a_policy_and_prints_nothing(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = vapo.fit(
        model=model,
        dataset=ROWS,
        reward=ends_in_a_digit,
        overrides={
            "output_dir": str(tmp_path / "runs"),
            "tracking.uri": str(store(tmp_path)),
            "rollouts.max_response_tokens": 8,
            "components.value_pretraining.num_iterations": 1,
            "components.group_sampling.num_prompts": 4,
            "components.group_sampling.group_size": 2,
            "training.num_iterations": 1,
            "training.minibatch_size": 8,
            "evaluation.k": 1,
        },
        quiet=True,
    )
    assert run.config.rewards.verifier == "python"
    rewards = [value for _, value in run.metrics()["rollout/reward_mean"]]
    assert len(rewards) == 2
    assert all(0 < reward < 1 for reward in rewards)
    said = capfd.readouterr()
    assert said.out == ""
    assert "vapo" not in said.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "x"}, r"needs a config, or model=, dataset= and reward="),
        ({"config": True, "reward": "exact"}, r"leave out either it or model="),
        ({"config": True, "overrides": {"seed": 1}}, r"leave out either it or model="),
    ],
)
def test_half_of_it_is_one_error(options: dict[str, Any], said: str):
    if options.pop("config", False):
        options["config"] = vapo.load_config("conf/vapo.yaml")
    with pytest.raises(UserError, match=said):
        vapo.fit(**options)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--model x --config y.yaml", "--model stands in place of --config"),
        ("--model x --data y", "--model needs --reward beside it"),
        ("--reward exact", "--reward needs --model beside it"),
        ("--model /nowhere --data y --reward exact", "the model: /nowhere: no such model folder"),
    ],
)
def test_half_of_the_options_is_one_error(args: str, said: str):
    result = command("fit", *args.split())
    assert result.returncode == 2
    assert said in result.stderr


@pytest.fixture
def shape(model: str, tmp_path: Path) -> str:
    """The folder of a model before its download: it has nothing but a config.json."""
    folder = tmp_path / "shape"
    folder.mkdir()
    shutil.copy(Path(model) / "config.json", folder)
    return str(folder)


@pytest.mark.parametrize("gpu_gib", [None, 24.0], ids=["as here", "for a GPU"])
def test_a_config_json_alone_is_estimated_as_the_whole_model_is(
    model: str, file: str, shape: str, gpu_gib: float | None
):
    peaks = []
    for args, enough in ((shape, None, None), True), ((model, file, "exact"), False):
        config = config_of(*args, gpu_gib=gpu_gib, config_is_enough=enough)
        estimate = estimate_config(config, tell=lambda line: None)[1]
        peaks.append((estimate.stages, estimate.checkpoint))
    assert peaks[0] == peaks[1]
    chosen = own_model(shape, None, None, gpu_gib=gpu_gib, config_is_enough=True)
    assert "chat template" not in chosen.line  # nobody has looked for one


def test_keys_of_the_fit_command_may_stand_in_its_estimate(shape: str):
    own = ["data.system_prompt=Be brief.", "data.train.prompt_column=x", "seed=3"]
    config = config_of(shape, None, None, overrides=own, config_is_enough=True)
    assert (config.data.system_prompt, config.seed) == ("Be brief.", 3)


def test_an_estimate_without_a_gpu_says_how_to_ask_about_one(model: str, file: str, shape: str):
    """The line of a run does not: it takes the machine as it is."""
    advice = "for a GPU of 80 GB add --gpu_memory_gib 80"
    assert advice in own_model(shape, None, None, config_is_enough=True).line
    assert advice not in own_model(shape, None, None, gpu_gib=80.0, config_is_enough=True).line
    assert advice not in own_model(model, file, "exact").line


def test_an_estimate_needs_no_data_and_no_reward(shape: str, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate", "--model", shape, "seed=3"]) == 0
    assert "peak: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model SHAPE --model_config SHAPE", "--model_config names a second model beside --mod"),
        ("--data y --reward exact", "--data needs --model beside it"),
        ("", "or --model in its place"),
        ("--model SHAPE --data none.jsonl", "data.train.path: there is no file none.jsonl"),
        ("--model SHAPE/..", "no config.json"),
    ],
)
def test_an_estimate_without_its_model_is_one_error(
    words: str, said: str, shape: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["estimate", *words.replace("SHAPE", shape).split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"data": "typo.jsonl"}, "data.train.path: there is no file typo.jsonl"),
        ({"reward": "exakt"}, "'exakt'; did you mean exact?"),
        ({"reward": "tests/commands/trl_reward.py:no_such"}, "trl_reward.py has no no_such"),
        ({"overrides": ["training.num_iteration=3"]}, "did you mean 'training.num_iterations'?"),
        ({"model": "/nowhere"}, "the model: /nowhere: no such model folder"),
    ],
    ids=["data", "verifier", "function", "key", "model"],
)
def test_what_is_written_is_checked_before_libraries_are_loaded(
    model: str, file: str, own: dict[str, Any], said: str
):
    """What takes seconds is told first, and nothing has been told here."""
    told: list[str] = []
    asked: dict[str, Any] = {"model": model, "data": file, "reward": "exact", **own}
    with pytest.raises(UserError, match=re.escape(said)):
        own_model(**asked, tell=told.append)
    assert told == []


def test_a_model_of_ones_own_is_tried_before_it_is_trained(model: str, file: str):
    result = command(
        "try", "--model", model, "--data", file, "--reward", "exact", "--num", "1",
        "rollouts.max_response_tokens=2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "1 of 1: " in result.stdout
    assert "response, 2 tokens" in result.stdout


def test_the_command_shows_the_config_that_it_chose(model: str, file: str, tmp_path: Path):
    result = command(
        "fit", "--model", model, "--data", file, "--reward", "exact", "--print_config",
        f"tracking.uri={store(tmp_path)}", "seed=3",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "begins with conf/scale/own_model_cpu.yaml" in result.stderr
    assert "seed: 3" in result.stdout
    assert "answer_column: solution" in result.stdout
