"""The benchmark scripts at sizes that take no time, without the peers' packages."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import forked

BENCH = Path(__file__).parents[2] / "experiments/bench"
TOY = ["--toy", "--repeats", "1"]


def script(name: str) -> Any:
    return importlib.import_module(name)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


# ---- what they share --------------------------------------------------------------------------


def test_sides_alternate_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measuring = script("measuring")
    clock = iter([0, 100, 200, 900, 1000, 1001, 2000, 2010, 3000, 3005, 4000, 4020])
    monkeypatch.setattr(measuring, "counts_cpu", lambda device: True)
    monkeypatch.setattr(measuring.time, "process_time", lambda: next(clock))
    order: list[str] = []

    def side(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    sides = {name: side(name) for name in "ab"}
    found = measuring.alternate(sides, repeats=2, device=torch.device("cpu"))
    assert order == list("ababab")
    assert found == {"a": (1 + 5) / 2, "b": (10 + 20) / 2}


def test_the_table_of_all_names_every_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everything, measuring = script("all"), script("measuring")
    claim = measuring.Claim("x", "linear", "at most 2x", "3x", False)
    report = measuring.Report("Title", "setting", ("a", "b"), ["| 1 | 2 |"], [claim])
    asked: list[list[str]] = []

    def run(name: str, options: list[str]) -> Any:
        asked.append(options)
        return report

    monkeypatch.setattr(everything, "run", run)
    everything.main(["--toy", "--repeats", "3", "--out", str(tmp_path / "table.md")])
    table = (tmp_path / "table.md").read_text()
    assert table.count("| x | linear | at most 2x | 3x | no |") == len(everything.BENCHMARKS)
    assert "    python experiments/bench/gae.py --claims --verl\n" in table
    again = measuring.Report("Title", "a new setting", ("a", "b"), ["| 3 | 4 |"])
    monkeypatch.setattr(everything, "run", lambda name, options: again)
    everything.main(["--only", "packing", "--out", str(tmp_path / "table.md")])
    table = (tmp_path / "table.md").read_text()
    assert table.count("a new setting") == 1
    assert table.count("| 1 | 2 |") == len(everything.BENCHMARKS) - 1, "the others stay"
    assert asked[0] == ["--repeats", "3", "--threads", "1", "--device", "cpu", "--toy"]


@pytest.mark.timeout(900)  # imports transformers' models, which takes long on a loaded machine
def test_every_benchmark_takes_its_own_options() -> None:
    everything = script("all")
    for module, options in everything.BENCHMARKS.values():
        script(module).options(options)


# ---- one by one -------------------------------------------------------------------------------


def test_gae_agrees_with_the_loop() -> None:
    gae = script("gae")
    rows = gae.measure(gae.options(TOY)).rows
    assert len(rows) == 4
    assert all(float(cells(row)[-1]) < 1e-5 for row in rows)


def test_packing_comes_to_the_same_gradient() -> None:
    packing = script("packing")
    report = packing.measure(packing.options(TOY))
    assert [cells(row)[2] for row in report.rows] == [
        "packed",
        "padded, by length",
        "padded, random order",
    ]
    assert all(float(cells(row)[-1]) < 1e-5 for row in report.rows)
    assert cells(report.rows[0])[4] == "0%"


def test_logprobs_sides_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = script("logprobs")

    def both(logits: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = logits.log_softmax(-1)
        return found.gather(-1, index[..., None])[..., 0], -(found.exp() * found).sum(-1)

    monkeypatch.setattr(logprobs, "trl_logprobs", lambda: both)
    hidden, weight = torch.randn(16, 8).double(), torch.randn(50, 8).double()
    targets = torch.randint(50, (16,))
    expected = logprobs.full_log_softmax(hidden, weight, targets)
    for side in logprobs.SIDES.values():
        for found, wanted in zip(side(hidden, weight, targets), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    report = logprobs.measure(logprobs.options([*TOY, "--claims"]))
    assert len(report.rows) == 3
    assert float(cells(report.rows[1])[6]) < 1, "chunked takes less memory"


@pytest.mark.slow
def test_growth_counts_every_token() -> None:
    growth = script("growth")
    report = growth.measure(growth.options(TOY))
    assert [cells(row)[1] for row in report.rows] == ["112", "224", "16", "32"]
    assert [claim.against for claim in report.claims] == ["linear", "linear"]


@pytest.mark.night
def test_critics_train_with_each_option() -> None:
    """Two epochs are two passes; the others are one of two minibatches, on the same tokens."""
    critics = script("critics")
    assert set(critics.OPTIONS) >= critics.IN_POLICY_PHASE
    report = critics.measure(critics.options(TOY))
    assert [cells(row)[0] for row in report.rows] == list(critics.OPTIONS)
    trained = {cells(row)[0]: int(cells(row)[1].replace(",", "")) for row in report.rows}
    whole = trained["the scalar head again"]
    assert trained["head bounded"] == whole + 1, "its bias"
    assert trained["lora, rank 8"] < trained["frozen self_attn."] < whole


def test_the_turns_of_critics_alternate_and_their_ratio_is_of_each() -> None:
    critics = script("critics")
    order: list[str] = []
    sides = [lambda name=name: order.append(name) for name in ("option", "plain")]
    turns = critics.in_turns(*sides, 2, torch.device("cpu"))
    assert order == ["plain", "option", "option", "plain", "plain", "option"]
    assert len(turns) == 2
    row = critics.row("x", 100, [(2.0, 1.0), (4.0, 3.0), (1.0, 1.0)], 5)
    assert cells(row) == ["x", "5", "100", "50", "0.75x", "0.50x to 1.00x"]


# ---- one iteration end to end -----------------------------------------------------------------

FAKE_SIDE = """\
import sys, time
sys.path.insert(0, {bench!r})
from turns import Turns
turns = Turns()
for tokens in range(1, 9):
    turns.wait()
    print("noise on the standard output")
    turns.num_tokens = 10 * tokens
