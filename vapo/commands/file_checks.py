"""Checks that the files, folders and functions which a config names exist. Imports no torch.

Each rule is a function of the room that it belongs to, and the command calls the same one again
when it comes to it. Only what costs no time is done here: of data the first row, of weights the
headers. Nothing is loaded from a hub. A user's code is not run, which might count or write
something: its file is read as text.
"""

from __future__ import annotations

from pathlib import Path

from vapo.config import FitConfig, RewardModelConfig, SftConfig, resolve
from vapo.config.data import sources_of, verifier_blocks
from vapo.config.engines import VllmEngine
from vapo.config.environments import VerifiersEnvironment
from vapo.config.functions import named_functions
from vapo.config.rewards import PythonVerifier, RewardModelVerifier
from vapo.environments.verifiers_package import check_verifiers_installed
from vapo.errors import about
from vapo.networks.critic_folders import critic_path, critic_start_key
from vapo.networks.model_folders import check_model_folder
from vapo.prompts.sources import check_source
from vapo.rewards.verifiers import check_package
from vapo.rollouts.engines.vllm.engine_args import check_installed
from vapo.runs.run_dirs import check_output_dir
from vapo.system.torch_build import check_build_has_gpus
from vapo.tracking.known_stores import check_known
from vapo.tracking.stores import check_writable, locate_store
from vapo.user_code.function_files import check_function

DATA_KEY = "components.value_pretraining.data"
Config = FitConfig | SftConfig | RewardModelConfig


def check_run(config: FitConfig) -> None:
    """Check what a training run, as `vapo fit` or a row of a sweep, will read and write.

    Raises: UserError: a file, folder or function is missing or cannot be used.
    """
    check_sampling(config)
    check_critic_folders(config)
    stored = config.components.value_pretraining.data
    if stored is not None and resolve(config).value_pretraining_iterations > 0:
        from vapo.rollouts.rollout_file import read_metadata  # it loads pyarrow

        read_metadata(Path(stored), key=DATA_KEY)
    check_output_dir(config.output_dir)
    check_store(config)


def check_sampling(config: FitConfig) -> None:
    """Check the device, the files and the functions for sampling a policy and judging responses."""
    check_build_has_gpus(config.trainer)
    with about("actor.path"):
        check_model_folder(config.actor.path, has_tokenizer=True)
    check_sources(config)


def check_sources(config: Config) -> None:
    """Check the engine's package, the first row of each source of prompts, and the user's
    functions.
    """
    if isinstance(config.rollouts, VllmEngine):
        check_installed()
    for name in ("train", "heldout"):
        for key, source in sources_of(config.data, name).items():
            check_source(source, key=key)
    check_functions(config)


def check_critic_folders(config: FitConfig) -> None:
    """Check that each critic's folder has a model.

    The first critic's folder must also have a tokenizer, unless it is the policy's folder.
    """
    if not config.algorithm.has_critic:
        return
    with about(critic_start_key(config)):
        for member in range(config.critic.count):
            path = critic_path(config, member)
            check_model_folder(path, has_tokenizer=member == 0 and path != config.actor.path)


def check_functions(config: Config) -> None:
    """Check that the verifiers exist, and each function of the user's that the config names."""
    for key, path, folder in named_functions(config):
        check_function(path, key=key, folder=folder)
    for key, block in verifier_blocks(config):
        if isinstance(block, RewardModelVerifier):
            with about(f"{key}.reward_model_path"):
                check_model_folder(block.reward_model_path, has_tokenizer=True)
        elif not isinstance(block, PythonVerifier):
            check_package(block.verifier, f"{key}.verifier")
    if isinstance(config, FitConfig) and isinstance(config.environment, VerifiersEnvironment):
        check_verifiers_installed("environment.kind")


def check_store(config: Config) -> None:
    """Check that the tracking store of a config can be written.

    A config in a run's folder cannot by itself choose where records and credentials are sent,
    because the folder may come from somebody else: the user must have named that store before.
    """
    store, run_folder = locate_store(config.tracking.uri), config.sources.run_with_store
    if run_folder is not None:
        folder = Path(run_folder)
        if store.database is None or folder in store.database.parents:
            check_known(config.tracking.uri, named_by=folder, how="tracking.uri=")
    check_writable(store)
