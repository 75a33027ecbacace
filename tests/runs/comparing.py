"""What is the same of a run that was stopped and one that was not: everything but times."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from tests.recorded_metrics import metric_points
from tests.runs import runs

NOT_REPEATED = ("time/", "memory/", "throughput/", "rollout/ahead_s")


def _kind(value: Any) -> type:
    plain: dict[type, type] = {tuple: list, OrderedDict: dict}
    return plain.get(type(value), type(value))


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Bit for bit, through dicts and lists (a restored optimizer has lists for tuples)."""
    kinds = [_kind(value) for value in (found, expected)]
    assert kinds[0] is kinds[1], path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, item in enumerate(expected):
            assert_same(found[index], item, f"{path}/{index}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), path
    else:
        assert found == expected or (found != found and expected != expected), path


def assert_same_run(folder: Path, whole: Path) -> None:
    """One folder and one MLflow run, the same final state, each step of each metric once."""
    run, expected = runs.only_run(folder), runs.only_run(whole)
    assert_same(runs.state(run), runs.state(expected))
    assert not list((run / "rollouts").glob("*")), "the kept rollouts are removed"
    found, wanted = metric_points(run), metric_points(expected)
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        steps, all_steps = ([step for step, _ in pairs] for pairs in (found[key], values))
        assert steps == sorted(set(steps)), key
        if key.startswith(NOT_REPEATED):  # kept rollouts take no time
            assert set(steps) <= set(all_steps), key
        else:
            assert steps == all_steps, key
            pairs = zip(found[key], values, strict=True)
            assert all(a == b or (math.isnan(a[1]) and math.isnan(b[1])) for a, b in pairs), key
