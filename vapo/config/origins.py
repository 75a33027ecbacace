"""What a config was made from: which layer set a key, and what the command line changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from vapo.config.layers import ROW, Layer, show
from vapo.config.options import Entries, Option
from vapo.config.other_models import written_rates
from vapo.config.run_folders import holds_a_run
from vapo.config.sources import Change, Sources
from vapo.config.spelling import null_excess
from vapo.config.written import flatten_written, written_source
from vapo.errors import UserError


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
        """Remove a key and all keys below it: no layer sets them any more."""
        for set_key in [k for k in self.layers if k == key or k.startswith(f"{key}.")]:
            del self.layers[set_key]

    def error(self, message: str, *keys: str) -> UserError:
        """With the place, `file:line`, of whichever of the keys was set last, if one was."""
        origins_of_keys = [(*origin, key) for key in keys if (origin := self._find(key))]
        if not origins_of_keys:
            return UserError(message)
        _, layer, key = max(origins_of_keys, key=lambda item: item[0])
        return UserError(f"{layer.place(key)}: {message}")

    def why_no_text(self, key: str, entries: Entries) -> str | None:
        """What is wrong with the text at a key that is another language's null; None: nothing."""
        _, layer = self.layers.get(key, (0, None))
        return None if layer is None else null_excess(layer.sources.get(key), entries.get(key))

    def _find(self, key: str) -> tuple[int, Layer] | None:
        while key:
            if key in self.layers:
                return self.layers[key]
            key = key.rpartition(".")[0]
        return None


def made_from(
    config: Any, layers: Sequence[Layer], changed: Sequence[tuple[Layer, Layer]], entries: Entries
) -> Sources:
    """The files that the user named, without those that they extend, and the changes.

    Args:
        changed: each layer of the command line, with what was there before it.
    """
    files = (layer for layer in layers if not (layer.is_overrides or layer.is_extended))
    return Sources(
        tuple(layer.name for layer in files),
        tuple(
            c
            for layer, previous_layer in changed
            for c in _changes(config, layer, previous_layer, entries)
        ),
        tuple(written_rates(layers)),
        _run_with_store(layers),
    )


def _run_with_store(layers: Sequence[Layer]) -> str | None:
    """The folder of the last layer that names `tracking.uri`, if that is a run's folder."""
    naming = [layer for layer in layers if layer.value("tracking.uri") is not None]
    last = naming[-1] if naming else None
    if last is None or last.is_overrides or last.folder is None or not holds_a_run(last.folder):
        return None
    return last.folder


def _changes(config: Any, layer: Layer, of_files: Layer, entries: Entries) -> Iterator[Change]:
    """The keys of the command line's layer whose values are others than without it.

    Args:
        config: checked; values are shown as it may be written, without what is secret.
        of_files: all config files together.
    """
    now, was_set = flatten_written(config), set(of_files.leaves())
    for key in layer.leaves():
        entry, previous_value = entries.get(key), of_files.value(key)
        if isinstance(entry, Option) and key not in was_set:
            previous_value = entry.default
        after = now.get(key, layer.value(key))
        change = Change(key, _text(previous_value), _text(after), is_of_row=layer.name == ROW)
        if change.earlier != change.after:
            yield change


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a block of keys"
    if value == MISSING:
        return "not set"
    source = written_source(value)
    return source if isinstance(source, str) else show(source)
