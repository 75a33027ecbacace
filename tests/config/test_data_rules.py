"""Rules between the keys of `data`: every mistake is one message with the key and how to fix it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import MINIMAL, fit_config, write
from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.kinds import make
from vapo.config.loading import from_yaml, load_config
from vapo.config.schema import MixtureSource, RewardConfig, SourceConfig
from vapo.config.written import flatten, to_yaml
from vapo.errors import UserError

MIXTURE = """\
data:
  train:
    kind: mixture
    sources:
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
GENERATED = """\
data:
  train:
    kind: procedural
    task: state_tracking
    num_examples: 50
    seed: 3
    options: {max_steps: 4}
    curriculum: [{from_iteration: 0}, {from_iteration: 2}]
  heldout: {path: heldout.jsonl, prompt_column: question, num_examples: 7}
rewards: {verifier: regex, pattern: "(x)"}
"""


def test_another_kind_begins_with_the_defaults(tmp_path: Path) -> None:
    """Nothing of the generator below it reaches a file, in whatever order the keys come."""
    given = ["data.train.path=mine.jsonl", "data.train.prompt_column=q", "data.train.kind=jsonl"]
    for overrides in (given, given[::-1]):
        config = fit_config(tmp_path, *overrides, overlay=GENERATED)
        assert config.data.train == make(SourceConfig, path="mine.jsonl", prompt_column="q")
    assert config.data.heldout == make(
        SourceConfig, path="heldout.jsonl", prompt_column="question", num_examples=7
    )
    mixture = fit_config(tmp_path, overlay=MIXTURE)
    file = write(tmp_path, GENERATED, "generated.yaml"), write(tmp_path, MIXTURE, "mixture.yaml")
    minimal = write(tmp_path, MINIMAL, "minimal.yaml")
    assert load_config(FitConfig, [minimal, *file], []).data.train == mixture.data.train
    back = load_config(FitConfig, [minimal, *file[::-1]], [])
    assert back.data.train == fit_config(tmp_path, overlay=GENERATED).data.train


def test_files_are_one_kind_of_source_and_keep_their_columns(tmp_path: Path) -> None:
    overrides = ["data.heldout.kind=huggingface", "data.heldout.path=some/dataset"]
    config = fit_config(tmp_path, *overrides, overlay=GENERATED)
    assert config.data.heldout == make(
        SourceConfig,
        kind="huggingface",
        path="some/dataset",
        prompt_column="question",
        num_examples=7,
    )
    same = fit_config(tmp_path, "data.train.kind=procedural", overlay=GENERATED)
    assert same.data.train == fit_config(tmp_path, overlay=GENERATED).data.train


def test_a_source_of_a_mixture_and_a_verifier_begin_anew_too(tmp_path: Path) -> None:
    overrides = ["data.train.sources.sums.kind=jsonl", "data.train.sources.sums.path=s.jsonl"]
    sums = fit_config(tmp_path, *overrides, overlay=MIXTURE).data.train.sources["sums"]  # type: ignore[attr-defined]
    assert sums == make(MixtureSource, path="s.jsonl", verifier="reasoning_gym")
    rewards = fit_config(tmp_path, "rewards.verifier=math", overlay=GENERATED).rewards
    assert rewards == make(RewardConfig, verifier="math")


