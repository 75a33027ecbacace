"""A new per-token column is one field: it reaches the micro-batches by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.systems import estimated, made_up_batch, system_config
from vapo.functional.columns import float_columns, moved_to, select_rows
from vapo.training.minibatches import make_minibatches
from vapo.types import TrainingBatch


@dataclass(frozen=True)
class WithColumn(TrainingBatch):
    place: Tensor = field(kw_only=True)
    per_response: Tensor | None = None


def test_a_field_is_selected_cut_moved_and_looked_at() -> None:
    config = system_config("vapo")
    batch, _ = made_up_batch(config)
    num_rows, width = batch.response_mask.shape
    rows, columns = torch.arange(num_rows), torch.arange(width)
    wide = WithColumn(
        **vars(estimated(config, batch)),
        place=100.0 * rows[:, None] + columns,
        per_response=rows.float(),
    )
    assert {"place", "per_response"} <= set(float_columns(wide))
    chosen = select_rows(wide, [5, 2], width=3)
    assert chosen.place.tolist() == [[500.0, 501.0, 502.0], [200.0, 201.0, 202.0]]
    assert moved_to(wide, torch.device("meta")).place.device.type == "meta"
    minibatches = make_minibatches(wide, num_minibatches=2, max_tokens=30, pad_id=0, seed=1)
    seen: list[int] = []
    for micro in (micro for minibatch in minibatches for micro in minibatch.microbatches):
        assert isinstance(micro.rows, WithColumn)
        per_response = micro.rows.per_response
        assert per_response is not None
        seen += per_response.int().tolist()
        longest = int(micro.rows.response_lengths.max())
        expected = 100.0 * per_response[:, None] + columns[:longest]
        assert torch.equal(micro.rows.place, expected)
    assert sorted(seen) == list(range(num_rows))
