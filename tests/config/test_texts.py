"""A text of a config is what was written: in Python, in the shell, in a file and in the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import vapo
from tests.config.fits import MINIMAL, PROCEDURAL, fit_config, write
from vapo.commands.python_values import as_overrides
from vapo.config import FitConfig
from vapo.config.layers import check_keys, read_text
from vapo.config.loading import compose, from_yaml
from vapo.config.options import NAME, describe
from vapo.config.overrides import read_overrides
from vapo.config.scalars import unescape_missing
from vapo.config.spelling import as_spelled
from vapo.config.written import to_yaml
from vapo.config.yaml_text import flow_text, yaml_text
from vapo.errors import UserError
from vapo.sweep.grid import read_grid

ENTRIES = describe(FitConfig)
TEXT_KEYS = [k.replace(NAME, "a") for k, e in ENTRIES.items() if getattr(e, "type", None) is str]
RUN_NAME = "tracking.run_name"
TEXTS = [
    *("Q: {prompt}\nA: ", "{prompt}\n", "\n{prompt}", " (\\d+)$", "\ta", "a\r\n", "\u00a0", "\x85"),
    *("'(a)'", '"a"', '"Q" {prompt}', "'", "''", "'''", "it's", '"', "\\", "\\n", "'a' or 'b'"),
    *("null", "Null", "~", "", "  ", "None", "none", "nil", "???", "\\???", "\\\\???", "a???"),
    *("007", "1:30", "2024_11_27", "1.10", "0x1F", ".5", "1e3", "1e-4", "1_0", "+1", ".inf"),
    *("yes", "true", "off", "2026-01-02", "=", "a=b", "a: b", "- a", "# a", "a # b", "{a: b}"),
    *("!!int 3", "&a", "*a", "@a", "`a", "%a", "| a", "> a", "\\$", "$5", "\u2028", "\x1b[1m"),
    *("caf\u00e9", "\U0001f600", "\ue000", "\ufeff", "x" * 300, "y " * 200, "?", "? a", ": a"),
    *("<<", ".nan", "[1", "\x7f", "\x00", "---", "...", "--- a", "\u2029a", " \n ", "a\n\n\nb"),
]
TAGS = {f"t{index}": text for index, text in enumerate(TEXTS)}
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda text: "${" not in text
)
many = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def read(key: str, text: str) -> Any:
    """What one override gives a key, without the rest of a config."""
    layer = read_overrides([text], ENTRIES)
    check_keys(layer, ENTRIES)
    return unescape_missing(as_spelled(layer, ENTRIES).value(key))


@pytest.fixture(scope="module")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("texts"), MINIMAL)


def test_a_text_from_python_is_the_value(minimal: Path) -> None:
    each = {f"tracking.tags.{name}": text for name, text in TAGS.items()}
    options = {"kind": "procedural", "task": "t", "num_examples": 9, "options": {"a": [TAGS]}}
    for overrides in (each, {"tracking.tags": TAGS}, {"tracking": {"tags": TAGS}}):
        config = vapo.load_config(minimal, overrides=overrides | {"data.train": options})
        assert config.tracking.tags == TAGS
        assert config.data.train.options == {"a": [TAGS]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["null", "", "???", " a\n", "'a'", "None", "007"])
def test_a_text_from_python_is_the_value_of_a_key_that_may_be_null(
    minimal: Path, text: str
) -> None:
    config = vapo.load_config(minimal, overrides={RUN_NAME: text, "output_dir": text})
    assert config.tracking.run_name == config.output_dir == text


@many
@given(key=st.sampled_from(TEXT_KEYS), text=st.one_of(any_text, st.sampled_from(TEXTS)))
def test_every_key_that_holds_a_text_takes_any_from_python(key: str, text: str) -> None:
    (override,) = as_overrides({key: text})
    assert read(key, override) == text
    first, _, rest = key.partition(".")
    if rest and "." not in rest:
        (block,) = as_overrides({first: {rest: text}})
        assert read(key, block) == text


def test_what_is_recorded_or_printed_is_read_back(minimal: Path) -> None:
    texts = {"tracking.tags": TAGS, RUN_NAME: "None", "output_dir": "???"}
    composed = compose(FitConfig, [minimal], as_overrides(texts))
    for written in (to_yaml(composed.config), to_yaml(composed.tree)):
        again = from_yaml(FitConfig, written, source="config.yaml")
        assert again == composed.config
        assert to_yaml(again) == to_yaml(composed.config)


@many
@given(
    tree=st.recursive(
        st.one_of(any_text, st.integers(-9, 9), st.booleans(), st.none(), st.floats(0, 1)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(any_text, inner)),
        max_leaves=6,
    )
)
def test_any_tree_is_written_as_yaml_of_the_same_values(tree: Any) -> None:
    assert yaml.safe_load(yaml_text({"a": tree})) == {"a": tree}
    assert yaml.safe_load(flow_text([tree])) == [tree]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        *[(text, text) for text in ("{prompt}\n", " a ", "\ta", '"Q" {prompt}', "'a' or 'b'", "'")],
        *[(text, text) for text in ("???", "#a", "a # b", "- a", "007", "true", "\u00a0", "  ")],
        ("'a '", "a "),
        ('"a\\n"', "a\n"),
        ('"a\nb"', "a\nb"),
        ("'it''s\n '", "it's\n "),
        ("''", ""),
        ("'null'", "null"),
        ("'None'", "None"),
        *[(text, None) for text in ("", "null", "~", "NULL", "Null")],
    ],
)
def test_nothing_is_stripped_in_the_shell_but_quotes_around_the_whole(
    typed: str, expected: str | None
) -> None:
    assert read(RUN_NAME, f"{RUN_NAME}={typed}") == expected
    if expected is not None:
        assert read("tracking.tags.a", f"tracking.tags.a={typed}") == expected


def test_null_of_the_shell_is_no_text_where_a_text_is_due(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="output_dir: expects text, got null"):
        fit_config(tmp_path, "output_dir=null")
    assert fit_config(tmp_path, "output_dir='null'").output_dir == "null"


LIKE_NUMBERS = ["2024_11_27", "1:30", "007", "010", "1.10", "0x1F", "0b11", "1_0", ".5", "1e3"]
LIKE_NUMBERS += ["3.14159265358979323846", "190:20:30.15", "+7", "-0", "1e-4", "1.", "0.10"]


@pytest.mark.parametrize("source", LIKE_NUMBERS)
def test_a_file_s_text_is_its_source(source: str) -> None:
    tracking = f"{{experiment: {source}, tags: {{{source}: x, b: {source}}}}}"
    text = f"output_dir: {source}\ncritic: {{frozen: [{source}]}}\ntracking: {tracking}"
    layer = as_spelled(read_text(text, "x"), ENTRIES)
    assert layer.tree == {
        "output_dir": source,
        "critic": {"frozen": [source]},
        "tracking": {"experiment": source, "tags": {source: "x", "b": source}},
    }
    assert read("tracking", f"tracking={tracking}") == layer.tree["tracking"]


def test_a_file_s_texts_reach_the_config_and_are_read_back(tmp_path: Path) -> None:
    overlay = "output_dir: 1:30\ncritic: {frozen: [007]}\ntracking: {tags: {1.10: 0x1F}}"
    config = fit_config(tmp_path, overlay=overlay)
    assert (config.output_dir, config.critic.frozen) == ("1:30", ["007"])
    assert config.tracking.tags == {"1.10": "0x1F"}
    assert from_yaml(FitConfig, to_yaml(config), source="config.yaml") == config


def test_a_file_s_text_is_its_source_through_anchors_and_merged_blocks() -> None:
    overlay = (
        "actor: &a {lora: &l {target_modules: 007}}\n"
        "critic: {lora: {<<: *l}, kind: adapters}\n"
        "tracking: {experiment: &e 1:30, run_name: *e, tags: {a: true, b: yes, on: 1}}"
    )
    layer = as_spelled(read_text(overlay, "x"), ENTRIES)
    assert layer.value("actor.lora.target_modules") == "007"
    assert layer.value("critic.lora.target_modules") == "007"
    assert (layer.value("tracking.experiment"), layer.value(RUN_NAME)) == ("1:30", "1:30")
    assert layer.value("tracking.tags") == {"a": "true", "b": "yes", "on": "1"}


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        *[(source, "an octal number") for source in ("010", "-017", "+07", "00")],
        *[(source, "a number of base 60") for source in ("1:30", "1:30.5", "190:20:30")],
        *[(source, "a number with underscores") for source in ("1_000", "1_0.5", "0x_1F")],
    ],
)
@pytest.mark.parametrize("key", ["algorithm.eps_low", "data.train.options.x"])
def test_a_number_that_reads_otherwise_is_refused(key: str, source: str, kind: str) -> None:
    block: Any = source
    for name in reversed(key.split(".")):
        block = f"{{{name}: {block}}}"
    in_file, typed = read_text(block[1:-1], "x.yaml"), read_overrides([f"{key}={source}"], ENTRIES)
    for layer, place in ((in_file, "x.yaml:1"), (typed, "command line")):
        with pytest.raises(UserError) as caught:
            as_spelled(layer, ENTRIES)
        assert f"{place}: {key}: YAML reads {source} as {kind}" in str(caught.value)


def test_a_whole_number_that_reads_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"overlay.yaml:1: seed: YAML reads 010 as an octal .*, 8:"):
        fit_config(tmp_path, overlay="seed: 010")
    with pytest.raises(UserError, match=r"command line: seed: YAML reads 1:30 as .* base 60, 90:"):
        fit_config(tmp_path, "seed=1:30")
    assert fit_config(tmp_path, "seed=010", "seed=3").seed == 3


@pytest.mark.parametrize("value", ["1_000", " 7", "7\n"])
def test_a_number_of_the_environment_is_digits_alone(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAPO_TEST_SEED", value)
    with pytest.raises(UserError, match="seed: expects int"):
        fit_config(tmp_path, "seed=${oc.env:VAPO_TEST_SEED}")


@pytest.mark.parametrize("null", ["None", "none", "NONE", "nil"])
def test_another_language_s_null_is_an_error_and_in_quotes_a_text(
    tmp_path: Path, null: str
) -> None:
    for overrides, overlay, place in (
        ([f"data.system_prompt={null}"], "", "command line"),
        ([f"data={{system_prompt: {null}}}"], "", "command line"),
        ([], f"data:\n  system_prompt: {null}\n", "overlay.yaml:2"),
    ):
        with pytest.raises(UserError) as caught:
            fit_config(tmp_path, "data.chat_template=true", *overrides, overlay=overlay)
        assert str(caught.value).endswith(
            f"{place}: data.system_prompt: {null} is not read as null here: write null, "
            f"or quote it if it is meant as text, as '{null}'"
        )
    quoted = fit_config(tmp_path, f"tracking.run_name='{null}'")
    assert quoted.tracking.run_name == null


def test_a_text_that_an_earlier_version_recorded_is_read(tmp_path: Path) -> None:
    text = to_yaml(fit_config(tmp_path, "tracking.run_name='None'"))
    assert text.count("run_name: 'None'") == 1
    earlier = text.replace("run_name: 'None'", "run_name: None")
    assert from_yaml(FitConfig, earlier, source="a checkpoint").tracking.run_name == "None"


def test_a_key_from_python_that_would_be_read_as_another(minimal: Path) -> None:
    with pytest.raises(UserError, match=r"the key 'tracking.tags.a=b' contains '='"):
        vapo.load_config(minimal, overrides={"tracking.tags.a=b": "x"})
    config = vapo.load_config(minimal, overrides={"tracking.tags": {"a=b": "x", "c.d": "007"}})
    assert config.tracking.tags == {"a=b": "x", "c.d": "007"}


def test_a_rule_s_error_says_that_the_text_is_another_language_s_null(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no effect without data.chat_template=true.*; None is not read as null"
    ):
        fit_config(tmp_path, "data.system_prompt=None")
    regex = ("rewards.verifier=regex", "rewards.pattern=None", *PROCEDURAL)
    with pytest.raises(UserError, match=r"rewards.pattern.*None is not read as null here"):
        fit_config(tmp_path, *regex)


def test_a_later_layer_takes_the_place_of_another_language_s_null(tmp_path: Path) -> None:
    overlay = "tracking: {run_name: None}"
    assert fit_config(tmp_path, "tracking.run_name=a", overlay=overlay).tracking.run_name == "a"


def test_the_hint_for_a_number_that_may_be_null(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expects float\|null, got 'None'; write null"):
        fit_config(tmp_path, "critic.value_clip=None")


def test_a_value_that_must_be_set_below_a_name_of_one_s_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.train.options.x must be set: \?\?\? stands for"):
        fit_config(tmp_path, *PROCEDURAL, "data.train.options.x=???")


@pytest.mark.parametrize(
    "entry",
    [
        "{row: a, overrides: {tracking.experiment: 007, tracking.run_name: 'null'}}",
        "{list: [{tracking.experiment: 007, tracking.run_name: 'null'}]}",
        "{product: {tracking.experiment: [007], tracking.run_name: ['null']}}",
    ],
)
def test_a_grid_s_texts_are_what_is_written(tmp_path: Path, entry: str) -> None:
    (row,) = read_grid(write(tmp_path, f"rows: [{entry}]", "grid.yaml")).rows
    config = fit_config(tmp_path, *row.overrides)
    assert (config.tracking.experiment, config.tracking.run_name) == ("007", "null")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("{seed: 010}", "overrides.seed: YAML reads 010 as an octal"),
        ("{data.system_prompt: None}", "None is not read as null"),
    ],
)
def test_a_grid_s_values_are_refused_as_a_config_s_are(
    tmp_path: Path, overrides: str, message: str
) -> None:
    text = f"rows:\n- {{row: a, overrides: {overrides}}}"
    with pytest.raises(UserError, match=rf"grid\.yaml:2: rows\.0\..*{message}"):
        read_grid(write(tmp_path, text, "grid.yaml"))
