"""Text that attacks: what is evaluated, what is too large, and thousands of responses."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rewards.adversarial import PATTERN, SPIRAL, cases, judged, wrongly_correct
from tests.rewards.rollouts_for_tests import rollout
from vapo.rewards.hostile_text import UnsafeTextError, check_expression_source, check_latex
from vapo.rewards.verifiers import make_math


@pytest.mark.parametrize(
    "source",
    [
        "1+2*3",
        b"[[1, 2], [3, 4]]",
        "Integer (1 )/Integer (2 )",
        "Pow(Integer(2), Integer(10), evaluate=False)",
        "(0x1a + 0x2b) << 3",
        "2**2024",
        "Symbol ('x')**2/2 + Symbol('C')",
        "Function('f')(Symbol('x'))",
        "from sympy import *",
        "'text'",
    ],
)
def test_bounded_expressions_are_evaluated(source: str | bytes):
    check_expression_source(source)


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os').system('true')",
        "open('x', 'w')",
        "sympify('1')",
        "().__class__",
        "(1).real",
        "[x for x in (1,)]",
        "lambda: 1",
        "a[0]",
        "import os",
        "from sympy import os",
        "f'{1}'",
        "(yield)",
        "(x := 1)",
        "9**9**9",
        "9**(9**9)",
        "((9**99)**99)**99",
        "Pow(Integer(9), Integer(99999))",
        "1 << 99999",
        "1e308 ** 99",
        "Float('1e99999999')",
        "factorial(Integer(99999))",
        "[0] * 99999999",
        "'a' * 99999999",
        "1" + "+1" * 15_000,
        "-" * 5_000 + "1",
        "(" * 500 + "1" + ")" * 500,
        "\x00",
        "",
    ],
)
def test_everything_else_is_not(source: str):
    with pytest.raises(UnsafeTextError):
        check_expression_source(source)


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{\sqrt{3}}{2}",
        r"\left(\frac{1}{2}, \frac{-3}{\sqrt[3]{x+\frac{1}{y}}}\right]",
        r"\{1, 2, 3\}",
        r"x^2 - 2xy + y^2 = 0",
        r"\binom{10}{5}",
        "\u03c0 \u2264 4",
        "2^{2024} - 1",
    ],
)
def test_latex_of_answers_passes(text: str):
    check_latex(text)


@pytest.mark.parametrize(
    "text",
    [
        "{" * 13 + "1" + "}" * 13,
        ")" * 3 + "{" * 13 + "1" + "}" * 13,  # what closes nothing does not lower the depth
        r"\sum_{i=1}^{9} i",
        r"\int_0^1 x",
        r"\lim_{x\to 0} x",
        "9" * 101,
        "1----2",
        "99999!",
        "(3!)!!!",
        "4\x002",
        "\u0664\u0662",
        r"\binom{99999}{3}",
        "|" * 9,
        "x=" * 6,
    ],
)
def test_latex_that_takes_long_does_not(text: str):
    with pytest.raises(UnsafeTextError):
        check_latex(text)


def test_the_guard_stops_code_and_effects_in_a_process_that_judges(tmp_path: Path):
    """In a process of its own, because an audit hook stays."""
    program = f"""
import os, subprocess, socket
from pathlib import Path
from vapo.rewards.hostile_text import UnsafeTextError, guarded, install

install()
path = Path({str(tmp_path / "made")!r})
attacks = [
    lambda: eval("open(path, 'w')"),
    lambda: exec("import os"),
    lambda: path.write_text("x"),
    lambda: os.open(path, os.O_CREAT | os.O_WRONLY),
    lambda: os.system("touch " + str(path)),
    lambda: subprocess.run(["touch", path]),
    lambda: os.kill(os.getpid(), 9),
    lambda: os.remove(__file__),
    lambda: socket.create_connection(("127.0.0.1", 9)),
]
for attack in attacks:
    try:
        with guarded():
            attack()
    except UnsafeTextError:
        print("stopped")
with guarded():
    assert eval("1 + 1") == 2
    assert Path("/proc/self/statm").read_text()
    import decimal, fractions
