"""Which layer set a key, so that an error can say where it is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vapo.config.layers import Layer


@dataclass
class Origins:
    """For each key, the last layer that set it."""

    layers: dict[str, tuple[int, Layer]] = field(default_factory=dict)

    def add(self, layer: Layer) -> None:
        order = len(self.layers) and 1 + max(order for order, _ in self.layers.values())
        for key in layer.leaves():
            self.forget(key)
            self.layers[key] = (order, layer)

    def forget(self, key: str) -> None:
        """It has its default again."""
        for known in [k for k in self.layers if k == key or k.startswith(f"{key}.")]:
            del self.layers[known]

    def place(self, key: str) -> str | None:
        """`file:line`, or None for a default."""
        return self.latest([key])

    def latest(self, keys: Iterable[str]) -> str | None:
        """The place of whichever of the keys was set last."""
        found = [(*self._find(key), key) for key in keys if self._find(key) is not None]  # type: ignore[misc]
        if not found:
            return None
        _, layer, key = max(found, key=lambda item: item[0])
        return layer.place(key)

    def _find(self, key: str) -> tuple[int, Layer] | None:
        while key:
            if key in self.layers:
                return self.layers[key]
            key = key.rpartition(".")[0]
        return None
