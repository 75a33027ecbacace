"""A run's default name, and what it says of the difference to its config files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.fits import MINIMAL, fit_config, write
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.sources import NAME_CHARS, default_name, short_names
from vapo.tracking.inputs import params


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A task's config and an overlay, below a folder `conf`."""
    for name in ("missed_checks", "algorithm"):
        (tmp_path / "conf" / name).mkdir(parents=True)
    base = write(tmp_path / "conf/missed_checks", MINIMAL, "vapo.yaml")
    overlay = "components: {value_pretraining: {enabled: false}}\nalgorithm: {entropy_coef: 0.5}"
    return [base, write(tmp_path / "conf/algorithm", overlay, "grpo.yaml")]


def test_a_name_says_config_changes_and_seed(files: list[Path]) -> None:
    def name(*overrides: str, command: str = "fit") -> str:
        return default_name(load_config(FitConfig, files, overrides), command)

    assert name() == "missed_checks/vapo +grpo seed0"
    assert (
        name("components.clip_higher.enabled=false", "seed=3")
        == "missed_checks/vapo +grpo clip_higher.enabled=false seed3"
    )
    where = ("tracking.uri=x", "output_dir=y", "trainer.num_threads=1", "checkpoints.keep=3")
    assert name(*where) == "missed_checks/vapo +grpo seed0", "not where and how it is run"
    assert name("algorithm.entropy_coef=0.5") == name(), "the file says the same"
    assert name("actor.path=/some/long/way/to/models/policy") == (
        "missed_checks/vapo +grpo policy seed0"
    )
    own = ("algorithm.eps_low=0.1", "actor.path=m", "data.train.path=a/d.jsonl")
    assert name(*own) == ("missed_checks/vapo +grpo m d.jsonl algorithm.eps_low=0.1 seed0")
    assert name(command="filter") == "filter missed_checks/vapo +grpo seed0"


def test_an_own_models_run_is_named_by_model_data_and_reward(tmp_path: Path) -> None:
    (tmp_path / "conf/scale").mkdir(parents=True)
    base = write(tmp_path / "conf/scale", MINIMAL, "own_model_cpu.yaml")
    chosen = [
        "actor.path=models/smollm2_135m",
        "data.train.path=my_problems.jsonl",
        "data.train.prompt_column=problem",
        "rollouts.engine=vllm",
        "output_dir=runs/smollm2_135m",
    ]
    function = ["rewards.verifier=python", "rewards.function=here/my_verifier.py:score"]

    def name(*overrides: str, max_chars: int = NAME_CHARS) -> str:
        config = load_config(FitConfig, [base], [*chosen, *overrides])
        return default_name(config, max_chars=max_chars)

    assert name(*function) == "smollm2_135m my_problems.jsonl score seed0"
    assert name(*function, max_chars=48) == name(*function), "a folder has the whole name"
    assert name("rewards.verifier=exact", "seed=3") == "smollm2_135m my_problems.jsonl exact seed3"
    rate = "actor.optimizer.lr=1e-5"
    assert name(*function, rate) == "smollm2_135m my_problems.jsonl score optimizer.lr=1e-05 seed0"
    assert default_name(load_config(FitConfig, [base], ["seed=1"])) == "scale/own_model_cpu seed1"


def test_a_name_has_not_the_files_that_a_file_extends(files: list[Path]) -> None:
    task = write(files[0].parent, "extends: vapo.yaml\nseed: 5", "longer.yaml")
    config = load_config(FitConfig, [task, files[1]], ["algorithm.entropy_coef=0.1"])
    assert default_name(config) == "missed_checks/longer +grpo algorithm.entropy_coef=0.1 seed5"
    assert config.sources.differences() == "algorithm.entropy_coef: 0.5 -> 0.1"


def test_a_long_name_is_cut_and_still_its_own(files: list[Path]) -> None:
    many = [
        "algorithm.kl.coef=0.1",
        "algorithm.eps_low=0.1",
        "components.positive_example_lm_loss.mu=0.2",
        "training.num_iterations=7",
        "rollouts.temperature=0.9",
    ]
    names = [
        default_name(load_config(FitConfig, files, [*many, f"rollouts.top_p={p}"]))
        for p in (0.5, 0.6, 0.6)
    ]
    assert all(len(name) <= NAME_CHARS for name in names)
    assert names[0] != names[1] == names[2]
    assert names[0].startswith("missed_checks/vapo +grpo ")
    assert " (+" in names[0]
    long_file = write(files[0].parent, MINIMAL, f"{'x' * 200}.yaml")
    assert len(default_name(load_config(FitConfig, [long_file], ["seed=123"]))) <= NAME_CHARS


def test_names_of_files() -> None:
    assert short_names(["conf/vapo.yaml", "conf/tasks/vapo.yaml", "conf/data/gsm8k.yaml"]) == [
        "vapo",
        "+tasks/vapo",
        "+gsm8k",
    ]
    assert short_names(["/home/me/mine.yaml"]) == ["mine"]
    assert short_names(["runs/vapo/20261122-190000_mine-seed0/config.yaml"]) == ["mine-seed0"]
    assert short_names([]) == []


def test_every_run_records_what_differs_from_its_files(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*overrides: str) -> str:
        return str(params(load_config(FitConfig, files, overrides))["_differs"])

    assert differs() == "nothing: the config files' values"
    assert differs("output_dir=y", "tracking.uri=x", "algorithm.entropy_coef=0.5") == differs()
    assert differs("components.clip_higher.enabled=false", "algorithm.entropy_coef=0.1") == (
        "components.clip_higher.enabled: true -> false; algorithm.entropy_coef: 0.5 -> 0.1"
    )
    assert differs("evaluation.num_prompts=5") == "evaluation.num_prompts: null -> 5"
    monkeypatch.setenv("VAPO_TEST_TOKEN", "pa55word")
    secret = "data.train.path=${oc.env:VAPO_TEST_TOKEN}"
    assert differs(secret) == "data.train.path: prompts.jsonl -> ${oc.env:VAPO_TEST_TOKEN}"
    config = load_config(FitConfig, files, [secret, "actor.path=http://me:pa55word@host/x"])
    assert "pa55word" not in default_name(config) + config.sources.differences()


def test_a_sweeps_difference_comes_first(tmp_path: Path) -> None:
    config = fit_config(tmp_path, "tracking.tags.differs=the row", "seed=3")
    assert params(config)["_differs"] == "the row"


def test_the_seed_changes_nothing_else_of_a_name(files: list[Path]) -> None:
    """A report takes the name without the seed as the row's."""
    seeds = {
        seed: load_config(FitConfig, files[:1], ["algorithm.entropy_coef=0.125", f"seed={seed}"])
        for seed in (7, 77, 777, 123456)
    }
    for length in range(20, 60):
        long_file = str(files[0].with_name(f"{'x' * length}.yaml"))
        names = []
        for seed, config in seeds.items():
            config.sources = replace(config.sources, files=(long_file,))
            name = default_name(config)
            names.append(name.removesuffix(f" seed{seed}"))
            assert name != names[-1]
        assert len(set(names)) == 1, names
