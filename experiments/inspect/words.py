"""Small sums told in words, for a language model: FOLDER/train.jsonl and FOLDER/heldout.jsonl.

python experiments/inspect/words.py runs/words
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NAMES = ("Ann", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry")
THINGS = ("apples", "books", "coins", "marbles", "stamps", "cookies", "pencils", "shells")


def problem(draw: random.Random) -> dict[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    first, more, less = (draw.randint(low, 9) for low in (2, 1, 1))
    text = f"{name} has {first} {thing}."
    total = first
    if draw.random() < 0.8:
        total += more
        text += f" {name} gets {more} more."
    if total > less and draw.random() < 0.6:
        total -= less
        text += f" Then {name} gives {less} away."
    text += f" How many {thing} does {name} have now? Calculate it, then say the number."
    return {"prompt": text, "answer": str(total)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    draw, problems = random.Random(0), set[str]()
    for name, num in (("train", 400), ("heldout", 16)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            while num:
                row = problem(draw)
                if row["prompt"] not in problems:
                    problems.add(row["prompt"])
                    file.write(json.dumps(row) + "\n")
                    num -= 1


if __name__ == "__main__":
    main()
