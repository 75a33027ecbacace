"""Annotations are enforced while tests run, or they would be decoration."""

from __future__ import annotations

import pytest
import torch

from vapo.config.loading import load_config
from vapo.config.schema import FitConfig
from vapo.functional.masking import place_at_last_token


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
