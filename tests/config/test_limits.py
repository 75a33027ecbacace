"""Configs that would expand to far more than they are: one error, at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.config.fits import fit_config
from vapo.config.limits import MAX_CONFIG_DEPTH, MAX_FILE_BYTES, MAX_INTEGER
from vapo.errors import UserError

ALPHA = "components: {length_adaptive_gae: {alpha: %s}}"


def aliases(levels: int) -> str:
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(rows)


def tags(**texts: str) -> str:
    rows = [f"    {name}: '{text}'" for name, text in texts.items()]
    return "\n".join(["tracking:", "  tags:", *rows])


TOO_MUCH = {
    "aliases": (aliases(7), 4, "more than 10000 keys and values"),
    "merged aliases": (
        "a0: &a0 {x: 1}\n"
        + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 9)),
        5,
        "more than 10000 keys and values",
    ),
    "keys": (tags(**{f"k{i}": "" for i in range(6_000)}), 5002, "more than 10000 keys and values"),
    "depth of lists": (f"tracking: {{tags: {'[' * 5000}{']' * 5000}}}", 1, "nested deeper than"),
    "depth of blocks": (f"seed: 1\na: {'{a: ' * 5000}1{'}' * 5000}", 2, "nested deeper than"),
    "nested": (tags(a="${" * 9 + "a" + "}" * 9), 3, "tracking.tags.a: interpolations nested deep"),
    "many": (tags(a="${seed}" * 51), 3, "tracking.tags.a: 51 interpolations in one text"),
    "long": (tags(a="${seed}" + "x" * 4_000), 3, "tracking.tags.a: a text of 4007 characters"),
    "seed of 400 digits": (f"seed: {'9' * 400}", 1, "seed: a number of 400 characters"),
    "seed of 5000 digits": (f"seed: {'9' * 5000}", 1, "seed: a number of 5000 characters"),
    "hexadecimal seed": (f"seed: 0x{'f' * 50_000}", 1, "seed: a number of 50002 characters"),
    "quoted seed": (f"seed: '{'9' * 400}'", 1, "seed: expects int, got '9999"),
    "seed of 65 bits": (f"seed: {2**64}", 1, "seed: an integer of 65 bits"),
    "alpha of 400 digits": (ALPHA % ("9" * 400), 1, "alpha: a number of 400 characters"),
    "alpha of 65 bits": (ALPHA % 2**64, 1, "alpha: an integer of 65 bits"),
    "number in a mapping": (f"tracking: {{tags: {{a: {2**64}}}}}", 1, "tracking.tags: an integer"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_would_expand_too_far_is_one_error_at_once(case: str, tmp_path: Path) -> None:
    overlay, line, expected = TOO_MUCH[case]
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, overlay=overlay)
    taken, message = time.process_time() - began, str(caught.value)
    assert f"overlay.yaml:{line}: " in message
    assert expected in message
    assert len(message) < 400
    assert taken < 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"seed={'9' * 400}", "command line: seed: a number of 400 characters"),
        (f"tracking.tags={'[' * 3000}", "command line: tracking.tags: "),
        ("tracking.tags={a: &a {b: *a}}", "command line: tracking.tags: "),
        (f"tracking.run_name={'${seed}' * 51}", "command line: tracking.run_name: 51 interpol"),
        (f"{'a.' * 3000}b=1", "command line: unknown key 'a"),
    ],
)
def test_as_an_override(override: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, override)
    assert str(caught.value).startswith(expected)


def test_a_file_that_is_too_large_or_has_no_end(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"overlay.yaml: larger than {MAX_FILE_BYTES} bytes"):
        fit_config(tmp_path, overlay="# " + "x" * MAX_FILE_BYTES)


def test_what_is_within_the_limits_is_read(tmp_path: Path) -> None:
    """The most interpolations, the largest seed, aliases and depth as a config may have them."""
    overlay = tags(a0="${seed}" * 10, **{f"b{i}": "${tracking.tags.a0}" * 10 for i in range(8)})
    config = fit_config(tmp_path, f"seed={MAX_INTEGER}", overlay=overlay)
    assert config.seed == MAX_INTEGER
    assert config.tracking.tags["b7"] == str(MAX_INTEGER) * 100
    depth = MAX_CONFIG_DEPTH - 4
    data = "data: {train: {options: {x: %s}}}" % ("[" * depth + "]" * depth)
    with pytest.raises(UserError, match=r"data\.train\.options"):  # read, and not of the right type
        fit_config(tmp_path, overlay=data)
    config = fit_config(tmp_path, overlay="tracking: {tags: {a: &x abc, b: *x}}")
    assert config.tracking.tags == {"a": "abc", "b": "abc"}


def test_numbers_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "7")
    texts = {f"t{i}": "${oc.decode:${oc.env:SEED}}" for i in range(30)}
    config = fit_config(tmp_path, "seed=${oc.env:SEED}", overlay=tags(**texts))
    assert (config.seed, config.tracking.tags["t29"]) == (7, "7")
    monkeypatch.setenv("SEED", "9" * 400)
    with pytest.raises(UserError, match=r"^command line: seed must be .* at most 63 bits, >= 0"):
        fit_config(tmp_path, "seed=${oc.env:SEED}")
    with pytest.raises(UserError, match="number"):
        fit_config(tmp_path, overlay=ALPHA % '"${oc.decode:${oc.env:SEED}}"')


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("alpha", "0.05 "), ("alpha", " 0.05"), ("alpha", "1_0"), ("alpha", "\u0663"),
        ("alpha", "0.05\\t"), ("alpha", ""), ("seed", "3 "), ("seed", " 3"), ("seed", "1_000"),
        ("seed", "\u0663"), ("seed", "3\\n"), ("shuffle", " true"), ("shuffle", "true "),
    ],
)  # fmt: skip
def test_quoted_text_is_a_number_only_as_it_stands(key: str, text: str, tmp_path: Path) -> None:
    overlay = {"alpha": ALPHA, "seed": "seed: %s", "shuffle": "rewards: {shuffle: %s}"}[key]
    kind = {"alpha": "float", "seed": "int", "shuffle": "true|false"}[key]
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, overlay=overlay % f'"{text}"')
    assert "overlay.yaml:1: " in str(caught.value)
    assert f"{key}: expects {kind}, got '" in str(caught.value)


def test_quoted_numbers_that_are_taken(tmp_path: Path) -> None:
    for text, value in [("0.05", 0.05), ("+.5", 0.5), ("5e-2", 0.05), ("1.", 1.0)]:
        config = fit_config(tmp_path, overlay=ALPHA % f"'{text}'")
        assert config.components.length_adaptive_gae.alpha == value
    assert fit_config(tmp_path, overlay="seed: '12'").seed == 12
    for text in ("nan", "inf", "-Infinity", "1e400"):
        with pytest.raises(UserError, match="alpha must be a finite number"):
            fit_config(tmp_path, overlay=ALPHA % f"'{text}'")