def test_an_error_does_not_name_the_place_of_a_forgotten_key(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        fit_config(tmp_path, "data.train.kind=jsonl", overlay=GENERATED)
    message = str(error.value)
    assert message.startswith("command line: data.train.kind jsonl needs data.train.path: ")


def test_a_mixture_is_typed_recorded_and_written_back(tmp_path: Path) -> None:
    config = fit_config(tmp_path, "data.train.sources.math.path=other.jsonl", overlay=MIXTURE)
    assert config.data.train.sources["math"].weight == 3  # type: ignore[attr-defined]
    assert config.data.train.sources["math"].path == "other.jsonl"  # type: ignore[attr-defined]
    assert config.data.train.sources["sums"].weight == 1  # type: ignore[attr-defined]
    assert config.data.train.sources["sums"].curriculum[1].options == {"max_terms": 6}  # type: ignore[attr-defined]
    assert flatten(config)["data.train.sources.math.weight"] == 3
    assert from_yaml(type(config), to_yaml(config), source="again") == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train.sources.math.weight=0"], r"data\.train\.sources\.math\.weight must be >= 1"),
        (
            ["data.train.sources.math.weight=1.5"],
            r"data\.train\.sources\.math\.weight: expects int",
        ),
        (
            ["data.train.sources.math.wieght=2"],
            r"did you mean 'data\.train\.sources\.NAME\.weight'",
        ),
        (["data.train.sources.Math.path=x"], r"the name 'Math' becomes part of metric keys"),
        (
            ["data.train.sources.math={path: null}"],
            r"data\.train\.sources\.math\.path: expects text, got null",
        ),
        (["data.train.sources.math.kind=mixture"], r"math\.kind: expects jsonl.*, got 'mixture'"),
        (
            ["data.heldout.sources={a: {path: x}}"],
            r"unknown key 'data\.heldout\.sources' with data\.heldout\.kind 'jsonl': .* mixture",
        ),
        (
            ["data.train.task=x"],
            r"train\.task' with data\.train\.kind 'mixture': it is a key of procedural, reas",
        ),
        (["data.train.path=x"], r"train\.path' with data\.train\.kind 'mixture'"),
        (["data.heldout.task=x"], r"unknown key .*heldout\.task' with data\.heldout\.kind"),
        (["data.heldout.subset=x"], r"heldout\.subset' with .* it is a key of huggingface"),
        (["data.train.kind=[a]"], r"data\.train\.kind: expects jsonl\|parquet.*, got \['a'\]"),
        (["data.heldout_size=5"], r"heldout_size 5 has no effect beside data\.heldout: set data"),
        (
            ["rewards.pattern=(x)"],
            r"rewards\.pattern' with rewards\.verifier .* a key of regex",
        ),
        (["rewards.reward_model_threshold=1"], r"threshold' with .*: it is a key of reward_model"),
        (["data.heldout.kind=mixture"], r"needs sources by name in data\.heldout\.sources"),
        (["data.train.deduplicate=true"], r"data\.train\.deduplicate' with .*mixture"),
        (
            ["data.heldout={kind: mixture, sources: {a: {path: x, weight: 2}}}"],
            r"heldout\.sources\.a\.weight has no effect: all held-out",
        ),
        (
            ["data.heldout={kind: mixture, sources: {sums: {path: x}}}"],
            r"heldout\.sources\.sums and data\.train\.sources\.sums have one name but diff",
        ),
        (
            ["data.train.sources.math.pattern=(x)"],
            r"pattern' with data\.train\.sources\.math\.verifier null: .*regex",
        ),
        (["data.train.sources.math.verifier=regex"], r"math\.verifier regex needs .*math\.pattern"),
        (
            ["data.train.sources.math.verifier=regex", "data.train.sources.math.pattern=x"],
            r"data\.train\.sources\.math\.pattern 'x' needs a group",
        ),
        (
            ["data.train.sources.math.verifier=python", "data.train.sources.math.function=f"],
            r"math\.function 'f' is not of the form",
        ),
        (
            ["data.train.sources.math.answer_pattern=####"],
            r"math\.answer_pattern '####' needs one group",
        ),
        (["data.train.sources.math.answer_pattern=(a)(b)"], r"needs one group"),
        (["data.train.sources.math.answer_pattern=("], r"is not a regular expression"),
        (
            [f"data.train.sources.math.answer_pattern={'(' * 5000}"],
            r"math\.answer_pattern '\(\(\(.*nested too deeply",
        ),
        (
            ["data.train.sources.sums.answer_pattern=(a)"],
            r"answer_pattern' with .*reasoning",
        ),
        (
            ["data.train.sources.math.prompt_template=Q"],
            r"prompt_template 'Q' must contain \{prompt\}",
        ),
        (["data.train.sources.math.min_pass_rate=1.5"], r"min_pass_rate must be >= 0, <= 1"),
        (
            [
                "data.train.sources.math.min_pass_rate=0.9",
                "data.train.sources.math.max_pass_rate=0.1",
            ],
            r"min_pass_rate 0\.9 is above .*max_pass_rate 0\.1",
        ),
        (
            ["data.heldout=null", "data.train.sources.math.min_pass_rate=0.1"],
            r"choose the held-out prompts by difficulty too: set data\.heldout",
        ),
        (["data.heldout=null"], r"sums\.curriculum changes the training prompts: set data\.held"),
        (
            ["data.train.sources.sums.curriculum=[{from_iteration: 1}]"],
            r"sums\.curriculum: from_iteration begins with 0 and rises, it is \[1\]",
        ),
        (
            ["data.train.sources.sums.curriculum=[{from_iteration: 0}, {from_iteration: 0}]"],
            r"begins with 0 and rises, it is \[0, 0\]",
        ),
        (["data.train.sources.sums.curriculum=[{level: -1}]"], r"levels are counted from 0"),
        (
            ["data.train.sources.sums.curriculum=[{leve: 1}]"],
            r"curriculum\[0\]: unknown key 'leve'; the block has from_iteration, level, options",
        ),
        (
            [
                "data.train.sources.sums.kind=procedural",
                "data.train.sources.sums.task=t",
                "data.train.sources.sums.num_examples=9",
                "data.train.sources.sums.curriculum=[{level: 1}]",
            ],
            r"`level` is reasoning_gym's; give `options`",
        ),
        (
            ["data.train.sources.math.curriculum=[{}]"],
            r"math\.curriculum' with .* 'jsonl'",
        ),
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
    overlay = "data: {train: {kind: mixture, sources: {a: {path: x}, b: {path: y}}}}"
    with pytest.raises(UserError, match=r"heldout_size 1 is below the number of data"):
        fit_config(tmp_path, "data.heldout_size=1", overlay=overlay)


def test_commands_without_iterations_have_no_curriculum_and_sft_no_mixture(tmp_path: Path) -> None:
    file = write(tmp_path, MIXTURE + "export_dir: x\n")
    with pytest.raises(UserError, match="this command reads demonstrations of one source"):
        load_config(SftConfig, [file], [])
    with pytest.raises(UserError, match=r"sums\.curriculum is for `vapo fit`"):
        load_config(RewardModelConfig, [file], ["policy_path=p"])
    overrides = ["policy_path=p", "data.train.sources.sums.curriculum=[]"]
    assert load_config(RewardModelConfig, [file], overrides).data.train.sources["math"].weight == 3  # type: ignore[attr-defined]
