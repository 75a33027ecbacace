"""Group recorded runs into rows of the table, name the rows, and report what is left out.

Runs of one name form one row if everything that decides their numbers is equal, except the seed
(`identity_facts`). Otherwise they form several rows, whose names contain the keys that differ. A
row has one run for each seed.
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
class RecordedRun:
    """A run of the MLflow store, before it is put into a row of the table.

    Attributes:
        name: the row's name that a sweep gave it, or the run's name without the seed.
        score: avg@k of the last evaluation; None if there was no evaluation.
        facts: all that decides the run's numbers beside the seed (`identity_facts`).
    """

    mlflow_run: Any
    name: str
    seed: int
    score: float | None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return str(self.mlflow_run.data.tags.get("role", "row"))

    @property
    def is_finished(self) -> bool:
        return bool(self.mlflow_run.info.status == "FINISHED")

    @property
    def started(self) -> str:
        when = datetime.fromtimestamp(self.mlflow_run.info.start_time / 1000, UTC)
        return f"{when:%Y-%m-%d %H:%M} UTC"


def make_recorded_run(run: Any) -> RecordedRun:
    """Return an MLflow run as a `RecordedRun`, whose facts are still empty."""
    tags = run.data.tags
    texts = (tags.get("seed"), run.data.params.get("seed"))
    seed = next((int(text) for text in texts if text and re.fullmatch(r"-?\d+", text)), 0)
    row = tags.get("row") or re.sub(
        rf"(/|[- ]seed){seed}$", "", run.info.run_name or run.info.run_id
    )
    return RecordedRun(run, row, seed, by_present_name(run.data.metrics).get(SCORE))


def identity_facts(run: Any, resumed_with: str | None, pretraining: Any | None) -> dict[str, str]:
    """Return the facts that two runs must share, beside the seed, to be seeds of one row.

    They are the config without the keys for where the run is written and what it keeps, the digest
    of the code (or its commit, if there is no digest), and the digests of models and prompts.

    Args:
        run: MLflow's run.
        resumed_with: the text of config_resumed.yaml; None if the run was not resumed. A value that
            a resumed run changed becomes the fact "OLD, then NEW".
        pretraining: MLflow's run of the sweep's value pretraining from which this run starts; None
            if there is none. Its facts replace the path of the critic, which differs between seeds.
    """
    tags, params = dict(run.data.tags), dict(run.data.params)
    if resumed_with is not None:
        tree: Any = OmegaConf.to_container(OmegaConf.create(resumed_with), resolve=True)
        for key, value in flatten_tree(tree).items():
            if key in params and params[key] != str(value):
                params[key] = f"{params[key]}, then {value}"
    if pretraining is not None:
        pretraining_data = pretraining.data
        params |= {
            key: pretraining_data.params[key]
            for key in _PRETRAINING_KEYS
            if key in pretraining_data.params
        }
        tags["model/critic"] = pretraining_data.tags.get("model/critic", "")
    facts = {key: value for key, value in identity_values(params).items() if key not in _NO_FACTS}
    if code := next((tags[tag] for tag in _CODE_TAGS if tags.get(tag)), None):
        facts["code"] = code[:12] if re.fullmatch(r"[0-9a-f]{40}", code) else code
    for tag in _MODEL_TAGS:
        if tags.get(tag):
            facts[tag] = tags[tag].rpartition("(")[2].rstrip(")")
    return facts | {f"{kind} prompts": digests for kind, digests in prompt_digests(run).items()}


def prompt_digests(run: Any) -> dict[str, str]:
    """Return "training" and "evaluation" -> the digests of a run's prompts, if it recorded them."""
    prompts = defaultdict(list)
    inputs = run.inputs.dataset_inputs if run.inputs else []
    for dataset_input in sorted(inputs, key=lambda dataset_input: str(dataset_input.dataset.name)):
        context = next(
            (tag.value for tag in dataset_input.tags if tag.key == "mlflow.data.context"), "other"
        )
        prompts[context].append(dataset_input.dataset.digest)
    return {kind: " ".join(digests) for kind, digests in prompts.items()}