"""


def test_a_side_runs_an_iteration_a_turn(tmp_path: Path) -> None:
    side_script = tmp_path / "side.py"
    side_script.write_text(FAKE_SIDE.format(bench=str(BENCH)))
    turns = script("turns")
    side = turns.Side(sys.executable, side_script, {"threads": 1}, tmp_path / "side.log")
    assert [side.iteration()["tokens"] for _ in range(3)] == [10, 20, 30]
    side.close()
    assert side.process.returncode == 0
    assert (tmp_path / "side.log").read_text().count("noise") == 3


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    side_script = tmp_path / "side.py"
    side_script.write_text("raise SystemExit('no such peer')")
    turns = script("turns")
    side = turns.Side(sys.executable, side_script, {"threads": 1}, tmp_path / "side.log")
    with pytest.raises(RuntimeError, match="no such peer"):
        side.iteration()
    side.close()


def forked_side(python: str, side_script: Path, settings: dict[str, Any], log: Path) -> Any:
    """`turns.Side` without a new interpreter, which would load the package for most of its time."""
    pipes = [log.with_suffix(end) for end in (".in", ".out")]
    for pipe in pipes:
        os.mkfifo(pipe)
    process = forked.start(log, {}, run_side, side_script, json.dumps(settings), *pipes)
    side = object.__new__(script("turns").Side)
    side.log = log
    side.process = SimpleNamespace(
        stdin=pipes[0].open("w"),
        stdout=pipes[1].open(),
        wait=lambda timeout: forked.end(process, timeout),
    )
    return side


def run_side(side_script: Path, settings: str, stdin: Path, stdout: Path) -> int:
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    os.dup2(os.open(stdout, os.O_WRONLY), 1)
    sys.stdin = os.fdopen(0)
    sys.argv = [str(side_script), settings]
    sys.path.insert(0, str(BENCH))
    runpy.run_path(str(side_script), run_name="__main__")
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "case"),
    [
        ("ppo", "equal"),
        pytest.param("ppo", "unequal", marks=pytest.mark.night),
        pytest.param("grpo", "equal", marks=pytest.mark.night),
        pytest.param("grpo", "unequal", marks=pytest.mark.night),
    ],
)
def test_our_side_of_an_iteration(
    system: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterations = script("iterations")
    monkeypatch.setattr(iterations, "SCRATCH", tmp_path)
    monkeypatch.setattr(iterations, "Side", forked_side)
    options = [*TOY, "--alone", "--system", system, "--case", case]
    report = iterations.measure(iterations.options(options))
    (row,) = report.rows
    tokens = int(cells(row)[4])
    assert tokens == 8 * 4 if case == "equal" else 8 <= tokens <= 8 * 4
    assert report.claims == []