path.write_text("after")
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["stopped"] * 9
    assert (tmp_path / "made").read_text() == "after"
    assert script.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier", ["regex", "math", pytest.param("reasoning_gym", marks=pytest.mark.attacks)]
)
def test_a_wrong_answer_is_never_correct_and_nothing_runs(verifier: str, tmp_path: Path):
    canary = tmp_path / "canary"
    tried = list(cases(140, seed=1, canary=canary))  # ten of each kind
    metadata = SPIRAL if verifier == "reasoning_gym" else {}
    fields = {"pattern": PATTERN} if verifier == "regex" else {}
    run = judged(
        verifier, [rollout(c.text, c.answer, **metadata) for c in tried], timeout_s=60, **fields
    )
    assert wrongly_correct(verifier, tried, run) == []
    assert [v.failure for v in run.verdicts if v.failure] == []
    assert not canary.exists()
    assert run.rss_mib < 2_048
    if verifier == "math":
        right = [v.is_correct for c, v in zip(tried, run.verdicts, strict=True) if c.is_right]
        assert right == [True] * 10


@pytest.mark.attacks
def test_the_scorers_of_reasoning_gym_run_no_code(tmp_path: Path):
    """Negative control: without the guard this scorer runs what the answer says."""
    canary = tmp_path / "canary"
    attack = f"[open({str(canary)!r}, 'w')]"
    answers = ["1 2 3", "[1, 2, 4]", attack]
    rollouts = [rollout(f"<answer>{text}</answer>", "1 2 3", **SPIRAL) for text in answers]
    verdicts = judged("reasoning_gym", rollouts).verdicts
    assert [verdict.is_correct for verdict in verdicts] == [True, False, False]
    assert not canary.exists()
    score = importlib.import_module("reasoning_gym").get_score_answer_fn("spiral_matrix")
    assert score("[1, 2, 3]", SPIRAL["entry"]) == 0.1  # lists are read by `eval`
    score(attack, SPIRAL["entry"])
    assert canary.exists()


@pytest.mark.parametrize(
    "text", [r"3289 \cup 3288", r"3288 \cap 3288", r"3289 \lor 3288", "41 \u222a 3288"]
)
def test_an_answer_among_others_is_none(text: str) -> None:
    assert not make_math()(f"\\boxed{{{text}}}", "3288", {}).is_correct


@pytest.mark.parametrize(
    "function", [r"\log_{2}{%s}", r"\ln(%s)", r"\sin(%s)", r"\log_{2}{\sin(%s)}"]
)
def test_nested_functions_are_compared_in_time_or_not_at_all(function: str) -> None:
    """Eleven logarithms took SymPy more than ten seconds."""
    verifier = make_math()

    def nested(depth: int) -> str:
        text = "2327"
        for _ in range(depth):
            text = function.replace("%s", text)
        return text

    began = time.process_time()
    assert not verifier(f"\\boxed{{{nested(11)}}}", "3288", {}).is_correct
    assert not verifier(f"\\boxed{{{nested(5)}}}", "3288", {}).is_correct
    assert time.process_time() - began < 8
    assert verifier(f"\\boxed{{{nested(2)} + 1}}", f"1 + {nested(2)}", {}).is_correct


def test_a_set_may_be_the_answer() -> None:
    assert make_math()(r"\boxed{[1,2) \cup (3,4]}", r"[1,2)\cup(3,4]", {}).is_correct


@pytest.mark.parametrize(
    "text",
    [
        r"\sin(\cos(\sin(\cos(1))))^{500}",
        r"(\sin(1)+\cos(2))^{100}",
        r"(1+\sin(1)^{20})^{20}",
        r"\sinh(1)^{-400}",
    ],
)
def test_high_powers_of_functions_are_not_factored(text: str) -> None:
    """The first took SymPy from 6 to 88 seconds, depending on the answer."""
    verifier = make_math()
    verifier(r"\boxed{1}", "2", {})  # imports
    began = time.process_time()
    assert not verifier(f"\\boxed{{{text}}}", r"\frac{1}{2}", {}).is_correct
    assert time.process_time() - began < 4
    assert verifier(f"\\boxed{{{text}}}", text, {}).is_correct
    assert verifier(r"\boxed{(\sin(x))^{30}}", r"\sin^{30}(x)", {}).is_correct
