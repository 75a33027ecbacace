"""Which recorded runs are one row of the table, what the row is called, what is left out.

Runs of one name are one row where all that decides their numbers but the seed is equal
(`facts_of`). Where it is not, there are several rows, and the keys that differ stand in their
names. A row has one run of each seed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from omegaconf import OmegaConf

from vapo.config.checkpoints import config_identity, identity_values
from vapo.config.written import flatten_tree
from vapo.tracking.metric_names import by_present_name

SCORE = "eval/avg_at_k"
CRITIC_INIT = "critic.init"
_PRETRAINING_KEYS = (CRITIC_INIT, "components.value_pretraining.num_iterations")
_NO_FACTS = ("seed", "_differs")
_CODE_TAGS = ("code", "git/commit", "version/vapo")
_MODEL_TAGS = ("model/actor", "model/critic")
_MAX_KEYS_IN_NAME = 3
_MAX_KEYS_LISTED = 20
_MAX_RUNS_LISTED = 10
_MAX_VALUE_CHARS = 40


@dataclass(frozen=True)
class Recorded:
    """One run of the store before it has its row. `name`: its row's, or its own without the seed.

    `run` is MLflow's. `facts`: what decides its numbers beside the seed, see `facts_of`. `score`:
    avg@k of the last evaluation; None where there was none.
    """

    run: Any
    name: str
    seed: int
    score: float | None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return str(self.run.data.tags.get("role", "row"))

    @property
    def is_finished(self) -> bool:
        return bool(self.run.info.status == "FINISHED")

    @property
    def started(self) -> str:
        when = datetime.fromtimestamp(self.run.info.start_time / 1000, UTC)
        return f"{when:%Y-%m-%d %H:%M} UTC"


def as_recorded(run: Any) -> Recorded:
    """From MLflow's run; its facts are left out."""
    tags = run.data.tags
    texts = (tags.get("seed"), run.data.params.get("seed"))
    seed = next((int(text) for text in texts if text and re.fullmatch(r"-?\d+", text)), 0)
    row = tags.get("row") or re.sub(
        rf"(/|[- ]seed){seed}$", "", run.info.run_name or run.info.run_id
    )
    return Recorded(run, row, seed, by_present_name(run.data.metrics).get(SCORE))


def facts_of(run: Any, resumed_with: str | None, pretraining: Any | None) -> dict[str, str]:
    """What two runs must have in common, beside the seed, to be seeds of one row.

    The config without where the run was and what it keeps; the code, by the digest of its
    sources, or the commit where there is none; the models' and the prompts' digests.

    Args:
        resumed_with: the text of config_resumed.yaml. A value that a resumed run changed is
            "before, then after".
        pretraining: the run of a sweep's value pretraining that this one starts from. It stands
            for the path of the critic, which is another one for every seed.
    """
    tags, params = dict(run.data.tags), dict(run.data.params)
    if resumed_with is not None:
        tree: Any = OmegaConf.to_container(OmegaConf.create(resumed_with), resolve=True)
        for key, value in flatten_tree(tree).items():
            if key in params and params[key] != str(value):
                params[key] = f"{params[key]}, then {value}"
    if pretraining is not None:
        before = pretraining.data
        params |= {key: before.params[key] for key in _PRETRAINING_KEYS if key in before.params}
        tags["model/critic"] = before.tags.get("model/critic", "")
    facts = {key: value for key, value in identity_values(params).items() if key not in _NO_FACTS}
    if code := next((tags[tag] for tag in _CODE_TAGS if tags.get(tag)), None):
        facts["code"] = code[:12] if re.fullmatch(r"[0-9a-f]{40}", code) else code
    for tag in _MODEL_TAGS:
        if tags.get(tag):
            facts[tag] = tags[tag].rpartition("(")[2].rstrip(")")
    return facts | {f"{kind} prompts": digests for kind, digests in prompts_of(run).items()}


def prompts_of(run: Any) -> dict[str, str]:
    """The digests of a run's prompts: `training` and `evaluation`, as far as it recorded them."""
    prompts = defaultdict(list)
    inputs = run.inputs.dataset_inputs if run.inputs else []
    for one in sorted(inputs, key=lambda one: str(one.dataset.name)):
        context = next((tag.value for tag in one.tags if tag.key == "mlflow.data.context"), "other")
        prompts[context].append(one.dataset.digest)
    return {kind: " ".join(digests) for kind, digests in prompts.items()}


def usable(
    recorded: Iterable[Recorded], *, only_finished: bool
) -> tuple[list[Recorded], list[str]]:
    """The runs that have a score, and sentences on the others. A sweep's parent is no run.

    Without `only_finished` a run that is not finished counts, with a note.
    """
    runs = [one for one in recorded if one.role != "sweep"]
    unfinished = [one for one in runs if not one.is_finished]
    if only_finished:
        notes = _listed("Left out, not finished", unfinished)
        runs = [one for one in runs if one.is_finished]
    else:
        scored = [one for one in unfinished if one.score is not None]
        notes = _listed("Not finished, taken at the last evaluation so far", scored)
    silent = [one for one in runs if one.score is None]
    notes += _listed("Left out, no evaluation was recorded", silent)
    return [one for one in runs if one.score is not None], notes


