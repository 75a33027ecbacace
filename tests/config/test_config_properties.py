"""Whatever is set: a valid config that survives its own YAML, or one line that names the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.config.fits import MINIMAL, write
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.options import Option, describe
from vapo.config.written import config_hash, to_yaml
from vapo.errors import UserError

ENTRIES = describe(FitConfig)
OPTIONS = [entry for entry in ENTRIES.values() if isinstance(entry, Option)]
bounded = settings(
    max_examples=12,  # a tenth of a second each
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking takes minutes; the message has all there is to see
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ODD = ["", "null", "~", "[1, 2]", "{a: b}", "${seed}", "${nothing}", "${", "'", "nan", "1e999"]
ODD += [
    "-1",
    "0",
    "0.5",
    "1e-9",
    "10",
    "true",
    "off",
    "x y",
    "\u00e9",
    "a: b",
    "- a",
    "!!int 3",
    "&a",
]


def fitting(option: Option) -> st.SearchStrategy[Any]:
    """Values that the key's own type and range allow."""
    low = max(option.bounds.get("ge", -math.inf), option.bounds.get("gt", -math.inf))
    high = min(option.bounds.get("le", math.inf), option.bounds.get("lt", math.inf))
    if option.type is bool:
        return st.sampled_from(["true", "false"])
    if option.type is int:
        return st.integers(max(int(max(low, 0)), 0), 16).map(str)
    if option.type is float:
        least = max(low, -8.0) if math.isfinite(low) else -8.0
        most = high if math.isfinite(high) else max(least, 0.0) + 8.0
        return st.floats(least, most, allow_subnormal=False).map(str)
    if get_origin(option.type) is Literal:
        return st.sampled_from([str(value) for value in get_args(option.type)])
    if option.type is str:
        return st.sampled_from(["some/path", "{prompt}", "a ${ b", "module:function", "(a)"])
    return st.sampled_from(["{}", "{a: b}"])


overrides = st.lists(
    st.sampled_from(OPTIONS).flatmap(
        lambda option: st.one_of(fitting(option), fitting(option), st.sampled_from(ODD)).map(
            lambda value: f"{option.key}={value}"
        )
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("properties"), MINIMAL)


def load(minimal: Path, chosen: list[str]) -> FitConfig | None:
    """The config, or None for one clear error."""
    try:
        return load_config(FitConfig, [minimal], chosen)
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        assert 0 < len(message) < 1000
        named = [override.partition("=")[0] for override in chosen]
        named += [
            ".".join(parts[:depth])
            for parts in (key.split(".") for key in named)
            for depth in range(2, len(parts))
        ]
        assert any(key in message for key in named), message
        return None


@pytest.mark.slow
@bounded
@given(chosen=overrides)
def test_overrides_give_a_config_or_one_line_that_names_a_key(
    minimal: Path, chosen: list[str]
) -> None:
    config = load(minimal, chosen)
    if config is None:
        return
    again = load_config(FitConfig, [write(minimal.parent, to_yaml(config), "again.yaml")], [])
    assert again == config
    assert config_hash(again) == config_hash(config)


@pytest.mark.slow
@bounded
@given(st.data())
def test_a_key_alone_within_its_range_is_taken_or_clashes_with_another(
    minimal: Path, data: st.DataObject
) -> None:
    option = data.draw(st.sampled_from(OPTIONS))
    load(minimal, [f"{option.key}={data.draw(fitting(option))}"])


@bounded
@given(text=st.text(alphabet="ab.=:[]{}#'\"&*!|>%@` \n\t0\u00e9-$", max_size=40))
def test_any_file_is_a_config_or_one_line_that_names_the_file(minimal: Path, text: str) -> None:
    path = write(minimal.parent, text, "any.yaml")
    try:
        load_config(FitConfig, [minimal, path], [])
        message = "any.yaml"
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert "any.yaml" in message
