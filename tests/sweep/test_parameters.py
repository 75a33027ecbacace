"""The parameters of `--slurm`, each as YAML has it, but for what YAML turns into another number."""

from __future__ import annotations

import pytest

from vapo.errors import UserError
from vapo.sweep.launch import read_parameter


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, text) for text in ("1:30", "02:00:00", "010", "1_000", "gpu_long", "2-00:00:00")],
        ("600", 600),
        ("[a_b, 2]", ["a_b", 2]),
        ("null", None),
        ("'1:30'", "1:30"),
    ],
)
def test_a_parameter_is_what_was_written(text: str, value: object) -> None:
    assert read_parameter("slurm_time", text) == value


def test_a_parameter_that_is_no_yaml_is_one_error() -> None:
    with pytest.raises(UserError, match=r"--slurm slurm_time=\[1: not valid YAML"):
        read_parameter("slurm_time", "[1")
