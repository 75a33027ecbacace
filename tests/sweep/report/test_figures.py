"""What is drawn: the points of each curve, bands over seeds, and files that hold something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.transforms import Bbox
from PIL import Image

from tests.diagnostics.value_page.made_up_pages import evaluated
from tests.sweep.report.synthetic import ablation, pretraining, run
from tests.systems import MAX_RESPONSE_TOKENS, estimated, system_config
from vapo.commands import report
from vapo.config import resolve
from vapo.diagnostics.position_profiles import position_profile
from vapo.sweep.grid import GridRow
from vapo.sweep.report.figures import (
    Drawing,
    curves,
    draw_all,
    legend_columns,
    legend_height,
    points_of,
    position_points,
    row_bands,
    row_groups,
)
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.run_records import RunRecord
from vapo.sweep.report.runs import Collection
from vapo.sweep.report.style import house_style, line_styles

ROOT = Path(__file__).parents[3]

# Two iterations of value pretraining, then two of the policy, of two steps each.
HISTORY = {
    "progress/phase": {2: 0.0, 4: 0.0, 6: 1.0, 8: 1.0},
    "progress/policy_steps": {2: 0.0, 4: 0.0, 6: 2.0, 8: 4.0},
    "rollout/reward_mean": {2: 9.0, 4: 9.0, 6: 0.5, 8: 0.7},
    "actor/entropy": {5: 1.0, 6: 2.0, 7: 3.0, 8: 5.0},
    "critic/value_loss": {1: 4.0, 2: 2.0, 3: 1.0, 4: 1.0, 5: 7.0},
    SCORE: {0: 0.25, 8: 0.5},
}


def test_value_pretraining_is_not_on_the_x_axis() -> None:
    """Rollouts belong to the policy before the iteration's update, evaluations to the one after."""
    record = RunRecord("r", "a", 0, HISTORY)
    assert points_of(record, "rollout/reward_mean") == {0.0: 0.5, 2.0: 0.7}
    assert points_of(record, "actor/entropy") == {0.0: 1.5, 2.0: 4.0}
    assert points_of(record, SCORE) == {0.0: 25.0, 4.0: 50.0}
    assert points_of(record, "critic/value_loss", pretraining=True) == {1: 3.0, 2: 1.0}
    only_pretraining = {**HISTORY, "progress/phase": {2: 0.0, 4: 0.0}}
    assert points_of(replace(record, history=only_pretraining), "rollout/reward_mean") == {}


def test_steps_below_0_are_those_of_value_pretraining() -> None:
    """The same run as newer versions record it: four steps lower, and the first score at 0."""
    history = {
        key: {step - 4: value for step, value in values.items()} for key, values in HISTORY.items()
    }
    record = RunRecord("r", "a", 0, history | {SCORE: {0: 0.25, 4: 0.5}})
    older = RunRecord("r", "a", 0, HISTORY)
    for key in ("rollout/reward_mean", "actor/entropy", SCORE):
        assert points_of(record, key) == points_of(older, key)
    assert points_of(record, "critic/value_loss", pretraining=True) == {1: 3.0, 2: 1.0}
    assert [record.score(n) for n in (0, 3, 4)] == [0.25, 0.25, 0.5]


def test_band_over_seeds() -> None:
    seeds: list[dict[float, float]] = [{0: 1.0, 2: 5.0, 4: 0.0}, {0: 3.0, 2: 6.0}, {}]
    records = [RunRecord("r", "a", seed) for seed in range(3)] + [RunRecord("r", "b", 2)]
    found = row_bands(records, ["a", "b"], lambda record: seeds[record.seed])
    assert found == {"a": {0: [1.0, 3.0], 2: [5.0, 6.0]}}


def test_positions_of_few_responses_are_left_out() -> None:
    points = partial(position_points, when="first", column="value_mean")
    x = list(row_bands([run("a", 0, 0.5)], ["a"], points)["a"])
    assert x[0] == 0
    assert 265 <= x[-1] <= 270  # exp(-p / 90) falls below 5 % at p = 269.6


def test_groups_hold_no_more_lines_than_can_be_told_apart() -> None:
    groups = {suffix: rows for suffix, _, rows in row_groups(ablation())}
    assert list(groups) == ["_systems", "_components"]
    assert groups["_systems"] == ["Vanilla PPO", "GRPO", "DAPO", "VAPO"]
    assert len(groups["_components"]) == 9
    one = Collection("t", [GridRow("a"), GridRow("b")], [run("a", 0, 0.5), run("b", 0, 0.4)])
    assert list(row_groups(one)) == [("", "", ["a", "b"])]
    rows = [GridRow(str(i)) for i in range(20)]
    many = Collection("t", rows, [run(row.name, 0, 0.5) for row in rows])
    assert [len(chosen) for *_, chosen in row_groups(many)] == [9, 9, 2]


