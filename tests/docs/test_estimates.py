"""The estimates of stored rollouts that train no network, by hand."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "experiments/smollm2"))
    return import_module("estimates")


def responses(script: ModuleType, **columns: Any) -> Any:
    """Three of one prompt and two of another, of two tokens each."""
    plain = {
        "groups": ["a", "a", "a", "b", "b"],
        "rewards": np.array([1.0, 0.0, 0.0, 1.0, 1.0]),
        "texts": [["5"], ["5"], ["7"], ["5"], ["x"]],
        "states": {},
    }
    return script.Responses(**{**plain, **columns})


def test_a_group_mean_leaves_the_response_out(script: ModuleType) -> None:
    assert script.group_means(responses(script)).tolist() == [0, 0.5, 0.5, 1, 1]
    ((_, values),) = script.candidates("group_mean", responses(script))
    assert [v.tolist() for v in values[:2]] == [[0, 0], [0.5, 0.5]]


def test_milestones_by_hand(script: ModuleType) -> None:
    """Before any number all others are alike; 5 was reached by one other, 7 by none; 5 of another
    prompt does not count."""
    exact = script.values_by_milestones(responses(script), kind="nth", shrinkage=0.0)
    assert [v.tolist() for v in exact] == [[0, 0], [0.5, 1], [0.5, 0.5], [1, 1], [1, 1]]
    shrunk = script.values_by_milestones(responses(script), kind="nth", shrinkage=1.0)
    assert shrunk[1].tolist() == [0.5, 0.75], "(1 + 0.5) / 2"
    texts = [["5", ";6"], ["6", ";5"], ["7", ";6"], ["5"], []]
    by_kind = {
        kind: script.values_by_milestones(responses(script, texts=texts), kind=kind, shrinkage=0.0)
        for kind in script.MILESTONES
    }
    assert by_kind["nth"][2].tolist() == [0.5, 0.5, 1], "the 1st has a second number 6, too"
    assert by_kind["all"][2].tolist() == [0.5, 0.5, 0.5], "and (7, 6) is nobody's"
    assert [len(values) for values in by_kind["all"]] == [3, 3, 3, 2, 1]


def test_a_kernel_by_hand(script: ModuleType) -> None:
    """Similarities 1 and 0 to the others' states: weights e and 1 at temperature 1."""
    x, y = [1.0, 0.0], [0.0, 2.0]
    states = [torch.tensor(pair) for pair in ([x, x], [x, y], [y, y], [x, x], [y, y])]
    returns = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])

    def value(by: str, groups: str | None) -> float:
        """Of the state x of the second response."""
        options = {"temperatures": [1.0], "by": by, "groups": groups}
        return float(script.kernel_values(states, returns, **options)[1.0][1][0])

    e = np.e
    assert value("states", "aaabb") == pytest.approx(2 * e / (2 * e + 2))
    assert value("responses", "aaabb") == pytest.approx(e / (e + 1))
    assert value("states", None) == pytest.approx((4 * e + 2) / (4 * e + 4))
    assert value("responses", None) == pytest.approx((2 * e + 1) / (2 * e + 2))


def test_advantages_of_a_kernel_by_hand(script: ModuleType) -> None:
    """Around the mean of x and y, x is opposite to y: weights e and 1/e. Lambda is 0, so that an
    advantage is the change of the value."""
    x, y = [2.0, 0.0], [0.0, 2.0]
    batch = SimpleNamespace(
        response_mask=torch.tensor([[True, True, False], [True, True, False], [True, True, False]]),
        actor_states=[torch.tensor(pair)[:, None] for pair in ([x, y], [x, x], [y, y])],
    )
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    options = {"temperature": 1.0, "by": "states", "alpha": 0.5}
    found = import_module("kernel").estimate(batch, rewards, SimpleNamespace(gamma=1.0), **options)
    q = 1 / (1 + np.e**2)  # 1/e beside e
    assert found.value_targets is None
    assert found.advantages[0].tolist() == pytest.approx([1 - 2 * q, q, 0])
    assert found.advantages[1].tolist() == pytest.approx([0, -1, 0]), "both others earned 1"
    value = (np.e + 1 / np.e) / (np.e + 3 / np.e)
    assert found.advantages[2].tolist() == pytest.approx([0, 1 - value, 0])


def test_no_value_reads_its_own_return(script: ModuleType) -> None:
    draw = np.random.default_rng(0)
    states = {0: [draw.normal(size=(2, 3)) for _ in range(5)]}
    plain = responses(script, states=states)
    changed = plain._replace(rewards=np.array([9.0, 0.0, 0.0, 1.0, 1.0]))
    for name in script.ESTIMATES:
        pairs = zip(script.candidates(name, plain), script.candidates(name, changed), strict=True)
        for (about, before), (_, after) in pairs:
            assert np.array_equal(before[0], after[0]), about
            moved = not np.array_equal(before[1], after[1])
            assert moved or about["temperature"] < 0.1, about


def test_what_explains_most_is_chosen(script: ModuleType) -> None:
    """The number that was reached says all, so nothing is shrunk to the mean. Before it the others'
    mean is off by 2/3: Var(R - V) is 2/9, and Var(R) 1/4."""
    texts = [["5"], ["5"], ["7"], ["7"]]
    made = script.Responses(["a"] * 4, np.array([1.0, 1.0, 0.0, 0.0]), texts, {})
    best, chosen = script.choose("milestones", made)
    assert (best, chosen["shrinkage"]) == (pytest.approx(1 / 9), 0.0)
