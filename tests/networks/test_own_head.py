"""A value head of the user's own: what becomes of it, and one clear error a mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from tests.config.fits import ON_STATE_TRACKING, STATE_TRACKING
from tests.integration.commands import ROOT, SHORTEST, fit, vapo
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.networks.build import make_critic
from vapo.networks.own_head import check_own_head, make_own_head
from vapo.runs.checkpoints import network_state, read_checkpoint

MODULE = "own_head_of_a_test"
TWO_LAYERS = "return nn.Sequential(nn.Linear(hidden_size, 5), nn.Dropout(0.5), nn.Linear(5, 1))"
SIZE = 8

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write the body of a function `make_head`, importable by its name."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def body(text: str) -> None:
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        (tmp_path / f"{MODULE}.py").write_text(
            f"import torch\nfrom torch import nn\ndef make_head(hidden_size):\n{lines}"
            "class Of(nn.Module):\n"
            "    def __init__(self, function):\n"
            "        super().__init__()\n"
            "        self.function, self.weight = function, nn.Parameter(torch.ones(1))\n"
            "    def forward(self, states):\n"
            "        return self.function(self.weight * states)\n"
        )

    yield body
    sys.modules.pop(MODULE, None)


def config(*overrides: str, function: str = "make_head") -> FitConfig:
    own = ["critic.init=policy", f"critic.head_function={MODULE}:{function}"]
    return load_config(FitConfig, STATE_TRACKING, [*own, *overrides])


def test_it_takes_the_place_of_the_linear_head(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    write(TWO_LAYERS)
    critic = make_critic(config(), None)
    head = critic.model.get_submodule("score")
    first, dropout, last = cast("tuple[nn.Linear, nn.Dropout, nn.Linear]", (*head.children(),))
    assert (first.out_features, last.in_features, dropout.p) == (5, 5, 0.0)
    width = first.in_features
    assert critic.forward_flops.per_state == 2 * (5 * width + 5 + 5 + 1)


def test_the_runs_seed_decides_its_first_weights(write: Write) -> None:
    write(TWO_LAYERS)
    state = torch.random.get_rng_state()
    first, again, other = (
        torch.cat(
            [p.flatten() for p in make_own_head(replace(config(), seed=s), SIZE).parameters()]
        )
        for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state), "no draw of the run's own is used up"


def test_it_has_the_critics_dtype(write: Write) -> None:
    write(TWO_LAYERS)
    head = make_own_head(config("critic.dtype=bfloat16"), SIZE)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1", "returned int, not a torch.nn.Module"),
        ("raise ValueError('no')", r"raised ValueError: no \(own_head_of_a_test.py:4\)"),
        ("return nn.Linear(hidden_size, 2)", r"values \[2, 3, 2\] of states \[2, 3, 8\], but must"),
        ("return Of(lambda s: s.sum(dim=-1))", r"values \[2, 3\] of states"),
        ("return nn.Linear(7, 1)", r"its module raised RuntimeError.* states \[2, 3, 8\]"),
        ("return Of(lambda s: s[..., :1].argmax(-1, keepdim=True))", "no floating-point tensor"),
        ("return Of(lambda s: s[..., :1] / 0)", "the values of ordinary states are not finite"),
        ("return Of(lambda s: s[..., :1] - s[..., :1].mean())", "must depend on the state alone"),
        ("return Of(lambda s: s[..., :1] + torch.rand(1))", "must depend on the state alone"),
        ("return Of(lambda s: s[..., :1]).requires_grad_(False)", "without parameters to train"),
    ],
)
def test_one_clear_error(write: Write, body: str, message: str) -> None:
    write(body)
    with pytest.raises(UserError, match=message) as caught:
        make_own_head(config(), SIZE)
    assert f"critic.head_function {MODULE}:make_head" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_is_looked_for_before_a_model_is_loaded(write: Write) -> None:
    write(TWO_LAYERS)
    message = r"critic.head_function: cannot import .* has no function f; .*functions: make_head"
    with pytest.raises(UserError, match=message):
        check_own_head(config(f"actor.path={ROOT / 'models/state_tracking/policy'}", function="f"))


OWN = ["critic.init=policy", f"critic.head_function={MODULE}:make_head"]


def head(run: Path) -> dict[str, torch.Tensor]:
    """The critic's weights in the run's last checkpoint, and the head among them."""
    state = read_checkpoint((run / "checkpoints" / "last.ckpt").resolve())
    weights = network_state(state, "critic")
    assert {"score.0.weight", "score.2.bias"} < weights.keys()
    return weights


@pytest.mark.kills
def test_a_resumed_run_has_the_same_weights(write: Write, tmp_path: Path) -> None:
    """A run of three iterations has those of one of two that is resumed."""
    write(TWO_LAYERS)
    whole = fit(tmp_path, *OWN, "training.num_iterations=2", small=SHORTEST)
    assert not (whole / "pretrained_critic").exists()
    part = fit(
        tmp_path, *OWN, "training.num_iterations=1", "tracking.run_name=part", small=SHORTEST
    )
    last = str(part / "checkpoints" / "last.ckpt")
    more = ("training.num_iterations=2", "tracking.run_name=part", "--ckpt_path", last)
    resumed = fit(tmp_path, *OWN, *more, small=SHORTEST)
    ends = [head(run) for run in (whole, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
def test_trained_saved_and_not_exported(write: Write, tmp_path: Path) -> None:
    write(TWO_LAYERS)
    run = fit(tmp_path, *OWN, "training.num_iterations=1", small=SHORTEST)
    assert not (run / "pretrained_critic").exists()
    last, end = str(run / "checkpoints" / "last.ckpt"), head(run)
    start = make_own_head(config(), end["score.0.weight"].shape[1])
    assert not torch.equal(end["score.0.weight"], start.get_parameter("0.weight"))

    result = vapo("export", last, str(tmp_path / "out"), "--network", "critic")
    assert result.returncode == 2
    assert f"critic.head_function {MODULE}:make_head" in result.stderr
    assert not (tmp_path / "out").exists()
    assert vapo("export", last, str(tmp_path / "actor")).returncode == 0

    page = tmp_path / "page.html"
    shown = ["--ckpt_path", last, "--value_page", str(page)]
    result = vapo("validate", *ON_STATE_TRACKING, *OWN, *SHORTEST, *shown)
    assert result.returncode == 0, result.stderr
    assert page.exists()

    result = vapo("estimate", *ON_STATE_TRACKING, *OWN)
    assert result.returncode == 2
    assert "set critic.head_function=null" in result.stderr

    result = vapo("fit", *ON_STATE_TRACKING, *SHORTEST, "critic.init=policy", "--ckpt_path", last)
    assert result.returncode == 2
    assert "score.0.weight is not in the model" in result.stderr