def separate_rows(recorded: Iterable[Recorded]) -> tuple[dict[str, list[Recorded]], list[str]]:
    """Row -> its runs, in the order of their first ones; and sentences on what was decided."""
    by_name: dict[str, dict[str, list[Recorded]]] = {}
    for one in sorted(recorded, key=lambda one: one.run.info.start_time):
        by_name.setdefault(one.name, {}).setdefault(config_identity(one.facts), []).append(one)
    rows: dict[str, list[Recorded]] = {}
    notes: list[str] = []
    for name, groups in by_name.items():
        titles = dict.fromkeys(groups, name)
        if len(groups) > 1:
            facts = {identity: runs[0].facts for identity, runs in groups.items()}
            titles, note = _told_apart(name, facts, {*by_name, *rows})
            notes.append(note)
        for identity, runs in groups.items():
            rows[titles[identity]], more = _one_of_each_seed(titles[identity], runs)
            notes += more

    def first_start(row: tuple[str, list[Recorded]]) -> int:
        return min(int(one.run.info.start_time) for one in row[1])

    return dict(sorted(rows.items(), key=first_start)), notes


def _one_of_each_seed(row: str, runs: Iterable[Recorded]) -> tuple[list[Recorded], list[str]]:
    """The latest of each seed, a finished one before any other, and sentences on the rest."""
    by_seed: dict[int, list[Recorded]] = {}
    for one in runs:
        by_seed.setdefault(one.seed, []).append(one)
    kept, notes = [], []
    for seed, same in by_seed.items():
        *others, latest = sorted(same, key=lambda one: (one.is_finished, one.run.info.start_time))
        kept.append(latest)
        if others:
            left = ", ".join(
                f"{one.run.info.run_id} ({one.started}, score {100 * (one.score or 0):.1f})"
                for one in others
            )
            notes.append(
                f"{row}, seed {seed}: {len(same)} runs of the same config, the latest, "
                f"{latest.run.info.run_id} ({latest.started}), is in the table; left out: {left}."
            )
    return kept, notes


def _told_apart(
    name: str, facts: Mapping[str, Mapping[str, str]], taken: Iterable[str]
) -> tuple[dict[str, str], str]:
    """`name (key value, ...)` by identity, whose digits stand there if the keys do not say all;
    and a sentence on the keys that differ."""
    keys = dict.fromkeys(key for one in facts.values() for key in one)
    values = {key: [_show(one.get(key)) for one in facts.values()] for key in keys}
    differing = [key for key in keys if len({one.get(key) for one in facts.values()}) > 1]
    shown, more = differing[:_MAX_KEYS_IN_NAME], len(differing) - _MAX_KEYS_IN_NAME
    columns = [[f"{_short(key, keys)} {value}" for value in values[key]] for key in shown]
    labels = [", ".join(parts) for parts in zip(*columns, strict=True)]
    titles = {}
    for identity, label in zip(facts, labels, strict=True):
        if more > 0:
            label = f"{label}, {more} more, {identity}"
        elif labels.count(label) > 1 or f"{name} ({label})" in taken:
            label = f"{label}, {identity}"
        titles[identity] = f"{name} ({label})"
    listed = [f"{key} ({'; '.join(values[key])})" for key in differing[:_MAX_KEYS_LISTED]]
    if len(differing) > _MAX_KEYS_LISTED:
        listed.append(f"{len(differing) - _MAX_KEYS_LISTED} more keys")
    note = f"{len(facts)} rows have runs named {name}; they differ in {', '.join(listed)}."
    return titles, note


def _short(key: str, keys: Iterable[str]) -> str:
    """The key's shortest end that no other key has."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1))
    others = {f".{other}" for other in keys if other != key}
    return next((e for e in ends if not any(other.endswith(f".{e}") for other in others)), key)


def _show(value: str | None) -> str:
    """As YAML has it; the end of a long text, which is where paths differ."""
    if value is None:
        return "not set"
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    return value if len(value) <= _MAX_VALUE_CHARS else f"...{value[3 - _MAX_VALUE_CHARS :]}"


def _listed(what: str, runs: Sequence[Recorded]) -> list[str]:
    infos = [one.run.info for one in runs]
    listed = ", ".join(
        f"{info.run_name} ({info.run_id}{'' if info.status == 'FINISHED' else f', {info.status}'})"
        for info in infos[:_MAX_RUNS_LISTED]
    )
    if len(runs) > _MAX_RUNS_LISTED:
        listed = f"{len(runs)} runs: {listed}, and {len(runs) - _MAX_RUNS_LISTED} more"
    return [f"{what}: {listed}."] if runs else []
