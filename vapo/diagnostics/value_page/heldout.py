"""Make the page of `vapo validate --value_page`: a policy and a critic on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.value_loss_columns import with_value_offsets
from vapo.config import FitConfig, resolve
from vapo.config.loading import from_yaml
from vapo.diagnostics.position_profiles import position_profile
from vapo.diagnostics.value_page.contents import (
    PageContents,
    estimator_facts,
    notes,
    page_contents,
    responses_fact,
)
from vapo.diagnostics.value_page.rendering import render_page
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.diagnostics.value_truth.measure import ValueTruth
from vapo.errors import UserError
from vapo.files.whole_files import write_text
from vapo.functional.columns import without_failed
from vapo.networks.actor_critic import Actor, Critic, members_of
from vapo.networks.build import check_tokenizers, make_actor, make_critic
from vapo.networks.critic_folders import critic_path, critic_start
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.layouts import choose_layout
from vapo.networks.precision import may_round_products
from vapo.networks.probe import estimator_layers
from vapo.rollouts.bad_rows import BadRollouts, CheckedBatch, check_batch
from vapo.rollouts.batch import configured_batch
from vapo.runs.checkpoints import Checkpoint, check_count, check_saved_head, value_head_options
from vapo.types import Phase, Rollout, RolloutBatch, TrainingBatch


def check_request(path: Path, config: FitConfig) -> None:
    """Check, before anything is loaded, that the page can be made and written.

    Raises: UserError: the page cannot be made, or the file cannot be written.
    """
    if path.suffix.lower() != ".html" or path.is_dir():
        raise UserError(f"--value_page {path}: give the name of a file, as page.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from None
    if config.algorithm.compares_groups and config.evaluation.k == 1:
        raise UserError(
            f"--value_page: algorithm.advantage_estimator {config.algorithm.advantage_estimator} "
            "compares the responses to a prompt, and evaluation.k is 1: set it to 2 or more"
        )


def check_heldout_groups(config: FitConfig) -> None:
    """Check that held-out prompts have enough responses for the critic's values.

    Raises: UserError: `critic.target` is residual, and a prompt has a single response.
    """
    if config.critic.target == "residual" and config.evaluation.k == 1:
        raise UserError(
            "critic.target residual: a value has the mean reward of the prompt's other responses "
            "in it, and evaluation.k is 1: set it to 2 or more"
        )


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"--value_page {path}: cannot be written ({error.strerror or error})")


def load_forward_networks(
    config: FitConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None,
    device: torch.device,
) -> ForwardNetworks:
    """Load the policy with its critic, and the reference if the reward depends on it.

    Args:
        model: the policy's model.
        checkpoint: has the critic. If None, the critic is the one that a run starts with.

    Raises: UserError: the critic cannot be loaded, or does not fit the config.
    """
    critic, reference, base = None, None, None
    if config.algorithm.has_critic:
        check_tokenizers(config, tokenizer)
        if config.critic.kind == "adapters":  # `model` may have adapters of its own merged into it
            base = make_actor(config, None, trained=False).to(device)
        critic = make_critic(config, None, base, trained=False)
        if checkpoint is not None:
            saved_config = from_yaml(FitConfig, checkpoint.contents["config"], source="its config")
            check_saved_head(value_head_options(saved_config), config, name=str(checkpoint.path))
            check_count(saved_config.critic.count, config, name=str(checkpoint.path))
            for number, member in enumerate(members_of(critic)):
                path = critic_path(config, number)
                checkpoint.fill(member.model, "critic", path, member=number)
    if config.algorithm.kl.coef > 0 and config.algorithm.kl.placement == "reward":
        reference = base or make_actor(config, None, trained=False)
    actor = Actor(model, rounds=may_round_products(config))
    networks: list[Actor | Critic] = [actor, *members_of(critic)]
    models = [network.model for network in (*networks, reference, base) if network is not None]
    return ForwardNetworks(
        actor=actor,
        reference=reference,
        critic=critic,
        temperature=config.evaluation.temperature,
        max_tokens=config.training.first_microbatch_tokens,
        pad_id=int(tokenizer.pad_token_id),
        layout=choose_layout(config.training.packing, models),
        device=device,
        # POISE fits its regression to a run's own rollouts: there are none here, so no states
        layers=()
        if config.algorithm.advantage_estimator == "poise"
        else estimator_layers(config.algorithm, model.config),
        wants_collisions=config.algorithm.reads_collisions,
        wants_answers=config.algorithm.reads_answers,
    )


def heldout_batch(config: FitConfig, rollouts: Sequence[Rollout]) -> RolloutBatch:
    """Make a rollout batch of held-out rollouts, `evaluation.k` for each prompt.

    Rewards are shaped by the training budget, as for the critic's training.
    """
    return without_failed(configured_batch(rollouts, config, group_size=config.evaluation.k))


def evaluated_heldout(
    config: FitConfig, batch: RolloutBatch, networks: ForwardNetworks
) -> tuple[TrainingBatch, CheckedBatch]:
    """Evaluate the rollouts up to their advantages, as a policy iteration would.

    Return the training batch, and the checked batch, which says how many rows were left out.

    Args:
        batch: held-out rollouts with the baselines that the estimator needs.

    Raises: UserError: too many numbers are not finite.
    """
    for network in (networks.actor, networks.reference, networks.critic):
        if network is not None:
            network.to(networks.device)
    is_mixed = config.trainer.precision == "bf16-mixed"
    with torch.autocast(networks.device.type, torch.bfloat16, enabled=is_mixed):
        evaluated = add_logprobs_and_values(batch, networks, with_entropy=True)
    evaluated = with_value_offsets(evaluated, config)
    if not config.algorithm.read_layers:  # no update follows, and the states are large
        evaluated = replace(evaluated, actor_states=None)
    checked = check_batch(
        evaluated, num_minibatches=1, by_group=True, records=BadRollouts(0), place="validate"
    )
    if checked.fault is not None:
        raise UserError(f"the held-out responses cannot be judged: {checked.fault}")
    return estimate_advantages(checked.batch, Phase.POLICY_OPTIMIZATION, config), checked


def write_page(
    path: Path,
    config: FitConfig,
    batch: TrainingBatch,
    checked: CheckedBatch,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    *,
    truth: ValueTruth | None = None,
) -> None:
    """Write the value page of held-out rollouts into the file `path`.

    A value page is an HTML file. It shows some responses token by token, with their advantages
    and, if there is a critic, its values.

    Args:
        path: the file, which is replaced if it exists.
        config: the run's config.
        batch: the held-out rollouts with their advantages, which `evaluated_heldout` returned.
        checked: says how many responses were left out and why; `evaluated_heldout` returned it.
        tokenizer: the policy's, which turns the tokens into text.
        checkpoint: the path of the checkpoint that was evaluated; None if it was the model that
            the config names.
        truth: measured true values of the batch; None if they were not measured.

    Raises: UserError: the file cannot be written.
    """
    budget = config.evaluation.max_response_tokens or config.rollouts.max_response_tokens
    positions = position_profile(batch, resolve(config), max_response_tokens=budget)
    contents = page_contents(batch, config, positions, iteration=0, truth=truth)
    about = _about(config, contents, checked, checkpoint)
    page = render_page(contents, TokenText(tokenizer), about)
    try:
        write_text(path, page)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _about(
    config: FitConfig, contents: PageContents, checked: CheckedBatch, checkpoint: Path | None
) -> dict[str, Any]:
    """Return title, facts and notes of the value page for held-out prompts.

    The title names the actor's path, or for a checkpoint its run's folder and the checkpoint.
    """
    sampling, k = config.evaluation, contents.batch.group_size
    top_k = f", top_k {sampling.top_k}" if sampling.top_k else ""
    facts = {
        "prompts": f"{len(contents.batch) // k} held-out ones, {k} responses each",
        "responses": responses_fact(contents),
        "sampled at": f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}{top_k}",
        "actor": str(checkpoint or config.actor.path),
    }
    if config.algorithm.has_critic:
        facts["critic"] = str(checkpoint or critic_start(config))
    name = config.actor.path
    if checkpoint is not None:  # the names of the run's folder and of the checkpoint's
        name = f"{checkpoint.parent.parent.name}/{checkpoint.name}"
    return {
        "title": f"{name}, held-out prompts",
        "facts": facts | estimator_facts(config),
        "notes": [*_notes(config, checked), *notes(config, Phase.POLICY_OPTIMIZATION)],
    }


def _notes(config: FitConfig, checked: CheckedBatch) -> Iterator[str]:
    """Yield notes on how the page of held-out prompts differs from a run's own pages."""
    baseline = config.algorithm.baseline.kind
    trained_on = "Advantages are those that a policy iteration would train on."
    if config.algorithm.advantage_estimator == "poise":
        trained_on = (
            "Advantages are computed against the other responses' mean reward. A run does so in "
            "its first iterations, and then uses a regression on its own rollouts."
        )
    elif baseline != "critic":  # such baselines weigh the critic by a run's own rollouts
        trained_on = (
            f"Advantages are the critic's alone. A run trains with algorithm.baseline {baseline}, "
            "which weighs them against mean rewards: value pages of the run itself have those."
        )
    yield f"Written by vapo validate: held-out prompts, and nothing was trained. {trained_on}"
    training, here = config.rollouts, config.evaluation
    names = ("temperature", "top_p", "top_k")
    differing = [name for name in names if getattr(training, name) != getattr(here, name)]
    if differing and config.algorithm.has_critic:
        logprobs = ""
        if config.critic.sampled_logprobs is not None:
            logprobs = ", and the log-probs that the critic reads,"
        settings = " ".join(f"evaluation.{name}={getattr(training, name):g}" for name in differing)
        yield (
            "These responses are sampled with other settings than those that the critic is trained "
            f"on, so their returns{logprobs} differ; {settings} removes the difference."
        )
    if here.top_p < 1 or here.top_k > 0:
        yield "The engine gap includes the probability that top_p or top_k cut off."
    if checked.num_left_out:
        yield f"{checked.num_left_out} responses are left out: {checked.reason}."
