"""What can be said of a command's files, folders and functions before torch is imported.

A wrong path is so an error after a second and not after half a minute. Each rule is a function of
the room that it belongs to, and the command calls the same one again when it comes to it. Only
what costs no time is done here: of data the first row, of weights the headers, of a checkpoint the
manifest. Nothing is loaded from a hub. A user's code is not run, which might count or write
something: its file is read as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vapo.commands.command_rules import (
    DATA_KEY,
    check_critic_row,
    check_estimate,
    check_filter,
    check_gates,
    check_measuring,
    check_rollouts,
    check_value_truth,
    model_config_folder,
    only_config_needed,
    simulated_config,
)
from vapo.config import FitConfig, RewardModelConfig, SftConfig, resolve
from vapo.config.data import sources_of, verifier_blocks
from vapo.config.engines import VllmEngine
from vapo.config.environments import VerifiersEnvironment
from vapo.config.rewards import PythonVerifier, RewardModelVerifier
from vapo.config.schema import DataConfig
from vapo.environments.verifiers_package import check_installed as check_verifiers_installed
from vapo.errors import UserError, about
from vapo.networks.critic_folders import critic_path, critic_start_key
from vapo.networks.model_folders import check_model_folder, folder_with_config
from vapo.prompts.sources import check_source
from vapo.rewards.math_verify_package import check_math_verify
from vapo.rewards.own_function import check_parameters
from vapo.rewards.verifiers import make_reasoning_gym
from vapo.rollouts.engines.vllm.installed import check_installed
from vapo.runs.run_dirs import check_resumable, look_for_checkpoint
from vapo.runs.summary import check_output_dir
from vapo.system.function_files import check_function
from vapo.system.writable import why_not_writable
from vapo.tracking.stores import check_writable, locate_store

Config = FitConfig | SftConfig | RewardModelConfig
Options = Mapping[str, Any]
"""A command's own options, by name."""


def check_early(command: str, config: Any, options: Options) -> None:
    """Check what the command will read and write; a sweep checks each of its rows itself.

    Raises: UserError for the first that is wrong.
    """
    if command in _CHECKS:
        _CHECKS[command](config, options)


def check_run(config: FitConfig) -> None:
    """What every training run reads and writes: `vapo fit`, and each row of a sweep."""
    _check_sampling(config)
    _check_critic(config)
    _check_stored(config)
    check_output_dir(config.output_dir)
    _check_store(config)


def _fit(config: FitConfig, options: Options) -> None:
    check_run(config)
    if (ckpt_path := options["ckpt_path"]) is not None:
        found = look_for_checkpoint(config.output_dir, ckpt_path)
        if (found / "manifest.json").is_file():  # a link to a damaged one gives way to another
            check_resumable(found.resolve(), config)


def _try(config: FitConfig, options: Options) -> None:
    if options["responses"] is None:  # given ones need neither policy nor prompts
        _check_sampling(config)


def _validate(config: FitConfig, options: Options) -> None:
    check_value_truth(config, options["value_truth"])
    _check_sampling(config)
    if options["value_page"] is not None or options["value_truth"] is not None:
        _check_critic(config)
    if options["ckpt_path"] is not None:
        look_for_checkpoint(config.output_dir, options["ckpt_path"])


def _filter(config: FitConfig, options: Options) -> None:
    check_filter(config)
    _check_sampling(config)
    _check_store(config)


def _rollouts(config: FitConfig, options: Options) -> None:
    check_rollouts(config, options["output"])
    check_measuring(config, options["value_truth"], options["truth_share"])
    _check_sampling(config)
    _check_store(config)


def _gates(config: FitConfig, options: Options) -> None:
    check_gates(config, options["answer_now"])
    check_run(config)


def _estimate(config: FitConfig, options: Options) -> None:
    check_estimate(config)
    rates = options["sustained_tflops"], options["interconnect_gb_s"]
    simulated_config(config, options["simulate_ranks"], *rates)
    if options["model_config"] is not None:
        model_config_folder(options["model_config"])
        return
    with only_config_needed():
        folder_with_config(config.actor.path)
        if config.algorithm.has_critic:
            folder_with_config(critic_path(config))


def _serve(config: FitConfig, options: Options) -> None:
    with about("actor.path"):
        folder_with_config(config.actor.path)


