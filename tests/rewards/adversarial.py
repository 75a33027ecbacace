"""Responses that attack the verifiers, from a seed, with the truth about each.

`python -m tests.rewards.adversarial NUM [SEED [VERIFIER]]` sends NUM of them through every verifier
of ours, or the one that is named (`math_verify`), prints times and memory, and fails if a wrong
answer is called correct or a limit is broken.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.rewards.adversarial_scores import save_reward_model, score_cases, scored
from tests.rewards.lookalikes import BOXES, TEXTS
from tests.rewards.processes import workers_of
from tests.rewards.rollouts_for_tests import rollout, scorer
from vapo.types import Rollout

PATTERN = r"answer: (\d+)"
ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
DEVANAGARI = str.maketrans("0123456789", "०१२३४५६७८९")
WRAPPERS = (
    r"\frac{1}{%s}", r"\sqrt{%s}", "(%s)", "{%s}", r"\left(%s\right)", "|%s|", r"\{%s\}",
    "-%s", r"\text{%s}", "%s!", r"\sin(%s)", r"\begin{pmatrix}%s\end{pmatrix}", "[%s]",
    r"\log_{2}{%s}", r"1+\frac{1}{%s}",
)  # fmt: skip
COMPUTATIONS = (
    r"\sum_{i=1}^{10^9}\frac{1}{i}", r"\prod_{i=1}^{99999999} i", r"\int_0^1 e^{x^x} dx",
    r"\lim_{x\to0}\frac{\sin x^{99}}{x^{98}}", r"\binom{99999999}{49999999}", "99999999!",
    r"((9!)!)!", r"(x+y+z+w)^{200}", r"\Gamma(10^{10})", r"7^{7^{7^7}} \mod 10", r"\infty-\infty",
    r"\frac{1}{0}", r"e^{e^{e^{e^e}}}", r"\lfloor 10^{10^{10}} \rfloor", r"1e999999999",
)  # fmt: skip
SYMBOLS = (
    "\\frac", "\\sqrt", "{", "}", "(", ")", "\\left", "\\right", "^", "_", "&", "\\\\", "=", "x",
    "\\boxed", "\\boxed{", "$", "\\text{", "\\begin{cases}", "\\end{cases}", "\\to", "|", "+", "-",
    "!", "%", ",", "\\pi", "\x00", "\u202e", "\ud800", "\n", " and ", "\\infty", "\\%", "~", "[",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`is_right`: whether the response's final answer is `answer`, for the verifier `math`."""

    text: str
    answer: str
    is_right: bool = False


def cases(num: int, seed: int, canary: Path) -> Iterator[Case]:
    """`canary` is a file that attacks which run code would make."""
    draw = Random(f"adversarial/{seed}")
    kinds = (nested, towers, huge, broken_characters, other_digits, several, code, digits,
             formats, near, soup, computations, lookalikes, right)  # fmt: skip
    for index in range(num):
        answer = draw.randint(12, 9_876)
        wrong = answer + draw.choice([1, -1, 3, 1000])
        kind = kinds[index % len(kinds)]
        yield kind(draw, str(answer), str(wrong), canary)


def boxed(text: str, draw: Random) -> str:
    form = draw.choice([r"\boxed{%s}", r"so $\boxed{%s}$.", r"\[\boxed{%s}\]", r"answer: $%s$"])
    return form.replace("%s", text)


