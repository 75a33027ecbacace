"""Where prefixes begin from which the policy samples on, to measure what they are worth."""

from __future__ import annotations

from dataclasses import dataclass

from vapo.config.fields import section
from vapo.config.kinds import make
from vapo.config.segments import SegmentsConfig


@dataclass
class ValueTruthConfig:
    segments: SegmentsConfig = section(
        lambda: make(SegmentsConfig), "steps of a response, before each of which it is measured"
    )
