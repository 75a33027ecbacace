"""A recorded run before it has its row: its name, its seed, and what decides its numbers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from omegaconf import OmegaConf

from vapo.config.checkpoints import identity_values
from vapo.config.written import flatten_tree
from vapo.tracking.metric_groups import documented

SCORE = "eval/avg_at_k"
CRITIC_INIT = "critic.init"
_PRETRAINING_KEYS = (CRITIC_INIT, "components.value_pretraining.num_iterations")
_NO_FACTS = ("seed", "_differs")
_CODE_TAGS = ("code", "git/commit", "version/vapo")
_COMMIT_DIGITS = 12
_MODEL_TAGS = ("model/actor", "model/critic")


@dataclass(frozen=True)
class Recorded:
    """One run of the store. `name`: its row's, or its own without the seed.

    `facts`: what decides its numbers beside the seed, see `facts_of`. `score`: avg@k of the
    last evaluation; None where there was none.
    """

    run_id: str
    run_name: str
    name: str
    seed: int
    role: str
    status: str
    started_ms: int
    score: float | None
    tags: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        return self.status == "FINISHED"

    @property
    def identity(self) -> str:
        """12 hex digits, equal exactly when the facts are."""
        canonical = json.dumps(dict(self.facts), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def started(self) -> str:
        when = datetime.fromtimestamp(self.started_ms / 1000, UTC)
        return f"{when:%Y-%m-%d %H:%M} UTC"


def as_recorded(run: Any) -> Recorded:
    """From MLflow's run; its facts are left out."""
    tags, info = run.data.tags, run.info
    run_name = info.run_name or info.run_id
    seed = _first_integer(tags.get("seed"), run.data.params.get("seed"))
    row = tags.get("row") or re.sub(rf"(/|[- ]seed){seed}$", "", run_name)
    role, score = tags.get("role", "row"), documented(run.data.metrics).get(SCORE)
    return Recorded(
        info.run_id, run_name, row, seed, role, info.status, info.start_time, score, tags
    )


def _first_integer(*texts: str | None) -> int:
    found = [int(text) for text in texts if text and re.fullmatch(r"-?\d+", text)]
    return found[0] if found else 0


def facts_of(run: Any, resumed_with: str | None, pretraining: Any | None) -> dict[str, str]:
    """What two runs must have in common, beside the seed, to be seeds of one row.

    The config without where the run was and what it keeps; the code, by the digest of its
    sources, or the commit where an older run has none; the models' and the prompts' digests.

    Args:
        resumed_with: the text of config_resumed.yaml. A value that a resumed run changed is
            "before, then after".
        pretraining: the run of a sweep's value pretraining that this one starts from. It stands
            for the path of the critic, which is another one for every seed.
    """
    tags, params = dict(run.data.tags), dict(run.data.params)
    if resumed_with is not None:
        params |= _changed(params, resumed_with)
    if pretraining is not None:
        before = pretraining.data
        params |= {key: before.params[key] for key in _PRETRAINING_KEYS if key in before.params}
        tags["model/critic"] = before.tags.get("model/critic", "")
    facts = {key: value for key, value in identity_values(params).items() if key not in _NO_FACTS}
    if code := next((tags[tag] for tag in _CODE_TAGS if tags.get(tag)), None):
        facts["code"] = code[:_COMMIT_DIGITS] if re.fullmatch(r"[0-9a-f]{40}", code) else code
    for tag in _MODEL_TAGS:
        if tags.get(tag):
            facts[tag] = tags[tag].rpartition("(")[2].rstrip(")")
    return facts | _prompts(run)


def _changed(params: Mapping[str, str], resumed_with: str) -> dict[str, str]:
    tree = OmegaConf.to_container(OmegaConf.create(resumed_with), resolve=True)
    assert isinstance(tree, dict)
    values = flatten_tree({str(key): value for key, value in tree.items()})
    now = {key: str(value) for key, value in values.items() if key in params}
    return {
        key: f"{params[key]}, then {value}" for key, value in now.items() if value != params[key]
    }


def _prompts(run: Any) -> dict[str, str]:
    """`training prompts` and `evaluation prompts`: the digests of their sets."""
    digests: dict[str, list[str]] = {}
    inputs = run.inputs.dataset_inputs if run.inputs else []
    for one in sorted(inputs, key=lambda one: str(one.dataset.name)):
        context = next((tag.value for tag in one.tags if tag.key == "mlflow.data.context"), "other")
        digests.setdefault(f"{context} prompts", []).append(one.dataset.digest)
    return {key: " ".join(values) for key, values in digests.items()}
