"""Each pass of each network is run once for all estimates of a test process.

A pass is a function of the network's shape and its lengths, and takes seconds; what sharding,
offloading and the stages make of it is worked out anew for every estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from vapo.studies.estimate.passes import NetworkPasses, PassMemory
from vapo.studies.estimate.shapes import NetworkShape

_networks: dict[tuple[str, ...], RememberedPasses] = {}


class RememberedPasses(NetworkPasses):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self._found: dict[tuple[Any, ...], PassMemory] = {}

    def run(self, one_pass: Callable[..., PassMemory], **sizes: Any) -> PassMemory:
        key = (one_pass, *sorted(sizes.items()))
        if key not in self._found:
            self._found[key] = super().run(one_pass, **sizes)
        return self._found[key]


def remembered_passes(shape: NetworkShape) -> RememberedPasses:
    """Stands in for `NetworkPasses`; networks of the same shape are one."""
    values = {field.name: getattr(shape, field.name) for field in fields(shape)}
    key = (values.pop("config").to_json_string(use_diff=False), repr(values))
    if key not in _networks:
        _networks[key] = RememberedPasses(shape)
    return _networks[key]
