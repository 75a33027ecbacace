"""Annotations are enforced while tests run, or they would be decoration."""

from __future__ import annotations

import pytest
import torch

from tests import shape_checks
from vapo.config.loading import load_config
from vapo.config.schema import FitConfig
from vapo.functional.masking import place_at_last_token
from vapo.types import Prompt


def test_wrong_shapes_fail_at_the_annotation() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    place_at_last_token(torch.ones(3), mask)
    with pytest.raises(Exception, match="place_at_last_token"):
        place_at_last_token(torch.ones(2), mask)  # B differs
    with pytest.raises(Exception, match="place_at_last_token"):
        place_at_last_token(torch.ones(3), mask.float())  # not a mask


def test_wrong_types_fail_in_the_config_too() -> None:
    with pytest.raises(Exception, match=r"load_config\(\) parameter files=7 violates type hint"):
        load_config(FitConfig, 7, [])  # type: ignore[arg-type]


def test_each_test_pays_for_the_first_calls() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    for _ in range(shape_checks.CALLS_CHECKED):
        with pytest.raises(Exception, match=r"checking the parameters of .*place_at_last_token"):
            place_at_last_token(torch.ones(2), mask)
    with pytest.raises(RuntimeError, match="must match the size"):  # what torch says
        place_at_last_token(torch.ones(2), mask)
    shape_checks.next_test()
    with pytest.raises(Exception, match=r"checking the parameters of .*place_at_last_token"):
        place_at_last_token(torch.ones(2), mask)


def test_a_dataclass_is_checked_too() -> None:
    with pytest.raises(Exception, match=r"checking the parameters of vapo.types.Prompt"):
        Prompt(7, "a", (1, 2), "")  # type: ignore[arg-type]
