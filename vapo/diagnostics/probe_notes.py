"""What a run says before it begins whose critic is of one actor: a probe, or adapters."""

from __future__ import annotations

from collections.abc import Iterator

from vapo.config import FitConfig, resolve
from vapo.config.critic import ProbeConfig, ProbeCritic, SampledLogprobs
from vapo.networks.critic_folders import critic_path
from vapo.networks.model_configs import read_model_config
from vapo.prompts.fingerprint import fingerprint

_FITS = {
    "probe": "a probe fits the actor that it was",
    "adapters": "adapters fit the actor.path that they were",
}


def probe_notes(config: FitConfig) -> Iterator[str]:
    """What its user should know: a rate that a probe does not read, and a folder of perhaps another
    actor's."""
    kind = config.critic.kind
    if not config.algorithm.has_critic:
        return
    yield from ridge_notes(config)
    if kind == "network":
        return
    if (
        kind == "probe"
        and config.components.value_pretraining.lr
        and resolve(config).value_pretraining_iterations
    ):
        yield "critic.kind probe reads critic.probe.lr, not components.value_pretraining.lr"
    if config.critic.init == "policy":
        return
    own = fingerprint(config.actor.path)
    for path in (critic_path(config, member) for member in range(config.critic.count)):
        read = getattr(read_model_config(path), "actor_fingerprint", None)
        if read is None or read != own:
            which = f"{read}, and actor.path's is {own}" if read else "not in its folder"
            yield (f"critic.init {path}: {_FITS[kind]} trained on, whose fingerprint is {which}")


def ridge_notes(config: FitConfig) -> Iterator[str]:
    """Which learning rates that are set `critic.ridge` leaves unread."""
    critic = config.critic
    if critic.ridge is None:
        return
    unread = []
    if critic.sampled_logprobs is not None and critic.sampled_logprobs != SampledLogprobs():
        unread.append("critic.sampled_logprobs.lr")
    if isinstance(critic, ProbeCritic) and critic.probe.lr != ProbeConfig.lr:
        unread.append("critic.probe.lr")
    if unread:
        yield f"critic.ridge fits weights without a learning rate: {' and '.join(unread)} not read"