def usable_runs(
    recorded: Iterable[RecordedRun], *, only_finished: bool
) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs that have a score, and sentences on the runs that are left out.

    Parent runs of sweeps are skipped.

    Args:
        only_finished: whether to leave out unfinished runs. Otherwise a sentence names them.
    """
    runs = [run for run in recorded if run.role != "sweep"]
    unfinished = [run for run in runs if not run.is_finished]
    if only_finished:
        notes = _listed("Left out, not finished", unfinished)
        runs = [run for run in runs if run.is_finished]
    else:
        scored = [run for run in unfinished if run.score is not None]
        notes = _listed("Not finished, taken at the last evaluation so far", scored)
    unscored = [run for run in runs if run.score is None]
    notes += _listed("Left out, no evaluation was recorded", unscored)
    return [run for run in runs if run.score is not None], notes


def separate_rows(
    recorded: Iterable[RecordedRun],
) -> tuple[dict[str, list[RecordedRun]], list[str]]:
    """Return row -> its runs, and sentences on how rows were separated and which runs left out.

    The rows are in the order of their earliest runs.
    """
    by_name: dict[str, dict[str, list[RecordedRun]]] = {}
    for run in sorted(recorded, key=lambda run: run.mlflow_run.info.start_time):
        by_name.setdefault(run.name, {}).setdefault(config_identity(run.facts), []).append(run)
    rows: dict[str, list[RecordedRun]] = {}
    notes: list[str] = []
    for name, groups in by_name.items():
        titles = dict.fromkeys(groups, name)
        if len(groups) > 1:
            facts = {identity: runs[0].facts for identity, runs in groups.items()}
            titles, note = _distinct_titles(name, facts, {*by_name, *rows})
            notes.append(note)
        for identity, runs in groups.items():
            rows[titles[identity]], seed_notes = _latest_of_each_seed(titles[identity], runs)
            notes += seed_notes

    def first_start(row: tuple[str, list[RecordedRun]]) -> int:
        return min(int(run.mlflow_run.info.start_time) for run in row[1])

    return dict(sorted(rows.items(), key=first_start)), notes


def _latest_of_each_seed(
    row: str, runs: Iterable[RecordedRun]
) -> tuple[list[RecordedRun], list[str]]:
    """Return the latest run of each seed, and sentences on the runs that are left out.

    A finished run goes before a later unfinished one.
    """
    by_seed: dict[int, list[RecordedRun]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    latest_runs, notes = [], []
    for seed, seed_runs in by_seed.items():
        *older_runs, latest = sorted(
            seed_runs, key=lambda run: (run.is_finished, run.mlflow_run.info.start_time)
        )
        latest_runs.append(latest)
        if older_runs:
            older_texts = ", ".join(
                f"{run.mlflow_run.info.run_id} ({run.started}, score {100 * (run.score or 0):.1f})"
                for run in older_runs
            )
            notes.append(
                f"{row}, seed {seed}: {len(seed_runs)} runs of the same config, the latest, "
                f"{latest.mlflow_run.info.run_id} ({latest.started}), is in the table; left out: "
                f"{older_texts}."
            )
    return latest_runs, notes


def _distinct_titles(
    name: str, facts: Mapping[str, Mapping[str, str]], row_names: Iterable[str]
) -> tuple[dict[str, str], str]:
    """Return identity -> the title of its row, and a sentence on the keys that differ.

    A title is `name (key value, ...)`. The digits of the identity are added if the keys do not make
    the title unique.

    Args:
        name: the name that all these runs have.
        facts: identity -> the facts of its runs.
        row_names: the titles that are in use already.
    """
    keys = dict.fromkeys(key for row_facts in facts.values() for key in row_facts)
    values = {key: [_show(row_facts.get(key)) for row_facts in facts.values()] for key in keys}
    differing = [
        key for key in keys if len({row_facts.get(key) for row_facts in facts.values()}) > 1
    ]
    named_keys, num_more = differing[:_MAX_KEYS_IN_NAME], len(differing) - _MAX_KEYS_IN_NAME
    columns = [[f"{_short(key, keys)} {value}" for value in values[key]] for key in named_keys]
    labels = [", ".join(parts) for parts in zip(*columns, strict=True)]
    titles = {}
    for identity, label in zip(facts, labels, strict=True):
        if num_more > 0:
            label = f"{label}, {num_more} more, {identity}"
        elif labels.count(label) > 1 or f"{name} ({label})" in row_names:
            label = f"{label}, {identity}"
        titles[identity] = f"{name} ({label})"
    listed = [f"{key} ({'; '.join(values[key])})" for key in differing[:_MAX_KEYS_LISTED]]
    if len(differing) > _MAX_KEYS_LISTED:
        listed.append(f"{len(differing) - _MAX_KEYS_LISTED} more keys")
    note = f"{len(facts)} rows have runs named {name}; they differ in {', '.join(listed)}."
    return titles, note


def _short(key: str, keys: Iterable[str]) -> str:
    """Return the shortest end of a dotted key that no other key has."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1))
    other_ends = {f".{other_key}" for other_key in keys if other_key != key}
    return next(
        (e for e in ends if not any(other_key.endswith(f".{e}") for other_key in other_ends)), key
    )


def _show(value: str | None) -> str:
    """Return a value as YAML writes it.

    Only the end of a long text is shown: there paths differ.
    """
    if value is None:
        return "not set"
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    return value if len(value) <= _MAX_VALUE_CHARS else f"...{value[3 - _MAX_VALUE_CHARS :]}"


def _listed(reason: str, runs: Sequence[RecordedRun]) -> list[str]:
    infos = [run.mlflow_run.info for run in runs]
    listed = ", ".join(
        f"{info.run_name} ({info.run_id}{'' if info.status == 'FINISHED' else f', {info.status}'})"
        for info in infos[:_MAX_RUNS_LISTED]
    )
    if len(runs) > _MAX_RUNS_LISTED:
        listed = f"{len(runs)} runs: {listed}, and {len(runs) - _MAX_RUNS_LISTED} more"
    return [f"{reason}: {listed}."] if runs else []
