"""A block's kind decides its type: which keys it has, and which survive another kind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from tests.config.fits import MINIMAL, fit_config, write
from vapo.config import FitConfig
from vapo.config.data import FileSource, HuggingfaceSource, MixtureSource, ProceduralSource
from vapo.config.engines import VllmEngine, VllmServerEngine
from vapo.config.estimators import OwnEstimatorOptions
from vapo.config.kinds import kinds_of, make
from vapo.config.loading import compose, from_yaml
from vapo.config.options import describe, describe_keys
from vapo.config.rewards import PythonVerifier, RegexVerifier, RewardConfig
from vapo.config.written import flatten, to_yaml
from vapo.errors import UserError

GENERATED = """\
data:
  train: {kind: procedural, task: state_tracking, num_examples: 50, seed: 3}
  heldout: {path: heldout.jsonl, prompt_column: question}
"""
SERVED = """\
rollouts:
  engine: vllm_server
  servers: {urls: "http://gpu2:8100", timeout_s: 5, dtype: float32}
"""


def test_a_block_is_of_its_kinds_type(tmp_path: Path) -> None:
    config = fit_config(tmp_path, overlay=GENERATED)
    assert isinstance(config.data.train, ProceduralSource)
    assert isinstance(config.data.heldout, FileSource)
    assert not isinstance(config.data.train, FileSource)
    assert not hasattr(config.data.train, "path")
    assert "data.train.path" not in flatten(config)
    assert "path" not in to_yaml(config.data.train)
    assert not isinstance(config.algorithm, OwnEstimatorOptions)


def test_two_kinds_in_one_block(tmp_path: Path) -> None:
    part = "{kind: huggingface, path: p, split: s, verifier: regex, pattern: (x)}"
    source = fit_config(
        tmp_path, "data.train.kind=mixture", f"data.train.sources.a={part}", overlay="{}"
    ).data.train.sources["a"]  # type: ignore[attr-defined]
    assert isinstance(source, HuggingfaceSource)
    assert isinstance(source, RegexVerifier)
    assert isinstance(source, MixtureSource)
    assert (source.split, source.pattern, source.weight) == ("s", "(x)", 1)


def test_an_engine_is_a_type(tmp_path: Path) -> None:
    rollouts = fit_config(tmp_path, overlay=SERVED).rollouts
    assert isinstance(rollouts, VllmServerEngine)
    assert not isinstance(rollouts, VllmEngine)
    assert (rollouts.servers.timeout_s, rollouts.servers.dtype) == (5.0, "float32")
    other = fit_config(tmp_path, "rollouts.engine=transformers", overlay=SERVED).rollouts
    assert not hasattr(other, "servers")


def test_a_kind_may_be_an_interpolation(tmp_path: Path) -> None:
    overlay = "data: {heldout: {kind: '${tracking.experiment}', task: t, num_examples: 5}}"
    config = fit_config(tmp_path, "tracking.experiment=procedural", overlay=overlay)
    assert isinstance(config.data.heldout, ProceduralSource)
    with pytest.raises(UserError, match=r"data\.heldout\.task' with data\.heldout\.kind 'jsonl'"):
        fit_config(tmp_path, "tracking.experiment=jsonl", overlay=overlay)


def test_a_key_of_another_kind_is_named_with_its_line_and_the_nearest(tmp_path: Path) -> None:
    overlay = GENERATED + "rewards:\n  verifier: python\n  function: a:b\n  patern: x\n"
    with pytest.raises(UserError, match=r"overlay\.yaml:7: unknown key 'rewards\.patern'; did you"):
        fit_config(tmp_path, overlay=overlay)
    with pytest.raises(UserError) as error:
        fit_config(tmp_path, overlay=overlay.replace("patern", "pattern"))
    expected = "unknown key 'rewards.pattern' with rewards.verifier 'python': it is a key of regex"
    assert str(error.value).endswith(f"overlay.yaml:7: {expected}")
    with pytest.raises(UserError, match=r"did you mean 'data\.heldout\.split'"):
        fit_config(tmp_path, "data.heldout.kind=huggingface", "data.heldout.slit=a")


def test_what_a_kind_needs_is_named_with_the_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rewards\.verifier regex needs rewards\.pattern: the la"):
        fit_config(tmp_path, "rewards.verifier=regex")


def test_the_order_of_files_decides_not_the_order_of_keys(tmp_path: Path) -> None:
    """A kind that a later file changes back is that file's alone."""
    there = write(tmp_path, "rewards: {verifier: regex, pattern: (x)}", "1.yaml")
    away = write(tmp_path, "rewards: {function: 'm:f', verifier: python}", "2.yaml")
    minimal = write(tmp_path, MINIMAL, "0.yaml")
    rewards = compose(FitConfig, [minimal, there, away], []).config.rewards
    own = {"function": "m:f", "function_folder": str(tmp_path)}
    assert rewards == make(RewardConfig, verifier="python", **own)
    with pytest.raises(UserError, match=r"rewards\.verifier regex needs rewards\.pattern"):
        compose(FitConfig, [minimal, there, away], ["rewards.verifier=regex"])


def test_configs_of_kinds_are_copied_pickled_and_written_back(tmp_path: Path) -> None:
    config = fit_config(tmp_path, overlay=GENERATED + SERVED)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert from_yaml(FitConfig, to_yaml(config), source="again") == config


def test_an_unknown_option_of_a_kind_is_refused_in_python_too() -> None:
    with pytest.raises(TypeError, match="pattern"):
        make(RewardConfig, verifier="python", function="a:b", pattern="x")
    assert isinstance(make(RewardConfig, verifier="python", function="a:b"), PythonVerifier)


def test_help_says_which_kinds_have_a_key() -> None:
    text = " ".join(describe_keys(describe(FitConfig)).split())
    assert "the dataset's configuration name (with data.train.kind huggingface)" in text


def test_every_kind_is_a_value_of_its_key() -> None:
    for key, entry in describe(FitConfig).items():
        kinds = getattr(entry, "kinds", {})
        assert set(kinds) <= set(getattr(entry, "label", "").split("|")), key
    assert set(kinds_of(RewardConfig)) == {"verifier"}