def test_lines_differ_without_colour() -> None:
    rows = ablation().rows
    styles = line_styles([row.name for row in rows[2:]], "VAPO")
    marks = {(str(style["linestyle"]), style["marker"]) for style in styles.values()}
    assert len(marks) == len(styles) - 1 or len(marks) == len(styles)
    assert styles["VAPO"]["color"] == "#000000"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Bbox]]:
    """The folder of a sweep's report, and where each figure's legend lies, in widths of it."""
    folder, legends = tmp_path_factory.mktemp("report"), dict[str, Bbox]()

    def draw(collection: Collection) -> Iterator[Drawing]:
        for drawing in draw_all(collection):
            yield drawing  # it is laid out where it is saved
            figure = drawing.figure
            [legend] = figure.legends
            legends[drawing.name] = legend.get_window_extent().transformed(
                figure.transFigure.inverted()
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_all", draw)
        report.write_report(ablation(), folder)
    return folder, legends


@pytest.mark.slow
def test_report_of_a_sweep(written: tuple[Path, dict[str, Bbox]]) -> None:
    folder, _ = written
    names = {path.name for path in folder.iterdir()}
    figures = {
        "training_curves_systems", "training_curves_components", "positions_systems",
        "positions_components", "value_pretraining",
    }  # fmt: skip
    assert names == {"table.md", "table.csv", "report.html"} | {
        f"{name}.{suffix}" for name in figures for suffix in ("png", "svg")
    }
    for name in figures:
        image = Image.open(folder / f"{name}.png").convert("L")
        assert image.width >= 1400, "readable in print"
        inked = sum(image.histogram()[:200]) / (image.width * image.height)
        assert 0.01 < inked < 0.5, f"{name}: {inked:.3f} of the picture is dark"
        assert (folder / f"{name}.svg").read_text().count("<path") > 20
    svg = (folder / "training_curves_systems.svg").read_text()
    words = ("Vanilla PPO", "optimizer steps of the policy", "entropy", "explained variance")
    assert all(text in svg for text in words)
    assert "upper clip fraction" not in svg, "no run has logged one: no empty panel"
    html = (folder / "report.html").read_text()
    assert html.count("data:image/png;base64,") == len(figures)
    assert "shade: lowest to highest" in html


@pytest.mark.slow
def test_legends_lie_inside_the_figures(written: tuple[Path, dict[str, Bbox]]) -> None:
    _, legends = written
    assert legends
    for name, box in legends.items():
        assert box.x0 >= 0, name
        assert box.x1 <= 1, name
        assert box.y0 >= 0, name


def test_the_legend_of_long_names_is_whole() -> None:
    """Two columns hold 50 characters; a name of 164 takes two lines of a single column."""
    names = [f"vapo +{'grpo_with_a_long_name ' * 7}seed{number}" for number in range(2)]
    assert [legend_columns(["x" * n]) for n in (18, 19, 32, 33, 50, 51)] == [4, 3, 3, 2, 2, 1]
    assert legend_height(names) == pytest.approx(4 * 0.16)
    with house_style():
        figure = curves([run(name, 0, 0.5) for name in names], names, {SCORE: "score"})
        assert figure is not None
        figure.draw_without_rendering()
    [legend] = figure.legends
    assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == names
    box = legend.get_window_extent().transformed(figure.transFigure.inverted())
    assert (box.x0 >= 0, box.x1 <= 1, box.y0 >= 0) == (True, True, True)
    pyplot.close(figure)


def test_mean_advantage_is_before_whitening_in_data_figures_and_words() -> None:
    """Whitening takes the batch's mean away: its sign at a position can be the other one."""
    config = system_config("vapo")
    made = evaluated(config)
    assert config.algorithm.whiten_advantages
    assert made.old_values is not None
    batch = estimated(config, replace(made, old_values=made.old_values - 0.5))  # all too low
    assert batch.raw_advantages is not None
    assert batch.advantages is not None
    columns = position_profile(batch, resolve(config), max_response_tokens=MAX_RESPONSE_TOKENS)
    raw, whitened = (
        [float(x[batch.response_mask[:, t], t].mean()) for t in range(MAX_RESPONSE_TOKENS)]
        for x in (batch.raw_advantages, batch.advantages)
    )
    assert columns["advantage_mean"] == pytest.approx(raw)
    assert any(a * b < 0 for a, b in zip(raw, whitened, strict=True)), "else nobody could tell"

    (positions,) = (d for d in draw_all(one_row()) if d.name == "positions")
    labels = " ".join(axis.get_ylabel() for axis in positions.figure.axes)
    texts = {"figure": labels, "caption": positions.caption}
    for name in ("docs/sweeps.md", "docs/metrics.md", "docs/value_page.md"):
        texts[name] = (ROOT / name).read_text()
    texts["chart"] = (ROOT / "vapo/diagnostics/value_page/charts.js").read_text()
    for name, text in texts.items():
        text = " ".join(text.split())
        assert re.search(r"(?i)advantage`?( is|s are)?,? \(?before whitening", text), name
        assert not re.search(r"mean advantage \(as the loss", text), name


def one_row() -> Collection:
    return Collection("t", [GridRow("a")], [run("a", 0, 0.5)])


def test_runs_without_a_critic_or_a_policy_phase_are_drawn_as_far_as_they_go() -> None:
    free = [run(name, 0, 0.5, has_critic=False) for name in "ab"]
    drawn = {d.name for d in draw_all(Collection("t", [GridRow("a"), GridRow("b")], free))}
    assert drawn == {"training_curves", "positions"}
    only = Collection("t", [GridRow("p")], [pretraining("p", 0)])
    assert "value_pretraining" in {d.name for d in draw_all(only)}


@pytest.fixture(autouse=True)
def close_figures():
    from matplotlib import pyplot

    yield
    pyplot.close("all")
