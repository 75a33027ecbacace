"""A page's contents are made when it is due, from what the iteration was before its update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diagnostics.value_page.reading import unpacked
from tests.diagnostics.value_page.training import train
from vapo.diagnostics.value_page.contents import page_contents
from vapo.training.callbacks import diagnostics as diagnostics_module

NAN = float("nan")
STOP_RULE = (
    "components.value_pretraining.num_iterations=9",
    "components.value_pretraining.min_iterations=3",
    "components.value_pretraining.stop_value_loss=1e9",
    "training.num_iterations=3",
    "value_pages.every_n_iterations=100",
)
NO_PRETRAINING = "components.value_pretraining.enabled=false"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The iterations whose contents were made, from 0."""
    iterations: list[int] = []

    def counted(batch: Any, config: Any, positions: Any, iteration: int, **rest: Any) -> Any:
        iterations.append(iteration)
        return page_contents(batch, config, positions, iteration, **rest)

    monkeypatch.setattr(diagnostics_module, "page_contents", counted)
    return iterations


@pytest.mark.slow
def test_contents_are_made_as_often_as_pages_are_written(tmp_path: Path, made: list[int]) -> None:
    """Only the update of iteration 3 decides that it was the last of value pretraining."""
    pages, watching, module = train(tmp_path, *STOP_RULE)
    assert list(pages) == ["iteration_0001", "iteration_0003", "iteration_0004", "iteration_0006"]
    assert made == [0, 2, 3, 5]
    assert int(module.iteration) == 6
    for name, page in pages.items():
        old_values = watching.old_values[int(name[-4:])]
        shown = [response for group in page["groups"] for response in group["responses"]]
        assert len(shown) == 16
        for response in shown:
            num = response["num_tokens"]
            values = unpacked(response["columns"]["value"], num)
            assert torch.equal(values, old_values[response["row"], :num]), name
    first, last = watching.old_values[3], watching.old_values[6]
    assert (first - last).abs().max() > 1e-3, "the critic was trained meanwhile"
    assert watching.num_batches == [0] * 6, "one iteration's numbers are in memory, and once:"
    assert len(watching.cut_values) > 12
    assert watching.num_cut == [0] * 6, "micro-batches are cut from them when they are read"


@pytest.mark.slow
def test_a_rollout_left_out_takes_its_group_off_the_page(tmp_path: Path) -> None:
    """What is left of a group is no group: its rows would be shown as another prompt's."""
    plan = {(2, "old_values"): {5: NAN}}
    pages, watching, _ = train(
        tmp_path,
        NO_PRETRAINING,
        "training.num_iterations=3",
        "value_pages.every_n_iterations=1",
        plan=plan,
    )
    assert [len(page["groups"]) for page in pages.values()] == [4, 3, 4]
    page = pages["iteration_0002"]
    kept = [0, 1, 2, 3, *range(8, 16)]
    rows = sorted(r["row"] for group in page["groups"] for r in group["responses"])
    assert rows == list(range(12))
    for group in page["groups"]:
        for response in group["responses"]:
            num = response["num_tokens"]
            old_values = watching.old_values[2][kept[response["row"]], :num]
            assert torch.equal(unpacked(response["columns"]["value"], num), old_values)
        first = kept[group["index"] * 4]
        assert group["prompt_id"] == f"made-up:{first}"


def test_nothing_to_show_where_nothing_was_trained_on(tmp_path: Path) -> None:
    pages, _, _ = train(
        tmp_path,
        NO_PRETRAINING,
        "training.num_iterations=3",
        "value_pages.every_n_iterations=1",
        plan={(2, "old_values"): dict.fromkeys(range(16), NAN)},
    )
    assert list(pages) == ["iteration_0001", "iteration_0003"]