def _sft(config: SftConfig, options: Options) -> None:
    if config.model_path is not None:
        with about("model_path"):
            check_model_folder(config.model_path, has_tokenizer=True)
    _supervised(config)


def _reward_model(config: RewardModelConfig, options: Options) -> None:
    with about("policy_path"):
        check_model_folder(config.policy_path, has_tokenizer=True)
    _supervised(config)


def _supervised(config: SftConfig | RewardModelConfig) -> None:
    _check_engine(config)
    check_prompts(config.data)
    check_functions(config)
    if reason := why_not_writable(Path(config.export_dir).expanduser().absolute()):
        raise UserError(f"export_dir: cannot write in {config.export_dir}: {reason}")
    _check_store(config)


def _critics(config: None, options: Options) -> None:
    from vapo.rollouts.rollout_file import read_metadata
    from vapo.sweep.grid import read_grid
    from vapo.sweep.plan import compose_rows

    rollouts = options["rollouts"]
    overrides = [*options["overrides"], f"{DATA_KEY}={rollouts}"]
    base, rows = compose_rows(read_grid(options["grid"]), options["config"], overrides)
    for name, row in rows.items():
        check_critic_row(name, row, rollouts)
    read_metadata(rollouts, key="--rollouts")
    _check_policy(base)
    for name, row in rows.items():
        with about(f"row '{name}' of the grid"):
            _check_critic(row)
            check_functions(row)
    _check_store(base)


def _check_sampling(config: FitConfig) -> None:
    """What sampling a policy and judging its responses needs."""
    _check_engine(config)
    _check_policy(config)
    check_prompts(config.data)
    check_functions(config)


def _check_engine(config: Config) -> None:
    if isinstance(config.rollouts, VllmEngine):
        check_installed()


def _check_policy(config: FitConfig) -> None:
    with about("actor.path"):
        check_model_folder(config.actor.path, has_tokenizer=True)


def _check_critic(config: FitConfig) -> None:
    """The folder of each critic, and its tokenizer's, which is compared with the policy's."""
    if not config.algorithm.has_critic:
        return
    with about(critic_start_key(config)):
        for member in range(config.critic.count):
            path = critic_path(config, member)
            check_model_folder(path, has_tokenizer=member == 0 and path != config.actor.path)


def check_prompts(data: DataConfig) -> None:
    """The sources of both sets, and the first row of each."""
    for name in ("train", "heldout"):
        for key, source in sources_of(data, name).items():
            check_source(source, key=key)


def check_functions(config: Config) -> None:
    """The verifiers, the user's own estimator, value head and environment: are they there?"""
    for key, block in verifier_blocks(config):
        if isinstance(block, PythonVerifier):
            own, folder = block.function, block.function_folder
            parameters = check_function(own, key=f"{key}.function", folder=folder)
            check_parameters(parameters or [], f"{key}.function {own}")
        elif isinstance(block, RewardModelVerifier):
            with about(f"{key}.reward_model_path"):
                check_model_folder(block.reward_model_path, has_tokenizer=True)
        elif block.verifier == "reasoning_gym":
            make_reasoning_gym()
        elif block.verifier == "math_verify":
            check_math_verify(f"{key}.verifier")
    if not isinstance(config, FitConfig):
        return
    for key in ("algorithm.estimator_function", "critic.head_function", "environment.function"):
        block, _, name = key.partition(".")
        options = vars(getattr(config, block))  # not every kind of block has one
        if (path := options.get(name)) is not None:
            check_function(path, key=key, folder=options[f"{name}_folder"])
    if isinstance(config.environment, VerifiersEnvironment):
        check_verifiers_installed("environment.kind")


def _check_stored(config: FitConfig) -> None:
    """The file of rollouts that value pretraining reads, if it does."""
    path = config.components.value_pretraining.data
    if path is None or resolve(config).value_pretraining_iterations == 0:
        return
    from vapo.rollouts.rollout_file import read_metadata

    read_metadata(Path(path), key=DATA_KEY)


def _check_store(config: Config) -> None:
    check_writable(locate_store(config.tracking.uri))


_CHECKS: dict[str, Callable[[Any, Options], None]] = {
    "fit": _fit,
    "try": _try,
    "validate": _validate,
    "filter": _filter,
    "rollouts": _rollouts,
    "gates": _gates,
    "estimate": _estimate,
    "serve": _serve,
    "sft": _sft,
    "reward-model": _reward_model,
    "critics": _critics,
}
