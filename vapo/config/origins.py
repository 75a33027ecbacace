"""Which layer (a file or the command line) set each config key, and what overrides changed."""

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
    """For each config key the layer that set it last, from which errors take its file and line.

    A number beside the layer is its position among the layers.
    """

    layers: dict[str, tuple[int, Layer]] = field(default_factory=dict)

    def add(self, layer: Layer) -> None:
        order = len(self.layers) and 1 + max(order for order, _ in self.layers.values())
        for key in layer.leaves():
            self.forget(key)
            self.layers[key] = (order, layer)

    def forget(self, key: str) -> None:
        """Forget which layers set a key and all keys below it."""
        for set_key in [k for k in self.layers if k == key or k.startswith(f"{key}.")]:
            del self.layers[set_key]

    def error(self, message: str, *keys: str) -> UserError:
        """Return a UserError that begins with `file:line` of the key that was set last.

        Without such a key it has the message alone.
        """
        origins_of_keys = [(*origin, key) for key in keys if (origin := self._find(key))]
        if not origins_of_keys:
            return UserError(message)
        _, layer, key = max(origins_of_keys, key=lambda item: item[0])
        return UserError(f"{layer.place(key)}: {message}")

    def why_no_text(self, key: str, entries: Entries) -> str | None:
        """Return why the text at a key is refused as another language's null; None if it is not."""
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
    """Return what a config was made from: the files that the user named, and changes to them.

    Files that other files extend are left out.

    Args:
        changed: each layer of the command line, with the merged layers before it.
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
    """Return the folder of the last layer that sets `tracking.uri`, if it is a run's, else None."""
    naming = [layer for layer in layers if layer.value("tracking.uri") is not None]
    last = naming[-1] if naming else None
    if last is None or last.is_overrides or last.folder is None or not holds_a_run(last.folder):
        return None
    return last.folder


def _changes(config: Any, layer: Layer, of_files: Layer, entries: Entries) -> Iterator[Change]:
    """Yield a change for each key whose value the command line's layer changes.

    Args:
        layer: the overrides of the command line, or of a grid's row.
        config: the checked config; values are shown as it may be written, without secrets.
        of_files: the merged config files.
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
