"""Which recorded runs are one row of the table, what the row is called, what is left out.

Runs of one name are one row where all that decides their numbers but the seed is equal
(`recorded.facts_of`). Where it is not, there are several rows, and the keys that differ stand in
their names. A row has one run of each seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vapo.sweep.report.recorded import Recorded

_ABSENT = "not set"
_MAX_KEYS_IN_NAME = 3
_MAX_KEYS_LISTED = 20
_MAX_RUNS_LISTED = 10
_MAX_VALUE_CHARS = 40


@dataclass(frozen=True)
class RecordedRow:
    """A row and its runs, one of each seed, in the order in which they were started."""

    name: str
    runs: Sequence[Recorded]

    def tag(self, key: str) -> str | None:
        """Of the latest run that has it: a grid may have been changed in between."""
        return next((run.tags[key] for run in reversed(self.runs) if run.tags.get(key)), None)


def usable(
    recorded: Iterable[Recorded], *, only_finished: bool
) -> tuple[list[Recorded], list[str]]:
    """The runs that have a score, and sentences on the others. A sweep's parent is no run.

    Without `only_finished` a run that is not finished counts, with a note.
    """
    runs = [run for run in recorded if run.role != "sweep"]
    unfinished = [run for run in runs if not run.is_finished]
    notes = []
    if only_finished:
        notes += _listed("Left out, not finished", unfinished)
        runs = [run for run in runs if run.is_finished]
    else:
        scored = [run for run in unfinished if run.score is not None]
        notes += _listed("Not finished, taken at the last evaluation so far", scored)
    notes += _listed(
        "Left out, no evaluation was recorded", [run for run in runs if run.score is None]
    )
    return [run for run in runs if run.score is not None], notes


def separate_rows(recorded: Iterable[Recorded]) -> tuple[list[RecordedRow], list[str]]:
    """The rows, in the order of their first runs, and sentences on what was decided."""
    by_name: dict[str, dict[str, list[Recorded]]] = {}
    for run in sorted(recorded, key=lambda run: run.started_ms):
        by_name.setdefault(run.name, {}).setdefault(run.identity, []).append(run)
    rows: list[RecordedRow] = []
    notes: list[str] = []
    taken = set(by_name)
    for name, groups in by_name.items():
        names = [name]
        if len(groups) > 1:
            names = _names(name, groups, taken)
            notes.append(_differences(name, [group[0].facts for group in groups.values()]))
        for row, group in zip(names, groups.values(), strict=True):
            kept, more = _one_of_each_seed(row, group)
            rows.append(RecordedRow(row, kept))
            notes += more
    return sorted(rows, key=lambda row: min(run.started_ms for run in row.runs)), notes


def _one_of_each_seed(row: str, runs: Iterable[Recorded]) -> tuple[list[Recorded], list[str]]:
    """The latest of each seed, a finished one before any other, and sentences on the rest."""
    by_seed: dict[int, list[Recorded]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    kept, notes = [], []
    for seed, same in by_seed.items():
        *others, latest = sorted(same, key=lambda run: (run.is_finished, run.started_ms))
        kept.append(latest)
        if others:
            left = ", ".join(
                f"{run.run_id} ({run.started}, score {100 * (run.score or 0):.1f})"
                for run in others
            )
            notes.append(
                f"{row}, seed {seed}: {len(same)} runs of the same config, the latest, "
                f"{latest.run_id} ({latest.started}), is in the table; left out: {left}."
            )
    return kept, notes


def differing_keys(facts: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for one in facts for key in one)
    return [key for key in keys if len({one.get(key) for one in facts}) > 1]


def _names(name: str, groups: Mapping[str, Sequence[Recorded]], taken: set[str]) -> list[str]:
    """`name (key value, ...)`; with the identity's digits where that does not say all."""
    facts = [group[0].facts for group in groups.values()]
    differing = differing_keys(facts)
    shown, more = differing[:_MAX_KEYS_IN_NAME], len(differing) - _MAX_KEYS_IN_NAME
    short = {key: _short(key, [key for one in facts for key in one]) for key in shown}
    labels = [", ".join(f"{short[key]} {_show(one.get(key))}" for key in shown) for one in facts]
    names = []
    for label, identity in zip(labels, groups, strict=True):
        if more > 0:
            label = f"{label}, {more} more, {identity}"
        elif labels.count(label) > 1 or f"{name} ({label})" in taken:
            label = f"{label}, {identity}"
        names.append(f"{name} ({label})")
    taken.update(names)
    return names


def _short(key: str, keys: Iterable[str]) -> str:
    """The key's shortest end that no other key has."""
    others = {other for other in keys if other != key}
    parts = key.split(".")
    for start in range(len(parts) - 1, 0, -1):
        end = ".".join(parts[start:])
        if not any(other == end or other.endswith(f".{end}") for other in others):
            return end
    return key


def _differences(name: str, facts: Sequence[Mapping[str, str]]) -> str:
    differing = differing_keys(facts)
    listed = [
        f"{key} ({'; '.join(_show(one.get(key)) for one in facts)})"
        for key in differing[:_MAX_KEYS_LISTED]
    ]
    if len(differing) > _MAX_KEYS_LISTED:
        listed.append(f"{len(differing) - _MAX_KEYS_LISTED} more keys")
    return f"{len(facts)} rows have runs named {name}; they differ in {', '.join(listed)}."


def _show(value: str | None) -> str:
    """As YAML has it; the end of a long text, which is where paths differ."""
    if value is None:
        return _ABSENT
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    return value if len(value) <= _MAX_VALUE_CHARS else f"...{value[3 - _MAX_VALUE_CHARS :]}"


def _listed(what: str, runs: Sequence[Recorded]) -> list[str]:
    if not runs:
        return []
    listed = ", ".join(
        f"{run.run_name} ({run.run_id}{'' if run.is_finished else f', {run.status}'})"
        for run in runs[:_MAX_RUNS_LISTED]
    )
    if len(runs) > _MAX_RUNS_LISTED:
        return [f"{what}: {len(runs)} runs: {listed}, and {len(runs) - _MAX_RUNS_LISTED} more."]
    return [f"{what}: {listed}."]
