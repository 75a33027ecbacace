"""Bad configs: one `UserError` that names the key, the place and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import MINIMAL, fit_config, write
from vapo.config import FitConfig, SftConfig
from vapo.config.loading import from_yaml, load_config
from vapo.errors import UserError


def message_of(folder: Path, overlay: str = "", *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        fit_config(folder, *overrides, overlay=overlay)
    message = str(caught.value)
    assert "\n" not in message
    assert "full_key" not in message
    return message


@pytest.mark.parametrize(
    ("overlay", "line", "key", "nearest"),
    [
        ("seed: 1\ncomponents:\n  clip_higer:\n    enabled: false\n", 3,
         "components.clip_higer", "components.clip_higher"),
        ("components:\n  clip_higher:\n    eps_hig: 0.3\n", 3,
         "components.clip_higher.eps_hig", "components.clip_higher.eps_high"),
        ("\nclip_higher: {enabled: false}\n", 2, "clip_higher", "components.clip_higher"),
        ("eps_low: 0.1\n", 1, "eps_low", "algorithm.eps_low"),
        ("data:\n  heldout:\n    pat: x\n", 3, "data.heldout.pat", "data.heldout.path"),
    ],
)  # fmt: skip
def test_unknown_key(tmp_path: Path, overlay: str, line: int, key: str, nearest: str) -> None:
    expected = f"overlay.yaml:{line}: unknown key '{key}'; did you mean '{nearest}'?"
    assert message_of(tmp_path, overlay).endswith(expected)


def test_unknown_key_with_nothing_near_says_where_the_keys_are_listed(tmp_path: Path) -> None:
    assert "`vapo fit --help` lists every key" in message_of(tmp_path, "qqqqq: 1")


def test_dotted_key_in_a_file(tmp_path: Path) -> None:
    message = message_of(tmp_path, "algorithm.gamma: 0.5")
    assert "overlay.yaml:1: unknown key 'algorithm.gamma'" in message
    assert "nested blocks" in message


@pytest.mark.parametrize(
    ("overlay", "line", "key", "expects", "got"),
    [
        ("algorithm:\n  eps_low: abc", 2, "algorithm.eps_low", "float", "'abc'"),
        ("algorithm:\n  eps_low:", 2, "algorithm.eps_low", "float", "null"),
        ("algorithm:\n  eps_low: true", 2, "algorithm.eps_low", "float", "true"),
        ("critic: {value_clip: x}", 1, "critic.value_clip", "float|null", "'x'"),
        ("seed: 1.5", 1, "seed", "int", "1.5"),
        ("seed: {a: 1}", 1, "seed", "int", "a block of keys"),
        ("seed: [1]", 1, "seed", "int", "[1]"),
        ("actor:\n  dtype: fp8", 2, "actor.dtype", "float32|bfloat16", "'fp8'"),
        ("rewards:\n  shuffle: 3", 2, "rewards.shuffle", "true|false", "3"),
        ("rewards:\n  shuffle: maybe", 2, "rewards.shuffle", "true|false", "'maybe'"),
        ("actor: {path: true}", 1, "actor.path", "text", "true"),
        ("actor: {path: [a]}", 1, "actor.path", "text", "['a']"),
        ("tracking: {tags: red}", 1, "tracking.tags", "mapping of text", "'red'"),
        ("tracking: {tags: {a: [b]}}", 1, "tracking.tags", "mapping of text", "a block of keys"),
    ],
)
def test_wrong_type(
    tmp_path: Path, overlay: str, line: int, key: str, expects: str, got: str
) -> None:
    expected = f"overlay.yaml:{line}: {key}: expects {expects}, got {got}"
    assert message_of(tmp_path, overlay).endswith(expected)


@pytest.mark.parametrize("value", ["3", "[1]", ""])
def test_value_where_a_block_is_due(tmp_path: Path, value: str) -> None:
    message = message_of(tmp_path, f"seed: 1\nalgorithm: {value}")
    assert "overlay.yaml:2: algorithm is a block of keys" in message


@pytest.mark.parametrize(
    ("key", "value", "range_"),
    [
        ("components.length_adaptive_gae.alpha", "0", "> 0"),
        ("components.length_adaptive_gae.alpha", "-0.5", "> 0"),
        ("components.decoupled_gae.lambda_critic", "1.01", ">= 0, <= 1"),
        ("components.group_sampling.group_size", "0", ">= 1"),
        ("algorithm.eps_low", "1", ">= 0, < 1"),
        ("algorithm.dual_clip", "1.0", "> 1"),
        ("rollouts.temperature", "0", "> 0"),
        ("evaluation.top_p", "1.5", "> 0, <= 1"),
        ("data.train.num_examples", "0", ">= 1"),
    ],
)
def test_out_of_range_names_the_place_of_the_last_value(
    tmp_path: Path, key: str, value: str, range_: str
) -> None:
    message = message_of(tmp_path, "", f"{key}={value}")
    assert message.startswith(f"command line: {key} must be {range_}, got ")
    *blocks, leaf = key.split(".")
    lines = [f"{'  ' * depth}{block}:" for depth, block in enumerate(blocks)]
    overlay = "\n".join([*lines, f"{'  ' * len(blocks)}{leaf}: {value}"])
    message = message_of(tmp_path, overlay)
    assert f"overlay.yaml:{len(blocks) + 1}: {key} must be {range_}, got " in message


def test_a_later_good_value_replaces_a_bad_one(tmp_path: Path) -> None:
    config = fit_config(tmp_path, "algorithm.gamma=0.9", overlay="algorithm: {gamma: 7}")
    assert config.algorithm.gamma == 0.9


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["rewards.correct", "actor.optimizer.lr", "data.train.options.x"])
def test_not_finite(tmp_path: Path, key: str, value: str) -> None:
    generator = "data: {train: {kind: procedural, task: t, num_examples: 9}}"
    message = message_of(tmp_path, generator, f"{key}={value}")
    assert message.startswith(f"command line: {key} must be a finite number, got ")


@pytest.mark.parametrize("value", ["1e308", "-1e39"])
def test_beyond_float32(tmp_path: Path, value: str) -> None:
    """The mathematics is done in it, and there such a number is infinite."""
    message = message_of(tmp_path, "", f"rewards.correct={value}")
    assert message.startswith("command line: rewards.correct must be at most 3.4e38 in size, got ")


def test_out_of_range_through_interpolation_blames_the_value_not_the_reference(
    tmp_path: Path,
) -> None:
    overlay = "actor: {optimizer: '${critic.optimizer}'}"
    message = message_of(tmp_path, overlay, "critic.optimizer.lr=-1")
    assert message == "command line: critic.optimizer.lr must be > 0, got -1.0"
    message = message_of(tmp_path, "algorithm:\n  eps_low: ${algorithm.gamma}\n")
    assert "overlay.yaml:2: algorithm.eps_low must be >= 0, < 1, got 1.0" in message
    assert "(from ${algorithm.gamma})" in message


@pytest.mark.parametrize(
    ("overlay", "parts"),
    [
        ("seed: ${algorithm.gama}",
         ["overlay.yaml:1: seed", "'${algorithm.gama}' points to nothing", "${algorithm.gamma}"]),
        ("seed: ${seed}", ["overlay.yaml:1: seed", "Recursive"]),
        ("\nseed: ${", ["overlay.yaml:2: seed"]),
        ("seed: ${algorithm.gamma}",
         ["overlay.yaml:1: seed: expects int, got 1.0 (from ${algorithm.gamma})"]),
        ("actor:\n  path: ${oc.env:VAPO_TEST_UNSET}", ["overlay.yaml:2: actor.path", "_UNSET"]),
    ],
)  # fmt: skip
def test_bad_interpolation(tmp_path: Path, overlay: str, parts: list[str]) -> None:
    message = message_of(tmp_path, overlay)
    assert all(part in message for part in parts), message


def test_missing_mandatory_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^actor\.path must be set: .*actor\.path=VALUE$"):
        load_config(FitConfig, [], [])
    path = write(tmp_path, "seed: 1\nexport_dir: ???\n")
    with pytest.raises(UserError, match=r"overlay\.yaml:2: export_dir must be set"):
        load_config(SftConfig, [path], [])
    overlay = "tracking: {run_name: '${actor.path}'}"
    with pytest.raises(UserError, match=r"actor\.path"):
        load_config(FitConfig, [write(tmp_path, overlay)], [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", ":2: duplicate key 'seed', first on line 1"),
        ("actor:\n  path: x\n  path: y\n", ":3: duplicate key 'actor.path', first on line 2"),
        ("seed: [1,\n", "not valid YAML"),
        ("a: b: c\n", ":1: not valid YAML"),
        ("seed: 1\n\tgamma: 2\n", ":2: not valid YAML"),
        ("- seed\n", ":1: a config is a mapping"),
        ("hello\n", ":1: a config is a mapping"),
        ("1: 2\n", ":1: unknown key '1'"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: &x\n  b: *x\n", "cannot be read as a config"),
        ("? [a]\n: 1\n", "cannot be read as a config"),
        ("seed: *x\n", ":1: not valid YAML"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, expected: str) -> None:
    message = message_of(tmp_path, text)
    assert "overlay.yaml" in message
    assert expected in message


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nope\.yaml: no such file"):
        load_config(FitConfig, [tmp_path / "nope.yaml"], [])
    with pytest.raises(UserError, match="folder"):
        load_config(FitConfig, [tmp_path], [])
    (tmp_path / "latin.yaml").write_bytes(b"output_dir: caf\xe9\n")
    with pytest.raises(UserError, match=r"latin\.yaml: not text in UTF-8"):
        load_config(FitConfig, [tmp_path / "latin.yaml"], [])


@pytest.mark.parametrize("override", ["seed", "=1", "a..b=1", ".seed=1", "se ed=1"])
def test_override_of_the_wrong_form(tmp_path: Path, override: str) -> None:
    message = message_of(tmp_path, "", override)
    assert message == f"command line: '{override}' is not of the form dotted.key=value"


def test_override_that_is_not_yaml_or_not_a_key(tmp_path: Path) -> None:
    assert "command line: seed: '[1' is not valid YAML" in message_of(tmp_path, "", "seed=[1")
    message = message_of(tmp_path, "", "components.clip_higer.enabled=false")
    assert message.startswith("command line: unknown key 'components.clip_higer'")


def test_from_yaml_names_its_source() -> None:
    with pytest.raises(UserError, match=r"^last\.ckpt:8: unknown key 'sede'; .*'seed'"):
        from_yaml(FitConfig, MINIMAL + "sede: 1\n", source="last.ckpt")
