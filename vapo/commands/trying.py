"""`vapo try`: print prompts, responses and verdicts of a config. It writes no files.

Responses from a file (`--responses FILE`) are judged without torch. The modules that sample are
imported only if responses are sampled.
"""

from __future__ import annotations

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
from vapo.config.rewards import RewardModelVerifier, verifiers_in
from vapo.errors import UserError, about
from vapo.errors.shown_text import say
from vapo.errors.suggestions import nearest_name, nearest_path
from vapo.files.row_values import RefusedValue, check_carried
from vapo.files.whole_files import check_regular_file, read_line
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

_COLUMNS = ("response", "prompt_id", "answer")
Judge = TextJudge | SeveralJudges[TextJudge]
NamedRow = tuple[str, SourceRow]
"""The name of a source in a mixture, and the row of it against which a response is judged."""


@dataclass(frozen=True)
class GivenResponse:
    """A response from the file of `--responses`.

    It is judged against its `answer`. If that is None, it is judged against the row of the data
    with its `prompt_id`, training or held-out. If both are None, response `number` is judged
    against the training row of the same number.

    Attributes:
        place: the response's file and line, which errors name.
        number: the response's position among the file's responses, from 0.
        response: the text that is judged.
        prompt_id: the id of a row of the data; None if the line gives none.
        answer: the right answer; None if the line gives none.
        metadata: the other values of the line, which the verifier gets with `answer`.
    """

    place: str
    number: int
    response: str
    prompt_id: str | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def run(config: FitConfig, *, num: int | None = None, responses: Path | None = None) -> list[Trial]:
    """Print responses with their verdicts, then the pass rate and hints. Return all as trials.

    The responses are those in a file, or are sampled to `num` training prompts.
    """
    with VerifierOutput() as output, ExitStack() as exit_stack:
        if responses is not None:
            file_responses = read_responses(responses)
            rows = list(rows_judged_against(config, file_responses))
            with _imports_shown(output):
                judges = start_judges(config, rows, output, exit_stack)
            return _show(
                judge_given_responses(file_responses, rows, judges, output),
                len(file_responses),
                config,
                None,
            )
        from vapo.commands.sampled_trials import sampled_trials, start_scorer

        num = 5 if num is None else num
        with _imports_shown(output):
            scorer = exit_stack.enter_context(start_scorer(config, output))
        policy, trials = exit_stack.enter_context(sampled_trials(config, num, scorer, output))
        return _show(trials, num, config, policy)


@contextmanager
def _imports_shown(output: VerifierOutput) -> Iterator[None]:
    """After the block, print what verifiers printed while they were imported, even if one fails."""
    try:
        yield
    finally:
        if printed := output.take_printed().rstrip("\n"):
            say(f"the verifier printed while it was imported:\n{block(printed)}\n")


def _show(
    trials: Iterable[Trial], total: int, config: FitConfig, policy: Policy | None
) -> list[Trial]:
    printed_trials = []
    for number, trial in enumerate(trials, start=1):
        say(f"{trial_text(trial, number, total)}\n")
        printed_trials.append(trial)
    say(trials_summary(printed_trials))
    for hint in hints(printed_trials, config, policy):
        say(f"hint: {hint}")
    return printed_trials


