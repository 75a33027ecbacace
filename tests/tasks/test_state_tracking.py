"""The state-tracking generator, checked by an independent simulation of the swaps."""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Any

import pytest

from tests.tasks.generated import generate
from vapo.errors import UserError
from vapo.tasks.state_tracking import state_tracking


def simulate(problem: str) -> list[tuple[str, int]]:
    """(label, position after it) of each swap, moving the ball over a row of cups."""
    assert re.fullmatch(r"[1-9]([a-zA-Z][1-9][1-9])+=", problem)
    cups = [False] * 10
    cups[int(problem[0])] = True
    steps = []
    for label, first, second in re.findall(r"([a-zA-Z])(\d)(\d)", problem):
        i, j = int(first), int(second)
        assert i != j
        cups[i], cups[j] = cups[j], cups[i]
        steps.append((label, cups.index(True)))
    return steps


def test_clean_demonstrations_are_the_simulated_steps():
    for row in state_tracking(300, seed=3):
        steps = simulate(row["prompt"])
        answer = str(steps[-1][1])
        assert row["answer"] == answer
        expected = "".join(f"{label}{position}" for label, position in steps)
        assert row["demonstration"] == f"{expected};{answer}"


def test_the_worked_example():
    assert simulate("3a12b45c31=") == [("a", 3), ("b", 3), ("c", 1)]


def test_steps_and_positions_cover_their_ranges():
    rows = state_tracking(400, seed=0, min_steps=3, max_steps=5, num_positions=4)
    assert {len(simulate(row["prompt"])) for row in rows} == {3, 4, 5}
    assert {row["answer"] for row in rows} == set("1234")
    assert not set("56789") & set("".join(row["prompt"] for row in rows))


def test_rows_are_the_ones_that_the_shipped_models_were_trained_on():
    """The digest was taken before the generator was cut into parts."""
    digest, bools = hashlib.sha256(), (False, True)
    for seed, steps, positions, repeats, noisy in itertools.product(
        (0, 3), ((1, 3), (2, 10), (60, 60)), (2, 5), bools, bools
    ):
        noise = {
            "skip_steps_probability": 0.3,
            "wrong_step_probability": 0.2,
            "early_stop_probability": 0.1,
            "terse_probability": 0.5 * repeats,
            "terse_wrong_step_probability": 0.4,
        }
        rows = state_tracking(
            8,
            seed=seed,
            min_steps=steps[0],
            max_steps=steps[1],
            num_positions=positions,
            repeat_swaps=repeats,
            **(noise if noisy else {}),
        )
        for row in rows:
            digest.update(f"{row['prompt']} {row['answer']} {row['demonstration']}\n".encode())
    assert digest.hexdigest().startswith("42b76d20dc25baed")


def test_row_depends_on_seed_and_index_only():
    assert state_tracking(5, seed=1) == state_tracking(50, seed=1)[:5]
    assert state_tracking(50, seed=1) != state_tracking(50, seed=2)
    assert len({row["prompt"] for row in state_tracking(50, seed=1)}) > 45


def test_noise_leaves_the_problems_alone():
    clean = state_tracking(200, seed=7)
    noisy = state_tracking(200, seed=7, skip_steps_probability=0.5, wrong_step_probability=0.3)
    assert [(r["prompt"], r["answer"]) for r in clean] == [
        (r["prompt"], r["answer"]) for r in noisy
    ]
    assert [r["demonstration"] for r in clean] != [r["demonstration"] for r in noisy]


def test_skipped_steps():
    rows = state_tracking(500, seed=0, skip_steps_probability=1.0)
    assert all(re.fullmatch(r";[1-5]", row["demonstration"]) for row in rows)
    right = sum(row["demonstration"] == f";{row['answer']}" for row in rows) / 500
    assert 0.13 < right < 0.27  # a guess among five
    some = state_tracking(500, seed=0, skip_steps_probability=0.1)
    assert 25 < sum(row["demonstration"][0] == ";" for row in some) < 80


def test_wrong_steps_continue_from_the_wrong_position():
    wrong = total = 0
    for row in state_tracking(500, seed=0, wrong_step_probability=0.2):
        written = re.findall(r"([a-z])(\d)", row["demonstration"])
        position = int(row["prompt"][0])
        swaps = re.findall(r"[a-z](\d)(\d)", row["prompt"])
        for (_, after), (first, second) in zip(written, swaps, strict=True):
            expected = {first: second, second: first}.get(str(position), str(position))
            wrong += after != expected
            total += 1
            position = int(after)
        assert row["demonstration"].endswith(f";{position}")
    assert 0.15 < wrong / total < 0.25
    every = state_tracking(50, seed=0, wrong_step_probability=1.0)
    for row in every:
        first_step = simulate(row["prompt"])[0]
        assert row["demonstration"][1] != str(first_step[1])


