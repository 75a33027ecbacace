"""Off by one: values that are shifted on purpose are named, and sound ones are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from vapo.studies.inspection.agreement import ValueComparison, advantage_alignment
from vapo.studies.inspection.alignment import Alignment, alignment, return_correlations
from vapo.studies.inspection.responses import InspectedResponse

NUM_GROUPS, GROUP, LENGTH = 24, 6, 16
Change = Callable[[list[InspectedResponse]], list[InspectedResponse]]


def responses(
    *, noise: float = 0.0, forks_at: int | None = None, size: int = GROUP
) -> list[InspectedResponse]:
    """Tokens of 0 to 3; token 3 is unlikely, and takes 0.3 of the value; the others add a bit.

    The value of a state is what its tokens so far have done. Its log-prob is the token's own.
    """
    draw = np.random.default_rng(0)
    found: list[InspectedResponse] = []
    chance = np.array([0.4, 0.35, 0.15, 0.1])
    for group in range(NUM_GROUPS):
        ids = draw.choice(4, size=LENGTH, p=chance)
        for row in range(size):
            if forks_at is None:
                ids = draw.choice(4, size=LENGTH, p=chance)
            else:  # the responses of a group differ there alone
                ids[forks_at] = row % 4
            done = np.array([0.01, 0.02, -0.02, -0.3])[ids]
            states = 0.5 + np.concatenate([[0.0], np.cumsum(done)]) + group / 50
            states = states + noise * draw.standard_normal(LENGTH + 1)
            found.append(
                InspectedResponse(
                    place=f"x, row {len(found) + 1}",
                    prompt=f"p{group}",
                    response="r",
                    reward=float(states[-1] > 0.5),
                    group=str(group),
                    response_ids=tuple(map(int, ids)),
                    values=tuple(states.tolist()),  # one more than tokens: `shifted` cuts it off
                    logprobs=tuple(np.log(chance[ids]).tolist()),
                )
            )
    return found


def shifted(rows: list[InspectedResponse], shift: int) -> list[InspectedResponse]:
    """values[t] = V(s_{t + shift}); before the first state there is one with the same value. The
    values of an environment's tokens are 0, as verl writes them."""

    def of(row: InspectedResponse) -> tuple[float, ...]:
        longer = (row.values or ())[:1] + (row.values or ())
        moved = longer[1 + shift : shift + len(longer) - 1]
        own = row.is_sampled or (True,) * len(moved)
        return tuple(v * is_own for v, is_own in zip(moved, own, strict=True))

    return [replace(row, values=of(row)) for row in rows]


def with_tools(rows: list[InspectedResponse]) -> list[InspectedResponse]:
    """Behind some sampled tokens an environment writes one or two, which change no value."""

    def of(row: InspectedResponse) -> InspectedResponse:
        ids, values, logprobs, own = list[int](), list[float](), list[float](), list[bool]()
        columns = zip(row.response_ids or (), row.values or (), row.logprobs or (), strict=False)
        for number, (token, value, logprob) in enumerate(columns):
            written = {5: 1, 10: 2}.get(number, 0)
            after = (row.values or ())[number + 1]
            ids += [token, *[7] * written]
            values += [value, *[after] * written]
            logprobs += [logprob, *[0.0] * written]
            own += [True, *[False] * written]
        last = (row.values or ())[-1]
        return replace(
            row,
            response_ids=tuple(ids),
            values=(*values, last),
            logprobs=tuple(logprobs),
            is_sampled=tuple(own),
        )

    return list(map(of, rows))


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("noise", [0.0, 0.0005])
@pytest.mark.parametrize("change", [list, with_tools])
def test_shared_prefixes_tell(shift: int, noise: float, change: Change) -> None:
    found = alignment(shifted(change(responses(noise=noise)), shift))
    assert (found.shift, found.by) == (shift, "shared prefixes")
    assert "pairs of responses to one prompt" in found.text


def test_a_tool_s_answer_behind_the_first_token_that_differs_is_no_lag() -> None:
    """What stands there as its value is none."""
    found = alignment(shifted(with_tools(responses(forks_at=5)), 0))
    assert (found.shift, found.by) == (0, "log-probs")


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("change", [list, with_tools])
def test_surprise_tells_where_prompts_have_one_response(shift: int, change: Change) -> None:
    found = alignment(shifted(change(responses(size=1)), shift))
    assert (found.shift, found.by) == (shift, "log-probs")


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("change", [list, with_tools])
def test_tokens_tell_where_there_are_no_log_probs(shift: int, change: Change) -> None:
    rows = shifted(change(responses(size=2)), shift)
    rows = [replace(row, logprobs=None, group=str(number)) for number, row in enumerate(rows)]
    found = alignment(rows)
    assert (found.shift, found.by) == (shift, "tokens")


