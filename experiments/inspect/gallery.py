"""The gallery of the documentation: a page of each broken critic, of sound ones, and of words.

    python experiments/inspect/gallery.py runs/inspect docs/gallery \\
        --policy models/checked_steps/policy --verifier 'regex:;(\\d)$'

reads FOLDER/NAME.jsonl, writes OUTPUT/NAME.html and prints what was said of each. The sound run
is continued by the policy, for the truth beside its values.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.report import inspect_responses
from vapo.studies.inspection.responses import BadRow, InspectedResponse


@dataclass(frozen=True)
class Page:
    """`file` is in the folder; `first_step` leaves out steps before it."""

    title: str
    file: str
    first_step: int = 0
    has_values: bool = True


PAGES = {
    "untrained": Page("A value head that was never trained, and shifted", "untrained"),
    "off_by_one": Page("Values off by one token", "off_by_one"),
    "wrong_scale": Page("A critic trained on other rewards", "wrong_scale"),
    "prompt_mean": Page("A critic that is the prompt's mean", "prompt_mean"),
    "reads_length": Page("A critic that reads length", "reads_length"),
    "sound": Page("The sound run that was broken", "sound"),
    "course": Page("A whole run, step by step", "course"),
    "words_values": Page("SmolLM2 on sums in words, with a critic", "words", first_step=4),
    "words_logprobs": Page("SmolLM2 on sums in words, without a critic", "words", has_values=False),
}


def rows(page: Page, file: Path) -> Iterator[InspectedResponse | BadRow]:
    for row in ResponseReader([file]):
        if isinstance(row, BadRow):
            yield row
        elif (row.step or 0) >= page.first_step:
            place = f"{page.file}.jsonl, row {row.place.rpartition(', row ')[2]}"
            values = row.values if page.has_values else None
            yield replace(row, place=place, table="", values=values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--names", nargs="*", default=list(PAGES))
    parser.add_argument("--policy")
    parser.add_argument("--verifier")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        page = PAGES[name]
        file = args.folder / f"{page.file}.jsonl"
        truth = None
        if name == "sound" and args.policy:
            from vapo.studies.inspection.truth_request import TruthRequest

            truth = TruthRequest(args.policy, 16, args.verifier, num_responses=24)
        inspection = inspect_responses(
            rows(page, file), name=page.title, truth=truth, policy=args.policy if truth else None
        )
        text = inspection.page(num_groups=3, max_responses=4, max_tokens=3000)
        (args.output / f"{name}.html").write_text(text, encoding="utf-8")
        print(f"\n== {name}: {len(text) / 1000:.0f} kB\n{inspection.text()}")


if __name__ == "__main__":
    main()
