"""Rules between the keys of `data`: every mistake is one message with the key and the mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config, write
from vapo.config import RewardModelConfig, SftConfig
from vapo.config.loading import flatten, from_yaml, load_config, to_yaml
from vapo.errors import UserError

MIXTURE = """\
data:
  train: {kind: mixture}
  mixture:
    math: {weight: 3, path: math.jsonl}
    sums:
      kind: reasoning_gym
      task: chain_sum
      num_examples: 50
      verifier: reasoning_gym
      curriculum:
        - {from_iteration: 0, level: 0}
        - {from_iteration: 20, options: {max_terms: 6}}
  heldout: {path: heldout.jsonl}
"""


def test_a_mixture_is_typed_recorded_and_written_back(tmp_path: Path) -> None:
    config = fit_config(tmp_path, "data.mixture.math.path=other.jsonl", overlay=MIXTURE)
    assert config.data.mixture["math"].weight == 3
    assert config.data.mixture["math"].path == "other.jsonl"
    assert config.data.mixture["sums"].weight == 1
    assert config.data.mixture["sums"].curriculum[1].options == {"max_terms": 6}
    assert flatten(config)["data.mixture.math.weight"] == 3
    assert from_yaml(type(config), to_yaml(config), source="again") == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.mixture.math.weight=0"], r"data\.mixture\.math\.weight must be >= 1"),
        (["data.mixture.math.weight=1.5"], r"data\.mixture\.math\.weight: expects int"),
        (["data.mixture.math.wieght=2"], r"did you mean 'data\.mixture\.NAME\.weight'"),
        (["data.mixture.Math.path=x"], r"the name 'Math' becomes part of metric keys"),
        (["data.mixture.math.path=null"], r"math\.kind jsonl needs data\.mixture\.math\.path"),
        (["data.mixture.math.kind=mixture"], r"a mixture has no mixtures in it"),
        (["data.train.kind=jsonl"], r"data\.mixture has no effect without data\.train\.kind=mix"),
        (["data.heldout.kind=mixture"], r"needs sources by name in data\.heldout_mixture"),
        (["data.train.deduplicate=true"], r"data\.train\.deduplicate has no effect with .*mixture"),
        (
            ["data.heldout={kind: mixture}", "data.heldout_mixture={a: {path: x, weight: 2}}"],
            r"heldout_mixture\.a\.weight has no effect: all held-out",
        ),
        (
            ["data.heldout={kind: mixture}", "data.heldout_mixture={sums: {path: x}}"],
            r"data\.heldout_mixture\.sums and data\.mixture\.sums have one name but different",
        ),
        (["data.mixture.math.pattern=(x)"], r"pattern has no effect without .*verifier=regex"),
        (["data.mixture.math.verifier=regex"], r"math\.verifier regex needs .*math\.pattern"),
        (
            ["data.mixture.math.verifier=regex", "data.mixture.math.pattern=x"],
            r"data\.mixture\.math\.pattern 'x' needs a group",
        ),
        (
            ["data.mixture.math.verifier=python", "data.mixture.math.function=f"],
            r"math\.function 'f' is not of the form",
        ),
        (["data.mixture.math.answer_pattern=####"], r"math\.answer_pattern '####' needs one group"),
        (["data.mixture.math.answer_pattern=(a)(b)"], r"needs one group"),
        (["data.mixture.math.answer_pattern=("], r"is not a regular expression"),
        (["data.mixture.sums.answer_pattern=(a)"], r"answer_pattern has no effect on .*reasoning"),
        (["data.mixture.math.prompt_template=Q"], r"prompt_template 'Q' must contain \{prompt\}"),
        (["data.mixture.math.min_pass_rate=1.5"], r"min_pass_rate must be >= 0, <= 1"),
        (
            ["data.mixture.math.min_pass_rate=0.9", "data.mixture.math.max_pass_rate=0.1"],
            r"min_pass_rate 0\.9 is above .*max_pass_rate 0\.1",
        ),
        (
            ["data.heldout=null", "data.mixture.math.min_pass_rate=0.1"],
            r"choose the held-out prompts by difficulty too: set data\.heldout",
        ),
        (["data.heldout=null"], r"sums\.curriculum changes the training prompts: set data\.held"),
        (
            ["data.mixture.sums.curriculum=[{from_iteration: 1}]"],
            r"sums\.curriculum: from_iteration begins with 0 and rises, it is \[1\]",
        ),
        (
            ["data.mixture.sums.curriculum=[{from_iteration: 0}, {from_iteration: 0}]"],
            r"begins with 0 and rises, it is \[0, 0\]",
        ),
        (["data.mixture.sums.curriculum=[{level: -1}]"], r"levels are counted from 0"),
        (["data.mixture.sums.curriculum=[{leve: 1}]"], r"Key 'leve' not in 'CurriculumStage'"),
        (["data.mixture.sums.kind=procedural"], r"`level` is reasoning_gym's; give `options`"),
        (["data.mixture.math.curriculum=[{}]"], r"math\.curriculum has no effect on .* jsonl"),
        (
            ["data.heldout={kind: procedural, task: t, num_examples: 3, curriculum: [{}]}"],
            r"data\.heldout\.curriculum: held-out prompts stay the same",
        ),
    ],
)
def test_mistakes(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_config(tmp_path, *overrides, overlay=MIXTURE)


def test_heldout_size_below_the_number_of_sources(tmp_path: Path) -> None:
    overlay = "data: {train: {kind: mixture}, mixture: {a: {path: x}, b: {path: y}}}"
    with pytest.raises(UserError, match=r"heldout_size 1 is below the number of sources"):
        fit_config(tmp_path, "data.heldout_size=1", overlay=overlay)


def test_commands_without_iterations_have_no_curriculum_and_sft_no_mixture(tmp_path: Path) -> None:
    file = write(tmp_path, MIXTURE + "export_dir: x\n")
    with pytest.raises(UserError, match="this command reads demonstrations of one source"):
        load_config(SftConfig, [file], [])
    with pytest.raises(UserError, match=r"sums\.curriculum is for `vapo fit`"):
        load_config(RewardModelConfig, [file], ["policy_path=p"])
    overrides = ["policy_path=p", "data.mixture.sums.curriculum=[]"]
    assert load_config(RewardModelConfig, [file], overrides).data.mixture["math"].weight == 3