def test_labels_continue_with_capitals_and_then_repeat():
    row = state_tracking(1, seed=0, min_steps=150, max_steps=150)[0]
    labels = [label for label, _ in simulate(row["prompt"])]
    assert len(labels) == 150
    assert "".join(labels[24:28]) == "yzAB"
    assert "".join(labels[50:54]) == "YZab"
    written = re.findall(r"([a-zA-Z])(\d)", row["demonstration"])
    assert [(label, int(position)) for label, position in written] == simulate(row["prompt"])


def test_repeated_swaps():
    for row in state_tracking(100, seed=3, max_steps=60, repeat_swaps=True):
        steps, _, answer = row["demonstration"].partition(";")
        swaps = re.findall(r"([a-zA-Z]\d\d)", row["prompt"])
        positions = [position for _, position in simulate(row["prompt"])]
        expected = "".join(f"{s}{p}" for s, p in zip(swaps, positions, strict=True))
        assert steps == expected
        assert answer == row["answer"]


def test_early_stops_answer_with_the_position_so_far():
    options: dict[str, Any] = {"seed": 0, "min_steps": 10, "max_steps": 10}
    stopped = 0
    for row in state_tracking(500, early_stop_probability=0.1, **options):
        written, steps = re.findall(r"([a-z])(\d)", row["demonstration"]), simulate(row["prompt"])
        assert [(label, int(after)) for label, after in written] == steps[: len(written)]
        last = written[-1][1] if written else row["prompt"][0]
        assert row["demonstration"].endswith(f";{last}")
        stopped += len(written) < 10
    assert 0.58 < stopped / 500 < 0.72  # 1 - 0.9^10 = 0.65
    clean = state_tracking(50, **options)
    assert clean == state_tracking(50, early_stop_probability=0.0, **options)
    every = state_tracking(20, early_stop_probability=1.0, **options)
    assert all(row["demonstration"] == f";{row['prompt'][0]}" for row in every)


def test_terse_demonstrations():
    options: dict[str, Any] = {"seed": 0, "min_steps": 8, "max_steps": 8, "repeat_swaps": True}
    rows = state_tracking(400, terse_probability=0.3, terse_wrong_step_probability=1.0, **options)
    terse = [row for row in rows if re.fullmatch(r"([a-h]\d){8};\d", row["demonstration"])]
    assert 0.23 < len(terse) / 400 < 0.37
    for row in rows:
        steps = simulate(row["prompt"])
        if row in terse:
            assert row["demonstration"][1] != str(steps[0][1])
        else:
            assert row["demonstration"].endswith(f"{steps[-1][1]};{row['answer']}")
            assert re.fullmatch(r"([a-h]\d\d\d){8};\d", row["demonstration"])
    plain = state_tracking(50, wrong_step_probability=0.2, **options)
    assert plain == state_tracking(50, wrong_step_probability=0.2, terse_probability=0.0, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_step": 2}, r"options\.min_step: .*did you mean 'min_steps'"),
        ({"seed": 2}, r"options\.seed: the task .* has no such option"),
        ({"min_steps": 0}, r"options\.min_steps is 0: .* from 1"),
        ({"max_steps": 2.5}, r"options\.max_steps is 2\.5"),
        ({"max_steps": True}, r"options\.max_steps is True"),
        ({"min_steps": 5, "max_steps": 3}, r"options\.min_steps is 5, above options\.max_steps"),
        ({"num_positions": 10}, r"options\.num_positions is 10: .* to 9"),
        ({"skip_steps_probability": 1.5}, r"options\.skip_steps_probability is 1\.5"),
        ({"repeat_swaps": 1}, r"options\.repeat_swaps is 1: give true or false"),
        ({"early_stop_probability": -0.1}, r"options\.early_stop_probability is -0\.1"),
        ({"terse_probability": 0.5}, r"options\.terse_probability .* options\.repeat_swaps"),
        ({"wrong_step_probability": "x"}, r"options\.wrong_step_probability is 'x'"),
        ({"wrong_step_probability": float("nan")}, r"options\.wrong_step_probability is nan"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        generate("state_tracking", options)


def test_unknown_task_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'state_tracking'"):
        generate("state_trackin", {})
