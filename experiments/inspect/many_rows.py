"""Many short responses in the plain form, to see what `vapo inspect` takes for them.

python experiments/inspect/many_rows.py runs/many.jsonl --values
/usr/bin/time -v vapo inspect runs/many.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TOKENS, SIZE, STEP = 20, 8, 10_000  # of a response; responses to a prompt; responses in a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--num_rows", type=int, default=1_000_000)
    parser.add_argument("--values", action="store_true", help="values and log-probs, too")
    parser.add_argument("--alone", action="store_true", help="a prompt for each, and no groups")
    args = parser.parse_args()
    draw = random.Random(0)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w") as lines:
        for number in range(args.num_rows):
            prompt = number if args.alone else number // SIZE
            ids = [draw.randrange(3, 30_000) for _ in range(TOKENS)]
            reward = float(draw.random() < 0.5)
            row = {"prompt": f"What is {prompt} + 3?", "response": "abcde " * 10, "reward": reward}
            row |= {"group": None if args.alone else prompt, "step": number // STEP}
            row["response_ids"] = ids
            if args.values:
                means = [reward * k / TOKENS + 0.5 * (1 - k / TOKENS) for k in range(TOKENS)]
                row["values"] = [round(draw.gauss(mean, 0.2), 4) for mean in means]
                row["logprobs"] = [round(-draw.expovariate(2), 4) for _ in range(TOKENS)]
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