def test_what_cannot_be_told_is_said() -> None:
    """A prompt's mean; values that know the whole response; no values; few responses."""
    rows = shifted(responses(), 0)
    flat = [replace(row, values=(0.5 + int(row.group) / 50,) * LENGTH) for row in rows]
    found = alignment(flat)
    assert found.shift is None
    assert "values do not depend on the tokens of a response" in found.text
    draw = np.random.default_rng(1)
    clever = [
        replace(row, values=tuple(np.full(LENGTH, draw.standard_normal())), logprobs=None)
        for row in rows
    ]
    found = alignment(clever)
    assert found.shift is None
    assert "responses that begin alike have different values there already" in found.text
    assert alignment([replace(row, values=None) for row in rows]).text == (
        "off by one? There are no values to look at"
    )
    assert alignment(rows[:3]).shift is None


BY_PLACE: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "the share that is written": lambda n, _: np.arange(n) / n,
    "of which the first is not 0": lambda n, _: np.arange(1, n + 1) / n,
    "from the second token on": lambda n, _: np.maximum(np.arange(n) - 1, 0) / n,
    "from the third token on": lambda n, _: np.maximum(np.arange(n) - 2, 0) / n,
    "squared": lambda n, _: (np.arange(n) / n) ** 2,
    "to the fourth": lambda n, _: (np.arange(n) / n) ** 4,
    "discounted from the end": lambda n, _: 0.1 ** (n - np.arange(n)),
    "left to write": lambda n, _: float(n) - np.arange(n),
    "with the reward's sign": lambda n, draw: draw.choice([-1, 1]) * np.arange(n) / n,
    "a walk of its own": lambda n, draw: np.cumsum(np.append(0, draw.standard_normal(n - 1))),
}


@pytest.mark.parametrize("name", BY_PLACE)
@pytest.mark.parametrize("vocabulary", [2, 8, 500])
def test_values_that_go_by_the_place_are_not_called_off_by_one(name: str, vocabulary: int) -> None:
    """They begin alike for every response, and differ from some place on, whatever is written."""
    draw = np.random.default_rng(3)
    rows: list[InspectedResponse] = []
    for number in range(40 * 6):
        length = int(draw.integers(8, 40))
        rows.append(
            InspectedResponse(
                place=f"x, row {number + 1}",
                prompt=f"p{number // 6}",
                response="r",
                reward=float(draw.random() < 0.5),
                group=str(number // 6),
                response_ids=tuple(map(int, draw.integers(0, vocabulary, length))),
                values=tuple(map(float, BY_PLACE[name](length, draw))),
            )
        )
    found = alignment(rows)
    assert found.shift is None, found.text
    if vocabulary == 500 and name != "discounted from the end":  # hardly a pair begins alike
        named = re.search(r"(\d+) of (\d+) pairs .* share their first token, and 8", found.text)
        assert named is not None, found.text
        assert int(named[1]) < 8 < int(named[2])


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["true", "raised", "smoothed", "noisy"])
def test_shifts_of_critics_of_every_kind_are_found_and_sound_ones_are_sound(
    kind: str, shift: int
) -> None:
    """Of a critic that is wrong otherwise each value still stands where it stands."""

    def of(row: InspectedResponse) -> InspectedResponse:
        values = np.array(row.values)
        if kind == "raised":
            values = values + 0.1
        elif kind == "noisy":
            values = values + 0.001 * np.random.default_rng(len(row.place)).standard_normal(
                len(values)
            )
        for place in range(1, len(values)) if kind == "smoothed" else ():
            values[place] = (values[place - 1] + values[place]) / 2
        return replace(row, values=tuple(values.tolist()))

    assert alignment(shifted(list(map(of, responses())), shift)).shift == shift


def test_noise_alone_tells_nothing() -> None:
    draw = np.random.default_rng(2)
    rows = [
        replace(row, values=tuple(draw.standard_normal(LENGTH))) for row in shifted(responses(), 0)
    ]
    assert alignment(rows).shift is None


