"""`vapo validate`: the held-out score of a policy, from its folder or from a checkpoint."""

from __future__ import annotations

from contextlib import closing

from vapo.config import FitConfig
from vapo.console import quiet_libraries
from vapo.devices import pick_device, set_threads
from vapo.evaluation import evaluate
from vapo.models.loading import load_causal_lm, load_tokenizer
from vapo.policies import Actor
from vapo.progress import Progress
from vapo.prompts import load_prompts
from vapo.resuming.checkpoints import network_state, read_checkpoint
from vapo.resuming.run_dirs import find_checkpoint
from vapo.rewards import make_scorer
from vapo.rollouts.selection import ActorAccess, check_engine, make_sampler


def run(config: FitConfig, *, ckpt_path: str | None = None) -> dict[str, float]:
    """Evaluate and print every metric, one a line."""
    quiet_libraries()
    set_threads(config.trainer)
    check_engine(config)
    tokenizer = load_tokenizer(config.actor.path)
    prompts = load_prompts(config.data, tokenizer)
    access = load_policy(config, ckpt_path=ckpt_path)
    with (
        closing(make_sampler(config, access, tokenizer)) as sampler,
        Progress() as progress,
        make_scorer(
            config.rewards,
            max_response_tokens=config.rollouts.max_response_tokens,
            data=config.data,
        ) as scorer,
    ):
        result = evaluate(
            prompts.heldout,
            sampler=sampler,
            scorer=scorer,
            config=config.evaluation,
            max_response_tokens=config.rollouts.max_response_tokens,
            progress=progress,
        )
    for key, value in result.metrics.items():
        print(f"{key}: {value:.4f}")
    return result.metrics


def load_policy(config: FitConfig, *, ckpt_path: str | None = None) -> ActorAccess:
    """The actor of the config's folder, or of a checkpoint, for a sampling engine."""
    model = load_causal_lm(
        config.actor.path,
        dtype=config.actor.dtype,
        attn_implementation=config.actor.attn_implementation,
    )
    if ckpt_path is not None:
        checkpoint = find_checkpoint(config.output_dir, ckpt_path)
        contents = read_checkpoint(checkpoint, verified=True)
        model.load_state_dict(network_state(contents, "actor"))
    device = pick_device(config.trainer)
    model.to(device)  # type: ignore[arg-type]
    actor = Actor(model)
    return ActorAccess(
        model=model,
        device=device,
        weights=lambda: model.state_dict().items(),
        logprobs=lambda inputs: inputs.scatter(actor(inputs, temperature=1.0)[0]),
    )
