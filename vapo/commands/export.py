"""`vapo export`: write one network of a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vapo.config import FitConfig
from vapo.config.loading import from_yaml
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.networks.critic_folders import critic_path, critic_start
from vapo.networks.export import save_folder
from vapo.networks.generation_files import generation_file
from vapo.networks.loading import load_causal_lm, load_tokenizer, load_value_model
from vapo.networks.written_folders import check_new_folder, whole_folder
from vapo.prompts.fingerprint import fingerprint
from vapo.runs.checkpoints import network_state, read_checkpoint


def run(checkpoint: Path, output_dir: Path, network: Literal["actor", "critic"]) -> None:
    """Write a network of a checkpoint as a folder that `from_pretrained` loads.

    Each of several critics gets a folder inside it. A warning is printed if the policy's held-out
    score does not exceed that at the start of its run.

    Raises: UserError: the folder is not empty, or the critic's head is a user's function.
    """
    check_new_folder(output_dir, sources=[str(checkpoint)])
    contents = read_checkpoint(checkpoint)
    config = from_yaml(FitConfig, contents["config"], source=str(checkpoint))
    check_new_folder(output_dir, sources=_model_folders(config))
    head = config.critic.head_function
    if network == "critic" and head is not None:
        raise UserError(
            f"--network critic: its value head is critic.head_function {head}, and a Hugging Face "
            "folder has no place for a head of your own. `vapo validate --ckpt_path "
            f"{checkpoint} --value_page page.html` shows its values; in Python, "
            "vapo.runs.checkpoints.network_state has its weights"
        )
    with whole_folder(output_dir) as aside:
        _write(contents, config, network, aside)
    if network == "actor" and (warning := no_better_than_start(contents)):
        say(f"vapo: {warning}", file=sys.stderr)
    say(output_dir)


def _model_folders(config: FitConfig) -> list[str]:
    """Return the folders or hub ids of the models that the run began with."""
    return [config.actor.path, *([critic_start(config)] if config.algorithm.has_critic else [])]


def _write(
    contents: dict[str, Any],
    config: FitConfig,
    network: Literal["actor", "critic"],
    output_dir: Path,
) -> None:
    """Write a checkpoint's network as a folder, or a folder for each of several critics."""
    count = config.critic.count if network == "critic" else 1
    for member in range(count):
        state, generation = network_state(contents, network, member=member), None
        if network == "actor":
            options = {"dtype": config.actor.dtype, "attn_implementation": "auto"}
            model = load_causal_lm(config.actor.path, **options)
            generation = generation_file(config.actor.path)
        else:
            path, dtype = critic_path(config, member), config.critic.dtype
            model = load_value_model(
                path, dtype=dtype, attn_implementation="auto", critic=config.critic
            )
            if config.critic.kind == "adapters":  # they fit the base still, which was frozen
                model.config.actor_fingerprint = fingerprint(config.actor.path)
        model.load_state_dict(state)
        folder = output_dir if count == 1 else output_dir / str(member)
        tokenizer = load_tokenizer(config.actor.path)
        save_folder(model, dict(model.state_dict()), tokenizer, folder, generation=generation)


def no_better_than_start(contents: Mapping[str, Any]) -> str | None:
    """Return a warning if the policy's held-out score is not above that of the run's first policy.

    The result is None if it is above, or if the checkpoint has no score of its present policy.
    """
    evaluation = contents.get("callbacks", {}).get("Evaluation", {})
    num_updates = int(contents["state_dict"].get("policy_steps", 0))
    if num_updates == 0 or evaluation.get("policy_steps") != num_updates:
        return None
    start, latest = (100 * evaluation[name]["eval/avg_at_k"] for name in ("first", "latest"))
    if latest > start:
        return None
    return (
        f"the policy's held-out score is {latest:.1f} %, and that of the run's start {start:.1f} %"
    )
