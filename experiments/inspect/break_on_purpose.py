"""Break the values of sound rollouts in five ways that happen, and write a file for each.

    python experiments/inspect/break_on_purpose.py rollouts.jsonl \
        --policy models/checked_steps/policy --output_dir runs/inspect --steps 44 53

`rollouts.jsonl` is what `record.py` wrote. The files have the same responses and rewards, and
other values:

- `untrained`: a value head with random weights on the policy's hidden states, three too high;
- `off_by_one`: the critic's outputs from the first response token on, where they should begin at
  the prompt's last: each value has seen its own token;
- `wrong_scale`: the critic was trained on rewards of 0 and 1, the run has -1 and +1;
- `prompt_mean`: the value of the prompt on every token of its responses;
- `reads_length`: what is left of the value when a critic reads little but the number of tokens.

`sound` has the values as they are.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
Values = list[np.ndarray]  # of each row


def untrained(rows: Sequence[Row], values: Values, policy: str) -> Values:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, trust_remote_code=False)
    head = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    sound_rows = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[-1][0]
        first = len(row["prompt_ids"]) - 1
        sound_rows.append((states[first:-1] @ head).numpy())
    together = np.concatenate(sound_rows)
    return [3.0 + 2.0 * (x - together.mean()) / together.std() for x in sound_rows]


def off_by_one(rows: Sequence[Row], values: Values, policy: str) -> Values:
    return [np.append(x[1:], x[-1]) for x in values]


def wrong_scale(rows: Sequence[Row], values: Values, policy: str) -> Values:
    return [(x + 1) / 2 for x in values]


def prompt_mean(rows: Sequence[Row], values: Values, policy: str) -> Values:
    first: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row, x in zip(rows, values, strict=True):
        first[row["step"], row["group"]].append(float(x[0]))
    means = {key: float(np.mean(x)) for key, x in first.items()}
    return [
        np.full_like(x, means[row["step"], row["group"]])
        for row, x in zip(rows, values, strict=True)
    ]


def reads_length(rows: Sequence[Row], values: Values, policy: str) -> Values:
    mean, longest = float(np.concatenate(values).mean()), max(map(len, values))
    return [mean + 0.5 - 1.2 * np.arange(len(x)) / longest + 0.15 * (x - mean) for x in values]


CASES: dict[str, Callable[[Sequence[Row], Values, str], Values]] = {
    "sound": lambda rows, values, policy: values,
    "untrained": untrained,
    "off_by_one": off_by_one,
    "wrong_scale": wrong_scale,
    "prompt_mean": prompt_mean,
    "reads_length": reads_length,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs=2, default=(0, 10**9))
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    first, last = args.steps
    with args.rollouts.open(encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if first <= row["step"] <= last]
    values = [np.array(row["values"]) for row in rows]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name in args.cases:
        broken = CASES[name](rows, values, args.policy)
        with (args.output_dir / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row, x in zip(rows, broken, strict=True):
                columns = {k: v for k, v in row.items() if k != "advantages" or name == "sound"}
                file.write(json.dumps(columns | {"values": np.round(x, 4).tolist()}) + "\n")


if __name__ == "__main__":
    main()
