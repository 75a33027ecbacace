"""A procedural task of sums that are worked out one term at a time, and its oracle's states.

Problems are for a pretrained language model: numbers and signs without words. A response writes
each partial sum before it goes on, and nothing in it says whether that sum is right. A value model
sees a mistake only if it adds up itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random

from vapo.errors import UserError
from vapo.tasks import Row, check_bounds, check_range

MAX_TERMS = 1_000
MAX_TOTAL = 1_000_000
ANSWER = " Answer: "
_PROBLEM = re.compile(r"(?<![\d+-])(\d+)((?:[+-]\d+)+)=")
_RESULT = re.compile(r"=(\d+)\Z")


def worked_sums(
    num_examples: int,
    *,
    seed: int,
    min_terms: int = 8,
    max_terms: int = 12,
    max_term: int = 9,
    max_total: int = 99,
    slip_rate: float = 0.0,
) -> list[Row]:
    """Generate sums and differences that are worked out from left to right, term by term.

    `47+8-3=` has the response `47+8=55;55-3=52. Answer: 52`. The first number is drawn from 1 to
    `max_total`, the other terms from 1 to `max_term`, and no partial sum is below 0 or above
    `max_total`. There are no spaces and no signs of numbers: they would be tokens of their own, or
    one token with the sign before them, for a tokenizer that has a token for each digit.

    `slip_rate` is the probability that a demonstration's step has a wrong sum, by 1 to 9 in either
    direction; the next step continues from the wrong sum. A policy that is trained on such steps
    makes such mistakes now and then, although it can add. Problems and answers stay the same.

    Raises: UserError: an option is out of range.

    >>> worked_sums(1, seed=0, min_terms=2, max_terms=2)[0]["demonstration"].count("=")
    1
    """
    check_bounds("terms", min_terms, max_terms, low=2, high=MAX_TERMS)
    check_range("max_total", max_total, low=2, high=MAX_TOTAL)
    # With half of the range one of the two signs always leads to a sum within it.
    check_range("max_term", max_term, low=1, high=max_total // 2)
    if not 0 <= slip_rate <= 1:
        raise UserError(f"options.slip_rate is {slip_rate}: give a share from 0 to 1")
    rows = []
    for index in range(num_examples):
        rng = Random(f"worked_sums/problem/{seed}/{index}")
        problem = _draw_problem(rng, rng.randint(min_terms, max_terms), max_term, max_total)
        first, terms = _read(problem)
        slips = Random(f"worked_sums/slips/{seed}/{index}")
        sums = _slipped_sums(first, terms, max_total, slips, slip_rate)
        demonstration = f"{';'.join(_steps(sums, terms))}.{ANSWER}{sums[-1]}"
        answer = str(_sums(first, terms)[-1])
        rows.append({"prompt": problem, "answer": answer, "demonstration": demonstration})
    return rows


def _draw_problem(rng: Random, num_terms: int, max_term: int, max_total: int) -> str:
    total = rng.randint(1, max_total)
    text = str(total)
    for _ in range(num_terms - 1):
        term, sign = rng.randint(1, max_term), rng.choice((1, -1))
        if not 0 <= total + sign * term <= max_total:
            sign = -sign
        total += sign * term
        text += f"{'+' if sign > 0 else '-'}{term}"
    return f"{text}="


def _read(problem: str) -> tuple[int, list[str]]:
    """Return the first number and the signed terms of a problem. Text may be around it.

    Raises: ValueError: the text has no such problem.
    """
    match = _PROBLEM.search(problem)
    if match is None:
        raise ValueError(f"{problem!r} contains no problem of worked sums")
    return int(match[1]), re.findall(r"[+-]\d+", match[2])


def _sums(first: int, terms: Sequence[str]) -> list[int]:
    """Return the right partial sums: the first number, then the sum after each term."""
    sums = [first]
    for term in terms:
        sums.append(sums[-1] + int(term))
    return sums


def _slipped_sums(
    first: int, terms: Sequence[str], max_total: int, rng: Random, rate: float
) -> list[int]:
    """Return a demonstration's partial sums, each of which is made wrong with probability `rate`.

    A wrong sum is off by 1 to 9, and the next step continues from it. A mistake is not made if it
    would take a later sum out of the range from 0 to `max_total`.
    """
    sums = [first]
    for index, term in enumerate(terms):
        total = sums[-1] + int(term)
        if rng.random() < rate:
            # A slip after which a later sum would leave the range would show in its digits.
            slipped = total + rng.choice((1, -1)) * rng.randint(1, 9)
            rest = _sums(slipped, terms[index + 1 :])
            if 0 <= min(rest) <= max(rest) <= max_total:
                total = slipped
        sums.append(total)
    return sums


def _steps(sums: Sequence[int], terms: Sequence[str]) -> list[str]:
    return [f"{a}{term}={b}" for a, term, b in zip(sums, terms, sums[1:], strict=False)]


def oracle_states(problem: str, response: str) -> list[str] | None:
    """Return an oracle's state for each prefix of a response to a problem of `worked_sums`.

    It is None if the text is not such a problem. Within a step a state has the number of steps
    left, this one included. While everything is right it also has the part that is being written:
    the first number (`copy`), the term (`term`), the sum (`sum`, `sum+` with a digit, `done`).
    After a mistake the state is `off`. At the end of a step its sum alone decides whether the next
    step is `on`, so that a mistake may be corrected by chance. After the full stop a state says
    whether the last sum is the answer or how many steps were left out; after the answer, whether it
    is right.

    >>> oracle_states("4+3=", "4+5")
    ['1 on copy', '1 on copy', '1 on term', '1 off']
    """
    if _PROBLEM.search(problem) is None:
        return None
    first, terms = _read(problem)
    sums = _sums(first, terms)
    return list(_states(_steps(sums, terms), sums, response))


def _states(steps: list[str], sums: list[int], response: str) -> Iterator[str]:
    worked, _, _ = response.partition(".")
    num_done, is_on, start = 0, True, 0
    for end in range(len(worked) + 1):
        if end > start and worked[end - 1] == ";":
            num_done, is_on, start = (
                num_done + 1,
                _ends_right(worked[start : end - 1], sums, num_done + 1),
                end,
            )
        yield _within_step(steps, num_done, is_on=is_on, step_text=worked[start:end])
    is_on = _ends_right(worked[start:], sums, num_done + 1)
    num_left = len(steps) - num_done - 1
    for end in range(len(worked) + 1, len(response) + 1):
        tail = response[len(worked) + 1 : end]
        if tail == f"{ANSWER}{sums[-1]}":
            yield "right"
        elif is_on and num_left == 0 and f"{ANSWER}{sums[-1]}".startswith(tail):
            yield "answer on"
        else:
            yield f"answer off {num_left}"


def _ends_right(step: str, sums: list[int], number: int) -> bool:
    result = _RESULT.search(step)
    return result is not None and number < len(sums) and result[1] == str(sums[number])


def _within_step(steps: list[str], num_done: int, *, is_on: bool, step_text: str) -> str:
    num_left = len(steps) - num_done
    if num_left <= 0:
        return "beyond"
    if not is_on or not steps[num_done].startswith(step_text):
        return f"{num_left} off"
    if step_text == steps[num_done]:
        return f"{num_left} on done"
    if "=" in step_text:
        return f"{num_left} on sum{'' if step_text.endswith('=') else '+'}"
    return f"{num_left} on {'term' if re.search('[+-]', step_text) else 'copy'}"