def test_the_reward_cannot_tell() -> None:
    """A later value knows more of it, whatever the alignment: the reason for the other tests."""
    for shift in (-1, 0, 1):
        found = return_correlations(shifted(responses(), shift), gamma=1.0)
        assert found is not None
        before, at, after = found
        assert before < at < after
    assert return_correlations([], gamma=1.0) is None


# ---- advantages ------------------------------------------------------------------------------


def with_gae(rows: list[InspectedResponse], lam: float) -> list[InspectedResponse]:
    """GAE over the sampled tokens, with gamma 1 and the reward at the end, whitened over all of
    them; 0 for other tokens."""
    masks = [np.asarray(row.is_sampled or (True,) * len(row.values or ())) for row in rows]
    all_of = []
    for row, is_own in zip(rows, masks, strict=True):
        values = np.asarray(row.values)[is_own]
        deltas = np.diff(values, append=row.reward)
        advantage, column = 0.0, np.zeros(len(values))
        for t in reversed(range(len(values))):
            advantage = deltas[t] + lam * advantage
            column[t] = advantage
        all_of.append(column)
    together = np.concatenate(all_of)
    found = []
    for row, column, is_own in zip(rows, all_of, masks, strict=True):
        placed = np.zeros(len(is_own))
        placed[is_own] = (column - together.mean()) / together.std()
        found.append(replace(row, advantages=tuple(placed)))
    return found


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("change", [list, with_tools])
def test_advantages_were_made_of_values_at_their_places(
    lam: float, shift: int, change: Change
) -> None:
    rows = with_gae(shifted(change(responses()), 0), lam)
    moved = shifted(change(responses()), shift)
    mixed = [replace(row, values=other.values) for row, other in zip(rows, moved, strict=True)]
    found = advantage_alignment(mixed)
    assert (found.shift, found.by) == (shift, "advantages")
    assert f"1.00 at {-shift:+d}" in found.text


def test_advantages_of_a_group_do_not_show_values() -> None:
    rows = [replace(row, advantages=(row.reward,) * LENGTH) for row in shifted(responses(), 0)]
    assert advantage_alignment(rows).shift is None
    assert "no advantages" in advantage_alignment(shifted(responses(), 0)).text


def test_too_few_places_in_every_step_are_not_missing_advantages() -> None:
    """The file has advantages, which 3 responses of 16 tokens are too few to judge."""
    rows = with_gae(shifted(responses(), 0), 0.9)[:3]
    verdict = advantage_alignment(rows)
    assert verdict.shift is None
    assert verdict.text == "no step has 50 places at which advantages and values can be compared"


@pytest.mark.parametrize("last", [0.0, 1.0])
def test_values_that_change_at_one_shift_alone_tell_nothing_of_advantages(last: float) -> None:
    """Responses of 4 tokens have one place each, and the values change only after it, or never."""
    rows = [
        InspectedResponse(
            prompt="",
            response="",
            reward=1.0,
            group="",
            place=f"file, row {number}",
            values=(0.0, 0.0, 0.0, last * (number % 3)),
            advantages=(0.1, 0.2, 0.1 * (number % 5), 0.0),
        )
        for number in range(60)
    ]
    verdict = advantage_alignment(rows)
    assert verdict.shift is None
    assert verdict.text == "the values change too little to compare the advantages with them"


# ---- a critic beside the file ----------------------------------------------------------------


def compared(theirs: list[InspectedResponse], ours: list[InspectedResponse]) -> Alignment:
    comparison = ValueComparison()
    for one, other in zip(theirs, ours, strict=True):
        comparison.add(one, other.values or ())
    return comparison.result()


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("change", [list, with_tools])
def test_a_critic_s_own_values_tell(shift: int, change: Change) -> None:
    """Also where the file's are noisy, in another scale, and of other weights."""
    theirs = [
        replace(row, values=tuple(3 * v + 1 for v in row.values or ()))
        for row in shifted(change(responses(noise=0.02)), shift)
    ]
    ours = [replace(row, values=(row.values or ())[:-1]) for row in change(responses())]
    found = compared(theirs, ours)
    assert (found.shift, found.by) == (shift, "critic")


def test_another_critic_s_values_are_none_of_them() -> None:
    draw = np.random.default_rng(3)
    rows = shifted(responses(), 0)
    others = [replace(row, values=tuple(draw.standard_normal(LENGTH))) for row in rows]
    found = compared(rows, others)
    assert found.shift is None
    assert "not those of this critic" in found.text
    assert "nothing to compare" in ValueComparison().result().text