def nested(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    text = wrong
    wrapper = draw.choice(WRAPPERS)
    for _ in range(draw.choice([1, 2, 5, 11, 13, 40, 400])):
        text = (wrapper if draw.random() < 0.9 else draw.choice(WRAPPERS)).replace("%s", text)
    # an even number of reciprocals is the number itself: never the right one here
    return Case(boxed(text, draw), answer)


def towers(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    base = str(draw.randint(2, 99))
    height = draw.choice([2, 3, 4, 50, 900])
    marks = draw.choice([("^", ""), ("**", ""), ("^{", "}")])
    text = marks[0].join([base] * (height + 1)) + marks[1] * height
    return Case(draw.choice([boxed(text, draw), text, f"answer: {text}"]), answer)


def huge(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    filler = draw.choice(["a", "$", "{", "\\boxed{", "9", "answer: ", "\\frac{", "1 + ", "\u0663"])
    size = draw.choice([10_000, 100_000, 1_000_000])
    return Case(filler * (size // len(filler)) + f" end \\boxed{{{wrong}}} answer: {wrong}", answer)


def broken_characters(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    character = draw.choice(["\x00", "\x1b[2J", "\ud800", "\udfff", "\u202e", "\ufeff", "\x7f"])
    return Case(boxed(wrong[:1] + character * draw.randint(1, 50) + wrong[1:], draw), answer)


def other_digits(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    text = answer.translate(draw.choice([ARABIC, DEVANAGARI]))
    return Case(draw.choice([boxed(text, draw), f"answer: {text}", text]), answer)


def several(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    both = [answer, wrong]
    draw.shuffle(both)
    joined = draw.choice([", ", ";", r" \text{ or } ", r" \cup ", " or ", r" \text{ and } ", r"\\"])
    options = [
        f"\\boxed{{{answer}}} no, \\boxed{{{wrong}}}",
        f"\\boxed{{{joined.join(both)}}}",
        f"\\boxed{{\\{{{both[0]}, {both[1]}\\}}}}",
        f"\\boxed{{{wrong}}} \\boxed{{",
        f"\\boxed{{{answer}",
        f"\\boxed{{}} {wrong}",
        f"answer: {answer}\nanswer: {wrong}",
    ]
    return Case(draw.choice(options), answer)


def code(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    attack = draw.choice(
        [
            f"__import__('os').system('touch {canary}')",
            f"open('{canary}', 'w')",
            f"exec(\"open('{canary}', 'w')\")",
            f"[x for x in [open('{canary}', 'w')]]",
            f"(lambda: open('{canary}', 'w'))()",
            f"sympify(\"open('{canary}', 'w')\")",
            f"().__class__.__base__.__subclasses__(), open('{canary}', 'w')",
            f"print({answer})",
            "9**9**9**9",
            "[0] * 10**10",
        ]
    )
    options = [boxed(attack, draw), attack, f"<answer>{attack}</answer>", f"answer: {attack}"]
    return Case(draw.choice(options), answer)


def digits(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    zeros = draw.choice("123456789") * draw.choice([1, 90, 101, 900, 4_301, 50_000])
    text = draw.choice([answer + zeros, zeros + answer, f"{answer}.{zeros}", f"{zeros}/{zeros}"])
    return Case(draw.choice([boxed(text, draw), f"answer: {text}", text]), answer)


def formats(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    tricks = [
        "{answer}",
        "%(answer)s",
        "${answer}",
        "{0}",
        "%s",
        "{answer.__class__}",
        "\\1",
        "\\g<1>",
    ]
    text = draw.choice(tricks)
    return Case(draw.choice([boxed(text, draw), text, f"answer: {text}"]), answer)


def near(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    forms = ("-%", "%.5", "%1", "%+1", "%i", "x+%", "%x", "%^2", "\\neq %", "\\ne%", "<%", "> %",
             "x \\not= %", "\\frac{%}{2}", "% \\cdot 0", "(%, %)", "\\approx % + 1")  # fmt: skip
    return Case(boxed(draw.choice(forms).replace("%", answer), draw), answer)


def soup(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    """No digit in it, so no number."""
    text = "".join(draw.choice(SYMBOLS) for _ in range(draw.choice([5, 50, 400, 4_000])))
    return Case(boxed(text, draw) if draw.random() < 0.7 else text, answer)


def computations(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    return Case(boxed(draw.choice(COMPUTATIONS), draw), answer)


def lookalikes(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    if draw.random() < 0.5:
        return Case(boxed(draw.choice(BOXES).replace("@", answer), draw), answer)
    return Case(draw.choice(TEXTS).replace("@", answer), answer)


def right(draw: Random, answer: str, wrong: str, canary: Path) -> Case:
    half = int(answer) // 2
    options = [answer, f" {answer} ", f"{answer}.0", f"{half} + {int(answer) - half}"]
    options += [f"\\frac{{{2 * int(answer)}}}{{2}}", f"x={answer}", f"\\sqrt{{{answer}}}^2"]
    options += [f"{answer} \\text{{ days}}", f"{answer}\\%", f"\\text{{The answer is }} {answer}"]
    return Case(f"\\boxed{{{wrong}}}, no: \\boxed{{{draw.choice(options)}}}", answer, True)


# ---- through the verifiers ----------------------------------------------------------------

SPIRAL = {"reasoning_gym_dataset": "spiral_matrix", "entry": {"answer": "1 2 3"}}


@dataclass(frozen=True)
class Run:
    """Verdicts in order, seconds of each, and the largest memory of a worker."""

    verdicts: list[Rollout]
    seconds: list[float]
    rss_mib: float


def judged(verifier: str, rollouts: Sequence[Rollout], **fields: Any) -> Run:
    """One worker, so that the time between two replies is that of one verdict."""
    seconds: list[float] = []
    rss = 0
    with scorer(verifier, num_workers=1, **fields) as judge:
        judge.score(rollouts[:1])  # the worker's start and imports
        last = time.perf_counter()

        def advance(num: int) -> None:
            nonlocal last, rss
            now = time.perf_counter()
            seconds.append((now - last) / num)
            pool = judge.judges[0].deciding.pool
            for worker in [] if pool is None else workers_of(pool):
                rss = max(rss, worker.memory_info().rss)
            last = time.perf_counter()

        verdicts = judge.score(rollouts, advance=advance)
    return Run(verdicts, seconds, rss / 2**20)


def wrongly_correct(verifier: str, tried: Sequence[Case], run: Run) -> list[Case]:
    """Wrong answers that were called correct; `regex` and `exact` know text only."""
    found = []
    for case, verdict in zip(tried, run.verdicts, strict=True):
        is_right = case.is_right
        if verifier == "regex":
            is_right = f"answer: {case.answer}" in case.text
        if verdict.is_correct and not is_right:
            found.append(case)
    return found


def scores_hold(num: int, seed: int, folder: Path) -> bool:
    """The reward model's row; whether every text was scored as its own characters."""
    run = scored(save_reward_model(folder), list(score_cases(num, seed)))
    ms = sorted(1000 * s for s in run.seconds)
    failures = Counter(v.failure for v in run.verdicts if v.failure)
    print(
        f"{'reward_model':14} {len(run.verdicts)} verdicts: p50 {ms[len(ms) // 2]:.1f} ms, p99 "
        f"{ms[int(len(ms) * 0.99)]:.1f} ms, max {ms[-1]:.0f} ms, process grew "
        f"{run.grown_mib:.0f} MiB, {failures.total()} without verdict {dict(failures)}, "
        f"{len(run.wrong)} scored as other text, by batch and order they differ by at most "
        f"{run.largest_difference:.0e}",
        flush=True,
    )
    for case in run.wrong[:10]:
        print(f"  {case.prompt!r} {case.response[-200:]!r} {case.reason}")
    return not run.wrong and run.largest_difference < 1e-4


def main(num: int, seed: int, *named: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        tried = list(cases(num, seed, canary))
        failed = False
        for verifier in named or ("exact", "regex", "math", "reasoning_gym"):
            metadata = SPIRAL if verifier == "reasoning_gym" else {}
            fields = {"pattern": PATTERN} if verifier == "regex" else {}
            rollouts = [rollout(c.text, c.answer, **metadata) for c in tried]
            run = judged(verifier, rollouts, timeout_s=2.0 if named else 10.0, **fields)
            wrong = wrongly_correct(verifier, tried, run)
            ms = sorted(1000 * s for s in run.seconds)
            failures = [v.failure for v in run.verdicts if v.failure]
            missed = sum(
                c.is_right and not v.is_correct for c, v in zip(tried, run.verdicts, strict=True)
            )
            print(
                f"{verifier:14} {len(run.verdicts)} verdicts: p50 {ms[len(ms) // 2]:.1f} ms, p99 "
                f"{ms[int(len(ms) * 0.99)]:.1f} ms, max {ms[-1]:.0f} ms, worker {run.rss_mib:.0f} "
                f"MiB, {len(failures)} without verdict {sorted(set(failures))[:3]}, "
                f"{len(wrong)} wrong ones called correct"
                + (f", {missed} right ones missed" if verifier == "math" else ""),
                flush=True,
            )
            for case in wrong[:10]:
                print(f"  {case.text[-200:]!r} for {case.answer}")
            for case, verdict in zip(tried, run.verdicts, strict=True):
                if verdict.failure:
                    print(f"  {verdict.failure}: {case.text[-200:]!r}")
            failed = failed or bool(wrong) or len(run.verdicts) != num
        if not named:
            failed = not scores_hold(num, seed, Path(folder) / "model") or failed
        if canary.exists() or failed:
            sys.exit("FAILED: a wrong answer was called correct, or code was run")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, *sys.argv[3:])
