"""The page of other frameworks' config keys, made from the rows in migration.yaml beside this file.

`python -m docs.hooks.migration` writes it again after a change of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROWS = Path(__file__).with_name("migration.yaml")
PAGE = Path(__file__).parents[1] / "migration.md"
INTRODUCTION = """\
# From verl and TRL, key by key

The tables have the config keys of verl and TRL beside ours, and say what differs. The keys of verl
are those of its `ppo_trainer` config and its DAPO recipe in 2026. Those of TRL are the fields of
`GRPOConfig` in TRL 1.x, the training arguments that it inherits, and the trainer's own arguments.
`PPOConfig.` marks what only its PPO trainer has or had;
[PPO after TRL](ppo_after_trl.md) has that one's defaults as a file. "none" stands where there is
nothing alike.

Three things are different as a whole:

- **There is a critic**, and all seven components of VAPO are on, unless a preset or you switch them
  off. GRPO as in verl or TRL is the preset `conf/algorithm/grpo.yaml`;
  [others](algorithms.md#algorithms-beside-it) are `dapo`, `gspo`, `cispo`, `rloo` and so on.
- **Sizes count over all devices**, and how a minibatch is cut into micro-batches changes no
  gradient.
- **Another framework's key is an error that names ours**, for most of these keys: `beta=0.01` leads
  to `algorithm.kl.coef`. No config of another framework is read.
"""

EARLIER_VERSIONS = """\
## From earlier versions of vapo

**The steps of metrics begin where the policy begins.** Value pretraining counts up to 0, from
-199 for 50 iterations of four minibatches, and the policy's first minibatch is step 1. So runs
with and without a critic stand over each other in every chart. Before, all minibatches were counted
from 1 on, and a run with value pretraining stood that much further to the right.

- Runs that are recorded already stay as they are. `vapo report` reads both kinds: its axis has
  always been the policy's steps.
- A run that an earlier version began keeps its axis to its end, also where it is resumed.
- The score before training is at step 0, as the policy that it belongs to.
- In a program that reads `Run.metrics()`, a journal or MLflow, a step is a step of the policy now.
  Take `progress/iteration` to count both phases. Old and new runs differ by the minibatches of
  value pretraining, whose last has `progress/phase` 0.
- The tables `samples/step_000008.json` have the same steps in their names.
"""


@dataclass(frozen=True)
class Row:
    """Keys of one meaning: `here` are ours, alone or as KEY=VALUE, and empty where we have none."""

    verl: tuple[str, ...]
    trl: tuple[str, ...]
    here: tuple[str, ...]
    difference: str


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    rows: tuple[Row, ...]


def sections() -> list[Section]:
    """The sections of the page, in order."""
    return [
        Section(part["title"], part["text"], tuple(_row(row) for row in part["rows"]))
        for part in yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    ]


def _row(row: dict[str, object]) -> Row:
    return Row(
        **{name: tuple(row.pop(name)) for name in ("verl", "trl", "here")},  # type: ignore[arg-type]
        **row,  # type: ignore[arg-type]
    )


def page() -> str:
    """The Markdown of the page."""
    parts = [INTRODUCTION.rstrip()]
    for section in sections():
        parts += [f"## {section.title}", *([section.text] if section.text else [])]
        rows = "\n".join(_line(row) for row in section.rows)
        parts.append(f"| verl | TRL | here | what differs |\n|---|---|---|---|\n{rows}")
    return "\n\n".join([*parts, EARLIER_VERSIONS])


def _line(row: Row) -> str:
    cells = [_cell(row.verl), _cell(row.trl), _cell(row.here), row.difference]
    return f"| {' | '.join(cells)} |"


def _cell(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys) or "none"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
