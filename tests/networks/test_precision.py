"""What `trainer.precision` auto becomes, with the processor's answer patched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.config.fits import ROOT, STATE_TRACKING
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.loading import load_config
from vapo.config.schema import NewModelConfig, TrainerConfig
from vapo.networks import precision
from vapo.networks.precision import (
    choose_precision,
    expected_precision,
    may_round_products,
    resolve_precision,
)
from vapo.rollouts.engines.selection import has_mixed_copy
from vapo.training.strategy import lightning_precision

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(precision, "cpu_has_bfloat16_products", lambda: request.param)
    return bool(request.param)


def wide_folder(tmp_path: Path, width: int) -> Path:
    return save_tiny_folder(tmp_path / "policy", tiny_model(hidden_size=width))


def test_a_processor_with_fast_products_and_a_wide_policy(has_bf16: bool) -> None:
    found = choose_precision(CPU, 576)
    assert found.name == ("bf16-mixed" if has_bf16 else "32-true")
    assert ("multiplies fast" in found.reason) is has_bf16


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_gpu_with_fast_products_and_one_without(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    asked: list[bool] = []

    def answer(*, including_emulation: bool) -> bool:
        asked.append(including_emulation)
        return is_fast

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answer)
    found = choose_precision(torch.device("cuda"), 576)
    assert found.name == ("bf16-mixed" if is_fast else "32-true")
    assert "this GPU" in found.reason
    assert asked == [False]


def test_a_narrow_policy_stays_in_float32(has_bf16: bool) -> None:
    assert choose_precision(CPU, 255).name == "32-true"


def test_the_config_gets_what_was_taken_and_one_line_says_why(
    tmp_path: Path, has_bf16: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wide_folder(tmp_path, 256)
    given = ["trainer.accelerator=cpu", f"actor.path={path}"]
    config = load_config(FitConfig, STATE_TRACKING, given)
    assert config.trainer.precision == "auto", "the schema's default, and the shipped config's"
    resolve_precision(config)
    expected = "bf16-mixed" if has_bf16 else "32-true"
    assert config.trainer.precision == lightning_precision(config.trainer) == expected
    assert has_mixed_copy(config) is has_bf16
    told = capsys.readouterr().err.splitlines()
    (line,) = [text for text in told if "precision" in text]
    assert line.startswith(f"trainer.precision auto: {expected}, since this processor")
    resolve_precision(config)
    assert not capsys.readouterr().err, "settled once"


@pytest.mark.parametrize("named", ["32-true", "bf16-mixed"])
def test_a_precision_that_the_config_names_is_kept(
    named: str, has_bf16: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is said of it, but a warning where bfloat16 is emulated."""
    config = load_config(FitConfig, STATE_TRACKING, [f"trainer.precision={named}"])
    config.trainer.accelerator = "cpu"
    resolve_precision(config)
    assert config.trainer.precision == named
    told = capsys.readouterr().err
    if named == "bf16-mixed" and not has_bf16:
        assert told.startswith("warning: trainer.precision=bf16-mixed: this processor")
    else:
        assert not told


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A T4, where torch emulates it and vLLM refuses it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: is_fast)
    config = load_config(FitConfig, STATE_TRACKING, ["trainer.precision=bf16-mixed"])
    config.trainer.accelerator = "gpu"
    resolve_precision(config)
    warning = "warning: trainer.precision=bf16-mixed: this GPU has no instructions"
    assert capsys.readouterr().err.startswith(warning) is not is_fast


def test_the_config_of_one_gpu_leaves_the_precision_to_the_card() -> None:
    """It said bf16-mixed, which a T4 emulates."""
    for name in ("one_gpu", "own_model_gpu"):
        overrides = ["actor.path=x", "critic.init=policy"]
        files = [ROOT / "conf/data/gsm8k.yaml", ROOT / f"conf/scale/{name}.yaml"]
        assert load_config(FitConfig, files, overrides).trainer.precision == "auto"


def test_every_command_asks_the_policy_that_it_reads_or_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bfloat16_products", lambda: True)
    wide, cpu = str(wide_folder(tmp_path, 256)), TrainerConfig(accelerator="cpu")
    new = NewModelConfig(hidden_size=512)
    for config, expected in (
        (SftConfig(trainer=cpu), "32-true"),
        (SftConfig(new_model=new, trainer=cpu), "bf16-mixed"),
        (SftConfig(model_path=wide, new_model=NewModelConfig(), trainer=cpu), "bf16-mixed"),
        (RewardModelConfig(policy_path=wide, trainer=cpu), "bf16-mixed"),
    ):
        resolve_precision(config)
        assert config.trainer.precision == expected
    assert cpu.precision == "auto", "another config's section is left alone"


def test_an_estimate_depends_on_the_processor_here_only_if_it_is_of_a_cpu(has_bf16: bool) -> None:
    of_gpu, of_cpu = TrainerConfig(), TrainerConfig(accelerator="cpu")
    assert expected_precision(of_gpu, 576).name == "bf16-mixed"
    assert expected_precision(of_gpu, 96).name == "32-true"
    assert expected_precision(of_cpu, 576).name == ("bf16-mixed" if has_bf16 else "32-true")


@pytest.mark.parametrize(
    ("machine", "avx512_bf16", "amx", "arm", "expected"),
    [
        ("x86_64", True, False, True, True),
        ("x86_64", False, True, True, True),
        ("x86_64", False, False, True, False),  # emulated in float32
        ("aarch64", False, False, True, True),
        ("aarch64", False, False, False, False),
    ],
)
def test_torch_says_what_the_processor_has(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    avx512_bf16: bool,
    amx: bool,
    arm: bool,
    expected: bool,
) -> None:
    from vapo.system import private_attributes

    class FakeOps:
        _is_mkldnn_bf16_supported = staticmethod(lambda: arm)

    monkeypatch.setattr(private_attributes.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops, "mkldnn", FakeOps)
    assert private_attributes.cpu_has_bfloat16_products() is expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert private_attributes.cpu_has_bfloat16_products() is False


AHEAD = ["training.max_staleness=1"]
SERVER = ["rollouts.engine=vllm_server", "rollouts.servers.urls=http://somewhere:8100"]
JUDGE = ["rewards.verifier=reward_model", "rewards.reward_model_path=x"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [([], True), (AHEAD, False), ([*AHEAD, *SERVER], True), ([*AHEAD, *SERVER, *JUDGE], False)],
)
def test_products_are_rounded_where_no_other_thread_multiplies(
    overrides: list[str], expected: bool
) -> None:
    assert may_round_products(load_config(FitConfig, STATE_TRACKING, overrides)) is expected
