"""Checks of a command, its options and its config, before torch is imported.

So a wrong path is an error after a second and not after half a minute. `file_checks` has the checks
that several commands share. What a command refuses is checked only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vapo.commands.estimate_checks import check_estimation
from vapo.commands.file_checks import (
    DATA_KEY,
    check_critic_folders,
    check_functions,
    check_run,
    check_sampling,
    check_sources,
    check_store,
)
from vapo.config import FitConfig, RewardModelConfig, SftConfig, resolve
from vapo.config.chosen_systems import check_one_system
from vapo.config.continuation_rules import unlike_the_rollouts
from vapo.config.data import GeneratedSource, Mixture
from vapo.config.environment_variables import values_of
from vapo.config.other_models import check_learning_rates
from vapo.config.overrides import override_of
from vapo.config.unread_changes import check_changes_are_read, check_rows_are_read
from vapo.errors import StoppedRun, UserError, about
from vapo.errors.redactor import hide, redacted
from vapo.networks.model_folders import check_model_folder, folder_with_config
from vapo.networks.written_folders import check_new_folder
from vapo.runs.resuming import check_resumable, readable_checkpoint
from vapo.system.torch_build import check_build_has_gpus
from vapo.user_code.credentials import secret_texts

Options = Mapping[str, Any]
"""A command's own options, by name."""


@contextmanager
def checked_command(command: str, config: Any, options: Options) -> Iterator[None]:
    """Check a command's config and options, then let the block run the command.

    The values of secret variables are redacted in the errors of the checks and of the command.

    Raises: UserError: whatever is wrong; StoppedRun: what the command raises.
    """
    hide(secret_texts(values_of(config)), in_errors=config.from_environment.texts)
    try:
        check_one_system(config.sources)
        check_early(command, config, options)
        yield
    except (UserError, StoppedRun) as error:
        error.args = (redacted(config.from_environment.redact(str(error))),)
        raise


def check_early(command: str, config: Any, options: Options) -> None:
    """Check what the command will read and write; a sweep checks each of its rows itself.

    Only the manifest of a checkpoint is read.

    Raises: UserError for the first that is wrong.
    """
    if command in _CHECKS:
        _CHECKS[command](config, options)


def _fit(config: FitConfig, options: Options) -> None:
    check_changes_are_read(config)
    check_run(config)
    if (ckpt_path := options["ckpt_path"]) is not None:
        checkpoint = readable_checkpoint(config.output_dir, ckpt_path)
        if checkpoint is not None:
            check_resumable(checkpoint, config)
    check_learning_rates(config)


def _try(config: FitConfig, options: Options) -> None:
    if options["responses"] is not None:  # a file of responses needs neither policy nor prompts
        if options["num"] is not None:
            raise UserError(
                "--num is not read beside --responses, whose file is judged whole: leave --num out"
            )
        return
    _check_one_process("try", config)
    check_sampling(config)


def _validate(config: FitConfig, options: Options) -> None:
    if (value_truth := options["value_truth"]) is not None:
        if value_truth < 2:
            raise UserError(
                "--value_truth: one continuation says nothing of its noise; give 2 or more"
            )
        for problem in unlike_the_rollouts(config, "--value_truth", in_training=False):
            raise UserError(problem.message)
    check_sampling(config)
    if options["value_page"] is not None or value_truth is not None:
        check_critic_folders(config)
    if options["ckpt_path"] is not None:
        readable_checkpoint(config.output_dir, options["ckpt_path"])


def _filter(config: FitConfig, options: Options) -> None:
    train = config.data.train
    if isinstance(train, Mixture):
        raise UserError("data.train.kind mixture: filter one source at a time, as data.train")
    if isinstance(train, GeneratedSource) and train.curriculum:
        raise UserError("data.train.curriculum: a curriculum has its own difficulty; leave it out")
    _check_one_process("filter", config)
    if config.rewards.shuffle:
        raise UserError("rewards.shuffle would make pass rates meaningless: set it to false")
    check_sampling(config)
    check_store(config)


def _rollouts(config: FitConfig, options: Options) -> None:
    _check_one_process("rollouts", config)
    is_plain = options["format"] == "plain"
    suffix, kind = (".jsonl", "JSON lines") if is_plain else (".parquet", "Parquet")
    if (output := options["output"]) is not None and Path(output).suffix != suffix:
        raise UserError(
            f"--output {output}: the file is {kind}: give it a name that ends in {suffix}"
        )
    if config.rewards.shuffle:
        raise UserError("rewards.shuffle would deal the rewards out anew: set it to false")
    _check_measuring(config, options["value_truth"], options["truth_share"])
    check_sampling(config)
    check_store(config)


