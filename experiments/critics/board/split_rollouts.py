"""Splits a file of `vapo rollouts` into the board's training and test rollouts, by groups.

    python experiments/critics/board/split_rollouts.py runs/board.parquet --test_groups 64

The last groups are the test rollouts. A prompt is in one of the two files alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet
from rollout_set import TEST, TRAINING  # beside this file

from vapo.rollouts.rollout_file import METADATA_KEY, write_table


def split(table: pa.Table, num_test_groups: int) -> tuple[pa.Table, pa.Table]:
    """Return the rows of the first groups and those of the last ones.

    Raises: SystemExit: a prompt is on both sides.
    """
    first = pc.max(table.column("group")).as_py() + 1 - num_test_groups
    is_test = pc.greater_equal(table.column("group"), first)
    training, test = table.filter(pc.invert(is_test)), table.filter(is_test)
    prompts = [set(side.column("prompt").to_pylist()) for side in (training, test)]
    if shared := prompts[0] & prompts[1]:
        raise SystemExit(f"{len(shared)} prompts would be on both sides, as {min(shared)!r}")
    return training, test


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--test_groups", type=int, default=64)
    options = parser.parse_args()
    table = parquet.read_table(options.rollouts)
    metadata = json.loads(table.schema.metadata[METADATA_KEY])
    for path, side in zip((TRAINING, TEST), split(table, options.test_groups), strict=True):
        num_groups = pc.count_distinct(side.column("group")).as_py()
        write_table(path, side, metadata | {"num_groups": num_groups})
        print(f"{path}: {side.num_rows} rollouts in {num_groups} groups")


if __name__ == "__main__":
    main()
