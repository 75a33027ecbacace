"""`vapo try`: prompts, responses and verdicts of a config, to look at. It writes nothing.

Given responses are judged without torch, so sampling is imported only where there is some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vapo.commands.command_rules import check_one_process
from vapo.commands.given_responses import (
    asked_by,
    given_trials,
    read_responses,
    started_judges,
)
from vapo.commands.trial_hints import Policy, hints
from vapo.commands.trials import Trial, block, render, summarize
from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.rewards.verifier_output import VerifierOutput
from vapo.system.shown_text import say

DEFAULT_NUM = 5


def run(config: FitConfig, *, num: int | None = None, responses: Path | None = None) -> list[Trial]:
    """Print each response with its verdict, then the pass rate and hints."""
    if responses is not None:
        if num is not None:
            raise UserError("--num has no effect with --responses: all of the file are judged")
        given = read_responses(responses)
        asked = asked_by(config, given)
        with VerifierOutput() as output, ExitStack() as started:
            with _imports_shown(output):
                judges = started.enter_context(started_judges(config, asked, output))
            trials = given_trials(given, asked, judges, output)
            return _show(trials, len(given), config, None)
    check_one_process("try", config)
    from vapo.commands.sampled_trials import load_tried, sampled_trials, start_scorer

    num = DEFAULT_NUM if num is None else num
    with VerifierOutput() as output, ExitStack() as started:
        with _imports_shown(output):
            scorer = started.enter_context(start_scorer(config, output))
        start = load_tried(config, num)
        trials = sampled_trials(start, scorer, output)
        return _show(trials, num, config, start.policy)


@contextmanager
def _imports_shown(output: VerifierOutput) -> Iterator[None]:
    """What the verifiers print while they start, also where one fails."""
    try:
        yield
    finally:
        if printed := output.take().rstrip("\n"):
            say(f"the verifier printed while it was imported:\n{block(printed)}\n")


def _show(
    trials: Iterable[Trial], total: int, config: FitConfig, policy: Policy | None
) -> list[Trial]:
    shown = []
    for number, trial in enumerate(trials, start=1):
        say(f"{render(trial, number, total)}\n")
        shown.append(trial)
    say(summarize(shown))
    for hint in hints(shown, config, policy):
        say(f"hint: {hint}")
    return shown