def _check_measuring(config: FitConfig, value_truth: int | None, truth_share: float | None) -> None:
    if value_truth is None:
        if truth_share is not None:
            raise UserError(
                f"--truth_share {truth_share:g} is the share of the groups whose prefixes are "
                "continued: give --value_truth K, too"
            )
        return
    if value_truth < 2:
        raise UserError(
            f"--value_truth {value_truth}: the noise of a value is estimated from at least 2 "
            "continuations; give 4, say"
        )
    if config.value_truth.max_tokens is not None:
        raise UserError(
            "value_truth.max_tokens bounds measurements of vapo validate and vapo fit, not this "
            "file: leave it out, and lower --truth_share"
        )
    if truth_share is not None and not 0 < truth_share <= 1:
        raise UserError(f"--truth_share {truth_share:g} must be above 0 and at most 1")


def _gates(config: FitConfig, options: Options) -> None:
    if (answer_now := options["answer_now"]) is not None and config.environment.is_used:
        raise UserError(
            f"--answer_now {answer_now!r} has a response answer in its middle, and an episode is "
            "answered by its environment: leave it out, or set environment.kind=null"
        )
    if not config.algorithm.has_critic:
        raise UserError(
            f"algorithm.advantage_estimator is {config.algorithm.advantage_estimator}, which has "
            "no critic: vapo gates measures what a critic can show; give the config of a system "
            "that has one, as conf/vapo.yaml"
        )
    _check_one_process("gates", config)
    if config.rewards.shuffle:
        raise UserError("rewards.shuffle deals the rewards out anew: set it to false")
    check_run(config)
    check_learning_rates(config)


def _serve(config: FitConfig, options: Options) -> None:
    with about("actor.path"):
        folder_with_config(config.actor.path)


def _supervised(config: SftConfig | RewardModelConfig, options: Options) -> None:
    check_build_has_gpus(config.trainer)
    key = "model_path" if isinstance(config, SftConfig) else "policy_path"
    if (path := getattr(config, key)) is not None:
        with about(key):
            check_model_folder(path, has_tokenizer=True)
    check_sources(config)
    sources, journal = [path] if path is not None else [], ("tracking",)
    check_new_folder(config.export_dir, key="export_dir", sources=sources, may_have=journal)
    check_store(config)


def _critics(config: None, options: Options) -> None:
    from vapo.rollouts.rollout_file import read_metadata
    from vapo.sweep.grid import choose_rows, read_grid
    from vapo.sweep.plan import compose_rows

    rollouts, heldout = options["rollouts"], options.get("heldout")
    grid = choose_rows(read_grid(options["grid"]), options.get("rows", ()))
    overrides = [*options["overrides"], override_of(DATA_KEY, str(rollouts))]
    base, rows = compose_rows(grid, options["config"], overrides)
    check_rows_are_read(rows)
    for name, row in rows.items():
        with about(f"row '{name}' of the grid"):
            _check_row(row, rollouts, has_heldout=heldout is not None)
    read_metadata(rollouts, key="--rollouts")
    if heldout is not None:
        read_metadata(heldout, key="--heldout")
    with about("actor.path"):
        check_model_folder(base.actor.path, has_tokenizer=True)
    for name, row in rows.items():
        with about(f"row '{name}' of the grid"):
            check_critic_folders(row)
            check_functions(row)
    check_store(base)


def _check_row(config: FitConfig, rollouts: Path, *, has_heldout: bool) -> None:
    settings = config.components.value_pretraining
    if settings.data != str(rollouts):
        raise UserError(f"{DATA_KEY}: every critic reads --rollouts; leave the key out")
    if not config.algorithm.has_critic or resolve(config).value_pretraining_iterations == 0:
        raise UserError(
            "it pretrains no critic: set components.value_pretraining.enabled=true and "
            "num_iterations above 0, with an estimator that has one"
        )
    if (settings.epochs, settings.patience) != (None, None):
        raise UserError(
            "components.value_pretraining.epochs and patience: every critic is trained "
            "for num_iterations, so that the curves can be compared; leave them out"
        )
    if settings.heldout_share == 0 and not has_heldout:
        raise UserError(
            "components.value_pretraining.heldout_share is 0: there is nothing to "
            "measure the critics on; set it above 0, or give --heldout FILE"
        )


def _check_one_process(command: str, config: FitConfig) -> None:
    if not config.trainer.is_one_process:
        raise UserError(
            f"vapo {command} is one process: set trainer.devices=1, trainer.num_nodes=1 and "
            "trainer.strategy=auto"
        )


_CHECKS: dict[str, Callable[[Any, Options], None]] = {
    "fit": _fit,
    "try": _try,
    "validate": _validate,
    "filter": _filter,
    "rollouts": _rollouts,
    "gates": _gates,
    "estimate": check_estimation,
    "serve": _serve,
    "sft": _supervised,
    "reward-model": _supervised,
    "critics": _critics,
}
