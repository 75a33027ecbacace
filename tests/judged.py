"""Rollouts that carry the verdicts that a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vapo.types import Rollout, Verdict


def judged(rollouts: Sequence[Rollout], verdicts: Iterable[Verdict]) -> list[Rollout]:
    return [replace(r, verdict=verdict) for r, verdict in zip(rollouts, verdicts, strict=True)]
