"""Everything that is measured on a GPU, in the order of its importance, within some minutes.

    python experiments/gpu/all.py --minutes 14 [--only NAME ...] [--toy]

Each piece is a command of its own, which writes its JSON file as it goes, so that a machine that
goes away takes nothing with it but the piece that was running. A piece that cannot end in what is
left of the time is not begun, and the next, shorter one may be. A table of all pieces is printed
at the end, and `tables.py` puts the results into docs/gpu.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_record import RESULTS, SCRATCH, Ended, device_slug, run_process  # beside this file
from recipe import RECIPES

HERE = Path(__file__).parent
COMPARE = HERE.parent / "smollm2/compare.py"  # its rows go into a file beside it


@dataclass(frozen=True)
class Piece:
    """A command, the minutes below which it is not begun, and those after which it is ended."""

    command: tuple[str, ...]
    least_minutes: float
    most_minutes: float


def script(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *arguments)


def iterations(case: str, *sides: str) -> tuple[str, ...]:
    return script("iterations.py", "--case", case, *(["--sides", *sides] if sides else []))


PYTEST = (sys.executable, "-m", "pytest", "-q")
GPU_TESTS = ("tests/integration/test_gpu_vllm.py", "tests/integration/test_gpu.py")

# In the order of their importance: GRPO beside TRL first, then what a step waits for,
# then what a critic costs, then the rest.
PIECES = {
    "equal, GRPO and TRL": Piece(iterations("equal", "GRPO", "TRL GRPO"), 2.5, 5),
    "drawn, GRPO and TRL": Piece(iterations("drawn", "GRPO", "TRL GRPO"), 2.5, 5),
    "profile of training": Piece(script("training_steps.py"), 1, 3),
    "profile of decoding": Piece(script("decoding_steps.py"), 2, 4),
    "equal, VAPO": Piece(iterations("equal", "VAPO", "VAPO, probe"), 2, 5),
    "verl's run": Piece(iterations("verl"), 1.5, 3),
    "make gpu": Piece((*PYTEST, "-m", "gpu", "--durations=15", *GPU_TESTS), 2, 6),
    "drawn, VAPO": Piece(iterations("drawn", "VAPO", "VAPO, probe"), 2, 5),
    **{f"recipe {name}": Piece(script("recipe.py", name), 2.5, 6) for name in RECIPES},
    "SmolLM2": Piece(
        (sys.executable, str(COMPARE), "--jobs", "16", "--seeds", "0,1,2,3,4,5,6,7"), 5, 15
    ),
}
# they take a limit, and end their own processes by it
MINUTES_OF = {"iterations.py", "recipe.py", "compare.py"}
PROFILES = {"training_steps.py": "--toy", "decoding_steps.py": "--tiny"}  # what only tries them


def run(name: str, piece: Piece, minutes: float, options: argparse.Namespace) -> Ended:
    limit = min(minutes, piece.most_minutes)
    command = list(piece.command)
    script_name = Path(command[1]).name
    if script_name in MINUTES_OF:
        command += ["--minutes", f"{limit:.2f}", *["--toy"] * options.toy]
    if script_name == "iterations.py" and options.peer_python is not None:
        command += ["--peer_python", options.peer_python]
    if script_name in PROFILES:
        folder = SCRATCH if options.toy else RESULTS
        command += ["--out", str(folder / f"{Path(script_name).stem}_{device_slug()}.json")]
        command += [PROFILES[script_name]] * options.toy
    log = SCRATCH / "logs" / f"all_{name.replace(', ', '_').replace(' ', '_')}.log"
    return run_process(command, log, limit_s=60 * limit + 10)


def run_all(
    pieces: dict[str, Piece],
    minutes: float,
    call: Callable[[str, Piece, float], Ended],
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run what fits, in order; a row for each piece."""
    end, rows = clock() + 60 * minutes, []
    for name, piece in pieces.items():
        minutes_left = (end - clock()) / 60
        if minutes_left < piece.least_minutes:
            rows.append(f"{name}: not begun, {max(minutes_left, 0):.1f} minutes left")
            continue
        exit_code = call(name, piece, minutes_left)
        rows.append(f"{name}: {exit_code.status}, {exit_code.seconds / 60:.1f} minutes")
        if not exit_code.is_done:  # its last line says what of it was not done
            rows[-1] += "".join(f"; {last}" for last in exit_code.tail(1))
        print(rows[-1], *exit_code.tail(30), sep="\n", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=14)
    parser.add_argument("--only", nargs="+", choices=list(PIECES), metavar="NAME")
    parser.add_argument("--peer_python", help="of TRL's environment, if it is another one")
    parser.add_argument("--toy", action="store_true", help="sizes that only try the scripts")
    options = parser.parse_args(arguments)
    if not (options.toy or torch.cuda.is_available()):
        parser.error("there is no GPU here: --toy tries the scripts on a CPU")
    pieces = {name: PIECES[name] for name in options.only or PIECES}
    rows = run_all(
        pieces,
        options.minutes,
        lambda name, piece, minutes: run(name, piece, minutes, options),
    )
    print("\n".join(["", "pieces:", *rows]), flush=True)


if __name__ == "__main__":
    main()