def read_responses(path: Path) -> list[GivenResponse]:
    """Return the responses in a file: JSON Lines if it ends in `.jsonl`, else one in each line.

    Raises: UserError: the file cannot be read or is empty, or a line is malformed. The message
        names file and line.
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
        return [GivenResponse(place, n, line) for n, (place, line) in enumerate(lines)]
    return [_parse_response(place, n, line) for n, (place, line) in enumerate(lines)]


def _parse_response(place: str, number: int, line: str) -> GivenResponse:
    try:
        record = read_line(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not a line of JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError(
            f'{place}: this line is not a JSON object: write {{"response": TEXT}}, and what '
            "else is known of it"
        )
    try:
        check_carried(record)
    except RefusedValue as error:
        raise UserError(f"{place}: the line has {error}") from None
    more = {name: value for name, value in record.items() if name not in _COLUMNS}
    texts = {name: record[name] for name in _COLUMNS if name in record}
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
            f"{place}: `{next(iter(more))}` is not read beside `prompt_id`, because the row of the "
            "data has its own columns: leave it out, or give `answer` instead of `prompt_id`"
        )
    return GivenResponse(place, number, metadata=more, **texts)


def start_judges(
    config: FitConfig, rows: Sequence[NamedRow], output: VerifierOutput, exit_stack: ExitStack
) -> dict[str, Judge]:
    """Start a verifier for each source in `rows`, each in a process that `exit_stack` closes.

    Returns: the verifiers by source.

    Raises: UserError: a verifier is a reward model, or cannot be made.
    """
    by_source = {"": config.rewards, **rewards_by_source(config.rewards, config.data)}
    judges: dict[str, Judge] = {}
    for source in dict.fromkeys(source for source, _ in rows):
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
            same[0] if same else exit_stack.enter_context(closing(one_or_several(rewards, make)))
        )
    return judges


def judge_given_responses(
    responses: Sequence[GivenResponse],
    rows: Sequence[NamedRow],
    judges: Mapping[str, Judge],
    output: VerifierOutput,
) -> Iterator[Trial]:
    """Judge one response after the other against its row, and yield each with its verdict."""
    for response, (source, row) in zip(responses, rows, strict=True):
        judge, problem = judges[source], row.problem
        reply = reply_of(judge, partial(_submit, response.response, row))
        if not isinstance(problem, str):
            problem = "\n".join(f"{message['role']}: {message['content']}" for message in problem)
        yield Trial(
            prompt_id=row.place,
            problem=problem,
            answer=row.answer,
            response=response.response,
            response_text=response.response,
            judged=which_part(judge.config, response.response),
            is_unanswered=is_unanswered(judge.config, response.response),
            output=output.take_printed(),
            **verdict_fields(judge.config, reply),
        )


def _submit(
    response: str, row: SourceRow, judge: TextJudge, on_reply: OnReply
) -> Callable[[], object]:
    """Submit the judged part of a response to the verifier; return a function that withdraws it.

    A response without such a part is incorrect and is not submitted.
    """
    part = judged_part(judge.config, response)
    if part is None:
        on_reply({"is_correct": False})
        return lambda: None
    return judge.submit((part, row.answer, row.columns), on_reply)


def rows_judged_against(
    config: FitConfig, responses: Sequence[GivenResponse]
) -> Iterator[NamedRow]:
    """Yield the row against which each response is judged. The data are read only if needed.

    Raises: UserError: a response's row does not exist. The message names the response's line.
    """
    rows: list[NamedRow] = []
    by_id: dict[str, NamedRow] = {}
    if any(response.answer is None for response in responses):
        rows = _rows(config, "train")
        by_id = {named_row[1].place: named_row for named_row in [*_rows(config, "heldout"), *rows]}
    for response in responses:
        if response.answer is not None:
            yield "", SourceRow(response.place, "", response.answer, metadata=response.metadata)
        elif response.prompt_id in by_id:
            yield by_id[response.prompt_id]
        elif response.prompt_id is not None:
            nearest = nearest_name(response.prompt_id, by_id)
            hint = (
                f"did you mean {nearest!r}?" if nearest else f"the first is {next(iter(by_id))!r}"
            )
            raise UserError(
                f"{response.place}: no row has the prompt_id {response.prompt_id!r}; {hint}"
            )
        elif response.number < len(rows):
            yield rows[response.number]
        else:
            raise UserError(
                f"{response.place}: it is response {response.number + 1}, and there are "
                f"{len(rows)} training rows; in a .jsonl file a line can have a `prompt_id` "
                "or an `answer`"
            )


def _rows(config: FitConfig, name: str) -> list[NamedRow]:
    """Return all rows of `train` or `heldout`, each with its source's name in a mixture.

    Of a curriculum, only the rows of the first stage are returned.
    """
    named_rows: list[NamedRow] = []
    for key, source in sources_of(config.data, name).items():
        if isinstance(source, GeneratedSource) and source.curriculum:
            source = stage_source(source, 0, key=key)
        named_rows += [(source_name(key), row) for row in read_rows(source, key=key)]
    return named_rows
