"""Model folders with missing, damaged and pickled files, and ports that are taken."""

from __future__ import annotations

import json
import math
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.config.fits import ON_STATE_TRACKING, ROOT
from tests.tiny_model import save_tiny_folder
from vapo.cli import main
from vapo.config.schema import TrainerConfig
from vapo.errors import UserError
from vapo.networks.loading import load_causal_lm, load_tokenizer, load_value_model
from vapo.system.distributed import check_launch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("model"))


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def replaced(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if name == INDEX:
            (folder / WEIGHTS).unlink()
        (folder / name).write_text(content)

    return change


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"model\.safetensors is damaged or cut short .*copy it again"),
        (replaced(WEIGHTS, ""), r"model\.safetensors is damaged or cut short"),
        (removed(WEIGHTS), r"no weights \(no model\.safetensors\)"),
        (pickled, r"pickles \(pytorch_model\.bin\), .* not loaded; .*save_pretrained"),
        (replaced(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), r"b\.safetensors is missing"),
        (replaced(INDEX, "{"), r"index\.json is damaged"),
        (replaced(INDEX, "[]"), r"index\.json is damaged"),
        (removed("config.json"), "no config.json"),
        (replaced("config.json", '{"a":'), "cannot load the config.json"),
        (replaced("config.json", "[]"), "cannot load the config.json"),
        (replaced("tokenizer.json", "{"), "cannot load the tokenizer"),
        (removed("tokenizer.json"), "the folder has no tokenizer"),
    ],
)
def test_damage_is_named(whole: Path, tmp_path: Path, damage: Callable[[Path], None], message: str):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    load_tokenizer(str(folder))
    damage(folder)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_weights_that_are_not_numbers_are_named(
    whole: Path, tmp_path: Path, load: Callable[..., object], number: float
):
    """They would give values and log-probs that are not finite, on some tokens only."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    weights = load_file(folder / WEIGHTS)
    name = sorted(weights)[1]
    weights[name].view(-1)[3] = number
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        load(str(folder), dtype="float32", attn_implementation="auto")
    assert str(caught.value).startswith(f"{folder}: 1 weights are not finite numbers ({name})")


def test_fit_refuses_a_critic_that_reads_other_tokens_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    critic = tmp_path / "critic"
    shutil.copytree("models/state_tracking/reward_model", critic)
    options = [
        *("fit", *ON_STATE_TRACKING, "data.train.num_examples=128"),
        f"critic.reward_model_path={critic}",
        *("trainer.accelerator=cpu", f"output_dir={tmp_path}/runs", f"tracking.uri={tmp_path}/ml"),
    ]
    tokenizer = json.loads((critic / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[5:7]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (critic / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(options) == 2
    assert "differ in 2 tokens" in capsys.readouterr().err
    shutil.copy("models/state_tracking/reward_model/tokenizer.json", critic)
    settings = json.loads((critic / "tokenizer_config.json").read_text())
    settings["eos_token"] = settings["pad_token"]
    (critic / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main(options) == 2
    assert "differ in eos_token_id" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [critic]


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("fit", "vapo"),
        ("sft", "state_tracking/sft"),
        ("reward-model", "state_tracking/reward_model"),
    ],
)
def test_a_gpu_that_is_not_there(
    command: str,
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    new = [] if command == "fit" else [f"export_dir={tmp_path / 'new'}"]
    options = ["--config", f"conf/{config}.yaml", "trainer.accelerator=gpu", *new]
    assert main([command, *options]) == 2
    assert "trainer.accelerator is gpu, but torch sees none: torch " in capsys.readouterr().err


def test_a_master_port_that_is_taken(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    two = TrainerConfig(devices=2)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(UserError, match=r"cannot listen on \*:\d+: .*MASTER_PORT"):
            check_launch(two)
        check_launch(TrainerConfig(devices=1))  # one process meets nobody
        monkeypatch.setenv("LOCAL_RANK", "1")
        check_launch(two)  # the first process has it
        monkeypatch.delenv("LOCAL_RANK")
    check_launch(two)
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(UserError, match="MASTER_PORT is 'http'"):
        check_launch(two)


def test_a_taken_port_stops_vapo_serve_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from vapo.commands import serve

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(serve, "check_options", lambda options: None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = ["rollouts.engine=vllm_server", "rollouts.servers.urls=http://127.0.0.1:1"]
        options += ["trainer.accelerator=cpu", "--port", str(port)]
        assert main(["serve", *ON_STATE_TRACKING, *options]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
