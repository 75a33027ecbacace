"""`vapo inspect`: what a critic knows, by the rollouts of whatever framework.

Light to import: without a policy and a critic neither torch nor transformers is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError, about
from vapo.errors.shown_text import say
from vapo.files.whole_files import why_not_writable, write_text
from vapo.networks.model_folders import check_critic_folder, check_model_folder
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.rows import find_files

if TYPE_CHECKING:
    from vapo.studies.inspection.report import Inspection
    from vapo.studies.inspection.responses import BadRow, InspectedResponse
    from vapo.studies.inspection.truth_request import TruthRequest

_STORED = ".parquet"
_TEMPLATE_KEY = "--chat_template_kwargs"
_WRITES = {".html": "page", ".json": "summary", _STORED: "rollouts"}


def run(
    *,
    rollouts: Sequence[Path],
    policy: str | None = None,
    chat_template_kwargs: str | None = None,
    critic: str | None = None,
    value_truth: int | None = None,
    verifier: str | None = None,
    gamma: float = 1.0,
    reward: str | None = None,
    sampling: Sequence[str] = (),
    output: Sequence[Path] = (),
) -> Inspection:
    """Inspect rollouts in files, print the figures, and write the files that `--output` names.

    The figures say what a critic knows, by its values in the rollouts or of a critic to load.
    """
    find_files(rollouts)
    for path in output:
        _check_output(path)
    inspection = inspect_rollouts(
        rollouts,
        name=", ".join(map(str, rollouts)),
        policy=policy,
        chat_template_kwargs=_template_variables(chat_template_kwargs),
        critic=critic,
        value_truth=value_truth,
        verifier=verifier,
        rewards=[] if reward is None else [part for part in reward.split(",") if part],
        gamma=gamma,
        sampling=sampling,
        output=output,
    )
    say(inspection.text())
    for path in output:
        write_inspection(inspection, path)
        say(path)
    return inspection


def _check_output(path: Path) -> None:
    if path.suffix not in _WRITES:
        raise UserError(f"--output {path}: give a name that ends in {', '.join(_WRITES)}")
    if reason := why_not_writable(path.expanduser().absolute().parent):
        raise UserError(f"--output {path}: {reason}")


def write_inspection(inspection: Inspection, path: Path) -> None:
    """Write the page or the figures as JSON, by the suffix of `path`.

    A Parquet file of rollouts is skipped, because it was written while they were read.
    """
    _check_output(path)
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == _STORED:
        return
    if _WRITES[path.suffix] == "page":
        write_text(path, inspection.page())
    else:
        write_text(path, json.dumps(inspection.summary(), indent=1) + "\n")


def inspect_rollouts(
    source: Any,
    *,
    name: str,
    policy: str | None,
    critic: str | None,
    value_truth: int | None,
    verifier: str | None,
    rewards: Sequence[str],
    gamma: float,
    sampling: Sequence[str],
    output: Sequence[Path] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Inspection:
    """Return what rollouts of any framework show of a critic.

    Args:
        source: paths of files with rollouts, or rows that a program has in hand.
        name: what the report calls the rollouts.
        policy: the model that sampled the rollouts, whose tokenizer reads their texts.
        critic: the folder of a critic, whose values are computed; None: those in the rows.
        value_truth: how many continuations of each measured prefix the policy samples.
        verifier: the verifier that judges continuations.
        rewards: the columns whose sum is the reward.
        gamma: the discount of the value targets.
        sampling: overrides of a config for continuations.
        output: files to write. Only Parquet files are written here, because the responses are
            read only once.
        chat_template_kwargs: variables of the policy's chat template.

    Raises: UserError: options do not fit together, a folder does not exist, or there are no
        rollouts.
    """
    if not 0 < gamma <= 1:
        raise UserError(f"gamma is a discount above 0 and at most 1, got {gamma:g}")
    truth = _truth_request(value_truth, policy, verifier, sampling)
    _check_models(policy, critic)
    tokenizer = loaded = num_ids = None
    if policy is not None or critic is not None:
        say("vapo inspect: loading torch and transformers ...", file=sys.stderr)
        tokenizer, loaded, num_ids = _load(policy, critic)
    if chat_template_kwargs:
        _check_template_variables(chat_template_kwargs, tokenizer)
    reader = ResponseReader(
        source,
        rewards=rewards,
        tokenizer=tokenizer,
        num_ids=num_ids,
        has_critic=loaded is not None,
        chat_template_kwargs=chat_template_kwargs,
    )
    responses: Iterable[InspectedResponse | BadRow] = reader
    if loaded is not None:
        from vapo.studies.inspection.critics import responses_with_values

        responses = responses_with_values(reader, loaded, notes=reader.notes)
    for path in output:
        if path.suffix == _STORED:
            responses = _stored(responses, path.expanduser(), tokenizer, reader.notes)
    from vapo.studies.inspection.report import inspect_responses

    return inspect_responses(
        responses,
        name=name,
        policy=policy,
        critic=critic,
        truth=None if truth is None else replace(truth, tokenizer=tokenizer),
        gamma=gamma,
        tokenizer=tokenizer,
        notes=reader.notes,
    )


def _template_variables(text: str | None) -> dict[str, Any]:
    try:
        variables = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{_TEMPLATE_KEY} {text!r:.80} is not valid JSON: {error}") from None
    if not isinstance(variables, dict):
        raise UserError(
            f"{_TEMPLATE_KEY} {text!r:.80} is not a JSON object: write the template's variables as "
            '{"NAME": VALUE}'
        )
    return variables


def _check_template_variables(variables: Mapping[str, Any], tokenizer: Any) -> None:
    """Check that the policy's chat template reads each of these variables.

    Raises: UserError: there is no policy, it has no chat template, or the template does not read
        one of them.
    """
    if tokenizer is None:
        raise UserError(f"{_TEMPLATE_KEY}: give --policy, whose chat template has them")
    from vapo.prompts.chat_arguments import check_template_variables

    check_template_variables(variables, tokenizer, key=_TEMPLATE_KEY)


def _stored(
    responses: Iterable[InspectedResponse | BadRow], path: Path, tokenizer: Any, notes: list[str]
) -> Iterable[InspectedResponse | BadRow]:
    from vapo.studies.inspection.stored import write_responses

    path.parent.mkdir(parents=True, exist_ok=True)
    fingerprint = None
    if tokenizer is not None:
        from vapo.networks.saved_tokenizers import tokenizer_fingerprint

        fingerprint = tokenizer_fingerprint(tokenizer)
    return write_responses(responses, path, tokenizer=fingerprint, notes=notes)


def _truth_request(
    value_truth: int | None, policy: str | None, verifier: str | None, sampling: Sequence[str]
) -> TruthRequest | None:
    if value_truth is None:
        if verifier is not None or sampling:
            option = "--sampling" if verifier is None else "--verifier"
            raise UserError(f"{option} is for continuations: give --value_truth K, too")
        return None
    from vapo.studies.inspection.truth_request import TruthRequest

    return TruthRequest(policy, value_truth, verifier, overrides=sampling)


def _check_models(policy: str | None, critic: str | None) -> None:
    if policy is not None:
        with about("--policy"):
            check_model_folder(policy, has_tokenizer=True)
    if critic is not None:
        with about("--critic"):
            check_critic_folder(critic)


def _load(policy: str | None, critic: str | None) -> tuple[Any, Any, int | None]:
    """Load the tokenizer and the critic.

    Returns: the policy's tokenizer, or without a policy the critic's; the critic, if there is
        one; and the smaller vocabulary size of both models.
    """
    from vapo.networks.loading import load_tokenizer
    from vapo.networks.model_configs import read_model_config
    from vapo.system.libraries import quiet_libraries

    quiet_libraries()
    tokenizer, loaded, sizes = None, None, list[int | None]()
    if policy is not None:
        tokenizer = load_tokenizer(policy, key="--policy")
        sizes.append(getattr(read_model_config(policy).get_text_config(), "vocab_size", None))
    if critic is not None:
        from vapo.studies.inspection.critics import load_critic

        loaded = load_critic(critic, tokenizer=tokenizer)
        tokenizer = loaded.tokenizer
        embedding: Any = loaded.critic.model.get_input_embeddings()
        sizes.append(embedding.num_embeddings)
    return tokenizer, loaded, min((size for size in sizes if size is not None), default=None)
