"""Notes at the start of a run on a critic that fits one actor only (a probe, adapters) or on
ridge.
"""

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
    """Yield notes for the user on learning rates that the critic ignores and on its start weights.

    A probe or adapters fit only the actor on which they were trained. So each folder of weights
    that `critic.init` names gets a note if it was trained on another actor than `actor.path`, or
    does not say on which. A critic that is a whole network gets only the notes of `ridge_notes`,
    and a run without a critic gets none.
    """
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
    actor_fingerprint = fingerprint(config.actor.path)
    for path in (critic_path(config, member) for member in range(config.critic.count)):
        saved_fingerprint = getattr(read_model_config(path), "actor_fingerprint", None)
        if saved_fingerprint is None or saved_fingerprint != actor_fingerprint:
            saved = "not in its folder"
            if saved_fingerprint:
                saved = f"{saved_fingerprint}, and actor.path's is {actor_fingerprint}"
            yield (f"critic.init {path}: {_FITS[kind]} trained on, whose fingerprint is {saved}")


def ridge_notes(config: FitConfig) -> Iterator[str]:
    """Yield a note if the config sets learning rates that `critic.ridge` ignores."""
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
