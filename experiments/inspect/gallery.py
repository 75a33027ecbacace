"""The gallery of the documentation: a page of each broken critic, of sound ones, and of words.

    python experiments/inspect/gallery.py runs/inspect docs/gallery

reads FOLDER/NAME.jsonl, writes OUTPUT/NAME.html and prints what was said of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vapo.studies.inspection.reading import read_responses
from vapo.studies.inspection.report import inspect_responses

TITLES = {
    "untrained": "A value head that was never trained, and shifted",
    "off_by_one": "Values off by one token",
    "wrong_scale": "A critic trained on other rewards",
    "prompt_mean": "A critic that is the prompt's mean",
    "reads_length": "A critic that reads length",
    "sound": "The sound run that was broken",
    "course": "A whole run, step by step",
    "words_values": "SmolLM2 on sums in words, with a critic",
    "words_logprobs": "SmolLM2 on sums in words, without a critic",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--names", nargs="*", default=list(TITLES))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        file = args.folder / f"{name}.jsonl"
        if not file.is_file():
            continue
        notes: list[str] = []
        found = inspect_responses(read_responses([file]), name=TITLES[name], notes=notes)
        page = found.page(num_groups=3, max_responses=4, max_tokens=3000)
        (args.output / f"{name}.html").write_text(page, encoding="utf-8")
        print(f"== {name}: {len(page) / 1000:.0f} kB")
        for remark in found.remarks:
            print(f"{remark.severity}: {remark.title}. {remark.text}")


if __name__ == "__main__":
    main()
