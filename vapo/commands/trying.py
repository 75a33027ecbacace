"""`vapo try`: prompts, responses and verdicts of a config, to look at. It writes nothing.

Given responses (`--responses FILE`) are judged without torch, so sampling is imported only where
there is some.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vapo.commands.trials import (
    Policy,
    Trial,
    block,
    hints,
    is_unanswered,
    trial_text,
    trials_summary,
    which_part,
)
from vapo.config import FitConfig
from vapo.config.data import GeneratedSource, source_name, sources_of
from vapo.config.nearest_path import nearest_path
from vapo.config.rewards import RewardModelVerifier, verifiers_in
from vapo.errors import UserError, about
from vapo.prompts.generated_rows import stage_source
from vapo.prompts.rows import SourceRow
from vapo.prompts.sources import read_rows
from vapo.rewards.several_judges import SeveralJudges, one_or_several, reply_of
from vapo.rewards.text_judge import (
    OnReply,
    TextJudge,
    judged_part,
    rewards_by_source,
    verdict_fields,
)
from vapo.rewards.verifier_output import VerifierOutput
from vapo.system.files import check_regular_file, read_line
from vapo.system.row_values import RefusedValue, check_carried
from vapo.system.shown_text import say

_OWN = ("response", "prompt_id", "answer")
Judge = TextJudge | SeveralJudges[TextJudge]
Asked = tuple[str, SourceRow]
"""What a response is judged against, and the name of its source in a mixture."""


@dataclass(frozen=True)
class Given:
    """A response of the file, and what it answers: an answer of its own, else a row of the data."""

    place: str
    number: int
    response: str
    prompt_id: str | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def run(config: FitConfig, *, num: int | None = None, responses: Path | None = None) -> list[Trial]:
    """Print each response with its verdict, then the pass rate and hints."""
    with VerifierOutput() as output, ExitStack() as started:
        if responses is not None:
            given = read_responses(responses)
            asked = list(asked_by(config, given))
            with _imports_shown(output):
                judges = started_judges(config, asked, output, started)
            return _show(given_trials(given, asked, judges, output), len(given), config, None)
        from vapo.commands.sampled_trials import sampled_trials, start_scorer

        num = 5 if num is None else num
        with _imports_shown(output):
            scorer = started.enter_context(start_scorer(config, output))
        policy, trials = started.enter_context(sampled_trials(config, num, scorer, output))
        return _show(trials, num, config, policy)


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
        say(f"{trial_text(trial, number, total)}\n")
        shown.append(trial)
    say(trials_summary(shown))
    for hint in hints(shown, config, policy):
        say(f"hint: {hint}")
    return shown


def read_responses(path: Path) -> list[Given]:
    """The responses of a file: `.jsonl` is JSON lines, any other a response a line.

    Raises: UserError: unreadable, empty, or a line is malformed; names file and line.
    """
    with about("--responses"):
        check_regular_file(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"--responses {path}: not text in UTF-8") from None
    except OSError as error:
        hint = nearest_path(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"--responses {path}: {error.strerror}{hint}") from None
    lines = [(f"{path}:{n}", line) for n, line in enumerate(text.split("\n"), start=1)]
    lines = [(place, line.removesuffix("\r")) for place, line in lines if line.strip()]
    if not lines:
        raise UserError(f"--responses {path}: it has no responses")
    if path.suffix != ".jsonl":
        return [Given(place, n, line) for n, (place, line) in enumerate(lines)]
    return [_given(place, n, line) for n, (place, line) in enumerate(lines)]


def _given(place: str, number: int, line: str) -> Given:
    try:
        record = read_line(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not a line of JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"{place}: a response is an object with `response`, this is no object")
    try:
        check_carried(record)
    except RefusedValue as error:
        raise UserError(f"{place}: the line has {error}") from None
    more = {name: value for name, value in record.items() if name not in _OWN}
    texts = {name: record[name] for name in _OWN if name in record}
    if wrong := [name for name, value in texts.items() if not isinstance(value, str)]:
        raise UserError(f"{place}: `{wrong[0]}` must be text")
    if "response" not in texts:
        raise UserError(f"{place}: it has no `response`")
    if "answer" in texts and "prompt_id" in texts:
        raise UserError(
            f"{place}: give `prompt_id`, to judge against that row of the data, or `answer`"
        )
    if more and "answer" not in texts:
        raise UserError(
            f"{place}: `{next(iter(more))}` has no effect: a row's own columns are the metadata, "
            "unless the line has an `answer`"
        )
    return Given(place, number, metadata=more, **texts)


def started_judges(
    config: FitConfig, asked: Sequence[Asked], output: VerifierOutput, started: ExitStack
) -> dict[str, Judge]:
    """The verifier of each source that is asked, in a process of its own, which `started` closes.

    Raises: UserError: one of them is a reward model, or cannot be made.
    """
    by_source = {"": config.rewards, **rewards_by_source(config.rewards, config.data)}
    judges: dict[str, Judge] = {}
    for source in dict.fromkeys(source for source, _ in asked):
        rewards = replace(by_source[source], num_workers=1)
        for key, verifier in verifiers_in("rewards", rewards):
            if isinstance(verifier, RewardModelVerifier):
                raise UserError(
                    f"{key}.verifier is reward_model, and --responses judges without a model: "
                    "choose another verifier, or leave --responses out"
                )
        same = [judge for judge in judges.values() if judge.config == rewards]
        make = partial(TextJudge, output=output)
        judges[source] = (
            same[0] if same else started.enter_context(closing(one_or_several(rewards, make)))
        )
    return judges


def given_trials(
    responses: Sequence[Given],
    asked: Sequence[Asked],
    judges: Mapping[str, Judge],
    output: VerifierOutput,
) -> Iterator[Trial]:
    """Judge one response after the other."""
    for given, (source, row) in zip(responses, asked, strict=True):
        judge, problem = judges[source], row.problem
        reply = reply_of(judge, partial(_ask, given.response, row))
        if not isinstance(problem, str):
            problem = "\n".join(f"{message['role']}: {message['content']}" for message in problem)
        yield Trial(
            prompt_id=row.place,
            problem=problem,
            answer=row.answer,
            response=given.response,
            response_text=given.response,
            judged=which_part(judge.config, given.response),
            is_unanswered=is_unanswered(judge.config, given.response),
            output=output.take(),
            **verdict_fields(judge.config, reply),
        )


def _ask(
    response: str, row: SourceRow, judge: TextJudge, on_reply: OnReply
) -> Callable[[], object]:
    """Ask about the part of a response that is judged; what is returned withdraws the question."""
    part = judged_part(judge.config, response)
    if part is None:
        on_reply({"is_correct": False})
        return lambda: None
    return judge.submit((part, row.answer, row.columns), on_reply)


def asked_by(config: FitConfig, responses: Sequence[Given]) -> Iterator[Asked]:
    """What each response is judged against; the data are read only where a line needs them.

    Raises: UserError: there is no such row; names the line.
    """
    rows: list[Asked] = []
    by_id: dict[str, Asked] = {}
    if any(given.answer is None for given in responses):
        rows = _rows(config, "train")
        by_id = {asked[1].place: asked for asked in [*_rows(config, "heldout"), *rows]}
    for given in responses:
        if given.answer is not None:
            yield "", SourceRow(given.place, "", given.answer, metadata=given.metadata)
        elif given.prompt_id in by_id:
            yield by_id[given.prompt_id]
        elif given.prompt_id is not None:
            close = difflib.get_close_matches(given.prompt_id, by_id, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the first is {next(iter(by_id))!r}"
            raise UserError(f"{given.place}: no row has the prompt_id {given.prompt_id!r}; {hint}")
        elif given.number < len(rows):
            yield rows[given.number]
        else:
            raise UserError(
                f"{given.place}: it is response {given.number + 1}, and there are {len(rows)} "
                "training rows; in a .jsonl file a line can have a `prompt_id` or an `answer`"
            )


def _rows(config: FitConfig, name: str) -> list[Asked]:
    """All rows of a set, in their order; of a curriculum those of the first stage."""
    found: list[Asked] = []
    for key, source in sources_of(config.data, name).items():
        if isinstance(source, GeneratedSource) and source.curriculum:
            source = stage_source(source, 0, key=key)
        found += [(source_name(key), row) for row in read_rows(source, key=key)]
    return found
