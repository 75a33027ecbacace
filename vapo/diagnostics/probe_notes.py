"""What a run with a probe says before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from vapo.config import FitConfig, resolve
from vapo.networks.critic_folders import critic_path
from vapo.networks.model_configs import read_model_config
from vapo.prompts.fingerprint import fingerprint


def probe_notes(config: FitConfig) -> Iterator[str]:
    """What the user of a probe should know: an unread rate, and a folder of perhaps another actor's
    probe."""
    if not config.algorithm.has_critic or not config.critic.reads_actor:
        return
    if config.components.value_pretraining.lr and resolve(config).value_pretraining_iterations:
        yield "critic.kind probe reads critic.probe.lr, not components.value_pretraining.lr"
    if config.critic.init == "policy":
        return
    own = fingerprint(config.actor.path)
    for path in (critic_path(config, member) for member in range(config.critic.count)):
        read = getattr(read_model_config(path), "actor_fingerprint", None)
        if read is None or read != own:
            which = f"{read}, and actor.path's is {own}" if read else "not in its folder"
            yield (
                f"critic.init {path}: a probe fits the actor that it was trained on, whose "
                f"fingerprint is {which}"
            )
