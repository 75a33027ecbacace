"""The block `watch`: ranges, and no watcher that may stop the run while it sees nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.config.test_validation import CRITIC_FREE, problem
from vapo.errors import UserError


@pytest.mark.parametrize("name", ["explained_variance", "value_bias"])
def test_a_stopping_watcher_sees_something(tmp_path: Path, name: str) -> None:
    stop = f"watch.{name}.action=stop"
    critic_free = ("algorithm.advantage_estimator=group_relative", *CRITIC_FREE)
    message = problem(tmp_path, stop, *critic_free)
    assert message.startswith(f"watch.{name}.action stop has no effect: ")
    assert "group_relative has no critic" in message
    assert message.endswith(f"set watch.{name}.action=ignore")
    fit_config(tmp_path, stop)
    fit_config(tmp_path, f"watch.{name}.action=warn", *critic_free)


@pytest.mark.parametrize("name", ["clip_fraction", "approx_kl"])
def test_one_step_an_iteration_has_no_ratio(tmp_path: Path, name: str) -> None:
    stop = f"watch.{name}.action=stop"
    for size in ("null", "8192"):
        message = problem(tmp_path, stop, f"training.minibatch_size={size}")
        assert "with one optimizer step an iteration" in message
    fit_config(tmp_path, stop, "training.minibatch_size=4096")


def test_clip_fraction_needs_a_clip(tmp_path: Path) -> None:
    message = problem(
        tmp_path,
        "watch.clip_fraction.action=stop",
        "algorithm.surrogate=logprob",
        "algorithm.advantage_estimator=correct_only",
        "components.clip_higher.enabled=false",
        *CRITIC_FREE,
    )
    assert "algorithm.surrogate logprob has no ratio to clip" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("watch.entropy.limit=0", "must be > 0, < 1, got 0"),
        ("watch.entropy.limit=1.0", "must be > 0, < 1, got 1"),
        ("watch.approx_kl.patience=0", "must be >= 1, got 0"),
        ("watch.max_bad_updates=0", "must be >= 1, got 0"),
        ("watch.approx_kl.action=halt", "watch.approx_kl.action"),
        ("watch.aprox_kl.limit=1", "did you mean 'watch.approx_kl'?"),
    ],
)
def test_ranges(tmp_path: Path, override: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, override)
    assert part in str(caught.value)


def test_the_watchers_of_a_config(tmp_path: Path) -> None:
    config = fit_config(tmp_path, "watch.entropy.action=ignore")
    assert "entropy" not in config.watch.watchers()
    assert len(config.watch.watchers()) == 8
    assert config.watch.watchers()["explained_variance"].patience == 10
