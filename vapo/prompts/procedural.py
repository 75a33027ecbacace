"""The procedural tasks by name: seeded generators of problems, and oracles of their states.

A generator is a function `(num_examples, *, seed, **options)` that returns a list of
`ProceduralRow`, or of `EpisodeRow` for an environment; `PROCEDURAL_TASKS` lists them by name. Row i
depends only on (seed, i) and the options. Problems and demonstrations draw from separate random
streams, so the problems do not depend on the noise in the demonstrations.

A task may have an oracle of the value of unfinished responses: a function `(problem, response) ->
states` that returns one text for each prefix of the response, the empty one first. As far as the
task goes, a prefix's value depends only on its state. So the mean return of equal states is the
best that a critic could know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vapo.errors import UserError
from vapo.errors.suggestions import nearest_name
from vapo.prompts.checked_steps import checked_steps, checked_steps_states, own_check
from vapo.prompts.procedural_rows import EpisodeRow, ProceduralRow
from vapo.prompts.state_tracking import state_tracking, state_tracking_states
from vapo.prompts.tug_of_war import tug_of_war
from vapo.prompts.worked_sums import worked_sums, worked_sums_states

PROCEDURAL_TASKS: Mapping[str, Callable[..., Sequence[ProceduralRow | EpisodeRow]]] = {
    "checked_steps": checked_steps,
    "state_tracking": state_tracking,
    "tug_of_war": tug_of_war,
    "worked_sums": worked_sums,
}
HIDDEN_STATES: Mapping[str, Callable[[str, str], list[str] | None]] = {
    "checked_steps": checked_steps_states,
    "state_tracking": state_tracking_states,
    "worked_sums": worked_sums_states,
}
OWN_CHECKS: Mapping[str, Callable[[str], bool | None]] = {"checked_steps": own_check}
"""For tasks whose responses judge their own steps: a function of the response so far, which says
whether the judgement that ends it is `wrong`; None if no judgement ends it."""


def generate(
    task: str | None, options: Mapping[str, Any], *, num_examples: int, seed: int
) -> Sequence[ProceduralRow | EpisodeRow]:
    """Return generated rows of one task of `PROCEDURAL_TASKS`.

    Raises: UserError: the task or an option is unknown, or an option's value is not usable.
    """
    if task is None or task not in PROCEDURAL_TASKS:
        raise UserError(f"task is {task!r}: {nearest(str(task), list(PROCEDURAL_TASKS))}")
    function = PROCEDURAL_TASKS[task]
    parameters = inspect.signature(function).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    checked = {}
    for name, value in options.items():
        if name not in defaults:
            fix = nearest(str(name), list(defaults))
            raise UserError(f"options.{name}: the task {task} has no such option; {fix}")
        checked[name] = _as_type_of(defaults[name], name, value)
    return function(num_examples, seed=seed, **checked)


def _as_type_of(default: Any, name: str, value: Any) -> bool | int | float:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UserError(f"options.{name} is {value!r}: give true or false")
        return value
    is_whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        expected = "a whole number" if is_whole else "a number"
        raise UserError(f"options.{name} is {value!r}: give {expected}")
    return value if is_whole else float(value)


def nearest(name: str, known_names: list[str]) -> str:
    """Return a hint for a misspelt name: a similar known name, if any, then all known ones."""
    similar_name = nearest_name(name, known_names, cutoff=0.7)  # solution is not question
    hint = f"did you mean {similar_name!r}? " if similar_name else ""
    return f"{hint}known: {', '.join(known_names)}"
