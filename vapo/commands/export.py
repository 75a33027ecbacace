"""`vapo export`: one network of a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vapo.config import FitConfig
from vapo.config.loading import from_yaml
from vapo.errors import UserError
from vapo.networks.critic_folders import critic_path
from vapo.networks.export import save_folder
from vapo.networks.loading import load_causal_lm, load_tokenizer, load_value_model
from vapo.prompts.fingerprint import fingerprint
from vapo.runs.checkpoints import network_state, read_checkpoint
from vapo.system.shown_text import say


def run(checkpoint: Path, output_dir: Path, network: Literal["actor", "critic"]) -> None:
    """Write the folder; `from_pretrained` loads it. Of several critics a folder in it for each.
    Says so where training has not made the policy better.

    Raises: UserError: there is something in the folder already.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"{output_dir} is not empty: give a new folder")
    contents = read_checkpoint(checkpoint)
    config = from_yaml(FitConfig, contents["config"], source=str(checkpoint))
    head = config.critic.head_function
    if network == "critic" and head is not None:
        raise UserError(
            f"--network critic: its value head is critic.head_function {head}, and a Hugging Face "
            "folder has no place for a head of your own. `vapo validate --ckpt_path "
            f"{checkpoint} --value_page page.html` shows its values; in Python, "
            "vapo.runs.checkpoints.network_state has its weights"
        )
    count = config.critic.count if network == "critic" else 1
    for member in range(count):
        state = network_state(contents, network, member=member)
        if network == "actor":
            options = {"dtype": config.actor.dtype, "attn_implementation": "auto"}
            model = load_causal_lm(config.actor.path, **options)
        else:
            path, dtype = critic_path(config, member), config.critic.dtype
            model = load_value_model(
                path, dtype=dtype, attn_implementation="auto", critic=config.critic
            )
            if config.critic.kind == "adapters":  # on the frozen base, so they fit it still
                model.config.actor_fingerprint = fingerprint(config.actor.path)
        model.load_state_dict(state)
        folder = output_dir if count == 1 else output_dir / str(member)
        save_folder(model, dict(model.state_dict()), load_tokenizer(config.actor.path), folder)
    if network == "actor" and (said := no_better_than_start(contents)):
        say(f"vapo: {said}", file=sys.stderr)
    say(output_dir)


def no_better_than_start(contents: Mapping[str, Any]) -> str | None:
    """That the held-out score of a checkpoint's trained policy does not exceed that of the policy
    with which its run began; None where it does, or the checkpoint has no score of its policy."""
    evaluation = contents.get("callbacks", {}).get("Evaluation", {})
    num_updates = int(contents["state_dict"].get("policy_steps", 0))
    if num_updates == 0 or evaluation.get("policy_steps") != num_updates:
        return None
    start, own = (100 * evaluation[name]["eval/avg_at_k"] for name in ("first", "latest"))
    if own > start:
        return None
    return f"the policy's held-out score is {own:.1f} %, and that of the run's start {start:.1f} %"
