"""Every benchmark that has a target, and a critic's options, one after the other, in one table.

    python experiments/bench/all.py [--only NAME ...] [--repeats 5] [--out FILE]

Writes the claims of all and then the table of each into experiments/bench/table.md, as they come.
What is not measured again stays as it was: table.json beside it keeps every report.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

from measuring import CLAIM_COLUMNS, Claim, Report, arguments, heading  # beside this file

TABLE = Path(__file__).parent / "table.md"
# name -> module and its options
BENCHMARKS = {
    "gae": ("gae", ["--claims"]),
    "gae-verl": ("gae", ["--claims", "--verl"]),
    "packing": ("packing", []),
    "logprobs": ("logprobs", ["--claims"]),
    "growth": ("growth", []),
    **{
        f"{system}-{case}": ("iterations", ["--system", system, "--case", case])
        for case in ("unequal", "equal", "larger")
        for system in ("ppo", "grpo")
    },
    "critics": ("critics", []),
}


def command(name: str) -> str:
    module, options = BENCHMARKS[name]
    return " ".join(["python", f"experiments/bench/{module}.py", *options])


def run(name: str, passed_on: list[str]) -> Report:
    module_name, options = BENCHMARKS[name]
    module = importlib.import_module(module_name)
    report: Report = module.measure(module.options([*options, *passed_on]))
    return report


def render(reports: dict[str, Report]) -> str:
    claims = [claim.row() for report in reports.values() for claim in report.claims]
    parts = ["# Benchmarks: what was measured", "\n".join([heading(CLAIM_COLUMNS), *claims])]
    for name, report in reports.items():
        table = "\n".join([heading(report.columns), *report.rows])
        parts += [f"## {report.title}", f"    {command(name)}", report.setting, table]
    return "\n\n".join(parts) + "\n"


def load(path: Path) -> dict[str, Report]:
    """The reports of earlier calls, by name."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Report(**{**report, "claims": [Claim(**claim) for claim in report["claims"]]})
        for name, report in record.items()
    }


def save(reports: dict[str, Report], path: Path) -> None:
    ordered = {name: reports[name] for name in BENCHMARKS if name in reports}
    contents = {name: dataclasses.asdict(report) for name, report in ordered.items()}
    path.with_suffix(".json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    path.write_text(render(ordered), encoding="utf-8")


def main(arguments_: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=TABLE)
    options: argparse.Namespace = parser.parse_args(arguments_)
    passed_on = ["--repeats", str(options.repeats), "--threads", str(options.threads)]
    passed_on += ["--device", options.device] + ["--toy"] * options.toy
    reports = load(options.out.with_suffix(".json"))
    for name in options.only or BENCHMARKS:
        print(f"{name}: {command(name)}", flush=True)
        reports[name] = run(name, passed_on)
        save(reports, options.out)
        print(reports[name].text(), flush=True)


if __name__ == "__main__":
    main()
